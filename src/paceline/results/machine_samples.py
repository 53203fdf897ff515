"""Samples of the machine itself: collectives, overlap, kernels, copies and node tests, every timed iteration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from paceline.errors import Scalar

Kernel = Literal["matmul", "attention_forward", "attention_backward", "copy", "h2d", "d2h"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveSample:
    """One row of a sweep on one rank: every timed iteration of one operation at one size.

    size_bytes is nccl-tests' S, count its elements. mode: `single` times each launch, `batch` and `graph` time `batch`
    launches at once, so a duration covers that many. wrong counts elements that differ from what all ranks' payloads
    give. status is ok, oom or unsupported; the last two have no durations. peer and turn are of the pair tournament.
    """

    kind: ClassVar[str] = "collective"
    rank: int
    operation: str
    dtype: str
    size_bytes: int
    count: int
    group_size: int
    in_place: bool
    mode: str
    batch: int
    durations_s: tuple[float, ...]
    wrong: int | None
    status: str = "ok"
    error: str | None = None
    peer: int | None = None
    turn: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapSample:
    """A collective and matrix products on one rank: each alone, then both at once, for every iteration."""

    kind: ClassVar[str] = "overlap"
    rank: int
    operation: str
    dtype: str
    size_bytes: int
    group_size: int
    collective_s: tuple[float, ...]
    compute_s: tuple[float, ...]
    together_s: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSample:
    """One kernel or copy on one device, every timed iteration. Work is stated, rates are computed afterwards.

    label says which shape, variant which way (pinned, pageable, a kernel's name), size what the sweep varies (side,
    bytes, sequence length; None for a model's own product). flops and moved_bytes are of one iteration. wrong counts
    checked elements that differ from the exact result. status is ok, oom, unsupported, skipped (it would take too long)
    or failed; only ok has durations. repeat counts earlier measurements of the same row.
    """

    kind: ClassVar[str] = "kernel"
    rank: int
    kernel: Kernel
    dtype: str
    label: str
    variant: str
    flops: int | None
    moved_bytes: int | None
    durations_s: tuple[float, ...]
    status: str = "ok"
    error: str | None = None
    size: int | None = None
    wrong: int | None = None
    repeat: int = 0


# Default limits for the deviation of a node from the median of its peers: 5 % in speed, 2 % in memory, 10 degrees.
SPEED_RATIO, MEMORY_RATIO, TEMPERATURE_C = 0.05, 0.02, 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductSample:
    """A product of whole numbers whose every element is known beforehand, compared element by element.

    sides are m, n and k. wrong counts the elements that differ; place (row, column), found and expected describe the
    first of them, None if there is none.
    """

    kind: ClassVar[str] = "product"
    rank: int
    repeat: int
    dtype: str
    sides: tuple[int, ...]
    wrong: int
    place: tuple[int, ...] | None = None
    found: float | None = None
    expected: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectorySample:
    """Seeded steps that every rank repeats alone with deterministic kernels: the exact loss of each step, and a digest
    of the final weights. turn 0 is before the timed work, turn 1 after it, from new weights."""

    kind: ClassVar[str] = "trajectory"
    rank: int
    turn: int
    losses: tuple[float, ...]
    weights: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthSample:
    """What the driver and the kernel report about a rank's device and host (see `host.health`). moment: `before` the
    timed work, or `loaded`, read after it while the device computes."""

    kind: ClassVar[str] = "health"
    rank: int
    moment: str
    facts: Mapping[str, Scalar]
