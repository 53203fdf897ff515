"""Chart of gauges over a run: power, clock, use and temperature on one axis, throttled stretches shaded."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.analysis.findings import Report
from paceline.report.charts.chart import CURVE, LINES, Axis, Chart, Point, Series, Span, used
from paceline.report.tables.gauges import GAUGES, curves, drawn, trace_title


def traces(report: Report) -> Iterator[Chart]:
    """A panel per cell: the device that was throttled most, else the one with the highest power."""
    found = [(trace_title(report, trace), trace) for trace in drawn(report)]
    points = [
        Point(x=at, y=value, series=curve.name, group=title, drawn=CURVE, cells=(trace.cell,), runs=(trace.run,))
        for title, trace in found
        for curve in curves(trace)
        for at, value in curve.points
    ]
    yield Chart(
        name="gauges",
        title="Gauges over the run",
        subtitle="One device of each cell, before and during the measured steps or loads, which begin at 0 s. "
        "Shaded: throttled (power cap, heat or hardware slowdown).",
        kind=LINES,
        x=Axis(label="s", zero=False, shared=False),
        y=Axis(label="% of the limit, or C"),
        points=tuple(points),
        series=used([Series(name=name, colour=colour) for name, colour in GAUGES.items()], points),
        spans=tuple(Span(start=a, end=b, group=title) for title, trace in found for a, b in trace.throttled),
    )
