"""Bootstrap intervals, ratios, outliers, percentiles and the end of warm-up (method.md, section 3).

Every random draw has a fixed seed, so a report built again from the same samples is identical to the last digit.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.experiment.spec import WarmUp

Array = NDArray[np.float64]

RESAMPLES = 1000
OUTLIER_Z = 3.5
# Two-sided, for one interval; comparisons of a family share it (`Ratio.interval`).
ERROR = 0.05
# One degree of freedom and a large family can reach further than a float.
LARGEST_EXPONENT = 600.0


def student_t(freedom: float, tail: float = ERROR / 2) -> float:
    """The value that Student's t exceeds with probability `tail`. freedom need not be whole; it is rounded down to one
    decimal, or to a whole number from 30 on.

    >>> round(student_t(1), 3), round(student_t(10, 0.0025), 3), round(student_t(math.inf), 3)
    (12.706, 3.581, 1.96)
    """
    if freedom > 1e4:
        return NormalDist().inv_cdf(1 - tail)
    return _student_t(math.floor(freedom) if freedom >= 30 else math.floor(freedom * 10) / 10, tail)


@lru_cache(maxsize=4096)
def _student_t(freedom: float, tail: float) -> float:

    def beyond(t: float) -> float:
        return _incomplete_beta(freedom / 2, 0.5, freedom / (freedom + t * t)) / 2

    low, high = 0.0, 1.0
    while beyond(high) > tail:
        low, high = high, 2 * high
    while high - low > 1e-7 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if beyond(middle) > tail else (low, middle)
    return high


def _incomplete_beta(a: float, b: float, x: float) -> float:
    """The regularised incomplete beta function, by its continued fraction (Abramowitz and Stegun 26.5.8)."""
    if not 0 < x < 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):
        return 1 - _incomplete_beta(b, a, 1 - x)
    logarithm = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    # Evaluated from its end; it converges after a few times sqrt(max(a, b)) terms.
    fraction = 1.0
    for m in range(20 + math.ceil(3 * math.sqrt(max(a, b))), 0, -1):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m - 1) * (a + b + m - 1) * x / ((a + 2 * m - 2) * (a + 2 * m - 1))
        fraction = 1 + odd / (1 + even / fraction)
    return math.exp(logarithm) / (a * fraction)


# --- bootstrap ---


@dataclass(frozen=True, slots=True)
class Resampled:
    """A statistic with its standard error: of its logarithm if `logarithmic`, else of itself.

    error is None if there is only one unit, which has no spread.
    """

    value: float
    error: float | None
    freedom: float
    launches: int
    logarithmic: bool

    def times(self, factor: float) -> Resampled:
        """The same statistic in another unit; factor is positive.

        >>> unbounded(0.25, launches=3).times(1000).value
        250.0
        """
        error = self.error if self.logarithmic or self.error is None else self.error * factor
        return replace(self, value=self.value * factor, error=error)

    @property
    def interval(self) -> tuple[float, float] | tuple[None, None]:
        """95 %, by Student's t, because few units estimate their spread badly."""
        if self.error is None:
            return None, None
        half = student_t(self.freedom) * self.error
        if self.logarithmic:
            return self.value * math.exp(-half), self.value * math.exp(half)
        return self.value - half, self.value + half


def seed_of(*words: str) -> int:
    """A seed from words: the same on every machine, independent for different cells.

    >>> seed_of("cell", "steps") == seed_of("cell", "steps"), seed_of("a", "b") == seed_of("ab")
    (True, False)
    """
    return int.from_bytes(hashlib.blake2b("\0".join(words).encode(), digest_size=8).digest(), "little")


def block_length(n: int) -> int:
    """About sqrt(n): long enough to keep the correlation of neighbouring steps, short enough to have many blocks.

    >>> block_length(100), block_count(105)
    (10, 11)
    """
    return max(1, round(math.sqrt(n)))


def block_count(n: int) -> int:
    return math.ceil(n / block_length(n))


