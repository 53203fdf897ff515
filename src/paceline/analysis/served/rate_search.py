"""The highest rate within the limits, from all loads that a search or a sweep by rate put on.

A load passes when early stopping believes its limits kept, and fails when so many late requests would be as rare if
they were. Between the two its requests are too few to tell, and it bounds nothing. Each launch is bracketed by itself:
what passed in one and failed in another is the spread of launches, and no bracket.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from paceline.analysis.findings import Measurement
from paceline.analysis.served import measurements as measured
from paceline.analysis.served.loads import Served
from paceline.analysis.statistics.intervals import DETECTABLE_ERRORS, Bounded, Ratio, student_t
from paceline.experiment.serving import PERCENTILE, STAGED_SCENARIOS
from paceline.serving import early_stopping
from paceline.serving.early_stopping import Verdict

METRIC = "max_rate_per_s"
# How far beyond their brackets two rates must lie apart, as a logarithm, where a side has one launch: its bracket holds
# nothing of what another launch would find.
UNREPEATED = 0.05
BRACKETED = "the interval is that of the rates between one that passed and one that failed"


class Bracket(NamedTuple):
    """What was found of one cell: its rate, the bounds of it over all launches, and how many they are. low is None
    where a launch passed no rate, high where one failed none."""

    rate: float
    low: float | None
    high: float | None
    launches: int = 1


class _Launch(NamedTuple):
    """All loads of one launch; of them the highest that passed below the lowest that failed, others that passed, and
    those whose requests are too few to tell."""

    loads: tuple[Served, ...]
    passed: Served | None
    failed: Served | None
    above: tuple[Served, ...]
    few: tuple[Served, ...]

    @property
    def tells(self) -> bool:
        return self.passed is not None or self.failed is not None

    @property
    def ends(self) -> tuple[float | None, float | None]:
        return _rate(self.passed), _rate(self.failed)


def outcome_of(served: Served) -> Verdict:
    return early_stopping.verdict_of(len(served.requests), measured.late_of(served), PERCENTILE)


def max_rate(loads: Sequence[Served]) -> Measurement | None:
    """Of the loads of one cell: the geometric mean over launches of the highest rate that passed below the lowest that
    failed. None where nothing was searched, or there are no limits to search within."""
    rated = [load for load in loads if load.rate_per_s is not None and load.has_limits]
    if not rated or rated[0].serving.scenario not in STAGED_SCENARIOS:
        return None
    launches = _launches(rated)
    note = " | ".join(map(_note, launches))
    # A launch that tells nothing is no repetition of one that does.
    telling = [launch for launch in launches if launch.tells] or launches
    whole = Served(tuple(stretch for launch in telling for load in launch.loads for stretch in load.stretches))
    return measured.measurement(whole, METRIC, combined([launch.ends for launch in telling]), note=note)


def _launches(rated: Sequence[Served]) -> list[_Launch]:
    """A sweep puts the same rates on in every launch: where they are too few to tell anything in each, all together
    are one."""
    runs = dict.fromkeys(id(record) for load in rated for record in load.records)
    parts = [[part for load in rated for part in load.launches if id(part.records[0]) == run] for run in runs]
    found = list(map(_bracketed, parts))
    return (
        found if any(launch.tells for launch in found) or rated[0].serving.scenario == "search" else [_bracketed(rated)]
    )


def _bracketed(loads: Sequence[Served]) -> _Launch:
    outcomes = [(outcome_of(load), load) for load in loads]
    by_outcome = {each: [load for of, load in outcomes if of is each] for each in Verdict}
    failed = min(by_outcome[Verdict.FAILED], key=_known_rate, default=None)
    limit = math.inf if failed is None else _known_rate(failed)
    passed = max((p for p in by_outcome[Verdict.PASSED] if _known_rate(p) < limit), key=_known_rate, default=None)
    above = tuple(load for load in by_outcome[Verdict.PASSED] if _known_rate(load) > limit)
    return _Launch(tuple(loads), passed, failed, above, tuple(by_outcome[Verdict.TOO_FEW]))


def combined(ends: Sequence[tuple[float | None, float | None]]) -> Bounded:
    """What launches passed and failed at, as one rate with its bounds: from the lowest that passed to the highest that
    failed, or Student's interval of their logarithms with the mean width of a bracket above it, whichever is wider."""
    passed = [low for low, _ in ends if low is not None]
    failed = [high for _, high in ends if high is not None]
    least = min(passed) if passed and len(passed) == len(ends) else None
    most = max(failed) if failed and len(failed) == len(ends) else None
    if len(ends) < 2 or not passed:
        return (least, least, most)
    logs = np.log(passed)
    value = float(logs.mean())
    reach = student_t(len(logs) - 1) * float(logs.std(ddof=1)) / math.sqrt(len(logs)) if len(logs) > 1 else 0.0
    # A bracket that lacks an end leaves that bound out, whatever the width of the others is.
    width = sum(math.log(high / low) for low, high in ends if low and high) / len(passed)
    low = None if least is None else min(least, math.exp(value - reach))
    high = None if most is None else max(most, math.exp(value + reach + width))
    return math.exp(value), low, high


