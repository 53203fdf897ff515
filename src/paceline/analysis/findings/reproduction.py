"""Concluded about a replay: whether stored runs, run again, showed the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from paceline.analysis.findings.training import Certificate, Measurement


class ReplayVerdict(StrEnum):
    """What a replay says about one cell. Only `reproduced` counts as such."""

    REPRODUCED = "reproduced"
    DIFFERS = "differs"
    UNDECIDED = "undecided"
    UNSUPPORTED = "unsupported"


@dataclass(frozen=True, slots=True, kw_only=True)
class Remeasured:
    """One metric of one cell, stored beside replayed. ratio is replayed over stored with its 95 % interval.

    within is None where the data supports no interval and the values are not near enough to do without; reason says so.
    stored and replayed are None for a metric of many rows, of which reason tells how many agree.
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
    """Losses of the replay beside the stored ones, step by step; largest_ratio is |new - old| / |old|."""

    steps: int
    equal_steps: int
    largest_ratio: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CellReproduction:
    """One stored cell and what became of it. certificate holds the replay against the stored reference.

    differences are facts of the machines that are not the same, by dotted name: (stored, replayed), each with every
    value that a host of that side has.
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
