"""Gauges of GPUs and hosts during the runs, as a table and as curves on one axis."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import NamedTuple

from paceline.analysis.findings import DeviceGauges, GaugeTrace, Report
from paceline.report.tables.table import Cell, Column, Filled, Table, filled, without_empty
from paceline.report.text.cells import axes_of, cell_name, varying_axes
from paceline.wording import MISSING, format_number

GIB, MHZ = 2.0**-30, 1e-6


def device_name(found: DeviceGauges | GaugeTrace) -> str:
    return f"{found.host}, " + ("processors" if found.device is None else f"GPU {found.device}")


# --- the table ---


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
    (Column("readings", True), lambda found: str(found.readings)),
    (Column("busy, %", True), _number("busy_median_ratio", 100.0)),
    (Column("most memory, GiB", True), _number("memory_max_bytes", GIB, 1)),
    (Column("power median / most, W", True), _pair("power_median_w", "power_max_w")),
    (Column("temperature median / most, C", True), _pair("temperature_median_c", "temperature_max_c")),
    (Column("clock least / median, MHz", True), _pair("clock_min_hz", "clock_median_hz", MHZ)),
    (Column("throttled"), _throttled),
)


# --- the curves ---


class Curve(NamedTuple):
    """One gauge of a trace on the common axis of 0 to 100; name is that of the gauge."""

    name: str
    points: tuple[tuple[float, float], ...]


# With their indexes in the palette; index 1 is for throttled stretches.
GAUGES = {"power, % of the cap": 0, "clock, % of its maximum": 2, "busy, %": 5, "temperature, C": 3}


def curves(trace: GaugeTrace) -> tuple[Curve, ...]:
    """Power and clock as shares of the machine's limits, or of the highest reading if those are unknown."""
    shares: tuple[tuple[Iterable[float | None], float | None], ...] = (
        (trace.power_w, trace.power_cap_w),
        (trace.clock_hz, trace.clock_max_hz),
        (trace.busy_ratio, 1.0),
        (trace.temperature_c, 100.0),
    )
    found = []
    for name, (values, whole) in zip(GAUGES, shares, strict=True):
        known = [(at, value) for at, value in zip(trace.seconds, values, strict=True) if value is not None]
        if most := whole or max((value for _, value in known), default=0.0):
            found.append(Curve(name, tuple((at, 100 * value / most) for at, value in known)))
    return tuple(curve for curve in found if curve.points)


def trace_title(report: Report, trace: GaugeTrace) -> str:
    """The cell and the device; only the device if one cell is drawn."""
    if len(drawn(report)) == 1:
        return device_name(trace)
    cell = cell_name(report, trace.cell, axes_of(report, trace.cell) or {}, varying_axes(report)) or trace.run
    return f"{cell}: {device_name(trace)}"


def drawn(report: Report) -> tuple[GaugeTrace, ...]:
    return tuple(trace for trace in report.gauge_traces if curves(trace))
