"""The verdict on a ratio with its interval."""

from __future__ import annotations

from collections.abc import Mapping

from paceline.analysis.findings import BETTER, HIGHER, TIE, WORSE, Comparison
from paceline.analysis.statistics.intervals import Ratio
from paceline.errors import Scalar

SMALLEST_EFFECT = 0.01


def verdict_of(ratio: Ratio, better: str) -> tuple[str, str]:
    """Verdict about the numerator, and the reason. Effects are max(r, 1/r) - 1, so that A/B and B/A agree.

    >>> verdict_of(Ratio(1.20, 1.15, 1.25, error=0.02), HIGHER)
    ('better', 'the difference of 20.0% exceeds the smallest detectable one, 5.8%')
    >>> verdict_of(Ratio(1.02, 0.97, 1.07, error=0.02), HIGHER)
    ('tie', 'the interval includes 1')
    """
    effect = max(ratio.value, 1 / ratio.value) - 1
    if ratio.low <= 1 <= ratio.high:
        return TIE, "the interval includes 1"
    if effect < SMALLEST_EFFECT:
        return TIE, f"the difference of {effect:.2%} is under {SMALLEST_EFFECT:.0%}"
    if effect < ratio.detectable:
        return TIE, f"the difference of {effect:.1%} is under the smallest detectable one, {ratio.detectable:.1%}"
    verdict = BETTER if (ratio.value > 1) == (better == HIGHER) else WORSE
    return verdict, f"the difference of {effect:.1%} exceeds the smallest detectable one, {ratio.detectable:.1%}"


def judged_ratio(
    metric: str,
    better: str,
    cells: tuple[str, str],
    names: tuple[str, str],
    ratio: Ratio,
    *,
    axes: Mapping[str, Scalar],
    runs: tuple[str, ...],
) -> Comparison:
    """The comparison of two cells that are known to have done equal work."""
    verdict, reason = verdict_of(ratio, better)
    return Comparison(
        metric=metric,
        better=better,
        cell=cells[0],
        other=cells[1],
        label=names[0],
        other_label=names[1],
        ratio=ratio.value,
        low=ratio.low,
        high=ratio.high,
        detectable_ratio=ratio.detectable,
        verdict=verdict,
        reason=reason,
        certified=True,
        axes=axes,
        runs=runs,
    )
