"""Computations with known exact results: a device that gets other bits is corrupt, however fast it is."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from paceline.contract import Seat
from paceline.results.machine_samples import ProductSample
from paceline.training.precision import whole_sums
from paceline.workloads.compute.kernels import TORCH_DTYPES

# Terms of a sum, and the largest operand: 256 x 15 x 15 is below the maximum of fp16, and 15 x 15 needs the 8
# significant bits of bf16, to which a power of two adds none. So every result is exact in every dtype.
TERMS = 256
LARGEST = 15


def known_product(side: int, dtype: str, device: torch.device, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """a, b and the exact a @ b. With signs s, a[i, k] = u[i] s[k] and b[k, j] = s[k] v[j], so every term of the sum at
    (i, j) is u[i] v[j], and no order of summation rounds."""
    random, operands = torch.Generator().manual_seed(seed), []
    for _ in range(2):
        # Integers other than 0, which would hide a wrong factor.
        size = torch.randint(1, LARGEST + 1, (side,), generator=random)
        operands.append(size * (torch.randint(0, 2, (side,), generator=random) * 2 - 1))
    s = torch.randint(0, 2, (TERMS,), generator=random) * 2 - 1
    kind, (u, v) = TORCH_DTYPES[dtype], operands
    a, b = (u[:, None] * s), (s[:, None] * v)
    expected = TERMS * u[:, None].to(device) * v.to(device)
    return a.to(device, kind), b.to(device, kind), expected.to(kind)


def multiply(a: Tensor, b: Tensor) -> Tensor:
    return torch.mm(a, b)


def prove_product(seat: Seat, repeat: int, side: int, dtype: str, seed: int) -> ProductSample:
    """Verify one product, with other values in every repeat; records the first wrong element."""
    device = torch.device(seat.torch_device)
    a, b, expected = known_product(side, dtype, device, seed + repeat)
    with whole_sums():
        found = multiply(a, b)
    differs = found != expected
    wrong = int(differs.sum().item())
    sample = ProductSample(rank=seat.rank, repeat=repeat, dtype=dtype, sides=(side, side, TERMS), wrong=wrong)
    if not wrong:
        return sample
    row, column = (int(i) for i in differs.nonzero()[0])
    values = float(found[row, column]), float(expected[row, column])
    return replace(sample, place=(row, column), found=values[0], expected=values[1])


def lacks_kernel(error: RuntimeError) -> bool:
    """Whether torch raised because no deterministic kernel exists."""
    return "deterministic" in str(error)


def prepare_products() -> None:
    """Call before the first product: cuBLAS is deterministic only with a configured workspace. This is torch's size on
    Hopper."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@contextlib.contextmanager
def deterministic(strict: bool = True) -> Iterator[None]:
    """Use deterministic kernels. If one is missing, torch raises an error; if not strict, it continues, and
    `analysis.machine.nodes` sees that no node agrees with itself.

    Try strict first: otherwise torch's fused attention uses its usual backward, which is not deterministic.
    """
    import warnings

    torch.use_deterministic_algorithms(True, warn_only=not strict)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            yield
    finally:
        torch.use_deterministic_algorithms(False)
