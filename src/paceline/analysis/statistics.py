"""What a series of steps can support: intervals, outliers, percentiles and the end of warm-up (method.md, section 3).

Every random draw has a fixed seed, so a report made again from the same samples is the same to the last digit.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.spec import WarmUp

Array = NDArray[np.float64]

RESAMPLES = 1000
Z_95 = 1.959964
# Two-sided 5 % at 80 % power: 1.96 + 0.84.
DETECTABLE_ERRORS = 2.8
OUTLIER_Z = 3.5
# A percentile with fewer values beyond it is told by single ones of them, and drawing them again shows no more.
FEWEST_BEYOND = 5
# Values that are told apart: more are put together, so that no number of tokens makes a bootstrap longer.
MOST_STEPS = 1000

# Student's t, 97.5 %, for 1 to 30 degrees of freedom (Abramowitz and Stegun, table 26.10); then the normal's value.
_T_975 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
_INVERSE_FREEDOM = np.array([0.0, *(1 / f for f in range(30, 0, -1))])
_T_ASCENDING = np.array([Z_95, *reversed(_T_975)])


def student_t(freedom: float) -> float:
    """97.5 % point of Student's t; between the table's rows linear in 1/freedom, which is exact to 0.002."""
    return float(np.interp(1 / freedom, _INVERSE_FREEDOM, _T_ASCENDING))


# --- bootstrap ---


@dataclass(frozen=True, slots=True, eq=False)
class Resampled:
    """A statistic with its bootstrap deviations: of its logarithm where `logarithmic`, else of itself.

    Deviations are already scaled by sqrt(u/(u-1)), u the resampled units (launches, or blocks of a single launch):
    drawing u units with replacement shows only (u-1)/u of their variance. None where one unit is all there is.
    """

    value: float
    deviations: Array | None
    freedom: float
    launches: int
    logarithmic: bool

    def times(self, factor: float) -> Resampled:
        """The same statistic in another unit; factor is positive."""
        deviations = self.deviations if self.logarithmic or self.deviations is None else self.deviations * factor
        return Resampled(self.value * factor, deviations, self.freedom, self.launches, self.logarithmic)

    def redrawn(self) -> Resampled:
        """The second side of a pair of equal cells: their seed would draw the same launches and hide their spread."""
        return self if self.deviations is None else replace(self, deviations=self.deviations[::-1])

    @property
    def interval(self) -> tuple[float, float] | tuple[None, None]:
        """95 %: percentiles of the deviations, widened by t/1.96 because few units estimate their spread badly."""
        if self.deviations is None:
            return None, None
        low, high = np.percentile(self.deviations, (2.5, 97.5)) * (student_t(self.freedom) / Z_95)
        if self.logarithmic:
            return self.value * math.exp(low), self.value * math.exp(high)
        return self.value + float(low), self.value + float(high)


def seed_of(*words: str) -> int:
    """The same words give the same draws on every machine; different cells draw independently."""
    return int.from_bytes(hashlib.blake2b("\0".join(words).encode(), digest_size=8).digest(), "little")


def block_length(n: int) -> int:
    """About sqrt(n): long enough to keep the correlation between neighbouring steps, short enough to have many."""
    return max(1, round(math.sqrt(n)))


def _blocks(n: int) -> int:
    return math.ceil(n / block_length(n))


def _block_sums(rows: Array, draws: int, rng: np.random.Generator) -> Array:
    """`draws` moving-block resamples of n rows, summed by column; the last block is cut so that n rows are drawn.

    Blocks wrap around the end: without that the first and last steps would be drawn less often than the others.
    """
    n, length = len(rows), block_length(len(rows))
    ends = np.vstack([np.zeros((1, rows.shape[1])), np.cumsum(np.vstack([rows, rows[:length]]), axis=0)])
    last = n - (_blocks(n) - 1) * length
    starts = rng.integers(0, n, size=(_blocks(n) - 1, draws))
    final = rng.integers(0, n, size=draws)
    total: Array = ends.take(final + last, axis=0) - ends.take(final, axis=0)
    blocks = ends[length:] - ends[:-length]
    for start in starts:
        total += blocks.take(start, axis=0)
    return total


def resample_sums(launches: Sequence[Array], seed: int, resamples: int = RESAMPLES) -> Array:
    """Bootstrap column sums, one row per resample. Each launch is an array of n steps by columns.

    One launch: blocks of its steps. Several: launches first, then blocks inside each launch drawn.
    """
    rng = np.random.default_rng(seed)
    if len(launches) == 1:
        return _block_sums(launches[0], resamples, rng)
    drawn = rng.integers(len(launches), size=(resamples, len(launches)))
    terms = np.empty((drawn.size, launches[0].shape[1]))
    for index, rows in enumerate(launches):
        slots = np.flatnonzero(drawn == index)
        terms[slots] = _block_sums(rows, len(slots), rng)
    # In the order of launches, whatever the order they were drawn in: equal draws give equal sums, to the last digit.
    ordered = np.argsort(drawn, axis=1, kind="stable") + len(launches) * np.arange(resamples)[:, None]
    total = np.zeros((resamples, launches[0].shape[1]))
    for column in ordered.T:
        total += terms.take(column, axis=0)
    return total


def ratio_of_sums(launches: Sequence[Array], sums: Array, numerator: int, denominator: int) -> Resampled | None:
    """sum(numerator) / sum(denominator) over all steps of all launches; None where a value is missing (NaN)."""
    steps = sum(len(rows) for rows in launches)
    top = float(sum(rows[:, numerator].sum() for rows in launches))
    bottom = float(sum(rows[:, denominator].sum() for rows in launches))
    if not steps or not math.isfinite(top) or not math.isfinite(bottom) or bottom <= 0:
        return None
    units = len(launches) if len(launches) > 1 else _blocks(steps)
    if units < 2:
        return unbounded(top / bottom, len(launches))
    return from_replicates(top / bottom, sums[:, numerator] / sums[:, denominator], units, len(launches))


def from_replicates(value: float, replicates: Array, units: int, launches: int) -> Resampled:
    logarithmic = value > 0 and bool((replicates > 0).all())
    deviations = np.log(replicates) - math.log(value) if logarithmic else replicates - value
    return Resampled(value, deviations * math.sqrt(units / (units - 1)), units - 1, launches, logarithmic)


def unbounded(value: float, launches: int) -> Resampled:
    """A number that the data supports no interval of."""
    return Resampled(value, None, math.inf, launches, value > 0)


def _percentiles_of(ascending: Array, counts: NDArray[np.int64], percent: float) -> Array:
    """Of values that each occur so often, row by row, without writing them out."""
    ends = np.cumsum(counts, axis=1)
    place = percent / 100 * (ends[:, -1:] - 1)
    below, above = (ascending[(ends <= edge).sum(axis=1)] for edge in (np.floor(place), np.ceil(place)))
    return np.asarray(below + (above - below) * (place - np.floor(place))[:, 0])


def clustered_percentiles(
    launches: Sequence[tuple[Array, NDArray[np.int64]]],
    percents: Sequence[float],
    seed: int,
    resamples: int = RESAMPLES,
) -> list[Resampled | None]:
    """numpy's percentiles of all values together; of each launch its values, and the number of the cluster that each is
    in. Launches are drawn where there are several, then clusters in each: values of one cluster may be as alike as they
    please, and clusters must not be. None unless every launch has values, and FEWEST_BEYOND clusters of one launch, or
    values of several, lie beyond it on either side.

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
    times = _drawn_clusters(sizes, resamples, np.random.default_rng(seed))
    # As floats: products of whole numbers have no fast kernel, and these are exact up to 2^53.
    counts = np.rint(times.astype(np.float64) @ held.astype(np.float64)).astype(np.int64)
    units = len(sizes) if len(sizes) > 1 else sizes[0]
    found: list[Resampled | None] = []
    for percent in percents:
        value = float(_percentiles_of(ascending, np.ones((1, len(ascending)), dtype=np.int64), percent)[0])
        below, above = np.searchsorted(ascending, value, "right"), np.searchsorted(ascending, value, "left")
        if min(_beyond(own[:below], len(sizes)), _beyond(own[above:], len(sizes))) < FEWEST_BEYOND:
            found.append(None)
            continue
        # Both rounded alike: what is left between them is what drawing did.
        here = float(_percentiles_of(steps, held.sum(axis=0)[None, :], percent)[0])
        again = _percentiles_of(steps, counts, percent)
        found.append(from_replicates(value, again * (value / here) if here > 0 else again, units, len(sizes)))
    return found


