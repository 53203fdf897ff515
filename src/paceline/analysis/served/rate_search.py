"""The highest rate within the limits, from all loads of a search or a sweep by rate.

A load passes if early stopping shows that its limits hold, and fails if it shows that they do not. Otherwise it has too
few requests to decide, and bounds nothing. Each launch has its own bracket: a rate that passed in one and failed in
another is the spread of launches, not a bracket.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from paceline.analysis.findings import Measurement
from paceline.analysis.served import measurements as measured
from paceline.analysis.served.loads import Served
from paceline.analysis.statistics.intervals import Bounded, Ratio, student_t
from paceline.experiment.serving import PERCENTILE, STAGED_SCENARIOS
from paceline.serving import early_stopping
from paceline.serving.early_stopping import Verdict

METRIC = "max_rate_per_s"
BRACKETED = "the interval spans the rates between one that passed and one that failed"


class Bracket(NamedTuple):
    """The rate of one cell, its bounds over all launches, and their number. low is None if no rate passed in a launch,
    high if none failed."""

    rate: float
    low: float | None
    high: float | None
    launches: int = 1


class _Launch(NamedTuple):
    """The loads of one launch: the highest that passed below the lowest that failed, others that passed above it, and
    those with too few requests."""

    loads: tuple[Served, ...]
    passed: Served | None
    failed: Served | None
    above: tuple[Served, ...]
    few: tuple[Served, ...]

    @property
    def is_conclusive(self) -> bool:
        return self.passed is not None or self.failed is not None

    @property
    def ends(self) -> tuple[float | None, float | None]:
        return _rate(self.passed), _rate(self.failed)


def outcome_of(served: Served) -> Verdict:
    return early_stopping.verdict_of(len(served.requests), served.late, PERCENTILE)


def max_rate(loads: Sequence[Served]) -> Measurement | None:
    """For the loads of one cell: the geometric mean over launches of the highest rate that passed below the lowest that
    failed. None if there was no search, or no limits."""
    rated = [load for load in loads if load.rate_per_s is not None and load.has_limits]
    if not rated or rated[0].serving.scenario not in STAGED_SCENARIOS:
        return None
    runs = dict.fromkeys(id(record) for load in rated for record in load.records)
    launches = [
        _bracketed([part for load in rated for part in load.launches if id(part.records[0]) == run]) for run in runs
    ]
    # A sweep applies the same rates in every launch: if they are inconclusive in each, all together count as one.
    if rated[0].serving.scenario != "search" and not any(launch.is_conclusive for launch in launches):
        launches = [_bracketed(rated)]
    note = " | ".join(map(_note, launches))
    # An inconclusive launch is not a repetition of a conclusive one.
    conclusive = [launch for launch in launches if launch.is_conclusive] or launches
    whole = Served(tuple(stretch for launch in conclusive for load in launch.loads for stretch in load.stretches))
    return measured.measurement(whole, METRIC, combined([launch.ends for launch in conclusive]), note=note)


def _bracketed(loads: Sequence[Served]) -> _Launch:
    outcomes = [(outcome_of(load), load) for load in loads]
    by_outcome = {each: [load for of, load in outcomes if of is each] for each in Verdict}
    failed = min(by_outcome[Verdict.FAILED], key=_known_rate, default=None)
    limit = math.inf if failed is None else _known_rate(failed)
    passed = max((p for p in by_outcome[Verdict.PASSED] if _known_rate(p) < limit), key=_known_rate, default=None)
    above = tuple(load for load in by_outcome[Verdict.PASSED] if _known_rate(load) > limit)
    return _Launch(tuple(loads), passed, failed, above, tuple(by_outcome[Verdict.TOO_FEW]))


def combined(ends: Sequence[tuple[float | None, float | None]]) -> Bounded:
    """One rate with its bounds from what launches passed and failed: from the lowest that passed to the highest that
    failed, or Student's interval of the logarithms with the mean width of a bracket above it, whichever is wider."""
    passed = [low for low, _ in ends if low is not None]
    failed = [high for _, high in ends if high is not None]
    least = min(passed) if passed and len(passed) == len(ends) else None
    most = max(failed) if failed and len(failed) == len(ends) else None
    if len(ends) < 2 or not passed:
        return (least, least, most)
    logs = np.log(passed)
    value = float(logs.mean())
    reach = student_t(len(logs) - 1) * float(logs.std(ddof=1)) / math.sqrt(len(logs)) if len(logs) > 1 else 0.0
    # A bracket without an end leaves that bound out, whatever the width of the others.
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
    parts = [f"{_rate(passed):g}/s passed ({_counts(passed)})" if passed else "no rate passed"]
    parts.append(f"{_rate(failed):g}/s failed ({_counts(failed)})" if failed else "none failed, so it may be higher")
    parts += [f"{_rates(launch.above)} passed as well"] if launch.above else []
    parts += [f"{_rates(launch.few)}: {Verdict.TOO_FEW}"] if launch.few else []
    # Why a search ended, as recorded.
    for record in {id(record): record for load in launch.loads for record in load.records}.values():
        if record.evidence and (why := record.evidence.settings.get("search_ended_by")):
            parts.append(str(why))
    return "; ".join(parts)


def _rates(loads: Sequence[Served]) -> str:
    return ", ".join(f"{_rate(load):g}/s" for load in loads)


def _counts(served: Served) -> str:
    return f"{len(served.requests):,} requests, {served.late:,} late"


def bracket(rate: Measurement | None) -> Bracket | None:
    """The bracket of what `max_rate` returned; None if no rate passed."""
    return None if rate is None or rate.value is None else Bracket(rate.value, rate.low, rate.high, rate.launches)


def ratio(over: Bracket, under: Bracket) -> Ratio | None:
    """One maximum rate over another, each over several launches: distances to the bounds add up as independent errors
    do. None if there is no upper bound."""
    if over.high is None or under.low is None:
        return None
    below, above = math.inf, math.hypot(math.log(over.high / over.rate), math.log(under.rate / under.low))
    if over.low is not None and under.high is not None:
        below = math.hypot(math.log(over.rate / over.low), math.log(under.high / under.rate))
    return Ratio(over.rate / under.rate, error=0.0, launches=min(over.launches, under.launches), slack=(below, above))


def interval_text(first: Bracket, second: Bracket) -> str:
    """What the interval of second over first covers, or why there is none."""
    if second.high is None:
        return "no rate failed in B, so it may be higher"
    if first.low is None:
        return "no rate passed in a launch of A, so it may be lower"
    return f"{BRACKETED}, over all launches"
