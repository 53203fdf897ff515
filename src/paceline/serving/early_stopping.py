"""How many requests a statement about a percentile needs, by the rule of LoadGen's early stopping.

`t` requests of `n` were late. That the true share of late ones is at most 1 - percentile is believed once such a small
count would be rarer than 1 - confidence if the share were exactly that: P(Binomial(n, 1 - percentile) <= t) < 0.01.
"""

from __future__ import annotations

import math
from enum import StrEnum
from functools import cache

CONFIDENCE = 0.99


class Told(StrEnum):
    """What the requests of one load say about its limits."""

    PASSED = "passed"
    FAILED = "failed"
    TOO_FEW = "too few requests to tell"


def told_by(requests: int, late: int, percentile: float) -> Told:
    """Passed where the limits are believed kept, failed where so many late ones would be as rare if they were. Between
    the two a load bounds nothing."""
    allowed = late_allowed(requests, percentile)
    if allowed is not None and late <= allowed:
        return Told.PASSED
    return Told.FAILED if too_many_late(requests, late, percentile) else Told.TOO_FEW


@cache
def requests_needed(late: int, percentile: float, confidence: float = CONFIDENCE) -> int:
    """The fewest requests of which `late` may be late: 459, 662, 838 for 0, 1, 2 at the 99th percentile."""
    low, high = late + 1, 2 * (late + 1)
    while not _believed(late, high, percentile, confidence):
        low, high = high, 2 * high
    while low < high:
        middle = (low + high) // 2
        if _believed(late, middle, percentile, confidence):
            high = middle
        else:
            low = middle + 1
    return low


@cache
def late_allowed(requests: int, percentile: float, confidence: float = CONFIDENCE) -> int | None:
    """How many of this many requests may be late; None where even none would be too few to tell."""
    if requests_needed(0, percentile, confidence) > requests:
        return None
    # Of more late ones than are to be expected nobody would believe it; to try them all takes seconds.
    low, high = 0, requests if confidence < 0.5 else min(requests, math.ceil(requests * (1 - percentile)) + 1)
    while low < high:
        middle = (low + high + 1) // 2
        if requests_needed(middle, percentile, confidence) <= requests:
            low = middle
        else:
            high = middle - 1
    return low


def too_many_late(requests: int, late: int, percentile: float, confidence: float = CONFIDENCE) -> bool:
    """Whether so many late ones would be rarer than 1 - confidence if the share were as allowed: the limit is not kept.
    Between this and `requests_needed` nothing can be told."""
    return late > 0 and 1 - _at_most(late - 1, requests, 1 - percentile) < 1 - confidence


def _believed(late: int, requests: int, percentile: float, confidence: float) -> bool:
    return _at_most(late, requests, 1 - percentile) < 1 - confidence


def _at_most(count: int, trials: int, share: float) -> float:
    """P(Binomial(trials, share) <= count), summed from the largest term so that small ones are not lost."""
    if count >= trials:
        return 1.0
    logs = [_log_term(k, trials, share) for k in range(count + 1)]
    top = max(logs)
    return math.exp(top) * math.fsum(math.exp(value - top) for value in logs)


def _log_term(k: int, trials: int, share: float) -> float:
    choose = math.lgamma(trials + 1) - math.lgamma(k + 1) - math.lgamma(trials - k + 1)
    return choose + k * math.log(share) + (trials - k) * math.log1p(-share)
