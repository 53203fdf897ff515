"""Percentiles of the gaps between tokens, with bounds that know what answers in flight together share.

They wait for the same steps and stall behind the same prefills: an answer is no draw of its own. What is drawn again is
launches, and in each of them blocks of answers that began one after another, long enough that most of what an answer
shared with others is within its block.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from paceline.analysis.served_loads import Served
from paceline.analysis.statistics import Resampled, block_length, clustered_percentiles, seed_of
from paceline.analysis.token_times import Gaps, most_in_flight

# A block is of so many times the answers in flight. Answers at its edges share steps with the next block: with r of
# them a bootstrap sees 1 - 1 / (3 r) of the variance.
ROUNDS = 2
# Drawn in all launches together, so that no number of answers makes a bootstrap longer.
MOST_BLOCKS = 2000


def percentiles(served: Served, gaps: Sequence[Gaps], percents: Sequence[float]) -> list[Resampled | None]:
    """One for each percent, of the gaps of each launch; None where the data supports no bounds: of one launch with few
    blocks, and where a launch has no gap."""
    most = MOST_BLOCKS // len(served.launches)
    launches = [
        (each.seconds, blocks(each.answers, most_in_flight(launch.requests), most))
        for launch, each in zip(served.launches, gaps, strict=True)
    ]
    return clustered_percentiles(launches, percents, seed_of(served.cell, served.words, "itl"))


def blocks(answers: NDArray[np.int64], in_flight: int, most: int) -> NDArray[np.int64]:
    """The block of each gap, by the number of its answer in the order of time; the last one takes what is left over.
    At most `most` of them."""
    if not len(answers):
        return answers
    count = int(answers.max()) + 1
    length = max(block_length(count), ROUNDS * in_flight, math.ceil(count / max(most, 1)))
    return np.minimum(answers // length, max(count // length - 1, 0))