def _drawn_clusters(sizes: Sequence[int], resamples: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """How often each resample (row) holds each cluster: launches first where there are several, then as many clusters
    of each launch drawn as it has."""
    count = len(sizes)
    drawn = rng.multinomial(count, np.full(count, 1 / count), size=resamples)
    parts = [rng.multinomial(drawn[:, n] * size, np.full(size, 1 / size)) for n, size in enumerate(sizes)]
    return np.concatenate(parts, axis=1)


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


class Ratio(NamedTuple):
    """low and high bound 95 %; error is the standard error of the logarithm, widened for few launches like them."""

    value: float
    low: float
    high: float
    error: float

    @property
    def detectable(self) -> float:
        """The smallest effect, as a fraction, that data of this spread shows four times out of five."""
        return math.expm1(DETECTABLE_ERRORS * self.error)


def ratio_between(over: Sequence[Resampled], under: Sequence[Resampled]) -> Ratio | None:
    """product(over) / product(under) with every side resampled independently; None where a side has no spread."""
    return contrast([*((side, 1) for side in over), *((side, -1) for side in under)])


def contrast(sides: Iterable[tuple[Resampled, float]]) -> Ratio | None:
    """The product of all values, each to the power of its weight; None where a side has no spread.

    Freedom is Welch and Satterthwaite's: (sum v)^2 / sum(v^2 / freedom), v the variance of each side's share of the
    logarithm.
    """
    value = 1.0
    total: Array = np.zeros(1)
    variances, freedoms = [], []
    for side, weight in sides:
        if side.deviations is None or not side.logarithmic:
            return None
        value *= side.value**weight
        total = total + weight * side.deviations
        variances.append(weight * weight * float(side.deviations.var()))
        freedoms.append(side.freedom)
    penalty = sum(v * v / f for v, f in zip(variances, freedoms, strict=True))
    widening = student_t(sum(variances) ** 2 / penalty if penalty > 0 else math.inf) / Z_95
    low, high = np.percentile(total, (2.5, 97.5)) * widening
    return Ratio(value, value * math.exp(low), value * math.exp(high), math.sqrt(sum(variances)) * widening)


def launches_note(launches: int, of: str = "steps") -> str | None:
    """What a reader must know about the interval when launches were few; of what it is within one."""
    if launches == 1:
        return f"launches were not repeated: the interval is of {of} within one launch only"
    if launches == 2:
        return "two launches: the interval is Student's with one degree of freedom and therefore wide"
    return None


# --- outliers and percentiles ---


def median(values: Array) -> float:
    """numpy's of a few dozen values, without the many calls it makes for arrays of any shape; NaN where one is."""
    ascending = np.sort(values)
    n = len(ascending)
    if not n or math.isnan(ascending[-1]):
        return math.nan
    return float((ascending[(n - 1) // 2] + ascending[n // 2]) / 2)


def outliers(values: Sequence[float] | Array) -> NDArray[np.bool_]:
    """True where the modified z-score 0.6745 |x - median| / MAD exceeds 3.5: a tag; nothing is ever deleted.

    Where more than half of the values are equal, MAD is 0 and the mean absolute deviation takes its place with the
    factor 1/1.253314 (Iglewicz and Hoaglin, 1993).
    """
    x = np.asarray(values, dtype=np.float64)
    if not len(x):
        return np.zeros(0, dtype=np.bool_)
    distance = np.abs(x - median(x))
    mad, mean = median(distance), float(distance.mean())
    if mad > 0:
        return np.asarray(0.6745 * distance / mad > OUTLIER_Z)
    return np.asarray(distance > OUTLIER_Z * 1.253314 * mean) if mean > 0 else np.zeros(len(x), dtype=np.bool_)


def percentile(values: Sequence[float] | Array, q: float) -> float | None:
    """The q-th percentile (0 to 100); None unless at least one of the n values is expected beyond it on either side."""
    if len(values) * min(q, 100 - q) < 100:
        return None
    return float(np.percentile(np.asarray(values, dtype=np.float64), q))


# --- warm-up ---


class WarmUpEnd(NamedTuple):
    """How many steps are excluded, whether the rule itself decided it, and the sentence for the report."""

    excluded: int
    by_rule: bool
    text: str


def warm_up(durations: Sequence[float] | Array, rule: WarmUp) -> WarmUpEnd:
    """Applies the rule of `spec.WarmUp` after the fact to the duration of every step (maximum over ranks).

    Excludes the first e >= minimum steps for which the median of steps e .. e+w-1 and the median of the w steps after
    them differ by less than slope_ratio. With fewer than minimum + 2w steps the rule cannot be asked.
    """
    n, w = len(durations), rule.window
    if n <= rule.minimum:
        return WarmUpEnd(n, False, f"no step is left: {n} ran and the minimum warm-up is {rule.minimum}")
    if n < rule.minimum + 2 * w:
        needed = rule.minimum + 2 * w
        return WarmUpEnd(
            rule.minimum, False, f"the minimum of {rule.minimum}: {n} steps are too few for the rule ({needed} needed)"
        )
    x = np.asarray(durations, dtype=np.float64)
    last = min(rule.maximum, n - 2 * w)
    for end in range(rule.minimum, last + 1):
        here, after = median(x[end : end + w]), median(x[end + w : end + 2 * w])
        if abs(after - here) < rule.slope_ratio * here:
            return WarmUpEnd(end, True, f"{end} steps: the median of {w} steps changed by {abs(after / here - 1):.2%}")
    why = "the cap" if last == rule.maximum else f"all that leaves two windows of {w} steps"
    return WarmUpEnd(last, False, f"{last} steps, {why}: the median never settled within {rule.slope_ratio:.0%}")
