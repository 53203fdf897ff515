"""Gauges over a run: power, clock, use and temperature of one device of each cell, throttled stretches shaded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from paceline.analysis.findings import GaugeTrace, Report
from paceline.report.exporters._matplotlib.canvas import GRID, PALETTE, QUIET, canvas, entitle, key
from paceline.report.tables.gauges import GAUGES, TOP, curves, drawn, trace_title

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PANEL_IN, TITLE_IN = 2.0, 0.9
SHADE = "#f7e1d2"  # of the palette's vermilion, pale enough to read curves on
COLOURS = {name: PALETTE[place] for name, place in GAUGES.items()}


def panels(report: Report) -> Sequence[GaugeTrace]:
    return drawn(report)


def draw(report: Report, found: Sequence[GaugeTrace]) -> Figure:
    heights = (PANEL_IN + (0.0 if i else TITLE_IN) for i in range(len(found)))
    title, subtitle = (
        "Gauges over the run",
        "what was measured lies between the dashed lines; before it is set-up and warm-up",
    )
    figure, axes = canvas("", "", *heights)
    for i, (panel, trace) in enumerate(zip(axes, found, strict=True)):
        entitle(panel, "" if i else title, subtitle, trace_title(report, trace))
        _panel(panel, trace)
    axes[-1].set_xlabel("s")
    told = {curve.name for trace in found for curve in curves(trace)}
    words = [(name, COLOURS[name]) for name in GAUGES if name in told]
    key(figure, [*words, *([("throttled", SHADE)] if any(trace.throttled for trace in found) else [])])
    return figure


def _panel(axes: Axes, trace: GaugeTrace) -> None:
    for begin, end in trace.throttled:
        axes.axvspan(begin, end, color=SHADE, linewidth=0, zorder=0)
    for curve in curves(trace):
        at, values = zip(*curve.points, strict=True)
        axes.plot(at, values, color=COLOURS[curve.name], linewidth=1.3)
    for edge in trace.window or ():
        axes.axvline(edge, color=QUIET, linewidth=0.9, linestyle="--")
    axes.set_ylim(0, TOP)
    axes.grid(axis="y", color=GRID)
    axes.set_ylabel("% of limit, or C")
