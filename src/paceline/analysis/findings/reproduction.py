"""Findings about a replay: whether stored runs, run again, gave the same results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from paceline.analysis.findings.training import Certificate, Measurement


class ReplayVerdict(StrEnum):
    """Verdict on one cell of a replay. Only `reproduced` counts as reproduced."""

    REPRODUCED = "reproduced"
    DIFFERS = "differs"
    UNDECIDED = "undecided"
    UNSUPPORTED = "unsupported"


@dataclass(frozen=True, slots=True, kw_only=True)
class Remeasured:
    """One metric of one cell, stored and replayed. ratio is replayed over stored with its 95 % interval.

    within is None if the data supports no interval and the values are not close; reason says so. stored and replayed
    are None for a metric with many rows; reason then says how many agree.
    """

    metric: str
    within: bool | None
    reason: str
    stored: Measurement | None = None
    replayed: Measurement | None = None
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    detectable_ratio: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """Losses of the replay compared with the stored ones, step by step; largest_ratio is |new - old| / |old|."""

    steps: int
    equal_steps: int
    largest_ratio: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CellReproduction:
    """One stored cell and its replay. certificate checks the replay against the stored reference.

    differences are facts of the machines that differ, by dotted name: (stored, replayed), each with all values on that
    side.
    """

    cell: str
    label: str
    verdict: ReplayVerdict
    reason: str
    metrics: tuple[Remeasured, ...] = ()
    trajectory: Trajectory | None = None
    certificate: Certificate | None = None
    differences: Mapping[str, tuple[str | None, str | None]]
    stored_runs: tuple[str, ...]
    replayed_runs: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reproduction:
    """All cells of a replay."""

    cells: tuple[CellReproduction, ...]

    @property
    def reproduced(self) -> bool:
        return bool(self.cells) and all(cell.verdict is ReplayVerdict.REPRODUCED for cell in self.cells)

    def count(self, verdict: ReplayVerdict) -> int:
        return sum(cell.verdict is verdict for cell in self.cells)
