"""Chart of a designed experiment: a dot per effect with its interval, speed above memory, around no change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from paceline.analysis.findings import Report
from paceline.report.charts.chart import Chart, Point
from paceline.report.charts.effects import effects
from paceline.report.exporters._matplotlib.canvas import (
    INK,
    PALETTE,
    QUIET,
    brief,
    canvas,
    entitle,
    key,
    say,
    thousands,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LANE_IN, MARGIN_IN, TITLE_IN = 0.3, 0.75, 0.8
MOST_LANES = 40
SUBTITLE = "each dot is an effect, each line its 95 % interval"


def charted(report: Report) -> Chart | None:
    """Of the first design; a folder seldom holds a second, and the tables have all."""
    return next((chart for chart in effects(report) if chart.points), None)


def draw_effects(report: Report, chart: Chart) -> Figure:
    panels: dict[str, list[Point]] = {}
    for point in chart.points:
        panels.setdefault(point.group, []).append(point)
    shown = {heading: points[:MOST_LANES] for heading, points in panels.items()}
    heights = [MARGIN_IN + LANE_IN * len(points) for points in shown.values()]
    figure, axes = canvas("", "", heights[0] + TITLE_IN, *heights[1:])
    colours = {series.name: PALETTE[series.colour] for series in chart.series}
    for i, (place, (heading, points)) in enumerate(zip(axes, shown.items(), strict=True)):
        entitle(place, chart.title if i == 0 else "", SUBTITLE, heading)
        _lanes(place, points, colours)
        place.set_xlabel(chart.y.label if i == len(axes) - 1 else "")
    if left := sum(len(points) for points in panels.values()) - sum(map(len, shown.values())):
        text = f"and {left} more effects, in the tables only"
        say(axes[-1], text, (1, 0), (0, -34), "axes fraction", color=QUIET, ha="right")
    key(figure, list(colours.items()))
    return figure


def _lanes(axes: Axes, points: Sequence[Point], colours: dict[str, str]) -> None:
    places = [-float(i) for i in range(len(points))]
    axes.axvline(0.0, color=INK, linewidth=1.0, linestyle=(0, (4, 3)))
    for y, point in zip(places, points, strict=True):
        colour = colours[point.series]
        if point.low is not None and point.high is not None:
            reach = [[max(point.y - point.low, 0.0)], [max(point.high - point.y, 0.0)]]
            axes.errorbar([point.y], [y], xerr=reach, fmt="none", ecolor=colour, elinewidth=1.6, capsize=4)
        axes.plot([point.y], [y], "o", color=colour, markersize=4.5)
        say(axes, point.text, (1, y), (6, 0), "side", color=INK)
    axes.set_yticks(places, [brief(point.label) for point in points])
    axes.set_ylim(places[-1] - 0.6, 0.6)
    axes.margins(x=0.06)
    axes.grid(axis="x")
    thousands(axes.xaxis)