def _block_sums(rows: Array, draws: int, rng: np.random.Generator) -> Array:
    """`draws` moving-block resamples of n rows, summed by column; the last block is cut so that n rows are drawn.

    Blocks wrap around the end: otherwise the first and last steps would be drawn less often.
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


def resample_sums(launches: Sequence[Array], seed: int, resamples: int = RESAMPLES) -> Array:
    """Column sums, one row per resample; each launch is an array of n steps by columns.

    Whole launches are drawn if there are several, because their differences include those of their steps; blocks of
    steps if there is only one.

    >>> resample_sums([np.ones((100, 2)), np.ones((100, 2))], seed=0, resamples=3)[:, 0].tolist()
    [200.0, 200.0, 200.0]
    """
    rng = np.random.default_rng(seed)
    if len(launches) == 1:
        return _block_sums(launches[0], resamples, rng)
    return redrawn_sums(np.array([rows.sum(axis=0) for rows in launches]), rng, resamples)


def unit_count(launches: Sequence[Array]) -> int:
    """How many units `resample_sums` draws."""
    return len(launches) if len(launches) > 1 else block_count(len(launches[0]))


def redrawn_sums(totals: Array, rng: np.random.Generator, resamples: int = RESAMPLES) -> Array:
    """As many launches as there are, drawn with replacement; a row of totals is one launch."""
    # Count how often each is drawn, so equal draws give equal sums to the last digit.
    drawn = rng.multinomial(len(totals), np.full(len(totals), 1 / len(totals)), size=resamples)
    # Not a matrix product: that spreads one NaN over all columns, and its last digit depends on the machine. Columns of
    # the result are contiguous: NumPy then adds several of their numbers at once.
    known = np.flatnonzero(~np.isnan(totals).any(axis=0))
    sums = np.zeros((len(known), resamples))
    for times, row in zip(drawn.T.astype(np.float64), totals[:, known], strict=True):
        sums += row[:, None] * times
    redrawn = np.full((totals.shape[1], resamples), math.nan)
    redrawn[known] = sums
    return redrawn.T


def column_totals(launches: Sequence[Array]) -> Array:
    """The sum of each column over all steps of all launches."""
    # A column of a launch is contiguous, so that NumPy adds it as it would add the column alone: in pairs.
    return np.asarray(sum(np.ascontiguousarray(rows.T).sum(axis=1) for rows in launches))


def ratio_of_sums(
    launches: Sequence[Array], sums: Array, numerator: int, denominator: int, totals: Array | None = None
) -> Resampled | None:
    """sum(numerator) / sum(denominator) over all steps of all launches; None if a value is missing (NaN). sums are
    those of `resample_sums`, totals those of `column_totals`, if they are known.

    >>> steps = [np.array([[10.0, 1.0], [20.0, 2.0], [30.0, 3.0], [40.0, 4.0]])]  # tokens, seconds
    >>> rate = ratio_of_sums(steps, resample_sums(steps, seed=0), 0, 1)
    >>> rate.value, rate.interval
    (10.0, (10.0, 10.0))
    """
    totals = column_totals(launches) if totals is None else totals
    top, bottom = float(totals[numerator]), float(totals[denominator])
    if not any(map(len, launches)) or not math.isfinite(top) or not math.isfinite(bottom) or bottom <= 0:
        return None
    return from_replicates(top / bottom, sums[:, numerator] / sums[:, denominator], unit_count(launches), len(launches))


def from_replicates(value: float, replicates: Array, units: int, launches: int) -> Resampled:
    """A statistic by its replicates over so many units: launches, or blocks of a single one.

    Drawing with replacement shows only (units - 1) / units of their variance, with units - 1 degrees of freedom.

    >>> from_replicates(10.0, np.array([9.0, 10.0, 11.0]), units=3, launches=3).freedom
    2
    """
    if units < 2:
        return unbounded(value, launches)
    logarithmic = value > 0 and bool((replicates > 0).all())
    # Differences first: the variance of equal numbers would not be exactly 0.
    parts = np.log(replicates) - math.log(value) if logarithmic else replicates - value
    error = math.sqrt(float(parts.var()) * units / (units - 1))
    return Resampled(value, error, units - 1, launches, logarithmic)


def from_launches(value: float, each: Sequence[float]) -> Resampled:
    """A statistic whose spread is that of its values for each of several launches.

    >>> from_launches(2.0, [1.0, 2.0, 3.0]).freedom
    2
    """
    logarithmic = value > 0 and min(each) > 0
    spread = (np.log(each) if logarithmic else np.asarray(each)).std(ddof=1)
    return Resampled(value, float(spread) / math.sqrt(len(each)), len(each) - 1, len(each), logarithmic)


def satterthwaite(variances: Sequence[float], freedoms: Sequence[float]) -> float:
    """Degrees of freedom of a sum of parts with these variances, (sum v)^2 / sum(v^2 / f); infinite if nothing varies.

    >>> satterthwaite([1.0, 1.0], [2, 2]), satterthwaite([1.0, 0.0], [4, 9])
    (4.0, 4)
    """
    varying = [(v, f) for v, f in zip(variances, freedoms, strict=True) if v > 0]
    if len(varying) < 2:
        return varying[0][1] if varying else math.inf
    return sum(v for v, _ in varying) ** 2 / sum(v * v / f for v, f in varying)


def unbounded(value: float, launches: int) -> Resampled:
    """A number without an interval, because the data supports none."""
    return Resampled(value, None, math.inf, launches, value > 0)


class Ratio(NamedTuple):
    """A ratio of measured values. error is the standard error of its logarithm, with so many degrees of freedom.

    launches is the fewest of a side, None if the question is about this launch alone. common is a known error that all
    comparisons of a family share, such as that of their days. slack widens the logarithm's interval below and above by
    what no number of launches removes, such as the distance between two rates that were tried.
    """

    value: float
    error: float
    freedom: float = math.inf
    launches: int | None = None
    common: float = 0.0
    slack: tuple[float, float] = (0.0, 0.0)

    def interval(self, family: int = 1) -> tuple[float, float]:
        """95 % for all `family` comparisons together: Bonferroni for their own errors.

        The common error is the same in all of them, so its tail is only halved, for what the largest of the own errors
        adds (simulated in `benchmarks/error_rates.py`).
        """
        below, above = (self._reach(ERROR / 2, family) + slack for slack in self.slack)
        return self.value * math.exp(-below), self.value * math.exp(min(above, LARGEST_EXPONENT))

    def _reach(self, tail: float, family: int = 1) -> float:
        own, common = student_t(self.freedom, tail / family), student_t(math.inf, tail / min(family, 2))
        return math.hypot(own * self.error, common * self.common)

    @property
    def low(self) -> float:
        return self.interval()[0]

    @property
    def high(self) -> float:
        return self.interval()[1]

    def detectable(self, family: int = 1) -> float:
        """The smallest true effect, as a fraction, that data of this spread shows four times out of five.

        It exceeds the interval by the quantile of a noncentral t, approximated by a normal distribution: with few
        degrees of freedom the spread may be overestimated too.

        >>> round(Ratio(1.1, error=0.02).detectable(), 3), round(Ratio(1.1, error=0.02, freedom=4).detectable(), 3)
        (0.058, 0.079)
        """
        critical, power = student_t(self.freedom, ERROR / 2 / family), student_t(math.inf, 0.2)
        own = power * math.sqrt(1 + critical**2 / (2 * self.freedom)) - critical / (4 * self.freedom)
        beyond = math.hypot(own * self.error, power * self.common) + max(filter(math.isfinite, self.slack))
        return math.expm1(min(self._reach(ERROR / 2, family) + beyond, LARGEST_EXPONENT))


def ratio_between(
    over: Sequence[Resampled], under: Sequence[Resampled], sharing: Sharing | None = None
) -> Ratio | None:
    """product(over) / product(under) of independent sides; None if a side has no spread. sharing: see `contrast`.

    >>> fast, slow = Resampled(110.0, 0.006, 2, 3, True), Resampled(100.0, 0.006, 2, 3, True)
    >>> ratio = ratio_between([fast], [slow])
    >>> round(ratio.value, 2), ratio.low > 1, ratio.freedom
    (1.1, True, 4)
    """
    return contrast([*((side, 1.0) for side in over), *((side, -1.0) for side in under)], sharing)


class Sharing(NamedTuple):
    """Cells that were measured together and share the variance of a launch, with its degrees of freedom."""

    cells: Sequence[Resampled]
    variance: float
    freedom: int


def sharing_of(among: Sequence[Resampled]) -> Sharing:
    """Those of the cells that can share their variance (`alike`), for all contrasts among them."""
    cells = alike([s for s in among if s.launches > 1 and s.logarithmic and s.error is not None])
    return Sharing(cells, *_launch_variance(cells))


def contrast(sides: Sequence[tuple[Resampled, float]], sharing: Sharing | None = None) -> Ratio | None:
    """The product of all values, each to the power of its weight; None if a side has no spread.

    Few launches estimate their spread badly, so cells that were measured together (`sharing`; the sides by default)
    share it: the variance of a launch is that of its own cell or the mean of these, whichever is larger, and has the
    degrees of freedom of all of them. Every other side keeps its own (Welch-Satterthwaite).
    """
    if any(side.error is None or not side.logarithmic for side, _ in sides):
        return None
    fewest = min(side.launches for side, _ in sides)
    if fewest < 2:
        sharing = sharing_of([])
    elif sharing is None:
        sharing = sharing_of([side for side, _ in sides])
    shares = [side in sharing.cells for side, _ in sides]
    variances, freedoms = [], []
    for (side, weight), is_shared in zip(sides, shares, strict=True):
        own = (side.error or 0.0) ** 2
        variances.append(weight * weight * (max(own, sharing.variance / side.launches) if is_shared else own))
        freedoms.append(sharing.freedom if is_shared else side.freedom)
    return Ratio(
        value=math.prod(side.value**weight for side, weight in sides),
        error=math.sqrt(sum(variances)),
        freedom=sharing.freedom if all(shares) else satterthwaite(variances, freedoms),
        launches=fewest,
    )


def alike(cells: Sequence[Resampled]) -> list[Resampled]:
    """The cells whose launches may have one variance: without those whose variance is far above that of the others, the
    largest first (Cochran's C test at 1 %). One unsteady strategy then leaves the intervals of the others as they are.

    >>> steady = [Resampled(1.0, error, 2, 3, True) for error in (0.002, 0.003, 0.004)]
    >>> [len(alike([*steady, Resampled(1.0, error, 2, 3, True)])) for error in (0.08, 0.009)]
    [3, 4]
    """
    left = sorted(cells, key=lambda cell: _launch_variance([cell])[0])
    while len(left) > 2:
        (largest, own), (others, freedom) = _launch_variance(left[-1:]), _launch_variance(left[:-1])
        if not others or _exceeds(largest / others, own, freedom) >= UNLIKE / len(left):
            break
        left.pop()
    return left


# Probability of setting a cell aside whose launches have the same variance as the others.
UNLIKE = 0.01


def _launch_variance(cells: Sequence[Resampled]) -> tuple[float, int]:
    """The mean variance of a launch, and its degrees of freedom."""
    freedom = sum(cell.launches - 1 for cell in cells)
    squares = sum((cell.launches - 1) * cell.launches * (cell.error or 0.0) ** 2 for cell in cells)
    return squares / max(freedom, 1), freedom


def _exceeds(ratio: float, over: float, under: float) -> float:
    """The probability that a ratio of two estimates of one variance is larger, by the F distribution."""
    return _incomplete_beta(under / 2, over / 2, under / (under + over * ratio))


def launches_note(launches: int, of: str = "steps") -> str | None:
    """What a reader must know about an interval over few launches; `of` names what was resampled within one.

    >>> launches_note(1)
    'launches were not repeated: the interval covers steps within one launch only'
    >>> launches_note(3) is None
    True
    """
    if launches == 1:
        return f"launches were not repeated: the interval covers {of} within one launch only"
    if launches == 2:
        return "only two launches: their spread has one degree of freedom, so the interval is wide"
    return None


# --- outliers and percentiles ---


def median(values: Array) -> float:
    """numpy's median, faster for a few dozen values; NaN if one is NaN.

    >>> median(np.array([3.0, 1.0, 2.0, 10.0]))
    2.5
    """
    ascending = np.sort(values)
    n = len(ascending)
    if not n or math.isnan(ascending[-1]):
        return math.nan
    return float((ascending[(n - 1) // 2] + ascending[n // 2]) / 2)


def outliers(values: Sequence[float] | Array) -> NDArray[np.bool_]:
    """True for a modified z-score 0.6745 |x - median| / MAD over 3.5. A tag only: nothing is ever deleted.

    If more than half of the values are equal, MAD is 0 and the mean absolute deviation replaces it, with factor
    1/1.253314 (Iglewicz and Hoaglin, 1993).

    >>> outliers([1.0, 1.1, 0.9, 1.0, 1.05, 5.0]).tolist()
    [False, False, False, False, False, True]
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
    """The q-th percentile (0 to 100); None unless at least one value is expected beyond it on either side.

    >>> percentile([1.0, 2.0, 3.0], 50), percentile([1.0, 2.0, 3.0], 99)
    (2.0, None)
    """
    if len(values) * min(q, 100 - q) < 100:
        return None
    # As numpy.percentile, faster for a few hundred values.
    ascending = np.sort(np.asarray(values, dtype=np.float64))
    place = (len(ascending) - 1) * (q / 100)
    share, below = math.modf(place)
    low, high = ascending[int(below) : int(below) + 2].tolist()
    found = high - (high - low) * (1 - share) if share >= 0.5 else low + (high - low) * share
    return math.nan if math.isnan(ascending[-1]) else found


# --- warm-up ---


class WarmUpEnd(NamedTuple):
    """How many steps are excluded, whether the rule itself decided it, and the sentence for the report."""

    excluded: int
    by_rule: bool
    text: str


def warm_up(durations: Sequence[float] | Array, rule: WarmUp) -> WarmUpEnd:
    """Apply the rule of `spec.WarmUp` to the duration of every step (maximum over ranks).

    Excludes the first e >= minimum steps such that the median of steps e .. e+w-1 and the median of the w steps after
    them differ by less than slope_ratio. With fewer than minimum + 2w steps the rule cannot be applied.

    >>> warm_up([3.0] * 4 + [1.0] * 20, WarmUp(minimum=1, window=5, slope_ratio=0.02, maximum=10)).excluded
    2
    """
    n, w = len(durations), rule.window
    if n <= rule.minimum:
        return WarmUpEnd(n, False, f"no step is left: {n} ran, and warm-up takes at least {rule.minimum}")
    if n < rule.minimum + 2 * w:
        needed = rule.minimum + 2 * w
        return WarmUpEnd(
            rule.minimum,
            False,
            f"minimum of {rule.minimum} steps; {n} steps are too few for the rule, which needs {needed}",
        )
    x = np.asarray(durations, dtype=np.float64)
    last = min(rule.maximum, n - 2 * w)
    for end in range(rule.minimum, last + 1):
        here, after = median(x[end : end + w]), median(x[end + w : end + 2 * w])
        if abs(after - here) < rule.slope_ratio * here:
            return WarmUpEnd(end, True, f"{end} steps: the median of {w} steps changed by {abs(after / here - 1):.2%}")
    why = "the maximum" if last == rule.maximum else f"the most that leaves two windows of {w} steps"
    return WarmUpEnd(last, False, f"{last} steps, {why}: the median never settled within {rule.slope_ratio:.0%}")


# From sums over launches (one row of columns, or many) to the number.
Estimate = Callable[[Array], Array]


def quotient(numerator: int = 0, denominator: int = 1) -> Estimate:
    """One column's sum over another's: never a mean of rates.

    >>> float(quotient(0, 1)(np.array([30.0, 10.0])))
    3.0
    """
    return lambda sums: sums[..., numerator] / sums[..., denominator]


def over_launches(rows: Sequence[Sequence[float]], estimate: Estimate, *words: str) -> Resampled | None:
    """The number of all launches together, with the spread of its launches; a row is one launch.

    None if it is not a number; missing columns are NaN. One launch has no spread: the variation of its requests says
    nothing about another launch.

    >>> over_launches([[30.0, 10.0], [50.0, 10.0]], quotient(), "example").value
    4.0
    """
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


def bounded(resampled: Resampled | None) -> Bounded:
    """The value and its 95 % interval, as a measurement stores them."""
    return (None, None, None) if resampled is None else (resampled.value, *resampled.interval)
