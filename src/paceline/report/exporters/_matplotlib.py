"""Draws any Chart with matplotlib. The page draws the same charts in page/charts.js; both only place pixels."""

from __future__ import annotations

import math
import statistics
import textwrap
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from paceline.report.charts.chart import (
    AREA,
    BARS,
    CURVE,
    DOTS,
    GREY,
    HEAT,
    JOINED,
    LINEAR,
    LINES,
    LOG2,
    LONE,
    MARK,
    NINES,
    RING,
    SERVED,
    SPANS,
    STACK,
    TRAIL,
    WRONG,
    Axis,
    Chart,
    Point,
    Rule,
)
from paceline.wording import format_size

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, QUIET, GRID, PAPER = "#1f2328", "#6e7781", "#d8dee4", "#ffffff"
# Okabe and Ito (2008): distinguishable under every common colour blindness. Yellow is left out: too pale for lines.
# Then the tones for parts of one thing, what went wrong, and lines to compare with, as in page.css.
PALETTE = (
    *("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#8b5a2b", "#7a7a00"),
    *("#453c78", "#7b74b4", "#aba6d6", "#46525e", "#84919e", "#c3ccd5", "#b42318", "#7f7f7f"),
)
STYLE: dict[str, Any] = {
    "axes.edgecolor": GRID,
    "axes.facecolor": "none",
    "axes.labelcolor": QUIET,
    "axes.spines.left": False,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.axisbelow": True,
    "figure.facecolor": PAPER,
    "font.family": "sans-serif",
    "font.size": 9.5,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "svg.fonttype": "none",
    "svg.hashsalt": "paceline",
    "text.color": INK,
    "text.parse_math": False,
    "xtick.color": QUIET,
    "ytick.color": INK,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
}
WIDTH_IN, EDGE_IN, LANE_IN = 8.2, 0.12, 0.3
WIDTH_PT = WIDTH_IN * 72
CHARACTER_PT = 5.2  # mean width of a character at the size of labels
MOST_LANES, MOST_PANELS, MOST_NUMBERED, MOST_NUMBERED_RANKS = 60, 12, 10, 16
MOST_LABEL, MOST_IN_LINE = 92, 48  # characters of a label beside the axes, and of each of its lines
STRAGGLER_RATIO = 1.35  # steps slower than this times the slowest lane's 95th percentile are counted, not drawn
MOST_VECTOR_POINTS = 400
DASHES = (0, (4, 3))
BOX = {"facecolor": PAPER, "edgecolor": "none", "pad": 1.2, "alpha": 0.8}


def draw(chart: Chart) -> Figure:
    """The figure of a chart; STYLE must be active."""
    if chart.kind == HEAT:
        return _draw_matrix(chart)
    return _draw_curves(chart) if chart.kind == LINES else _draw_lanes(chart)


# --- the frame of every figure ---


def _frame(
    chart: Chart, height_in: float, rows: Sequence[float], columns: int, count: int, note: str = ""
) -> tuple[Figure, list[Axes]]:
    """Panels under the title and the subtitle, above the legend and the note.

    height_in is that of all panels; rows are their relative heights.
    """
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    title = _wrapped(chart.title, WIDTH_PT - 20, 7.5)
    subtitle = _wrapped(chart.subtitle, WIDTH_PT - 20)
    handles = _legend(chart)
    longest = max((len(handle.get_label()) for handle in handles), default=1)
    across = max(1, min(len(handles), int((WIDTH_PT - 20) / (CHARACTER_PT * longest + 34))))
    top = EDGE_IN + 0.21 * len(title) + 0.19 * len(subtitle) + 0.08
    bottom = (0.08 + 0.2 * math.ceil(len(handles) / across) if handles else 0.0) + (0.2 if note else 0.0)
    height = top + height_in + bottom + 0.05
    layout = ConstrainedLayoutEngine(
        w_pad=0.06, h_pad=0.05, rect=(0.008, bottom / height, 0.984, 1 - (top + bottom) / height)
    )
    figure = Figure(figsize=(WIDTH_IN, height), layout=layout)
    axes = list(figure.subplots(len(rows), columns, squeeze=False, height_ratios=rows).ravel())
    for spare in axes[count:]:
        spare.remove()
    left = EDGE_IN / WIDTH_IN
    figure.text(left, 1 - EDGE_IN / height, "\n".join(title), va="top", fontsize=12, fontweight="bold")
    below_title = 1 - (EDGE_IN + 0.21 * len(title) + 0.02) / height
    figure.text(left, below_title, "\n".join(subtitle), va="top", color=QUIET, linespacing=1.25)
    if handles:
        figure.legend(
            handles=handles,
            loc="lower left",
            bbox_to_anchor=(left, (0.2 if note else 0.0) / height),
            ncols=across,
            frameon=False,
            fontsize=9,
            borderaxespad=0.2,
            borderpad=0.1,
            handlelength=1.9,
        )
    if note:
        figure.text(1 - left, 0.05 / height, note, ha="right", va="bottom", color=QUIET, fontsize=9)
    return figure, axes[:count]


