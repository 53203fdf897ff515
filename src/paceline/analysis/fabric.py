"""Collectives: rows to nccl-tests' definitions, alpha-beta fits, overlap, and the slow link or node among peers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.findings import CollectiveFit, CollectiveRow, Measurement, Overlap, Suspect
from paceline.records import RunRecord


@dataclass(frozen=True, slots=True)
class Fabric:
    """All that the collectives of a set of runs say."""

    rows: tuple[CollectiveRow, ...] = ()
    fits: tuple[CollectiveFit, ...] = ()
    overlaps: tuple[Overlap, ...] = ()
    suspects: tuple[Suspect, ...] = ()
    measurements: tuple[Measurement, ...] = ()


def analyse(records: Sequence[RunRecord]) -> Fabric:
    return Fabric()
