"""Percentiles of latencies and of the gaps between tokens, with bounds that know what answers in flight together share.

They wait for the same steps and stall behind the same prefills: an answer is no draw of its own. What is drawn again is
launches, and in each of them blocks of answers that began one after another, long enough that most of what an answer
shared with others is within its block. Waits in a queue of requests that are all due at once have the bounds of
launches alone.
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

# Of a launch its values, and the number of the answer that each is of, in the order of time.
Timed = tuple[Array, NDArray[np.int64]]
Quantity = Callable[[RequestSample], float | None]
# Counted from when a request was due.
WAITS: frozenset[Quantity] = frozenset((ttft_s, latency_s, first_reasoning_s, first_answer_s))

# A block is of so many times the answers in flight. Answers at its edges share steps with the next block: with r of
# them a bootstrap sees 1 - 1 / (3 r) of the variance.
ROUNDS = 2
# Drawn in all launches together, so that no number of answers makes a bootstrap longer.
MOST_BLOCKS = 2000


def of_gaps(served: Served, gaps: Sequence[Gaps], percents: Sequence[float]) -> list[Bounded]:
    """One for each percent, of the gaps of each launch."""
    return list(map(bounded, _percentiles(served, [(each.seconds, each.answers) for each in gaps], percents, "itl")))


def of_answers(served: Served, quantity: Quantity, percents: Sequence[float]) -> list[Bounded]:
    """One for each percent, of what is told of each answer; those of which it is not told have no part in it."""
    return list(map(bounded, estimates(served, quantity, percents)))


def estimates(served: Served, quantity: Quantity, percents: Sequence[float]) -> list[Resampled | None]:
    """The same with their draws, so that two loads can be compared; None where it is told of no answer."""
    timed = [_told(launch, quantity) for launch in served.launches]
    if is_queue(served, quantity):
        timed = [(values, np.zeros_like(answers)) for values, answers in timed]
    return _percentiles(served, timed, percents, "latency")


def is_queue(served: Served, quantity: Quantity) -> bool:
    """Whether it tells a place in a queue: all requests are due at once, and each waits for those before it. Values go
    up from the first to the last, so that blocks of neighbours are no draws of one law; a launch is one draw."""
    return served.scenario == "offline" and quantity in WAITS


def why_by_launches(served: Served, quantity: Quantity) -> str | None:
    """What is to be said of the bounds of a queue; None of other loads."""
    if not is_queue(served, quantity):
        return None
    bounds = "one launch has no bounds" if len(served.launches) == 1 else "bounds are of launches only"
    return f"all requests are due at once, so that it tells a place in the queue: {bounds}"


def why_unbounded(launches: int) -> str:
    """Why a percentile of so many launches has a value and no draws."""
    if launches == 1:
        return (
            f"one launch, and fewer than {FEWEST_BEYOND} blocks of its answers lie beyond the percentile on a side; "
            "repeat launches, or ask more requests"
        )
    return f"fewer than {FEWEST_BEYOND} answers lie beyond the percentile, or a launch has none"


def _told(launch: Served, quantity: Quantity) -> Timed:
    told = np.array([np.nan if (value := quantity(request)) is None else value for request in launch.answered])
    known = np.flatnonzero(~np.isnan(told))
    return told[known], known


def _percentiles(
    served: Served, timed: Sequence[Timed], percents: Sequence[float], word: str
) -> list[Resampled | None]:
    """Without draws where the data supports none: of one launch with few blocks, and where a launch has no value."""
    seconds, most = np.concatenate([each for each, _ in timed]), MOST_BLOCKS // len(served.launches)
    if not len(seconds):
        return [None] * len(percents)
    launches = [
        (values, blocks(answers, most_in_flight(launch.requests), most))
        for launch, (values, answers) in zip(served.launches, timed, strict=True)
    ]
    drawn = clustered_percentiles(launches, percents, seed_of(served.cell, served.words, word))
    values = [float(np.percentile(seconds, percent)) for percent in percents]
    return [found or unbounded(value, len(launches)) for value, found in zip(values, drawn, strict=True)]


def blocks(answers: NDArray[np.int64], in_flight: int, most: int) -> NDArray[np.int64]:
    """The block of each gap, by the number of its answer in the order of time; the last one takes what is left over.
    At most `most` of them."""
    if not len(answers):
        return answers
    count = int(answers.max()) + 1
    length = max(block_length(count), ROUNDS * in_flight, math.ceil(count / max(most, 1)))
    return np.minimum(answers // length, max(count // length - 1, 0))
