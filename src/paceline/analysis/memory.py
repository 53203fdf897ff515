"""Memory by component, predicted beside measured, and the largest micro batch that fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.findings import FrontierPoint, Measurement, MemoryRow, RunFinding
from paceline.records import RunRecord


@dataclass(frozen=True, slots=True)
class Held:
    """What the memory runs say."""

    rows: tuple[MemoryRow, ...] = ()
    frontier: tuple[FrontierPoint, ...] = ()
    measurements: tuple[Measurement, ...] = ()


def analyse(records: Sequence[RunRecord], runs: Sequence[RunFinding]) -> Held:
    """records are those that ended ok; runs are all, because a probe that ran out of memory is a result too."""
    return Held()
