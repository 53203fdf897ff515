"""The verdict on a ratio with its interval."""

from __future__ import annotations

from collections.abc import Mapping

from paceline.analysis.findings import BETTER, HIGHER, TIE, WORSE, Comparison
from paceline.analysis.statistics.intervals import Ratio
from paceline.errors import Scalar

SMALLEST_EFFECT = 0.01


def verdict_of(found: Ratio, better: str) -> tuple[str, str]:
    """Verdict about the numerator and the reason. Effects are max(r, 1/r) - 1, so that A/B and B/A agree."""
    effect = max(found.value, 1 / found.value) - 1
    if found.low <= 1 <= found.high:
        return TIE, "the interval includes 1"
    if effect < SMALLEST_EFFECT:
        return TIE, f"the effect of {effect:.2%} is under {SMALLEST_EFFECT:.0%}"
    if effect < found.detectable:
        return TIE, f"the effect of {effect:.1%} is under the {found.detectable:.1%} this data could show"
    verdict = BETTER if (found.value > 1) == (better == HIGHER) else WORSE
    return verdict, f"the effect of {effect:.1%} exceeds the {found.detectable:.1%} this data could show"


def judged_ratio(
    metric: str,
    better: str,
    cells: tuple[str, str],
    names: tuple[str, str],
    found: Ratio,
    *,
    axes: Mapping[str, Scalar],
    runs: tuple[str, ...],
) -> Comparison:
    """The ratio with its verdict, of cells of which the caller knows that they did equal work."""
    verdict, reason = verdict_of(found, better)
    return Comparison(
        metric=metric,
        better=better,
        cell=cells[0],
        other=cells[1],
        label=names[0],
        other_label=names[1],
        ratio=found.value,
        low=found.low,
        high=found.high,
        detectable_ratio=found.detectable,
        verdict=verdict,
        reason=reason,
        certified=True,
        axes=axes,
        runs=runs,
    )
