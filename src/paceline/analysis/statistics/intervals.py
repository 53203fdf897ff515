"""Bootstrap intervals, ratios, outliers, percentiles and the end of warm-up (method.md, section 3).

Every random draw has a fixed seed, so a report built again from the same samples is identical to the last digit.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.experiment.spec import WarmUp

Array = NDArray[np.float64]

RESAMPLES = 1000
Z_95 = 1.959964
# Two-sided 5 % at 80 % power: 1.96 + 0.84.
DETECTABLE_ERRORS = 2.8
OUTLIER_Z = 3.5

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

    Deviations are the sum of those of its components, each already scaled (`from_components`). None where one unit is
    all there is.
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


def block_count(n: int) -> int:
    return math.ceil(n / block_length(n))


def _block_sums(rows: Array, draws: int, rng: np.random.Generator) -> Array:
    """`draws` moving-block resamples of n rows, summed by column; the last block is cut so that n rows are drawn.

    Blocks wrap around the end: without that the first and last steps would be drawn less often than the others.
    """
    n, length = len(rows), block_length(len(rows))
    ends = np.vstack([np.zeros((1, rows.shape[1])), np.cumsum(np.vstack([rows, rows[:length]]), axis=0)])
    last = n - (block_count(n) - 1) * length
    starts = rng.integers(0, n, size=(block_count(n) - 1, draws))
    final = rng.integers(0, n, size=draws)
    total: Array = ends.take(final + last, axis=0) - ends.take(final, axis=0)
    blocks = ends[length:] - ends[:-length]
    for start in starts:
        total += blocks.take(start, axis=0)
    return total


class Draws(NamedTuple):
    """Column sums, one row per resample, of the two things that are drawn again, each by itself: blocks inside every
    launch, and whole launches where there are several."""

    within: Array
    between: Array | None


def resample_sums(launches: Sequence[Array], seed: int, resamples: int = RESAMPLES) -> Draws:
    """Each launch is an array of n steps by columns."""
    rng = np.random.default_rng(seed)
    within = np.zeros((resamples, launches[0].shape[1]))
    for rows in launches:
        within += _block_sums(rows, resamples, rng)
    if len(launches) == 1:
        return Draws(within, None)
    return Draws(within, redrawn_sums(np.array([rows.sum(axis=0) for rows in launches]), rng, resamples))


def redrawn_sums(totals: Array, rng: np.random.Generator, resamples: int = RESAMPLES) -> Array:
    """As many launches as there are, drawn with replacement; a row of totals is one launch."""
    # How often each is drawn, and not which came first: equal draws give equal sums, to the last digit.
    drawn = rng.multinomial(len(totals), np.full(len(totals), 1 / len(totals)), size=resamples)
    # By hand: a product of matrices turns one missing value into many, and its last digit depends on the machine.
    return np.asarray(sum((drawn[:, n, None] * row for n, row in enumerate(totals)), np.zeros((1, totals.shape[1]))))


def ratio_of_sums(launches: Sequence[Array], draws: Draws, numerator: int, denominator: int) -> Resampled | None:
    """sum(numerator) / sum(denominator) over all steps of all launches; None where a value is missing (NaN)."""
    steps = [len(rows) for rows in launches]
    top = float(sum(rows[:, numerator].sum() for rows in launches))
    bottom = float(sum(rows[:, denominator].sum() for rows in launches))
    if not sum(steps) or not math.isfinite(top) or not math.isfinite(bottom) or bottom <= 0:
        return None
    within, between = (None if s is None else s[:, numerator] / s[:, denominator] for s in draws)
    return from_components(top / bottom, components(within, between, [block_count(n) for n in steps]), len(launches))


class Component(NamedTuple):
    """What one kind of draw makes of a statistic. units are drawn with replacement in each of so many groups, which
    shows only (units - groups) / units of their variance; that many degrees of freedom know it."""

    replicates: Array
    units: int
    groups: int = 1


def components(within: Array | None, between: Array | None, blocks: Sequence[int]) -> list[Component]:
    """Of a statistic of launches of so many blocks each: what its blocks tell, and what its launches tell. A launch of
    one block tells nothing within itself."""
    found = [] if between is None else [Component(between, len(blocks))]
    return found if within is None else [*found, Component(within, sum(blocks), len(blocks))]


def from_components(value: float, found: Sequence[Component], launches: int) -> Resampled:
    """Each kind of draw widens the interval by its own degrees of freedom: two launches know their spread badly, and
    hundreds of blocks in them know theirs well. Freedom is Welch and Satterthwaite's, as in `contrast`.

    What launches differ by holds what blocks made them differ by, so that both together are rather wide than narrow.
    """
    known = [c for c in found if c.units > c.groups]
    if not known:
        return unbounded(value, launches)
    logarithmic = value > 0 and all(bool((c.replicates > 0).all()) for c in known)
    parts = [
        (np.log(c.replicates) - math.log(value) if logarithmic else c.replicates - value)
        * math.sqrt(c.units / (c.units - c.groups))
        for c in known
    ]
    freedom = satterthwaite([float(x.var()) for x in parts], [c.units - c.groups for c in known])
    return Resampled(value, np.sum(parts, axis=0), freedom, launches, logarithmic)


def from_replicates(value: float, replicates: Array, units: int, launches: int) -> Resampled:
    """Of one kind of draw: launches, or blocks of a single one."""
    return from_components(value, [Component(replicates, units)], launches)


def satterthwaite(variances: Sequence[float], freedoms: Sequence[float]) -> float:
    """Degrees of freedom of a sum whose parts have these variances, each known by so many: (sum v)^2 / sum(v^2 / f).
    Of a single part its own; infinite where nothing varies."""
    told = [(v, f) for v, f in zip(variances, freedoms, strict=True) if v > 0]
    if len(told) < 2:
        return told[0][1] if told else math.inf
    return sum(v for v, _ in told) ** 2 / sum(v * v / f for v, f in told)


def unbounded(value: float, launches: int) -> Resampled:
    """A number that the data supports no interval of."""
    return Resampled(value, None, math.inf, launches, value > 0)


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

    Freedom is Welch and Satterthwaite's, of the variance of each side's share of the logarithm.
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
    widening = student_t(satterthwaite(variances, freedoms)) / Z_95
    low, high = np.percentile(total, (2.5, 97.5)) * widening
    return Ratio(value, value * math.exp(low), value * math.exp(high), math.sqrt(sum(variances)) * widening)


def launches_note(launches: int, of: str = "steps") -> str | None:
    """What a reader must know about the interval when launches were few; of what it is within one."""
    if launches == 1:
        return f"launches were not repeated: the interval is of {of} within one launch only"
    if launches == 2:
        return "two launches: what they differ by is known with one degree of freedom, which makes the interval wide"
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
