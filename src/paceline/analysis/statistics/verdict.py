"""The one rule for verdicts: ranking, compare, gate, effects, replays and load tests all use `verdict_of`.

The interval of a ratio is corrected for the number of comparisons in its family. If it excludes 1 and the difference is
at least SMALLEST_EFFECT, the verdict is better or worse; if it lies within EQUAL_WITHIN of 1, equal; everything else,
and every comparison of single launches, is inconclusive. `benchmarks/error_rates.py` measures how often that is wrong.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from paceline.analysis.findings import BETTER, EQUAL, HIGHER, INCONCLUSIVE, WORSE, Comparison
from paceline.analysis.statistics.intervals import Ratio
from paceline.errors import Scalar
from paceline.wording import factor, short_percent

SMALLEST_EFFECT = 0.01
EQUAL_WITHIN = 0.02
# From this ratio on, percent would be unreadable.
FACTORS_FROM = 10.0
# With fewer launches of each, their spread is too badly known.
FEWEST_LAUNCHES = 3
MOST_LAUNCHES = 100
ONE_LAUNCH = (
    f"one launch cannot show how much launches differ; use at least {FEWEST_LAUNCHES} of each "
    f"(--set repeats={FEWEST_LAUNCHES})"
)
# Standard deviation, as a fraction, that is assumed between days and between nodes: launches of one day do not show it.
BETWEEN_DAYS = 0.01


def verdict_of(ratio: Ratio, better: str, family: int = 1, equal_within: float = EQUAL_WITHIN) -> tuple[str, str]:
    """Verdict about the numerator, one of `family` comparisons, and the reason.

    Effects are max(r, 1/r) - 1, so that A/B and B/A agree.

    >>> verdict_of(Ratio(1.20, error=0.02, launches=3), HIGHER)
    ('better', 'a difference of 20.0 %; 95 % interval +15.4 % to +24.8 %')
    >>> verdict_of(Ratio(1.002, error=0.004, launches=3), HIGHER)
    ('equal', 'within 2 %; 95 % interval -0.6 % to +1.0 %')
    >>> verdict_of(Ratio(1.02, error=0.02, launches=3), HIGHER)
    ('inconclusive', '95 % interval -1.9 % to +6.1 %; four times out of five, 5.8 % would have been shown')
    >>> verdict_of(Ratio(20, error=0.1, launches=3), HIGHER)
    ('better', 'a difference of 20 times; 95 % interval 16 to 24 times')
    """
    if ratio.launches is not None and ratio.launches < 2:
        return INCONCLUSIVE, ONE_LAUNCH
    effect = max(ratio.value, 1 / ratio.value) - 1
    low, high = ratio.interval(family)
    together = f" for all {family} comparisons together" if family > 1 else ""
    words = _signed if high < FACTORS_FROM else factor
    ends = f"{words(low)} to {words(high)}{'' if high < FACTORS_FROM else ' times'}"
    interval = f"95 % interval {ends}{together}"
    if not low <= 1 <= high and effect >= SMALLEST_EFFECT:
        verdict = BETTER if (ratio.value > 1) == (better == HIGHER) else WORSE
        size = f"{abs(ratio.value - 1) * 100:.1f} %" if ratio.value < FACTORS_FROM else f"{factor(ratio.value)} times"
        return verdict, f"a difference of {size}; {interval}"
    if 1 / (1 + equal_within) <= low and high <= 1 + equal_within:
        return EQUAL, f"within {equal_within * 100:.2g} %; {interval}"
    if not low <= 1 <= high:
        return INCONCLUSIVE, f"a difference of {effect * 100:.2f} % is under {SMALLEST_EFFECT * 100:.0f} %; {interval}"
    shown = short_percent(ratio.detectable(family))
    return INCONCLUSIVE, f"{interval}; four times out of five, {shown} would have been shown"


def _signed(ratio: float) -> str:
    """`-1.9 %`."""
    return f"{round((ratio - 1) * 100, 1) + 0.0:+.1f} %"


def judged_ratio(
    metric: str,
    better: str,
    cells: tuple[str, str],
    names: tuple[str, str],
    ratio: Ratio,
    *,
    family: int,
    axes: Mapping[str, Scalar],
    runs: tuple[str, ...],
) -> Comparison:
    """The comparison of two cells that are known to have done equal work, one of `family`."""
    verdict, reason = verdict_of(ratio, better, family)
    low, high = ratio.interval()
    return Comparison(
        metric=metric,
        better=better,
        cell=cells[0],
        other=cells[1],
        label=names[0],
        other_label=names[1],
        ratio=ratio.value,
        low=low,
        high=high,
        detectable_ratio=None if ratio.launches == 1 else ratio.detectable(family),
        verdict=verdict,
        reason=reason,
        certified=True,
        axes=axes,
        runs=runs,
        launches=ratio.launches,
        launches_needed=launches_needed(ratio, family) if verdict == INCONCLUSIVE else None,
    )


def launches_needed(ratio: Ratio, family: int) -> int | None:
    """About how many launches of each side show a difference of this size, or of EQUAL_WITHIN if it is smaller.

    >>> launches_needed(Ratio(1.03, error=0.02, freedom=4, launches=3), 1)
    12
    """
    if ratio.launches is None or ratio.launches < 2:
        return None
    target = max(ratio.value - 1, 1 / ratio.value - 1, EQUAL_WITHIN)
    for count in range(ratio.launches + 1, MOST_LAUNCHES + 1):
        error = ratio.error * math.sqrt(ratio.launches / count)
        freedom = ratio.freedom * (count - 1) / (ratio.launches - 1)
        if ratio._replace(error=error, freedom=freedom).detectable(family) <= target:
            return count
    return None
