"""Percentiles of values that come in clusters, such as tokens in answers, with spread over clusters and launches."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from paceline.analysis.statistics.intervals import RESAMPLES, Array, Resampled, from_launches, from_replicates

# With fewer values beyond it, a percentile depends on single values, and resampling them shows nothing.
FEWEST_BEYOND = 5
# Number of distinct values: more are binned, so the bootstrap takes the same time for any number of tokens.
MOST_STEPS = 1000


def clustered_percentiles(
    launches: Sequence[tuple[Array, NDArray[np.int64]]],
    percents: Sequence[float],
    seed: int,
    resamples: int = RESAMPLES,
) -> list[Resampled | None]:
    """numpy's percentiles of all values together, with their spread: between launches, or within the only one.

    Each launch is its values and the cluster number of each value: values of one cluster may be correlated, clusters
    must not be. None unless every launch has values and FEWEST_BEYOND clusters (one launch) or values (several
    launches) lie beyond the percentile on either side.

    >>> values, clusters = np.arange(100.0), np.arange(100)
    >>> median = clustered_percentiles([(values, clusters)], [50], seed=0)[0]
    >>> median.value
    49.5
    """
    known = [(values, clusters) for values, clusters in launches if len(values)]
    if not known or len(known) < len(launches):
        return [None] * len(percents)
    ascending = np.sort(np.concatenate([values for values, _ in known]))
    every = [_percentile(ascending, percent) for percent in percents]
    if len(known) == 1:
        return _of_one_launch(*known[0], percents, every, np.random.default_rng(seed), resamples)
    found: list[Resampled | None] = []
    for percent, value in zip(percents, every, strict=True):
        beyond = min(np.searchsorted(ascending, value, "right"), (ascending >= value).sum())
        # Launches drawn again would understate this: the percentile of a mixture often stays at one of them.
        each = [_percentile(np.sort(values), percent) for values, _ in known]
        found.append(from_launches(value, each) if beyond >= FEWEST_BEYOND else None)
    return found


def _of_one_launch(
    values: Array,
    clusters: NDArray[np.int64],
    percents: Sequence[float],
    every: Sequence[float],
    rng: np.random.Generator,
    resamples: int,
) -> list[Resampled | None]:
    """Percentiles (`every`) with the spread of clusters drawn with replacement; drawn values are rounded up to one of
    about MOST_STEPS quantiles, half of them in the upper tenth.
    """
    own = np.unique(clusters, return_inverse=True)[1]
    size = int(own.max()) + 1
    order = np.argsort(values)
    ascending, own = values[order], own[order]
    steps, step_of = _steps(ascending)
    counts = np.bincount(own * len(steps) + step_of, minlength=size * len(steps)).reshape(size, -1)
    draws = rng.multinomial(size, np.full(size, 1 / size), size=resamples)
    # As floats: integer matrix products have no fast kernel, and these are exact up to 2^53.
    drawn = np.rint(draws.astype(np.float64) @ counts.astype(np.float64)).astype(np.int64)
    found: list[Resampled | None] = []
    for percent, value in zip(percents, every, strict=True):
        below, above = np.searchsorted(ascending, value, "right"), np.searchsorted(ascending, value, "left")
        if min(len(np.unique(own[:below])), len(np.unique(own[above:]))) < FEWEST_BEYOND:
            found.append(None)
            continue
        # Both are rounded the same way, so what remains between them comes from resampling.
        rounded = float(_percentiles_of(steps, counts.sum(axis=0)[None, :], percent)[0])
        again = _percentiles_of(steps, drawn, percent) * (value / rounded if rounded > 0 else 1.0)
        found.append(from_replicates(value, again, size, 1))
    return found


def _steps(ascending: Array) -> tuple[Array, NDArray[np.int64]]:
    """Distinct values, and for each value the index of the first one that is not less. Beyond MOST_STEPS values,
    quantiles of them including the largest.
    """
    is_new = np.concatenate(([True], np.diff(ascending) > 0))
    if np.count_nonzero(is_new) <= MOST_STEPS:
        return ascending[is_new], np.cumsum(is_new) - 1
    last, half = len(ascending) - 1, MOST_STEPS // 2
    levels = np.concatenate((np.linspace(0, 0.9, half), np.linspace(0.9, 1, half)))
    steps = np.unique(ascending[np.rint(levels * last).astype(np.int64)])
    ends = np.searchsorted(ascending, steps, "right")
    return steps, np.repeat(np.arange(len(steps)), np.diff(ends, prepend=0))


def _percentile(ascending: Array, percent: float) -> float:
    return float(_percentiles_of(ascending, np.ones((1, len(ascending)), dtype=np.int64), percent)[0])


def _percentiles_of(ascending: Array, counts: NDArray[np.int64], percent: float) -> Array:
    """Percentiles of values that occur `counts` times, row by row, without expanding them."""
    ends = np.cumsum(counts, axis=1)
    index = percent / 100 * (ends[:, -1:] - 1)
    below, above = (ascending[(ends <= edge).sum(axis=1)] for edge in (np.floor(index), np.ceil(index)))
    return np.asarray(below + (above - below) * (index - np.floor(index))[:, 0])
