"""What checkpoints and restarts cost: seconds as measured, and goodput at a stated failure rate by formula."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from paceline.errors import Scalar


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointCost:
    """The checkpoints of one cell, means over its launches.

    pause_s: the time per checkpoint in which no step runs. lost_s adds what the steps took longer than those of the
    same cell without checkpoints, with its 95 % interval over launches; without such a cell, or if ranks write while
    nothing else runs, it is the pause. restart_s: detecting the loss, starting and loading, per restart of killed runs;
    None if none was restarted. goodput_ratio is that of these runs, with the failures that they had.
    """

    cell: str
    axes: Mapping[str, Scalar]
    is_async: bool
    every: int
    checkpoints: int
    step_s: float
    pause_s: float
    lost_s: float
    lost_low_s: float | None
    lost_high_s: float | None
    is_beside_none: bool
    bytes: float | None
    restarts: int
    restart_s: float | None
    redone_s: float | None
    goodput_ratio: float | None
    runs: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedGoodput:
    """A cell at a mean time between failures: the chosen interval beside Young's and Daly's, each with its goodput."""

    cost: CheckpointCost
    mtbf_s: float
    restart_s: float
    chosen_s: float
    chosen_ratio: float
    young_s: float
    daly_s: float
    daly_ratio: float

    @property
    def daly_steps(self) -> int:
        return max(1, round(self.daly_s / self.cost.step_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class SpotOffer:
    """The price of an hour of steps that count, on demand and on spot capacity, at the best interval of each.

    break_even_per_h: interruptions per hour from which spot is no longer cheaper; None if no rate makes it so.
    """

    cost: CheckpointCost
    usd_per_h: float
    spot_usd_per_h: float
    interruptions_per_h: float
    ratio: float
    spot_ratio: float
    break_even_per_h: float | None

    @property
    def usd_per_useful_h(self) -> float:
        return self.usd_per_h / self.ratio

    @property
    def spot_usd_per_useful_h(self) -> float:
        return self.spot_usd_per_h / self.spot_ratio
