"""Charts of served models: the same as the page's, panel under panel."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from paceline.analysis.findings import Report
from paceline.report.charts.chart import AREA, CURVE, JOINED, LOG, LONE, NINES, RING, TRAIL, Axis, Chart, Point, Rule
from paceline.report.exporters._matplotlib.canvas import (
    CLEAR,
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

PANEL_IN, TITLE_IN, LANE_IN = 2.3, 0.9, 0.3
MOST_PANELS = 6
# Shares of a panel that the name of a point takes.
TEXT_ACROSS, TEXT_UP = 0.035, 0.09
PERCENTILES = (0.0, 50.0, 90.0, 99.0, 99.9, 99.99, 99.999)


def only(build: Callable[[Report], Iterator[Chart]]) -> Callable[[Report], Chart | None]:
    """The chart that a builder makes, None where it holds no point."""
    return lambda report: next((chart for chart in build(report) if chart.points), None)


# --- curves ---


def draw_lines(report: Report, chart: Chart) -> Figure:
    """A panel per group of the chart, as many as a page can show."""
    panels: dict[str, list[Point]] = {}
    for point in chart.points:
        panels.setdefault(point.group, []).append(point)
    shown = dict(list(panels.items())[:MOST_PANELS])
    heights = (PANEL_IN + (0.0 if i else TITLE_IN) for i in range(len(shown)))
    figure, axes = canvas("", "", *heights)
    colours = {one.name: PALETTE[one.colour] for one in chart.series}
    dashed = {one.name for one in chart.series if one.dashed}
    for i, (panel, (group, points)) in enumerate(zip(axes, shown.items(), strict=True)):
        entitle(panel, "" if i else chart.title, chart.subtitle, group)
        _panel(panel, chart, points, colours, dashed)
        _rules(panel, [rule for rule in chart.rules if rule.group in ("", group)])
        _texts(panel, points)
    axes[-1].set_xlabel(chart.x.label if chart.x else "")
    words = [(_key_word(one.name), PALETTE[one.colour]) for one in chart.series if not one.dashed]
    key(figure, words if len(words) > 1 else [])
    return figure


def _key_word(name: str) -> str:
    """Median and 99th percentile of one line share a colour, and the subtitle says which is dashed."""
    return brief(name.removesuffix(", p99"))


def _panel(axes: Axes, chart: Chart, points: Sequence[Point], colours: Mapping[str, str], dashed: set[str]) -> None:
    assert chart.x is not None
    place = _nines if chart.x.scale == NINES else float
    lines: dict[tuple[str, str], list[Point]] = {}
    for point in points:
        lines.setdefault((point.series, point.drawn), []).append(point)
    for (series, drawn), ours in lines.items():
        _line(axes, ours, [place(float(p.x or 0.0)) for p in ours], drawn, colours[series], series in dashed)
    _scales(axes, chart.x, chart.y, points)


def _line(axes: Axes, ours: Sequence[Point], x: Sequence[float], drawn: str, colour: str, dashed: bool) -> None:
    y = [point.y for point in ours]
    if drawn == AREA:
        axes.fill_between(x, [p.low or 0.0 for p in ours], y, color=colour, alpha=0.75, linewidth=0)
    elif drawn == LONE:
        axes.plot(x, y, "o", color=colour, markersize=3.2, zorder=4)
    elif drawn == RING:
        axes.plot(x, y, "o", color=colour, markersize=6, markerfacecolor="none", zorder=4)
    elif drawn in (CURVE, TRAIL):
        for part in _stretches(x) if drawn == TRAIL else [slice(None)]:
            axes.plot(x[part], y[part], color=colour, linewidth=1.4)
    else:
        assert drawn == JOINED, drawn
        axes.plot(x, y, color=colour, linewidth=1.6, marker="o", markersize=4, linestyle="--" if dashed else "-")
        for at, point in zip(x, ours, strict=True):
            if point.low is not None and point.high is not None:
                axes.plot((at, at), (point.low, point.high), color=colour, linewidth=1.1)


def _stretches(x: Sequence[float]) -> list[slice]:
    """Where nothing was seen for a while, a line ends and the next one begins."""
    gaps = [b - a for a, b in pairwise(x)]
    usual = statistics.median(gaps) if gaps else 0.0
    cuts = [0, *(i + 1 for i, gap in enumerate(gaps) if gap > 1.6 * usual), len(x)]
    return [slice(a, b) for a, b in pairwise(cuts)]


def _texts(axes: Axes, points: Sequence[Point]) -> None:
    """Names of points where they do not touch one before them; call it when the limits of the axes are final."""
    to_axes = axes.transData + axes.transAxes.inverted()
    taken: list[tuple[float, float]] = []
    for point in points:
        if not point.text:
            continue
        across, up = to_axes.transform((float(point.x or 0.0), point.y))
        if all(abs(across - x) > TEXT_ACROSS or abs(up - y) > TEXT_UP for x, y in taken):
            taken.append((across, up))
            at = (float(point.x or 0.0), point.y)
            say(axes, point.text, at, (0, 9), color=QUIET, fontsize=8, ha="center", in_layout=False)


def _nines(percent: float) -> float:
    return -math.log10(1 - percent / 100)


def _scales(axes: Axes, x: Axis, y: Axis, points: Sequence[Point]) -> None:
    from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

    if y.scale == LOG:
        axes.set_yscale("log")
        ends = [value for p in points for value in (p.y, p.low or p.y, p.high or p.y) if value > 0]
        axes.set_ylim(min(ends) / 1.25, max(ends) * 1.4)
        wide = max(ends) / min(ends) > 8
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)) if wide else MaxNLocator(4, steps=[1, 2, 5]))
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.minorticks_off()
    else:
        axes.set_ylim(0, max(max(p.y for p in points) * 1.08, 1e-9))
        axes.yaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 5, 10]))
    if x.scale == NINES:
        last = max(float(p.x or 0.0) for p in points)
        ticks = [percent for percent in PERCENTILES if percent <= last + 1e-9]
        axes.set_xticks([_nines(percent) for percent in ticks], [f"{percent:g}" for percent in ticks])
        axes.set_xlim(0, _nines(last))
    else:
        axes.set_xlim(0, max(float(p.x or 0.0) for p in points) * 1.02)
        axes.xaxis.set_major_locator(MaxNLocator(7, steps=[1, 2, 5, 10]))
        thousands(axes.xaxis)
    thousands(axes.yaxis)
    axes.set_ylabel(y.label)
    axes.grid(axis="y")


def _rules(axes: Axes, rules: Sequence[Rule]) -> None:
    """Moments by dotted lines, limits by dashed ones that are named one beside the other: two may be close."""
    level = [rule for rule in rules if not rule.upright]
    how = {"fontsize": 8, "bbox": CLEAR | {"alpha": 0.7}, "in_layout": False}
    for rule in rules:
        if rule.upright:
            axes.axvline(rule.y, color=INK, linewidth=0.9, linestyle=":")
    for rule in _apart(axes, [rule for rule in rules if rule.upright]):
        say(axes, rule.label, (rule.y, 1), (3, -3), "foot", va="top", **how)
    for i, rule in enumerate(level):
        low, high = axes.get_ylim()
        axes.set_ylim(min(low, rule.y / 1.25), max(high, rule.y * 1.4))
        axes.axhline(rule.y, color=INK, linewidth=1.0, linestyle=(0, (4, 3)))
        say(axes, rule.label, (0.24 * i, rule.y), (4, 6), "side", **how)


def _apart(axes: Axes, rules: Sequence[Rule]) -> list[Rule]:
    """Those whose names do not run into another's; the first ones have the right of way."""
    whole = axes.get_xlim()[1]
    kept: list[tuple[float, float]] = []
    found = []
    for rule in rules:
        start, end = rule.y / whole, rule.y / whole + 0.01 * len(rule.label)
        if all(start > b or end < a for a, b in kept):
            kept.append((start, end))
            found.append(rule)
    return found


# --- the client ---


def draw_client(report: Report, chart: Chart) -> Figure:
    """A lane per cell, its bound across all of them."""
    points = chart.points
    figure, (axes,) = canvas(chart.title, chart.subtitle, 1.3 + LANE_IN * len(points))
    colours = {one.name: PALETTE[one.colour] for one in chart.series}
    for y, point in enumerate(points):
        axes.barh(-y, point.y, 0.62, color=colours[point.series], linewidth=0)
        say(axes, point.text, (point.y, -y), (6, 0))
    for rule in chart.rules:
        axes.axvline(rule.y, color=INK, linewidth=1.0, linestyle=(0, (4, 3)))
    axes.set_yticks([-y for y in range(len(points))], [brief(point.label) for point in points])
    axes.set_xlim(0, max(100.0, *(point.y for point in points)) * 1.3)
    thousands(axes.xaxis)
    axes.set_xlabel(chart.y.label)
    axes.grid(axis="x")
    return figure
