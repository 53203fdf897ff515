"""Findings about differences: two result folders, one cell over time, and the effects of a designed experiment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from paceline.analysis.findings.training import LeftOut
from paceline.errors import Scalar


@dataclass(frozen=True, slots=True, kw_only=True)
class Differing:
    """One recorded fact or field that is not the same on both sides; None where a side does not have it."""

    path: str
    first: str | None
    second: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One metric of one cell, B over A. subject is cell, or row for one row of a sweep; row names it.

    low, high and detectable_ratio are None where the data supports no interval; then verdict, which speaks about B, is
    None too and reason says why. differences are those of this cell that not all cells share.
    """

    subject: str
    metric: str
    unit: str
    better: str
    cell: str
    label: str
    row: str | None
    first: float
    second: float
    ratio: float
    low: float | None
    high: float | None
    detectable_ratio: float | None
    verdict: str | None
    reason: str
    differences: tuple[Differing, ...]
    runs_first: tuple[str, ...]
    runs_second: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """A cell with an ok run in A and none in B, or all of whose runs were ok in A and not all are in B."""

    cell: str
    label: str
    status: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Between:
    """Two folders, cell by cell. changes begin with the largest decided effect; shared holds for every pair."""

    first: str
    second: str
    changes: tuple[Change, ...]
    shared: tuple[Differing, ...]
    lost: tuple[Lost, ...]
    only_first: tuple[str, ...]
    only_second: tuple[str, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Regression:
    """Why a gate at limit_percent fails: a cell, and the sentence about it."""

    cell: str
    text: str


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


FACTOR, COMBINED, INTERACTION = "factor", "combined", "interaction"
FASTER, SLOWER, MORE, LESS = "speeds up", "slows down", "needs more memory", "needs less memory"
NO_EFFECT, OPEN, ALIASED = "no effect", "undecided", "aliased"


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """What a change did to one metric: changed over unchanged, its 95 % interval, the smallest effect that data of this
    spread shows, and the largest that the interval allows. None where launches were too few for a spread.

    verdict: speeds up, slows down, needs more memory, needs less memory, no effect (none over bound_ratio), undecided,
    or aliased (there is an effect or none, but nobody knows whose). Of an interaction the ratio is by how much the
    effect of one factor grows when the other is changed too.
    """

    metric: str
    ratio: float
    low: float | None
    high: float | None
    detectable_ratio: float | None
    bound_ratio: float | None
    verdict: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """One change and what it did. kind is factor, combined or interaction; name is the change in words.

    pairs counts the comparisons that were averaged: all other factors stood at the same levels on both sides of each.
    aliases are the main effects and two-factor interactions that the design cannot tell from it.
    """

    kind: str
    name: str
    factors: tuple[str, ...]
    pairs: int
    aliases: tuple[str, ...]
    responses: tuple[Response, ...]
    cells: tuple[str, ...]
    runs: tuple[str, ...]

    def response(self, metric: str) -> Response | None:
        return next((r for r in self.responses if r.metric == metric), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class DesignOutcome:
    """One designed experiment on one kind of device, its effects ranked: what mattered most first.

    levels has each factor's, the baseline first. resolution and relation (its defining words) are of a fraction only.
    names has each measured cell as its changes from the baseline; left_out are points without a valid run.
    """

    kind: str
    title: str
    levels: Mapping[str, tuple[str, ...]]
    names: Mapping[str, str]
    baseline: str | None
    resolution: int | None
    relation: tuple[str, ...]
    effects: tuple[Effect, ...]
    left_out: tuple[LeftOut, ...]
    notes: tuple[str, ...]
