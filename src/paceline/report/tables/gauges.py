"""Gauges of GPUs and hosts during the runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from paceline.analysis.findings import DeviceGauges, GaugeTrace, Report
from paceline.report.tables.table import Cell, Column, Filled, Table, filled, numeric, without_empty
from paceline.wording import MISSING, format_number

GIB, MHZ = 2.0**-30, 1e-6


def device_name(found: DeviceGauges | GaugeTrace) -> str:
    return f"{found.host}, " + ("processors" if found.device is None else f"GPU {found.device}")


def tables(report: Report) -> tuple[Table, ...]:
    """Empty if no run recorded a gauge; a column without readings is left out."""
    table = filled("Gauges during the runs", report.gauges, _COLUMNS)
    if table is None or not any(found.readings for found in report.gauges):
        return ()
    table, absent = without_empty(table)
    notes = ["Over the measured steps or loads of all runs that ended ok."]
    notes += [f"Not reported here: {', '.join(column.name for column in absent)}."] if absent else []
    return (replace(table, notes=tuple(notes)),)


def _pair(first: str, second: str, factor: float = 1.0) -> Callable[[DeviceGauges], Cell]:
    def fill(found: DeviceGauges) -> Cell:
        values = [getattr(found, name) for name in (first, second)]
        if any(value is None for value in values):
            return Cell(MISSING)
        return Cell(" / ".join(format_number(value * factor, 0) for value in values))

    return fill


def _number(name: str, factor: float = 1.0, digits: int = 0) -> Callable[[DeviceGauges], Cell]:
    def fill(found: DeviceGauges) -> Cell:
        value = getattr(found, name)
        return Cell(MISSING if value is None else format_number(value * factor, digits))

    return fill


def _throttled(found: DeviceGauges) -> Cell:
    if found.throttled_ratio is None:
        return Cell(MISSING)
    words = f"{found.throttled_ratio:.0%} of readings"
    return Cell(words, ", ".join(found.throttle_reasons), "bad" if found.throttled_ratio else "good")


_COLUMNS: tuple[Filled[DeviceGauges], ...] = (
    (Column("device"), device_name),
    (numeric("readings"), lambda found: str(found.readings)),
    (numeric("busy, %"), _number("busy_median_ratio", 100.0)),
    (numeric("most memory, GiB"), _number("memory_max_bytes", GIB, 1)),
    (numeric("power median / most, W"), _pair("power_median_w", "power_max_w")),
    (numeric("temperature median / most, C"), _pair("temperature_median_c", "temperature_max_c")),
    (numeric("clock least / median, MHz"), _pair("clock_min_hz", "clock_median_hz", MHZ)),
    (Column("throttled"), _throttled),
)
