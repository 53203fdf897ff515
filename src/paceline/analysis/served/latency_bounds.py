"""Percentiles of latencies and of gaps between tokens, with confidence intervals that respect shared delays.

Answers in flight together wait for the same steps and stall behind the same prefills, so they are not independent. The
bootstrap therefore resamples launches, and within each launch blocks of consecutive answers, long enough that most
shared delays are within one block. If all requests are due at once, waiting times are positions in a queue: only
launches are resampled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from paceline.analysis.served.loads import Served, first_answer_s, first_reasoning_s, latency_s, ttft_s
from paceline.analysis.served.token_times import Gaps, most_in_flight
from paceline.analysis.statistics.clustered_percentiles import FEWEST_BEYOND, clustered_percentiles
from paceline.analysis.statistics.intervals import Array, Bounded, Resampled, block_length, bounded, seed_of, unbounded
from paceline.results.served_samples import RequestSample
from paceline.serving import early_stopping

# Values of one launch, and the number of the answer of each, in the order of time.
Timed = tuple[Array, NDArray[np.int64]]
Quantity = Callable[[RequestSample], float | None]
# Counted from when a request was due.
WAITS: frozenset[Quantity] = frozenset((ttft_s, latency_s, first_reasoning_s, first_answer_s))

# A block has so many times the answers in flight. Answers at its edges share steps with the next block: with r times,
# the bootstrap sees 1 - 1 / (3 r) of the variance.
ROUNDS = 2
# Blocks of all launches together, which bounds the time of a bootstrap.
MOST_BLOCKS = 2000


def percentile(values: Sequence[float] | Array, percent: float) -> float | None:
    """A percentile of a load test; None if there are too few values to bound it (`early_stopping.requests_for`).

    >>> percentile([0.1] * 458, 99), percentile([0.1] * 459, 99)
    (None, 0.1)
    """
    if len(values) < early_stopping.requests_for(percent / 100):
        return None
    return float(np.percentile(np.asarray(values, dtype=np.float64), percent))


def why_missing(percent: float, count: int, what: str = "requests") -> str | None:
    """Why a percentile of so many values is not reported; None if it is.

    >>> why_missing(99, 60)
    'p99 needs 459 requests, got 60'
    """
    needed = early_stopping.requests_for(percent / 100)
    return f"p{percent:g} needs {needed:,} {what}, got {count:,}" if count < needed else None


def of_gaps(served: Served, gaps: Sequence[Gaps], percents: Sequence[float]) -> list[Bounded]:
    """One estimate per percentile, from the gaps of each launch."""
    return list(map(bounded, _percentiles(served, [(each.seconds, each.answers) for each in gaps], percents, "itl")))


def of_answers(served: Served, quantity: Quantity, percents: Sequence[float]) -> list[Bounded]:
    """One estimate per percentile, from one value per answer; answers without the value are skipped."""
    return list(map(bounded, estimates(served, quantity, percents)))


def estimates(served: Served, quantity: Quantity, percents: Sequence[float]) -> list[Resampled | None]:
    """The same with their bootstrap draws, so that two loads can be compared; None with too few answers."""
    timed = []
    for launch in served.launches:
        values = np.array([np.nan if (value := quantity(request)) is None else value for request in launch.answered])
        known = np.flatnonzero(~np.isnan(values))
        timed.append((values[known], np.zeros_like(known) if is_queue(served, quantity) else known))
    return _percentiles(served, timed, percents, "latency")


def is_queue(served: Served, quantity: Quantity) -> bool:
    """Whether the value is a position in a queue: all requests are due at once, so each waits for those before it.
    Neighbouring blocks then differ systematically; only a launch is one draw."""
    return served.scenario == "offline" and quantity in WAITS


def why_by_launches(served: Served, quantity: Quantity) -> str | None:
    """The note on the confidence interval of a queue; None for other loads."""
    if not is_queue(served, quantity):
        return None
    bounds = "one launch has none" if len(served.launches) == 1 else "it is over launches only"
    return f"all requests are due at once, so this is a position in the queue; confidence interval: {bounds}"


def why_unbounded(launches: int) -> str:
    """Why a percentile of so many launches has no confidence interval."""
    if launches == 1:
        return (
            f"one launch, with fewer than {FEWEST_BEYOND} blocks of answers beyond the percentile on one side; "
            "repeat launches or send more requests"
        )
    return f"fewer than {FEWEST_BEYOND} answers are beyond the percentile, or a launch has none"


def _percentiles(
    served: Served, timed: Sequence[Timed], percents: Sequence[float], seed_text: str
) -> list[Resampled | None]:
    """None with too few values for the percentile. Without draws if the data supports none: one launch with few blocks,
    or a launch without a value."""
    seconds, most = np.concatenate([each for each, _ in timed]), MOST_BLOCKS // len(served.launches)
    if not len(seconds):
        return [None] * len(percents)
    launches = [
        (values, blocks(answers, most_in_flight(launch.requests), most))
        for launch, (values, answers) in zip(served.launches, timed, strict=True)
    ]
    drawn = clustered_percentiles(launches, percents, seed_of(served.cell, served.seed_text, seed_text))
    values = [percentile(seconds, percent) for percent in percents]
    return [
        None if value is None else found or unbounded(value, len(launches))
        for value, found in zip(values, drawn, strict=True)
    ]


def blocks(answers: NDArray[np.int64], in_flight: int, most: int) -> NDArray[np.int64]:
    """The block number of each gap, from the number of its answer in time order. There are at most `most` blocks; the
    last one takes the remainder."""
    if not len(answers):
        return answers
    count = int(answers.max()) + 1
    length = max(block_length(count), ROUNDS * in_flight, math.ceil(count / max(most, 1)))
    return np.minimum(answers // length, max(count // length - 1, 0))
