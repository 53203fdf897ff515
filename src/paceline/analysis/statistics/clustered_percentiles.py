"""Percentiles of values that come in clusters, such as tokens in answers, with what clusters and launches vary by."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from paceline.analysis.statistics.intervals import RESAMPLES, Array, Resampled, components, from_components

# A percentile with fewer values beyond it is told by single ones of them, and drawing them again shows no more.
FEWEST_BEYOND = 5
# Values that are told apart: more are put together, so that no number of tokens makes a bootstrap longer.
MOST_STEPS = 1000


def clustered_percentiles(
    launches: Sequence[tuple[Array, NDArray[np.int64]]],
    percents: Sequence[float],
    seed: int,
    resamples: int = RESAMPLES,
) -> list[Resampled | None]:
    """numpy's percentiles of all values together; of each launch its values, and the number of the cluster that each is
    in. Clusters of each launch are drawn, and launches where there are several: values of one cluster may be as alike
    as they please, and clusters must not be. None unless every launch has values, and FEWEST_BEYOND clusters of one
    launch, or values of several, lie beyond it on either side.

    Deviations are of values rounded up to one of some MOST_STEPS quantiles, half of them in the upper tenth."""
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
    steps, place = _steps(ascending)
    held = np.bincount(own * len(steps) + place, minlength=sum(sizes) * len(steps)).reshape(sum(sizes), -1)
    drawn = [_counts(times, held) for times in _drawn_clusters(sizes, resamples, np.random.default_rng(seed))]
    found: list[Resampled | None] = []
    for percent in percents:
        value = float(_percentiles_of(ascending, np.ones((1, len(ascending)), dtype=np.int64), percent)[0])
        below, above = np.searchsorted(ascending, value, "right"), np.searchsorted(ascending, value, "left")
        if min(_beyond(own[:below], len(sizes)), _beyond(own[above:], len(sizes))) < FEWEST_BEYOND:
            found.append(None)
            continue
        # Both rounded alike: what is left between them is what drawing did.
        here = float(_percentiles_of(steps, held.sum(axis=0)[None, :], percent)[0])
        again = [_percentiles_of(steps, counts, percent) * (value / here if here > 0 else 1.0) for counts in drawn]
        within, between = again if len(again) > 1 else (again[0], None)
        found.append(from_components(value, components(within, between, sizes), len(sizes)))
    return found


def _counts(times: NDArray[np.int64], held: NDArray[np.int64]) -> NDArray[np.int64]:
    # As floats: products of whole numbers have no fast kernel, and these are exact up to 2^53.
    return np.rint(times.astype(np.float64) @ held.astype(np.float64)).astype(np.int64)


def _drawn_clusters(sizes: Sequence[int], resamples: int, rng: np.random.Generator) -> list[NDArray[np.int64]]:
    """How often each resample (row) holds each cluster: as many of each launch as it has; then, where there are several
    launches, whole ones."""
    within = np.concatenate([rng.multinomial(n, np.full(n, 1 / n), size=resamples) for n in sizes], axis=1)
    if len(sizes) == 1:
        return [within]
    drawn = rng.multinomial(len(sizes), np.full(len(sizes), 1 / len(sizes)), size=resamples)
    return [within, np.repeat(drawn, sizes, axis=1)]


def _steps(ascending: Array) -> tuple[Array, NDArray[np.int64]]:
    """Values that are told apart, and for each value the first one that is no less: all that occur, or so many
    quantiles of them, the largest one among them."""
    is_new = np.concatenate(([True], np.diff(ascending) > 0))
    if np.count_nonzero(is_new) <= MOST_STEPS:
        return ascending[is_new], np.cumsum(is_new) - 1
    last, half = len(ascending) - 1, MOST_STEPS // 2
    levels = np.concatenate((np.linspace(0, 0.9, half), np.linspace(0.9, 1, half)))
    steps = np.unique(ascending[np.rint(levels * last).astype(np.int64)])
    ends = np.searchsorted(ascending, steps, "right")
    return steps, np.repeat(np.arange(len(steps)), np.diff(ends, prepend=0))


def _beyond(clusters: NDArray[np.int64], launches: int) -> int:
    """Of one launch clusters, which are all that tells its spread; of several, whose spread is theirs, values."""
    return int(np.count_nonzero(np.bincount(clusters))) if launches == 1 and len(clusters) else len(clusters)


def _percentiles_of(ascending: Array, counts: NDArray[np.int64], percent: float) -> Array:
    """Of values that each occur so often, row by row, without writing them out."""
    ends = np.cumsum(counts, axis=1)
    place = percent / 100 * (ends[:, -1:] - 1)
    below, above = (ascending[(ends <= edge).sum(axis=1)] for edge in (np.floor(place), np.ceil(place)))
    return np.asarray(below + (above - below) * (place - np.floor(place))[:, 0])
