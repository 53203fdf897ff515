"""Findings about differences: two result folders, one cell over time, and the effects of a designed experiment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from paceline.analysis.findings.training import LeftOut
from paceline.errors import Scalar


@dataclass(frozen=True, slots=True, kw_only=True)
class Differing:
    """One recorded fact that differs between two sides; None if a side does not have it."""

    path: str
    first: str | None
    second: str | None


# How the reason of a change without a verdict begins if B did other work than A.
NOT_EQUAL_WORK = "not equal work: "


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One metric of one cell, B over A. subject is `cell`, or `row` for one row of a sweep, which `row` names.

    low, high and detectable_ratio are None if the data supports no interval. verdict (about B) is then None too, and
    reason says why. differences are those of this cell that not all cells share. level: how equal the work of a foreign
    script is on both sides, or on what the work of a side was proved; None for others.
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
    level: str | None = None

    @property
    def did_other_work(self) -> bool:
        return self.verdict is None and self.reason.startswith(NOT_EQUAL_WORK)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """A cell with an ok run in A and none in B, or with only ok runs in A and a failed one in B."""

    cell: str
    label: str
    status: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Between:
    """Two folders, compared cell by cell. changes start with the largest decided effect; shared is in all pairs.

    occasions says on which other day or node B ran, and what that adds to every interval; None if on the same.
    disturbed says how many launches have a red or amber trust light; None if none has.
    """

    first: str
    second: str
    changes: tuple[Change, ...]
    shared: tuple[Differing, ...]
    lost: tuple[Lost, ...]
    only_first: tuple[str, ...]
    only_second: tuple[str, ...]
    notes: tuple[str, ...] = ()
    occasions: str | None = None
    disturbed: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Regression:
    """Why a gate fails: a cell, and a sentence about it."""

    cell: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryPoint:
    """One launch. campaign is its folder; segment numbers the levels of the series from 0."""

    run: str
    campaign: str
    started_at: float
    value: float
    segment: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangePoint:
    """The level changed between launches index - 1 and index. ratio is the level after over the level before.

    p_value comes from the permutation test. If throughout is True, differences hold for every launch after the change
    and for none before. Otherwise they are those between the two launches around it, because no recorded fact separates
    the levels.
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
    """One metric of one cell, or of one load of a sweep, over all launches that ended ok, oldest first.

    note says why the series was not searched for a change; it is None if it was.
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
NO_EFFECT, OPEN, ALIASED = "no effect", "inconclusive", "aliased"


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """Effect of a change on one metric: changed over unchanged, with its 95 % interval.

    detectable_ratio is the smallest effect that data of this spread can show, bound_ratio the largest that the interval
    allows. Both are None if there were too few launches for a spread. verdict is speeds up, slows down, needs more
    memory, needs less memory, no effect (none over bound_ratio), inconclusive, or aliased (the design cannot say which
    factor causes it). The ratio of an interaction is how much the effect of one factor grows when the other changes
    too.
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
    """One change and its effect. kind is factor, combined or interaction; name is the change in words.

    pairs counts the comparisons that were averaged; all other factors had the same levels on both sides of each.
    aliases are the main effects and two-factor interactions that the design cannot separate from this one.
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
    """One designed experiment on one kind of device, with its effects ranked by importance.

    levels lists each factor's levels, baseline first. resolution and relation (the defining words) apply to a fraction
    only. names describes each measured cell by its changes from the baseline; left_out are points without a valid run.
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
