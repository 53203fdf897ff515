"""Where the level of a short series changed: segmentation whose every cut is confirmed by a permutation test.

A series is asked twice: for a step (the mean of its end against the rest: CUSUM, Page 1954; Vostrikova 1981) and, where
there is none, for a stretch (the mean of a part inside against the rest: circular binary segmentation, Olshen et al.
2004), because a fault that was mended leaves no step. The chance of the best cut is read from permutations of the same
values, as E-divisive does (Matteson and James 2014): no distribution is assumed, only that without a change every order
is as likely. Each question has half of LEVEL, and parts are searched only after the whole has changed, so LEVEL is the
chance of a false change in a series of equal launches.
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
# Fewer on a side would let a single outlier, or two, be a level.
FEWEST_PER_SIDE = 3
# The clearest order of ten values has a chance of 2/252, too much for half of LEVEL; of eleven, 2/462.
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
    """All confirmed changes of level of at least 1 %, in order. The same values and seed give the same answer."""
    return sorted(_search(np.asarray(logarithms, dtype=np.float64), 0, np.random.default_rng(seed)))


def _search(x: Array, offset: int, rng: np.random.Generator) -> Iterator[Split]:
    for parts in _questions(len(x)) if len(x) >= FEWEST and np.ptp(x) > 0 else ():
        scores = _scores(x[np.newaxis], parts)[0]
        best = int(scores.argmax())
        start, end = int(parts.start[best]), int(parts.end[best])
        inside, outside = x[start:end].mean(), np.concatenate([x[:start], x[end:]]).mean()
        if abs(inside - outside) < math.log1p(SMALLEST_EFFECT):
            continue
        p_value = _chance(x, parts, float(scores.max()), rng)
        if p_value <= LEVEL / QUESTIONS:
            cuts = [cut for cut in (start, end) if 0 < cut < len(x)]
            yield from (Split(offset + cut, p_value) for cut in cuts)
            for first, last in zip([0, *cuts], [*cuts, len(x)], strict=True):
                yield from _search(x[first:last], offset + first, rng)
            return


def _questions(n: int) -> Iterator[Parts]:
    """Ends of the series, then stretches inside it; no piece is shorter than FEWEST_PER_SIDE."""
    side = FEWEST_PER_SIDE
    cuts = np.arange(side, n - side + 1)
    yield Parts(cuts, np.full(len(cuts), n), n)
    start, end = (found.ravel() for found in np.meshgrid(cuts, cuts))
    inner = end - start >= side
    yield Parts(start[inner], end[inner], n)


def _scores(rows: Array, parts: Parts) -> Array:
    """Of every part of every row: |mean inside - mean outside| over its standard error, up to a constant."""
    length = parts.end - parts.start
    centred = rows - rows.mean(axis=1, keepdims=True)
    sums = np.hstack([np.zeros((len(rows), 1)), np.cumsum(centred, axis=1)])
    weight = np.sqrt(parts.n / (length * (parts.n - length)))
    return np.asarray(np.abs(sums[:, parts.end] - sums[:, parts.start]) * weight)


def _chance(x: Array, parts: Parts, observed: float, rng: np.random.Generator) -> float:
    """Share of permutations whose best part is at least as good; stops as soon as it cannot be small any more."""
    batch = max(50, min(250, MOST_AT_ONCE // len(parts.start)))
    beyond = done = 0
    while done < PERMUTATIONS and beyond <= LEVEL / QUESTIONS * PERMUTATIONS:
        shuffled = rng.permuted(np.tile(x, (batch, 1)), axis=1)
        # Equal orders differ in the last bits of their sums.
        beyond += int((_scores(shuffled, parts).max(axis=1) >= observed * (1 - 1e-9)).sum())
        done += batch
    return (1 + beyond) / (1 + done)
