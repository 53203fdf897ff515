"""Chart of gauges over a run: power, clock, use and temperature on one axis, throttled stretches shaded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from paceline.analysis.findings import GaugeTrace, Report
from paceline.report.charts.chart import CURVE, LINES, Axis, Chart, Point, Span, others, used
from paceline.report.tables.gauges import device_name
from paceline.report.text.cells import axes_of, cell_name, varying_axes, without_shared

GAUGES = ("power, % of the cap", "clock, % of its maximum", "busy, %", "temperature, C")


def traces(report: Report) -> Iterator[Chart]:
    """A panel per cell: the device that was throttled most, else the one with the highest power."""
    curves = [(trace, drawn) for trace in report.gauge_traces if (drawn := _curves(trace))]
    points: list[Point] = []
    spans: list[Span] = []
    named = varying_axes(report)
    cells = {t.cell: cell_name(report, t.cell, axes_of(report, t.cell) or {}, named) or t.run for t, _ in curves}
    short, shared = without_shared(cells.values())
    for trace, drawn in curves:
        title = device_name(trace)
        if len(curves) > 1:
            title = f"{short[cells[trace.cell]]}: {title}"
        base = Point(y=0.0, group=title, drawn=CURVE, cells=(trace.cell,), runs=(trace.run,))
        points += [replace(base, x=at, y=value, series=name) for name, at, value in drawn]
        spans += [Span(start=a, end=b, group=title) for a, b in trace.throttled]
    yield Chart(
        name="gauges",
        title="Gauges over the run",
        subtitle="One device of each cell, before and during the measured steps or loads, which begin at 0 s. "
        f"Shaded: throttled (power cap, heat or hardware slowdown).{f' All panels: {shared}.' if shared else ''}",
        kind=LINES,
        x=Axis(label="s", zero=False, shared=False),
        y=Axis(label="% of the limit, or C"),
        points=tuple(points),
        series=used(others(GAUGES), points),
        spans=tuple(spans),
    )


def _curves(trace: GaugeTrace) -> list[tuple[str, float, float]]:
    """Gauge, time and percent. Power and clock are shares of the machine's limits, or of the highest reading if those
    are unknown."""
    shares: tuple[tuple[Sequence[float | None], float | None], ...] = (
        (trace.power_w, trace.power_cap_w),
        (trace.clock_hz, trace.clock_max_hz),
        (trace.busy_ratio, 1.0),
        (trace.temperature_c, 100.0),
    )
    found = []
    for name, (values, limit) in zip(GAUGES, shares, strict=True):
        known = [(at, value) for at, value in zip(trace.seconds, values, strict=True) if value is not None]
        if most := limit or max((value for _, value in known), default=0.0):
            found += [(name, at, 100 * value / most) for at, value in known]
    return found
