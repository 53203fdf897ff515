"""How many requests a statement about a percentile needs, by the rule of LoadGen's early stopping.

`late` of `n` requests were late. The limit counts as met (the true share of late requests is at most 1 - percentile) if
so few late requests would be rarer than 1 - confidence at exactly that share: P(Binomial(n, 1 - percentile) <= late) <
0.01.
"""

from __future__ import annotations

import bisect
import math
from enum import StrEnum
from functools import cache

CONFIDENCE = 0.99


class Verdict(StrEnum):
    """What the requests of one load say about its limits."""

    PASSED = "passed"
    FAILED = "failed"
    TOO_FEW = "too few requests to decide"


def verdict_of(requests: int, late: int, percentile: float) -> Verdict:
    """Passed if the limits are met with confidence, failed if they are exceeded with the same confidence.

    >>> str(verdict_of(459, 0, 0.99)), str(verdict_of(459, 11, 0.99)), str(verdict_of(458, 0, 0.99))
    ('passed', 'failed', 'too few requests to decide')
    """
    allowed = late_allowed(requests, percentile)
    if allowed is not None and late <= allowed:
        return Verdict.PASSED
    return Verdict.FAILED if too_many_late(requests, late, percentile) else Verdict.TOO_FEW


@cache
def requests_needed(late: int, percentile: float, confidence: float = CONFIDENCE) -> int:
    """The fewest requests of which `late` may be late.

    >>> [requests_needed(late, 0.99) for late in (0, 1, 2)]
    [459, 662, 838]
    """

    def is_met(requests: int) -> bool:
        return _at_most(late, requests, 1 - percentile) < 1 - confidence

    high = 2 * (late + 1)
    while not is_met(high):
        high *= 2
    return bisect.bisect_left(range(high), True, lo=late + 1, key=is_met)


def requests_for(percentile: float, confidence: float = CONFIDENCE) -> int:
    """The fewest requests from which a percentile (0 to 1) is reported.

    The rule for all percentiles of load tests: n values bound a percentile if one of them is beyond it with confidence
    0.99. All n are on its near side with probability p^n, so p^n < 0.01. With fewer the largest value itself may be
    below the percentile, and nothing measured bounds it. This is n(0) of early stopping: a load with enough requests
    for a verdict about its p99 limit has enough for its p99.

    >>> [requests_for(p) for p in (0.5, 0.9, 0.95, 0.99)]
    [7, 44, 90, 459]
    """
    return requests_needed(0, max(percentile, 1 - percentile), confidence)


@cache
def late_allowed(requests: int, percentile: float, confidence: float = CONFIDENCE) -> int | None:
    """The number of requests that may be late; None if there are too few requests even with none late.

    >>> late_allowed(13368, 0.99), late_allowed(458, 0.99)
    (107, None)
    """
    if requests_needed(0, percentile, confidence) > requests:
        return None
    # More late requests than expected are never allowed; trying them all would take seconds.
    most = requests if confidence < 0.5 else min(requests, math.ceil(requests * (1 - percentile)) + 1)
    return bisect.bisect_right(range(most + 1), requests, key=lambda n: requests_needed(n, percentile, confidence)) - 1


def too_many_late(requests: int, late: int, percentile: float, confidence: float = CONFIDENCE) -> bool:
    """Whether so many late requests would be rarer than 1 - confidence if the limit were met. Between this and
    `requests_needed` the load is inconclusive."""
    return late > 0 and 1 - _at_most(late - 1, requests, 1 - percentile) < 1 - confidence


def _at_most(count: int, trials: int, share: float) -> float:
    """P(Binomial(trials, share) <= count), summed from the largest term so that small ones are not lost."""
    if count >= trials:
        return 1.0

    def log_term(k: int) -> float:
        choose = math.lgamma(trials + 1) - math.lgamma(k + 1) - math.lgamma(trials - k + 1)
        return choose + k * math.log(share) + (trials - k) * math.log1p(-share)

    logs = [log_term(k) for k in range(count + 1)]
    top = max(logs)
    return math.exp(top) * math.fsum(math.exp(value - top) for value in logs)
