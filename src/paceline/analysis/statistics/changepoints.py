"""Where the level of a short series changed: segmentation in which a permutation test confirms every cut.

A series is searched for a step (the mean of its end against the rest: CUSUM, Page 1954; Vostrikova 1981) and, if there
is none, for an interval (the mean of an inner part against the rest: circular binary segmentation, Olshen et al. 2004),
because a fault that was fixed leaves no step. The p-value of the best cut comes from permutations of the same values,
as in E-divisive (Matteson and James 2014): it assumes no distribution, only that without a change every order is
equally likely. Each of the two searches has half of LEVEL, and parts are searched only after the whole has changed, so
LEVEL is the probability of a false change in a series of equal launches.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.analysis.statistics.intervals import Array

LEVEL = 0.01
QUESTIONS = 2
# With fewer on a side, one or two outliers would count as a level.
FEWEST_PER_SIDE = 3
# The clearest order of ten values has a p-value of 2/252, too large for half of LEVEL; with eleven it is 2/462.
FEWEST = 11
SMALLEST_EFFECT = 0.01
PERMUTATIONS = 9999
MOST_AT_ONCE = 2_000_000


class Split(NamedTuple):
    """The level changes before values[at]."""

    at: int
    p_value: float


class Parts(NamedTuple):
    """Candidate parts [start, end) of a series of n values."""

    start: NDArray[np.int64]
    end: NDArray[np.int64]
    n: int


def splits(logarithms: Array, seed: int) -> list[Split]:
    """All confirmed changes of level of at least 1 %, in order. The same values and seed give the same result.

    >>> [split.at for split in splits(np.log([10.0] * 8 + [12.0] * 8), seed=0)]
    [8]
    """
    return sorted(_search(np.asarray(logarithms, dtype=np.float64), 0, np.random.default_rng(seed)))


def _search(x: Array, offset: int, rng: np.random.Generator) -> Iterator[Split]:
    """Cuts of one part of the series: first as a step, then as an interval inside it."""
    if len(x) < FEWEST or np.ptp(x) == 0:
        return
    n, side = len(x), FEWEST_PER_SIDE
    cuts_at = np.arange(side, n - side + 1)
    starts, ends = (grid.ravel() for grid in np.meshgrid(cuts_at, cuts_at))
    inner = ends - starts >= side
    for parts in (Parts(cuts_at, np.full(len(cuts_at), n), n), Parts(starts[inner], ends[inner], n)):
        scores = _scores(x[np.newaxis], parts)[0]
        best = int(scores.argmax())
        start, end = int(parts.start[best]), int(parts.end[best])
        inside, outside = x[start:end].mean(), np.concatenate([x[:start], x[end:]]).mean()
        if abs(inside - outside) < math.log1p(SMALLEST_EFFECT):
            continue
        p_value = _p_value(x, parts, float(scores.max()), rng)
        if p_value <= LEVEL / QUESTIONS:
            cuts = [cut for cut in (start, end) if 0 < cut < len(x)]
            yield from (Split(offset + cut, p_value) for cut in cuts)
            for first, last in zip([0, *cuts], [*cuts, len(x)], strict=True):
                yield from _search(x[first:last], offset + first, rng)
            return


def _scores(rows: Array, parts: Parts) -> Array:
    """|mean inside - mean outside| over its standard error, up to a constant, for every part of every row."""
    length = parts.end - parts.start
    centred = rows - rows.mean(axis=1, keepdims=True)
    sums = np.hstack([np.zeros((len(rows), 1)), np.cumsum(centred, axis=1)])
    weight = np.sqrt(parts.n / (length * (parts.n - length)))
    return np.asarray(np.abs(sums[:, parts.end] - sums[:, parts.start]) * weight)


def _p_value(x: Array, parts: Parts, observed: float, rng: np.random.Generator) -> float:
    """Share of permutations whose best part is at least as good; stops once it cannot be small any more."""
    batch = max(50, min(250, MOST_AT_ONCE // len(parts.start)))
    beyond = done = 0
    while done < PERMUTATIONS and beyond <= LEVEL / QUESTIONS * PERMUTATIONS:
        shuffled = rng.permuted(np.tile(x, (batch, 1)), axis=1)
        # Equal orders differ in the last bits of their sums.
        beyond += int((_scores(shuffled, parts).max(axis=1) >= observed * (1 - 1e-9)).sum())
        done += batch
    return (1 + beyond) / (1 + done)
