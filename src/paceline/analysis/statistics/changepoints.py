"""Where the level of a short series changed: segmentation in which a test by simulation confirms every cut.

A series is searched for a step (the mean of its end against the rest: CUSUM, Page 1954; Vostrikova 1981) and, if there
is none, for an interval (the mean of an inner part against the rest: circular binary segmentation, Olshen et al. 2004),
because a fault that was fixed leaves no step. Single outliers are first replaced by the median of their neighbours, so
that one bad launch neither makes a change nor hides one. Neighbouring launches may be correlated (a busy day, a warm
machine): the p-value of the best cut comes from series with the same correlation and no change, made of the
permuted innovations of this one. Each of the two searches has half of LEVEL, and parts are searched only after the
whole has changed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.analysis.statistics.intervals import OUTLIER_Z, Array, median

LEVEL = 0.01
QUESTIONS = 2
# With fewer on a side, one or two outliers would count as a level.
FEWEST_PER_SIDE = 3
# The clearest order of ten values has a p-value of 2/252, too large for half of LEVEL; with eleven it is 2/462.
FEWEST = 11
SMALLEST_EFFECT = 0.01
PERMUTATIONS = 9999
MOST_AT_ONCE = 2_000_000
# A launch is compared with the median of itself and so many neighbours on each side.
NEIGHBOURS = 2
# Correlations of neighbouring launches that are tried, on how many series, and which quantile of what they show must
# not exceed what is seen: a short series shows less correlation than there is.
CORRELATIONS, SERIES, CAUTION = np.arange(0.0, 0.96, 0.05), 300, 0.15


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
    cleaned = without_outliers(x)
    for parts in _candidates(len(x)):
        scores = _scores(cleaned[np.newaxis], parts)[0]
        best = int(scores.argmax())
        start, end = int(parts.start[best]), int(parts.end[best])
        inside, outside = cleaned[start:end].mean(), np.concatenate([cleaned[:start], cleaned[end:]]).mean()
        if abs(inside - outside) < math.log1p(SMALLEST_EFFECT):
            continue
        p_value = _p_value(cleaned, parts, float(scores.max()), rng)
        if p_value <= LEVEL / QUESTIONS:
            cuts = [cut for cut in (start, end) if 0 < cut < len(x)]
            yield from (Split(offset + cut, p_value) for cut in cuts)
            for first, last in zip([0, *cuts], [*cuts, len(x)], strict=True):
                yield from _search(x[first:last], offset + first, rng)
            return


def _candidates(n: int) -> tuple[Parts, Parts]:
    """All steps, and all inner parts, with at least FEWEST_PER_SIDE values on each side of a cut."""
    cuts = np.arange(FEWEST_PER_SIDE, n - FEWEST_PER_SIDE + 1)
    starts, ends = (grid.ravel() for grid in np.meshgrid(cuts, cuts))
    inner = ends - starts >= FEWEST_PER_SIDE
    return Parts(cuts, np.full(len(cuts), n), n), Parts(starts[inner], ends[inner], n)


def without_outliers(x: Array) -> Array:
    """The series with single outliers replaced by the median around them; a change of level stays what it is.

    >>> without_outliers(np.array([1.0, 1.1, 1.0, 0.2, 1.1, 1.0, 1.1, 2.0, 2.1, 2.0])).round(1).tolist()
    [1.0, 1.1, 1.0, 1.0, 1.1, 1.0, 1.1, 2.0, 2.1, 2.0]
    """
    around = np.array([median(x[max(0, i - NEIGHBOURS) : i + NEIGHBOURS + 1]) for i in range(len(x))])
    distance = np.abs(x - around)
    # As in `intervals.outliers`: the mean deviation if most values are equal to their neighbours.
    scale = median(distance) / 0.6745 or 1.253314 * float(distance.mean())
    return np.where(distance > OUTLIER_Z * scale, around, x)


def _scores(rows: Array, parts: Parts) -> Array:
    """|mean inside - mean outside| over the spread of the row, up to a constant, for every part of every row."""
    length = parts.end - parts.start
    centred = rows - rows.mean(axis=1, keepdims=True)
    spread = np.maximum(centred.std(axis=1, keepdims=True), 1e-300)
    sums = np.hstack([np.zeros((len(rows), 1)), np.cumsum(centred / spread, axis=1)])
    weight = np.sqrt(parts.n / (length * (parts.n - length)))
    return np.asarray(np.abs(sums[:, parts.end] - sums[:, parts.start]) * weight)


def _p_value(x: Array, parts: Parts, observed: float, rng: np.random.Generator) -> float:
    """Share of series without a change whose best part is at least as good; stops once it cannot be small any more."""
    steps = _residuals(x[np.newaxis], parts)
    seen, shown = float(_correlations(steps)[0]), _shown_correlations(parts.n, parts.end[0] == parts.end[-1])
    correlation = float(np.interp(seen, shown, CORRELATIONS)) if seen > shown[0] else 0.0
    batch = max(50, min(250, MOST_AT_ONCE // len(parts.start)))
    # Without correlation, every order of the values themselves is equally likely.
    innovations = steps[0].copy() if correlation else x - x.mean()
    innovations[1:] -= correlation * innovations[:-1].copy()
    innovations[0] *= math.sqrt(1 - correlation**2)
    beyond = done = 0
    while done < PERMUTATIONS and beyond <= LEVEL / QUESTIONS * PERMUTATIONS:
        rows = _correlated(rng.permuted(np.tile(innovations, (batch, 1)), axis=1), correlation)
        # Equal orders differ in the last bits of their sums.
        beyond += int((_scores(rows, parts).max(axis=1) >= observed * (1 - 1e-9)).sum())
        done += batch
    return (1 + beyond) / (1 + done)


def _correlated(innovations: Array, correlation: float) -> Array:
    """AR(1) series with these innovations, row by row."""
    rows = innovations.copy()
    if correlation:
        rows[:, 0] /= math.sqrt(1 - correlation**2)
        for index in range(1, rows.shape[1]):
            rows[:, index] += correlation * rows[:, index - 1]
    return rows


def _residuals(rows: Array, parts: Parts) -> Array:
    """Each row without its best change of level."""
    best = _scores(rows, parts).argmax(axis=1)
    at = np.arange(parts.n)
    inside = (at >= parts.start[best][:, np.newaxis]) & (at < parts.end[best][:, np.newaxis])
    means = [(rows * side).sum(axis=1) / side.sum(axis=1) for side in (inside, ~inside)]
    return np.asarray(rows - np.where(inside, *(mean[:, np.newaxis] for mean in means)))


def _correlations(rows: Array) -> Array:
    """Of each value with the next, row by row."""
    return np.asarray((rows[:, 1:] * rows[:, :-1]).sum(axis=1) / np.maximum((rows * rows).sum(axis=1), 1e-300))


@lru_cache(maxsize=256)
def _shown_correlations(n: int, is_step: bool) -> Array:
    """The correlation that series of each of CORRELATIONS show after their best change is taken out, with CAUTION."""
    parts = _candidates(n)[0 if is_step else 1]
    count = max(30, min(SERIES, MOST_AT_ONCE // len(parts.start)))
    noise = np.random.default_rng(n).standard_normal((count, n))
    found = [
        float(np.quantile(_correlations(_residuals(_correlated(noise * math.sqrt(1 - c * c), c), parts)), CAUTION))
        for c in CORRELATIONS.tolist()
    ]
    return np.asarray(np.maximum.accumulate(found))
