"""Percentiles of values that come in clusters, such as tokens in answers, with spread over clusters and launches."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from paceline.analysis.statistics.intervals import RESAMPLES, Array, Resampled, from_replicates

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
    """numpy's percentiles of all values together, with resampled deviations.

    Each launch is its values and the cluster number of each value. Launches are drawn if there are several, else
    clusters: values of one cluster may be correlated, clusters must not be. None unless every launch has
    values and FEWEST_BEYOND clusters (one launch) or values (several launches) lie beyond the percentile on either
    side. Deviations are of values rounded up to one of about MOST_STEPS quantiles, half of them in the upper tenth.

    >>> values, clusters = np.arange(100.0), np.arange(100)
    >>> median = clustered_percentiles([(values, clusters)], [50], seed=0)[0]
    >>> median.value
    49.5
    """
    known = [(values, clusters) for values, clusters in launches if len(values)]
    if not known or len(known) < len(launches):
        return [None] * len(percents)
    numbers = [np.unique(clusters, return_inverse=True)[1] for _, clusters in known]
    sizes = [int(own.max()) + 1 for own in numbers]
    starts = np.cumsum([0, *sizes[:-1]])
    values = np.concatenate([x for x, _ in known])
    own = np.concatenate([n + start for n, start in zip(numbers, starts, strict=True)])
    order = np.argsort(values)
    ascending, own = values[order], own[order]
    steps, step_of = _steps(ascending)
    counts = np.bincount(own * len(steps) + step_of, minlength=sum(sizes) * len(steps)).reshape(sum(sizes), -1)
    rng = np.random.default_rng(seed)
    units = len(sizes) if len(sizes) > 1 else sizes[0]
    draws = rng.multinomial(units, np.full(units, 1 / units), size=resamples)
    if len(sizes) > 1:
        draws = np.repeat(draws, sizes, axis=1)
    # As floats: integer matrix products have no fast kernel, and these are exact up to 2^53.
    drawn = np.rint(draws.astype(np.float64) @ counts.astype(np.float64)).astype(np.int64)
    found: list[Resampled | None] = []
    for percent in percents:
        value = float(_percentiles_of(ascending, np.ones((1, len(ascending)), dtype=np.int64), percent)[0])
        below, above = np.searchsorted(ascending, value, "right"), np.searchsorted(ascending, value, "left")
        if min(_beyond(own[:below], len(sizes)), _beyond(own[above:], len(sizes))) < FEWEST_BEYOND:
            found.append(None)
            continue
        # Both are rounded the same way, so what remains between them comes from resampling.
        rounded = float(_percentiles_of(steps, counts.sum(axis=0)[None, :], percent)[0])
        again = _percentiles_of(steps, drawn, percent) * (value / rounded if rounded > 0 else 1.0)
        found.append(from_replicates(value, again, units, len(sizes)))
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


def _beyond(clusters: NDArray[np.int64], launches: int) -> int:
    """Number of clusters for one launch, whose spread they determine; number of values for several launches."""
    return int(np.count_nonzero(np.bincount(clusters))) if launches == 1 and len(clusters) else len(clusters)


def _percentiles_of(ascending: Array, counts: NDArray[np.int64], percent: float) -> Array:
    """Percentiles of values that occur `counts` times, row by row, without expanding them."""
    ends = np.cumsum(counts, axis=1)
    index = percent / 100 * (ends[:, -1:] - 1)
    below, above = (ascending[(ends <= edge).sum(axis=1)] for edge in (np.floor(index), np.ceil(index)))
    return np.asarray(below + (above - below) * (index - np.floor(index))[:, 0])
