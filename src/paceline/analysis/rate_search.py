"""The highest rate within the limits, from all loads that a search or a sweep by rate put on.

A load passes when early stopping believes its limits kept, and fails when so many late requests would be as rare if
they were. Between the two its requests are too few to tell, and it bounds nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from paceline import stopping
from paceline.analysis import served as measured
from paceline.analysis.served_loads import Served
from paceline.analysis.statistics import DETECTABLE_ERRORS, Ratio
from paceline.findings import Measurement
from paceline.serving import PERCENTILE, STAGED_SCENARIOS
from paceline.stopping import Told

METRIC = "max_rate_per_s"


class Bracket(NamedTuple):
    """The highest rate that passed, and the lowest that failed; None where none did."""

    passed: float
    failed: float | None


def outcome_of(served: Served) -> Told:
    return stopping.told_by(len(served.requests), measured.late_of(served), PERCENTILE)


def max_rate(loads: Sequence[Served]) -> Measurement | None:
    """Of the loads of one cell: the highest rate that passed below the lowest that failed; these two are its bounds.
    None where nothing was searched, or there are no limits to search within."""
    rated = [load for load in loads if load.rate_per_s is not None and load.has_limits]
    if not rated or rated[0].serving.scenario not in STAGED_SCENARIOS:
        return None
    outcomes = [outcome_of(load) for load in rated]
    by_outcome = {o: [load for load, of in zip(rated, outcomes, strict=True) if of is o] for o in Told}
    failed = min(by_outcome[Told.FAILED], key=_rate, default=None)
    below = [load for load in by_outcome[Told.PASSED] if failed is None or _rate(load) < _rate(failed)]
    passed = max(below, key=_rate, default=None)
    value, high = (None if load is None else _rate(load) for load in (passed, failed))
    note = _note(passed, failed, by_outcome[Told.PASSED], by_outcome[Told.TOO_FEW])
    whole = Served(tuple(stretch for load in rated for stretch in load.stretches))
    return measured.measurement(whole, METRIC, (value, value, high), note=note)


def _rate(served: Served) -> float:
    assert served.rate_per_s is not None
    return served.rate_per_s


def _note(passed: Served | None, failed: Served | None, all_passed: Sequence[Served], few: Sequence[Served]) -> str:
    said = [f"{_rate(passed):g}/s passed ({_counts(passed)})" if passed else "no rate passed"]
    said.append(f"{_rate(failed):g}/s failed ({_counts(failed)})" if failed else "none failed, so it may be higher")
    above = [f"{_rate(load):g}/s" for load in all_passed if failed and _rate(load) > _rate(failed)]
    said += [f"{', '.join(above)} passed all the same"] if above else []
    said += [f"{', '.join(f'{_rate(load):g}/s' for load in few)}: {Told.TOO_FEW}"] if few else []
    return "; ".join(said)


def _counts(served: Served) -> str:
    return f"{len(served.requests):,} requests, {measured.late_of(served):,} late"


# --- found again ---


def bracket(found: Measurement | None) -> Bracket | None:
    """Of what `max_rate` found; None where no rate passed."""
    return None if found is None or found.value is None else Bracket(found.value, found.high)


def ratio(over: Bracket, under: Bracket) -> Ratio | None:
    """One found rate over another. The true rates lie between what passed and what failed, each end as sure as early
    stopping is: the interval is that of all their ratios. None where nothing failed over, so that nothing bounds it."""
    if over.failed is None:
        return None
    value = over.passed / under.passed
    low, high = over.passed / under.failed if under.failed else 0.0, over.failed / under.passed
    # The interval leaves out 1 where the lower of both failed below what the other passed: the width of its own bracket
    # is the smallest effect that could be shown.
    lower = over if value < 1 or under.failed is None else under
    width = math.log((lower.failed or over.failed) / lower.passed)
    return Ratio(value, low, high, width / DETECTABLE_ERRORS)
