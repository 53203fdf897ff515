"""Numbers that only a whole launch has, such as tokens over its wall time, with their spread over launches.

One launch has no spread: what its requests vary by says nothing about what another launch would give.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from paceline.analysis.statistics.intervals import Array, Resampled, from_replicates, redrawn_sums, seed_of, unbounded

# Sums over launches (one row of columns, or many) to the number.
Estimate = Callable[[Array], Array]


def quotient(numerator: int = 0, denominator: int = 1) -> Estimate:
    """One column's sum over another's: never a mean of rates."""
    return lambda sums: sums[..., numerator] / sums[..., denominator]


def over_launches(rows: Sequence[Sequence[float]], estimate: Estimate, *words: str) -> Resampled | None:
    """The number of all launches together and its deviations when launches are drawn again with replacement; a row is
    one launch. None where it is not a number: what is missing among the columns is NaN."""
    table = np.asarray(rows, dtype=np.float64)
    if not len(table):
        return None
    with np.errstate(divide="ignore", invalid="ignore"):
        value = float(estimate(table.sum(axis=0)))
        if not math.isfinite(value):
            return None
        if len(table) == 1:
            return unbounded(value, 1)
        again = estimate(redrawn_sums(table, np.random.default_rng(seed_of(*words))))
    if not np.isfinite(again).all():
        return unbounded(value, len(table))
    return from_replicates(value, again, len(table), len(table))


Bounded = tuple[float | None, float | None, float | None]


def bounded(found: Resampled | None) -> Bounded:
    """The value and its 95 % bounds, as a measurement holds them."""
    return (None, None, None) if found is None else (found.value, *found.interval)
