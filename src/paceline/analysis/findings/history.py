"""Concluded about one cell over time: its launches in order, and where its level changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from paceline.analysis.findings.between import Differing
from paceline.errors import Scalar


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryPoint:
    """One launch. campaign is the folder it stands in; segment counts the levels of the series from 0."""

    run: str
    campaign: str
    started_at: float
    value: float
    segment: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangePoint:
    """The level changed between launches index - 1 and index. ratio is the level after over the level before.

    p_value is the permutation test's. differences hold for every launch after and for none before where throughout is
    True; else they are those of the two launches around the change, because nothing recorded separates the levels.
    """

    index: int
    before_at: float
    after_at: float
    ratio: float
    low: float
    high: float
    p_value: float
    verdict: str
    differences: tuple[Differing, ...]
    throughout: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class HistorySeries:
    """One metric of one cell, or of one load of a sweep, over all its launches that ended ok, the oldest first.

    note says why no change could be looked for; it is None where the series was searched.
    """

    metric: str
    unit: str
    better: str
    cell: str
    label: str
    axes: Mapping[str, Scalar]
    points: tuple[HistoryPoint, ...]
    changes: tuple[ChangePoint, ...]
    note: str | None = None
