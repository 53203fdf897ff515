"""The chart of a node test: a panel per measure, a lane per node, the accepted band behind them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from paceline.analysis.findings import NodeMeasure, Report
from paceline.analysis.findings.machine import FAIL, PASS, SUSPECT, UNDECIDED
from paceline.report.exporters._matplotlib.canvas import GRID, PALETTE, QUIET, brief, canvas, entitle, say
from paceline.report.tables.nodes import furthest, measure_names, shown

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {PASS: PALETTE[2], UNDECIDED: PALETTE[7], SUSPECT: PALETTE[5], FAIL: PALETTE[1]}
MOST_LANES = 32
LANE_IN = 0.26


class Panel(NamedTuple):
    measure: str
    lanes: list[tuple[str, NodeMeasure]]


def lanes(report: Report) -> list[Panel]:
    """Measures with a lane for each node that has them."""
    found = []
    for name in measure_names(report.nodes):
        ours = [(node.node, m) for node in report.nodes if (m := furthest(node, name)) is not None]
        found.append(Panel(name, sorted(ours, key=lambda lane: lane[1].verdict == PASS)[:MOST_LANES]))
    return found


def draw(report: Report, found: list[Panel]) -> Figure:
    heights = [0.75 + LANE_IN * len(panel.lanes) for panel in found]
    heights[0] += 0.6
    figure, axes = canvas("", "", *heights)
    subtitle = "furthest rank of each node; band: accepted; whiskers are 95 % intervals over the repeats"
    for i, (one, panel) in enumerate(zip(axes, found, strict=True)):
        entitle(one, "" if i else "Nodes beside their peers", subtitle, panel.measure)
        _draw_panel(one, panel)
    return figure


def _draw_panel(axes: Axes, panel: Panel) -> None:
    first = panel.lanes[0][1]
    values = [shown(m, m.relative) or 0.0 for _, m in panel.lanes]
    ends = [shown(m, end) for _, m in panel.lanes for end in (m.low, m.high)]
    reached = [*values, *(end for end in ends if end is not None)]
    low, high = (shown(first, end) for end in first.accepted)
    margin = 0.1 * max(max(reached) - min(reached), abs(values[0]) * 0.05, 1.0)
    left = min([*reached, *([low] if low is not None else [])]) - margin
    right = max([*reached, *([high] if high is not None else [])]) + margin
    axes.axvspan(left if low is None else low, right if high is None else high, color=GRID, alpha=0.5, linewidth=0)
    for y, (value, (_, m)) in enumerate(zip(values, panel.lanes, strict=True)):
        _draw_lane(axes, -y, value, m)
    axes.set_yticks([-y for y in range(len(panel.lanes))], [brief(node) for node, _ in panel.lanes])
    axes.set_ylim(-len(panel.lanes) + 0.4, 0.6)
    axes.set_xlim(left, right)
    axes.set_xlabel("C above the median" if first.unit == "C" else "% of the median")
    axes.grid(axis="x")


def _draw_lane(axes: Axes, y: float, value: float, m: NodeMeasure) -> None:
    low, high = shown(m, m.low), shown(m, m.high)
    if low is not None and high is not None:
        axes.plot((low, high), (y, y), color=QUIET, linewidth=1.2, zorder=2)
    axes.plot((value,), (y,), "o", color=COLOURS[m.verdict], markersize=6, zorder=3)
    if m.verdict != PASS:
        say(axes, m.verdict, (value, y), (8, 0), color=COLOURS[m.verdict], fontsize=8.5)
