"""Options of the workload compute, and one row of its sweep."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.errors import require
from paceline.results.machine_samples import Kernel

KERNELS = ("matmul", "copy", "h2d", "d2h", "attention")
DTYPES = ("fp32", "tf32", "bf16", "fp16", "fp8")
FEWEST_ITERATIONS = 5


@dataclass(frozen=True)
class Options:
    """kernels and dtypes: `all`, or names joined by '+'. None means the device's default.

    budget_s: the time of a row, kept by fewer iterations, but at least 5. tokens: micro batch x sequence length of the
    model's products. largest_matmul, largest_copy_bytes and longest_sequence end the sweeps.
    """

    kernels: str = "all"
    dtypes: str = "all"
    iters: int = 100
    warmup: int = 10
    budget_s: float = 2.0
    tokens: int | None = None
    largest_matmul: int | None = None
    largest_copy_bytes: int | None = None
    longest_sequence: int | None = None

    def __post_init__(self) -> None:
        for name, known in (("kernels", KERNELS), ("dtypes", DTYPES)):
            given = getattr(self, name)
            accepted = f"all, or names out of {', '.join(known)} joined by '+'"
            require(given == "all" or set(given.split("+")) <= set(known), f"compute.{name}", given, accepted)
        require(
            self.iters >= FEWEST_ITERATIONS, "compute.iters", self.iters, f"a whole number from {FEWEST_ITERATIONS}"
        )
        require(self.warmup >= 0, "compute.warmup", self.warmup, "a whole number from 0")
        require(0 < self.budget_s < float("inf"), "compute.budget_s", self.budget_s, "a positive number of seconds")
        for name in ("tokens", "largest_matmul", "largest_copy_bytes", "longest_sequence"):
            given = getattr(self, name)
            accepted = "a whole number from 1, or null for the device's default"
            require(given is None or (type(given) is int and given >= 1), f"compute.{name}", given, accepted)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row of the sweep and its work. kernel, dtype, label, variant and size are those of `KernelSample`.

    dims: m, n, k of a product; bytes of a copy; batch and sequence length of attention. needed_bytes: its memory.
    """

    kernel: Kernel
    dtype: str
    label: str
    variant: str
    dims: tuple[int, ...]
    needed_bytes: int
    size: int | None = None
    flops: int | None = None
    moved_bytes: int | None = None
