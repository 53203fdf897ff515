"""What a node shows when it is tested for acceptance: the workload nodes' own samples, listed by `records`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from paceline.experiment.choices import Scalar

# How far a node may lie from its peers' median where nobody says otherwise: 5 % in speed, 2 % in memory, 10 degrees.
SPEED_RATIO = 0.05
MEMORY_RATIO = 0.02
TEMPERATURE_C = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductSample:
    """A product of whole numbers whose every element is known beforehand, compared element by element.

    sides are m, n and k. wrong counts the elements that differ; place (row, column), found and expected are the first
    one's, None where all are right.
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
    """The same seeded steps, taken by every rank for itself with deterministic kernels: the loss of each, exact to the
    bit, and a digest of the weights after the last. turn 0 is before the timed work, turn 1 after it, from new weights.
    """

    kind: ClassVar[str] = "trajectory"
    rank: int
    turn: int
    losses: tuple[float, ...]
    weights: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthSample:
    """What the driver and the kernel say of a rank's device and host (see `health`). moment: `before` the timed work,
    or `loaded`, read after it while the device computes."""

    kind: ClassVar[str] = "health"
    rank: int
    moment: str
    facts: Mapping[str, Scalar]
