"""Concluded from a designed experiment: what each change did to speed and memory, and what the design cannot tell."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from paceline.analysis.findings.verdicts import LeftOut

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