def _rate(served: Served | None) -> float | None:
    return None if served is None else served.rate_per_s


def _known_rate(served: Served) -> float:
    assert served.rate_per_s is not None
    return served.rate_per_s


def _note(launch: _Launch) -> str:
    passed, failed = launch.passed, launch.failed
    said = [f"{_rate(passed):g}/s passed ({_counts(passed)})" if passed else "no rate passed"]
    said.append(f"{_rate(failed):g}/s failed ({_counts(failed)})" if failed else "none failed, so it may be higher")
    said += [f"{_rates(launch.above)} passed all the same"] if launch.above else []
    said += [f"{_rates(launch.few)}: {Verdict.TOO_FEW}"] if launch.few else []
    said += _ended_by(launch)
    return "; ".join(said)


def _ended_by(launch: _Launch) -> Iterator[str]:
    """Why a search came to its end, in its own words."""
    for record in {id(record): record for load in launch.loads for record in load.records}.values():
        if record.evidence and (why := record.evidence.settings.get("search_ended_by")):
            yield str(why)


def _rates(loads: Sequence[Served]) -> str:
    return ", ".join(f"{_rate(load):g}/s" for load in loads)


def _counts(served: Served) -> str:
    return f"{len(served.requests):,} requests, {measured.late_of(served):,} late"


# --- found again ---


def bracket(found: Measurement | None) -> Bracket | None:
    """Of what `max_rate` found; None where no rate passed."""
    return None if found is None or found.value is None else Bracket(found.value, found.low, found.high, found.launches)


def ratio(over: Bracket, under: Bracket) -> Ratio | None:
    """One found rate over another. Where a side has one launch, the interval is that of all ratios of what lies within
    their brackets; between sides that were repeated, distances to the bounds add up as independent ones do. None where
    nothing bounds it from above."""
    if over.high is None or under.low is None:
        return None
    value, low, high = over.rate / under.rate, 0.0, over.high / under.low
    if over.low is not None and under.high is not None:
        low = over.low / under.high
    if min(over.launches, under.launches) > 1:
        high = value * math.exp(math.hypot(math.log(over.high / over.rate), math.log(under.rate / under.low)))
        if over.low is not None and under.high is not None:
            low = value / math.exp(math.hypot(math.log(over.rate / over.low), math.log(under.high / under.rate)))
    # An interval leaves out 1 where its end on that side is nearer to the value than 1 is: so much is the smallest
    # effect that could be shown.
    smallest = math.log(high / value if value < 1 or not low else value / low)
    margin = UNREPEATED if min(over.launches, under.launches) < 2 else 0.0
    return Ratio(value, low, high, (smallest + margin) / DETECTABLE_ERRORS)


def told_by(first: Bracket, second: Bracket) -> str:
    """What the interval of second over first is of, or why there is none."""
    if second.high is None:
        return "no rate failed in B, so that it may be higher"
    if first.low is None:
        return "no rate passed in a launch of A, so that it may be lower"
    if min(first.launches, second.launches) > 1:
        return f"{BRACKETED}, over all launches"
    return f"{BRACKETED}; launches were not repeated, so that these must lie {math.expm1(UNREPEATED):.0%} apart"
