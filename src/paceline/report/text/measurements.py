"""How a measurement reads: its value with its interval, in the unit people use."""

from __future__ import annotations

from paceline.analysis.findings import Measurement
from paceline.wording import MISSING, Scale, format_own, format_quantity, places


def format_measurement(m: Measurement, scale: Scale | None = None) -> str:
    return format_quantity(m.value, m.low, m.high, m.unit, m.metric, scale)


def format_brief(m: Measurement, scale: Scale) -> str:
    """The number alone: three digits."""
    value = scale.apply(m.value)
    return MISSING if value is None else format_own(value, places(value, None, None))
