"""Results that are known beforehand, to the bit: a device that computes them otherwise is corrupt, however fast."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from paceline.contract import Seat
from paceline.results.machine_samples import ProductSample
from paceline.workloads.compute.kernels import TORCH_DTYPES

# Terms of a sum, and the largest operand: 256 x 15 x 15 is below fp16's largest number, 15 x 15 needs the 8 significant
# bits that bf16 has, and a power of two adds none. So every result is exact in every dtype.
TERMS = 256
LARGEST = 15


def known_product(side: int, dtype: str, device: torch.device, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """a, b and what a @ b must be. a[i, k] = u[i] s[k] and b[k, j] = s[k] v[j] with signs s, so every term of the sum
    at (i, j) is u[i] v[j], and no order of summation rounds."""
    random = torch.Generator().manual_seed(seed)
    u, v = (_whole_numbers(side, random) for _ in range(2))
    s = torch.randint(0, 2, (TERMS,), generator=random) * 2 - 1
    kind = TORCH_DTYPES[dtype]
    a, b = (u[:, None] * s), (s[:, None] * v)
    expected = TERMS * u[:, None].to(device) * v.to(device)
    return a.to(device, kind), b.to(device, kind), expected.to(kind)


def _whole_numbers(count: int, random: torch.Generator) -> Tensor:
    """Never 0: a product with 0 hides a wrong factor."""
    size = torch.randint(1, LARGEST + 1, (count,), generator=random)
    return size * (torch.randint(0, 2, (count,), generator=random) * 2 - 1)


def multiply(a: Tensor, b: Tensor) -> Tensor:
    return torch.mm(a, b)


def prove_product(seat: Seat, repeat: int, side: int, dtype: str, seed: int) -> ProductSample:
    """The values change with every repeat; the first element that is wrong is named."""
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
    """Whether torch refused to compute because no kernel has one order of sums."""
    return "deterministic" in str(error)


@contextlib.contextmanager
def whole_sums() -> Iterator[None]:
    """Partial sums stay in fp32: cuBLAS may otherwise hold those of a split sum in 16 bit, where they would round."""
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_bf16_reduced_precision_reduction, matmul.allow_fp16_reduced_precision_reduction
    matmul.allow_bf16_reduced_precision_reduction = matmul.allow_fp16_reduced_precision_reduction = False
    try:
        yield
    finally:
        matmul.allow_bf16_reduced_precision_reduction, matmul.allow_fp16_reduced_precision_reduction = before


def prepare_products() -> None:
    """Before the first product of the process: cuBLAS keeps to one order of sums only with a workspace that is told.
    This one is torch's own size on Hopper."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@contextlib.contextmanager
def deterministic(strict: bool = True) -> Iterator[None]:
    """Kernels whose sums have one order. Where one has none, torch raises an error; not strict, it goes on, and
    `analysis.nodes` sees that no node agrees with itself.

    Strict comes first, because otherwise torch's fused attention takes its usual backward, whose sums have none.
    """
    import warnings

    torch.use_deterministic_algorithms(True, warn_only=not strict)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            yield
    finally:
        torch.use_deterministic_algorithms(False)
