"""How a measurement reads: its value with its interval, in the unit people use."""

from __future__ import annotations

from paceline.analysis.findings import Comparison, Measurement
from paceline.wording import DIGITS_OF_RATIO, MISSING, TIMES, Scale, _interval, format_own, format_quantity, places


def format_measurement(m: Measurement, scale: Scale | None = None) -> str:
    return format_quantity(m.value, m.low, m.high, m.unit, m.metric, scale)


def format_brief(m: Measurement, scale: Scale) -> str:
    """The number alone: three digits."""
    value = scale.apply(m.value)
    return MISSING if value is None else format_own(value, places(value, None, None))


def format_ratio(c: Comparison) -> tuple[str, str]:
    """`0.912x` and `[0.900, 0.924]`: never finer than a tenth of the percent under which everything is a tie."""
    digits = min(places(c.ratio, c.low, c.high), DIGITS_OF_RATIO)
    return f"{format_own(c.ratio, digits)}{TIMES}", _interval(c.low, c.high, digits)