def _wrapped(text: str, room_pt: float, character_pt: float = 4.9, most: int = 4) -> list[str]:
    return textwrap.wrap(text, max(12, int(room_pt / character_pt)), max_lines=most, placeholder=" ...")


def _short(label: str, most: int = MOST_LABEL) -> str:
    """The label without its middle if it is long: names differ at either end, and the tables have the whole text."""
    half = (most - 3) // 2
    return label if len(label) <= most else f"{label[:half]}...{label[-half:]}"


def _legend(chart: Chart) -> list[Any]:
    """Handles of the series; none for lanes if their labels already say it or if there is only one series."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    drawn = {point.series: point.drawn for point in reversed(chart.points)}
    if chart.kind != LINES and (len(drawn) < 2 or all(point.series == point.label for point in chart.points)):
        return []
    handles: list[Any] = []
    for series in chart.series:
        if series.name not in drawn:
            continue
        colour, name, how = PALETTE[series.colour], _short(series.name, 72), drawn[series.name]
        if chart.kind != LINES or how == AREA:
            handles.append(Patch(facecolor=colour, label=name, linewidth=0))
        else:
            line: Any = "" if how in (LONE, RING, MARK) else DASHES if series.dashed else "-"
            marker = "o" if how in (LONE, RING, MARK) else ""
            hollow: dict[str, Any] = {"markerfacecolor": "none"} if how == RING else {}
            handles.append(
                Line2D([], [], color=colour, linestyle=line, marker=marker, markersize=4.5, label=name, **hollow)
            )
    return handles


def _colours(chart: Chart) -> dict[str, str]:
    return {series.name: PALETTE[series.colour] for series in chart.series}


def _thousands(axis: Any) -> None:
    """Ticks as 12,000 and 0.00001; never 1.2e4 nor an offset."""
    axis.set_major_formatter(
        lambda x, _: f"{x:,.10g}" if abs(x) >= 1e-4 or x == 0 else f"{x:.12f}".rstrip("0").rstrip(".")
    )


# --- lanes: bars, parts of bars, intervals, samples ---


class _Lane(NamedTuple):
    """One row of a chart; top and height are in lanes, downwards."""

    top: float
    height: float
    label: str
    points: list[Point]

    @property
    def middle(self) -> float:
        return self.top + self.height / 2


class _Panel(NamedTuple):
    lanes: list[_Lane]
    headings: list[tuple[float, str]]
    height: float


def _draw_lanes(chart: Chart) -> Figure:
    """Bars and stacks share one axis. Samples and intervals of different groups are not comparable: one axis each."""
    lanes: dict[tuple[str, str, bool], list[Point]] = {}
    for point in chart.points:
        lanes.setdefault((point.group, point.label, point.faint), []).append(point)
    shown = list(lanes.items())[:MOST_LANES]
    names = {label: _wrapped(_short(label), CHARACTER_PT * MOST_IN_LINE, CHARACTER_PT) for (_, label, _), _ in shown}
    label_pt = CHARACTER_PT * max(len(line) for lines in names.values() for line in lines or [""]) + 24
    room_pt = WIDTH_PT - label_pt
    groups = dict.fromkeys(group for (group, _, _), _ in shown) if chart.kind in (SPANS, DOTS) else [None]
    panels = [_arranged([lane for lane in shown if group in (None, lane[0][0])], room_pt, chart) for group in groups]
    more = len(lanes) - len(shown)
    heights = [panel.height * LANE_IN + 0.42 for panel in panels]
    note = f"and {more} more cells, in the tables only" if more else ""
    figure, axes = _frame(chart, sum(heights), heights, 1, len(panels), note)
    for axis, panel in zip(axes, panels, strict=True):
        axis.set_ylim(panel.height, 0)
        named = [lane for lane in panel.lanes if lane.label]
        axis.set_yticks([lane.middle for lane in named], ["\n".join(names[lane.label]) for lane in named])
        {BARS: _bars, STACK: _bars, SPANS: _intervals, DOTS: _samples}[chart.kind](axis, chart, panel.lanes, room_pt)
        for top, text in panel.headings:
            _say(axis, text, (0, top), (0, 0), "side", color=QUIET, fontsize=9, va="top", bbox=BOX, linespacing=1.2)
        axis.grid(axis="x")
        _thousands(axis.xaxis)
    axes[-1].set_xlabel(chart.y.label)
    return figure


def _arranged(lanes: Sequence[tuple[tuple[str, str, bool], list[Point]]], room_pt: float, chart: Chart) -> _Panel:
    rows: list[_Lane] = []
    headings: list[tuple[float, str]] = []
    top, current = 0.1, ""
    for (group, label, faint), points in lanes:
        if group and group != current:
            lines = _wrapped(group, room_pt - 10, most=3)
            headings.append((top + (0.25 if rows else 0.0), "\n".join(lines)))
            top += 0.55 * len(lines) + (0.4 if rows else 0.15)
        current = group
        height = 0.36 if faint else 1.1 if chart.kind == DOTS else 0.68
        rows.append(_Lane(top, height, "" if faint else label, points))
        top += height + (0.62 if len(label) > MOST_IN_LINE and chart.kind != DOTS else 0.24)
    if any(not rule.upright for rule in chart.rules) and chart.kind in (BARS, STACK):
        top += 0.6  # the labels of the rules
    return _Panel(rows, headings, top + 0.1)


def _say(axes: Axes, text: str, at: tuple[float, float], offset: tuple[float, float], on: str, **how: Any) -> None:
    """Text at a point, moved by `offset` points; on is `data`, `side` (x in axes, y in data) or `foot` (x in data)."""
    mixed = {"side": ("axes fraction", "data"), "foot": ("data", "axes fraction")}
    coordinates: Any = mixed.get(on, on)
    how.setdefault("va", "center")
    axes.annotate(text, at, offset, coordinates, "offset points", annotation_clip=False, in_layout=False, **how)


def _bars(axes: Axes, chart: Chart, lanes: Sequence[_Lane], room_pt: float) -> None:
    """Bars from 0 with their intervals, or parts one after another. The axis leaves room for the texts."""
    colours, ends = _colours(chart), []
    for lane in lanes:
        start = end = 0.0
        for point in lane.points:
            faint: dict[str, Any] = {"alpha": 0.5} if point.faint else {}
            axes.barh(lane.middle, point.y, lane.height, start, color=colours[point.series], linewidth=0, **faint)
            start += point.y if chart.kind == STACK else 0.0
            end = max(end, start if chart.kind == STACK else point.y, point.expected or 0.0)
            if point.low is not None and point.high is not None and chart.kind == BARS:
                reach = [[max(point.y - point.low, 0.0)], [max(point.high - point.y, 0.0)]]
                axes.errorbar(point.y, lane.middle, xerr=reach, fmt="none", ecolor=INK, elinewidth=1.2, capsize=2.5)
                end = max(end, point.high)
            if point.expected is not None:
                axes.vlines(point.expected, lane.top, lane.top + lane.height, color=INK, linewidth=1.8)
        text = "".join(point.text for point in lane.points)
        ends.append((end, len(text)))
        size = {"fontsize": 8.0, "color": QUIET} if lane.points[0].faint else {}
        _say(axes, text, (end, lane.middle), (6, 0), "data", bbox=BOX, **size)
    limits = [rule.y for rule in chart.rules]
    reach_of = [end / (1 - min((CHARACTER_PT * long + 10) / room_pt, 0.6)) for end, long in ends]
    axes.set_xlim(0, max(*reach_of, *(1.02 * end for end, _ in ends), *(1.03 * y for y in limits), 1e-12))
    for rule in chart.rules:
        axes.axvline(rule.y, color=INK, linewidth=1.0, linestyle=DASHES)
        right = rule.y > 0.5 * axes.get_xlim()[1]
        how: dict[str, Any] = {"ha": "right" if right else "left", "va": "bottom", "fontsize": 9, "bbox": BOX}
        _say(axes, rule.label, (rule.y, 0), (-5 if right else 5, 2), "foot", **how)


def _intervals(axes: Axes, chart: Chart, lanes: Sequence[_Lane], room_pt: float) -> None:
    """A dot and its interval per lane, on both sides of the rule."""
    colours = _colours(chart)
    values = [rule.y for rule in chart.rules]
    for lane in lanes:
        (point,) = lane.points
        low = point.y if point.low is None else point.low
        high = point.y if point.high is None else point.high
        values += [low, high]
        axes.plot((low, high), (lane.middle,) * 2, color=colours[point.series], linewidth=2.2, solid_capstyle="butt")
        axes.plot(point.y, lane.middle, "o", color=colours[point.series], markersize=6)
    _room_at_the_right(axes, min(values), max(values), [(lane, lane.points[0].text) for lane in lanes], room_pt)
    for rule in chart.rules:
        axes.axvline(rule.y, color=INK, linewidth=1.0, linestyle=DASHES)


def _room_at_the_right(axes: Axes, low: float, high: float, texts: Sequence[tuple[_Lane, str]], room_pt: float) -> None:
    """Limits that leave a column for the texts right of all marks."""
    edge = 0.04 * (high - low) or 0.05 * abs(high) or 1.0
    beside = min((CHARACTER_PT * max(len(text) for _, text in texts) + 10) / room_pt, 0.5)
    axes.set_xlim(low - edge, low - edge + (high - low + 2 * edge) / (1 - beside))
    for lane, text in texts:
        _say(axes, text, (high + edge, lane.middle), (4, 0), "data")


def _samples(axes: Axes, chart: Chart, lanes: Sequence[_Lane], room_pt: float) -> None:
    """A box over the dots of each lane. The axis ends where only stragglers are left, and the text counts them."""
    import numpy as np
    from matplotlib.patches import Rectangle

    colours = _colours(chart)
    spread = [np.asarray(lane.points[0].samples) for lane in lanes]
    limit = STRAGGLER_RATIO * max(float(np.percentile(x, 95)) for x in spread)
    texts = []
    for lane, x in zip(lanes, spread, strict=True):
        colour = colours[lane.points[0].series]
        low, first, median, third, high = (float(q) for q in np.percentile(x, (5, 25, 50, 75, 95)))
        shown = x[x <= limit]
        jitter = lane.top + 0.5 + 0.55 * ((np.arange(len(shown)) * 0.618034) % 1.0)
        dots = axes.scatter(shown, jitter, s=7, color=colour, alpha=0.45, linewidths=0)
        dots.set_rasterized(len(shown) > MOST_VECTOR_POINTS)
        axes.plot((low, high), (lane.top + 0.22,) * 2, color=INK, linewidth=1.1)
        box = Rectangle((first, lane.top + 0.06), third - first, 0.32, facecolor=colour, edgecolor=INK, linewidth=0.8)
        axes.add_patch(box).set_zorder(3)
        axes.plot((median, median), (lane.top, lane.top + 0.44), color=INK, linewidth=2.0, zorder=4)
        beyond = len(x) - len(shown)
        texts.append((lane, lane.points[0].text + (f", +{beyond} slower" if beyond else "")))
    drawn = [x[x <= limit] for x in spread]
    _room_at_the_right(axes, min(map(np.min, drawn)), max(map(np.max, drawn)), texts, room_pt)


# --- curves ---


def _draw_curves(chart: Chart) -> Figure:
    """A panel per group, in as many columns as its width allows."""
    groups: dict[str, list[Point]] = {}
    for point in chart.points:
        groups.setdefault(point.group, []).append(point)
    shown = list(groups.items())[:MOST_PANELS]
    columns = max(1, min(len(shown), int(WIDTH_IN * 105 / (chart.panel_px + 24))))
    rows = math.ceil(len(shown) / columns)
    more = len(groups) - len(shown)
    note = f"and {more} more panels, in the tables only" if more else ""
    height = 3.6 if len(shown) == 1 else 2.5 * rows
    figure, axes = _frame(chart, height, [1.0] * rows, columns, len(shown), note)
    everything = [point for _, points in shown for point in points]
    assert chart.x is not None
    for i, (panel, (group, points)) in enumerate(zip(axes, shown, strict=True)):
        heading = "\n".join(_wrapped(group, WIDTH_PT / columns - 36, 4.6, most=3))
        panel.set_title(heading, loc="left", fontsize=9, color=QUIET, pad=6)
        rules = [rule for rule in chart.rules if rule.group in ("", group)]
        _x_scale(panel, chart.x, everything if chart.x.shared else points, columns)
        level = [rule.y for rule in rules if not rule.upright]
        _y_scale(panel, chart.y, everything if chart.y.shared else points, level)
        _curves(panel, chart, points)
        for span in chart.spans:
            if span.group == group:
                low, high = panel.get_xlim()
                panel.axvspan(max(span.start, low), min(span.end, high), color=PALETTE[WRONG], alpha=0.14, linewidth=0)
        _rules(panel, rules, columns)
        _numbers(panel, chart, points, columns, 72 * height / rows - 60)
        if i + columns >= len(shown):
            panel.set_xlabel(chart.x.label)
        if i % columns == 0:
            panel.set_ylabel(chart.y.label)
        panel.grid(axis="y")
        panel.tick_params(labelsize=8.5 if columns > 1 else 9.5)
    return figure


def _place(axis: Axis | None, value: float | str | None) -> float:
    """Where a value is on its axis; percent as the number of nines, so that 90, 99 and 99.9 are equally far apart."""
    number = float(value or 0.0)
    return -math.log10(1 - number / 100) if axis is not None and axis.scale == NINES else number


def _curves(axes: Axes, chart: Chart, points: Sequence[Point]) -> None:
    colours = _colours(chart)
    dashed = {series.name for series in chart.series if series.dashed}
    lines: dict[tuple[str, str], list[Point]] = {}
    for point in points:
        lines.setdefault((point.series, point.drawn), []).append(point)
    for (series, drawn), ours in lines.items():
        x, y, colour = [_place(chart.x, p.x) for p in ours], [p.y for p in ours], colours[series]
        if drawn == AREA:
            alpha = 0.2 if colour == PALETTE[GREY] else 0.75
            axes.fill_between(x, [p.low or 0.0 for p in ours], y, color=colour, alpha=alpha, linewidth=0)
        elif drawn == LONE:
            axes.plot(x, y, "o", color=colour, markersize=3.4, zorder=4)
        elif drawn == RING:
            axes.plot(x, y, "o", color=colour, markersize=6.5, markerfacecolor="none", zorder=4)
        elif drawn == CURVE:
            axes.plot(x, y, color=colour, linewidth=1.4, linestyle="--" if series in dashed else "-")
        elif drawn == MARK:
            axes.plot(x, y, "o", color=colour, markersize=7.5, zorder=4)
            ends = [(at, p.low, p.high) for at, p in zip(x, ours, strict=True) if p.low is not None]
            for at, low, high in ends:
                axes.vlines(at, low, high or low, color=colour, linewidth=1.4)
        elif drawn == TRAIL:
            # A gap in time ends the line, and so does the next run; the next stretch begins a new one.
            gaps = [b - a for a, b in pairwise(x)]
            usual = statistics.median([gap for gap in gaps if gap > 0] or [0.0])
            cuts = [0, *(i + 1 for i, gap in enumerate(gaps) if gap < 0 or gap > 1.6 * usual), len(x)]
            style = "--" if series in dashed else "-"
            for start, end in pairwise(cuts):
                axes.plot(x[start:end], y[start:end], color=colour, linewidth=1.4, linestyle=style)
        else:
            assert drawn == JOINED, drawn
            style = "--" if series in dashed else "-"
            axes.plot(x, y, color=colour, linewidth=1.6, marker="o", markersize=4, linestyle=style)
            known = [
                (at, p.low, p.high) for at, p in zip(x, ours, strict=True) if p.low is not None and p.high is not None
            ]
            if known:
                where, lows, highs = (list(column) for column in zip(*known, strict=True))
                axes.vlines(where, lows, highs, color=colour, linewidth=1.1)


def _x_scale(axes: Axes, axis: Axis, points: Sequence[Point], columns: int) -> None:
    from matplotlib.ticker import MaxNLocator

    values = sorted({float(point.x or 0.0) for point in points})
    low, high = values[0], values[-1]
    if axis.scale == NINES:
        ticks = [percent for percent in (0, 50, 90, 99, 99.9, 99.99, 99.999) if percent <= high + 1e-9]
        axes.set_xticks([_place(axis, percent) for percent in ticks], [f"{percent:g}" for percent in ticks])
        axes.set_xlim(0, _place(axis, high) or 1.0)
    elif axis.scale == LINEAR:
        edge = 0.02 * (high - low) or 0.5
        axes.set_xlim(0.0 if axis.zero and low >= 0 else low - 2 * edge, high + 2 * edge)
        axes.xaxis.set_major_locator(MaxNLocator(7 if columns == 1 else 4, steps=[1, 2, 5, 10]))
        _thousands(axes.xaxis)
    else:
        axes.set_xscale("log", base=2 if axis.scale == LOG2 else 10)
        axes.set_xlim(low / 1.25, high * 1.25)
        text = format_size if axis.ticks == "bytes" else lambda value: f"{value:,.10g}"
        every = math.ceil(len(values) * (44 if axis.ticks == "bytes" else 40) / (WIDTH_PT / columns - 70))
        axes.set_xticks(values[::every], [text(int(value)) for value in values[::every]])
        axes.xaxis.minorticks_off()


def _y_scale(axes: Axes, axis: Axis, points: Sequence[Point], rules: Sequence[float]) -> None:
    from matplotlib.ticker import FixedLocator, LogLocator, MaxNLocator, NullFormatter

    ends = [value for p in points for value in (p.y, p.low, p.high) if value is not None]
    if any(point.drawn == CURVE for point in points):
        ends = [p.y for p in points]
    low, high = min([*ends, *rules]), max([*ends, *rules])
    if axis.scale == LINEAR:
        room = high - low or abs(high) or 1.0
        bottom = min(low, 0.0) if axis.zero else low - 0.08 * room
        axes.set_ylim(bottom, high + (0.12 if not axis.zero or rules else 0.08) * room)
        axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
    elif axis.scale == LOG2:
        first, last = math.floor(math.log2(low / 1.05)), math.ceil(math.log2(high * 1.05))
        axes.set_yscale("log", base=2)
        axes.set_ylim(2.0**first, 2.0**last)
        axes.yaxis.set_major_locator(FixedLocator([2.0**k for k in range(first, last + 1)]))
    else:
        low = min(value for value in [*ends, *rules] if value > 0)
        axes.set_yscale("log")
        axes.set_ylim(low / 1.25, high * 1.5)
        wide = high / low
        every = (1.0,) if wide > 1e3 else (1.0, 2.0, 5.0)
        axes.yaxis.set_major_locator(LogLocator(subs=every) if wide > 8 else MaxNLocator(4, steps=[1, 2, 5]))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.minorticks_off()
    _thousands(axes.yaxis)


def _rules(axes: Axes, rules: Sequence[Rule], columns: int) -> None:
    """Moments are dotted, limits dashed. A label that would touch an earlier one is left out."""
    low, high = axes.get_xlim()
    room_pt = WIDTH_PT / columns - 50
    taken: list[tuple[float, float]] = []
    how: dict[str, Any] = {"fontsize": 8, "bbox": BOX}
    for rule in rules:
        if not rule.upright:
            continue
        axes.axvline(rule.y, color=INK, linewidth=0.9, linestyle=":")
        start, long = (rule.y - low) / (high - low) * room_pt, 4.4 * len(rule.label) + 8
        turned = start + long > room_pt
        start -= long if turned else 0.0
        if all(start > b or start + long < a for a, b in taken):
            taken.append((start, start + long))
            side: dict[str, Any] = {"ha": "right"} if turned else {}
            _say(axes, rule.label, (rule.y, 1), (-3 if turned else 3, -2), "foot", va="top", **side, **how)
    across = 4.0
    for rule in rules:
        if not rule.upright:
            axes.axhline(rule.y, color=INK, linewidth=1.0, linestyle=DASHES)
            _say(axes, rule.label, (0, rule.y), (across, 6), "side", **how)
            across += 4.4 * len(rule.label) + 10  # two limits may be close


def _numbers(axes: Axes, chart: Chart, points: Sequence[Point], columns: int, height_pt: float) -> None:
    """Texts of points that do not touch an earlier one. Many numbers on one set of curves would cover them."""
    named = [point for point in points if point.text]
    if len(named) > MOST_NUMBERED and chart.section != SERVED:
        named = list({point.series: point for point in named}.values())  # the last of each line
    to_axes = axes.transData + axes.transAxes.inverted()
    width_pt = WIDTH_PT / columns - 60
    taken: list[tuple[float, float, float]] = []
    for point in named:
        at = (_place(chart.x, point.x), point.y)
        across, up = (float(v) for v in to_axes.transform(at))
        half = (4.2 * len(point.text) / 2 + 3) / width_pt
        inside = min(max(across, half), 1 - half) - across
        if all(abs(across + inside - x) > half + h or abs(up - y) > 11 / height_pt for x, y, h in taken):
            taken.append((across + inside, up, half))
            shift = inside * width_pt
            _say(axes, point.text, at, (shift, 9), "data", color=INK, fontsize=8, ha="center", bbox=BOX | {"pad": 0.4})


# --- matrix ---


def _draw_matrix(chart: Chart) -> Figure:
    import numpy as np
    from matplotlib.colors import LinearSegmentedColormap

    ranks = sorted({int(point.label) for point in chart.points})
    at = {rank: i for i, rank in enumerate(ranks)}
    share = np.full((len(ranks), len(ranks)), np.nan)
    for point in chart.points:
        share[at[int(point.label)], at[int(point.x or 0)]] = point.y
    figure, (axes,) = _frame(chart, 0.7 + min(max(len(ranks) * 0.42, 2.4), 6.5), [1.0], 1, 1)
    colours = LinearSegmentedColormap.from_list("share", [PALETTE[WRONG], "#f0d3cf", "#e6e4f2", "#aba6d6"])
    mesh = axes.pcolormesh(share, cmap=colours, vmin=50, vmax=110, edgecolors="white", linewidth=1.5)
    bar = figure.colorbar(mesh, ax=axes, fraction=0.03, pad=0.02, label=chart.y.label)
    bar.outline.set_visible(False)
    every = 1 if len(ranks) <= MOST_NUMBERED_RANKS else len(ranks) // 8
    middle, names = [i + 0.5 for i in range(len(ranks))][::every], [str(rank) for rank in ranks][::every]
    axes.set_xticks(middle, names)
    hosts = {point.label: point.group for point in chart.points}
    axes.set_yticks(middle, [f"{hosts[name]}  {name}".strip() for name in names])
    axes.invert_yaxis()
    axes.set_box_aspect(1)
    axes.spines["bottom"].set_visible(False)
    label = chart.x.label if chart.x else ""
    axes.set(xlabel=label, ylabel=label)
    for point in chart.points if every == 1 else ():
        colour = "#fdfdfd" if point.y < 62 else "#111111"
        x, y = at[int(point.x or 0)] + 0.5, at[int(point.label)] + 0.5
        axes.text(x, y, point.text, ha="center", va="center", color=colour, fontsize=8.5)
    return figure
