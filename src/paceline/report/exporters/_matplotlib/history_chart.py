"""Cells over time: a point per launch, a line per level, a mark where the level changed."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import TYPE_CHECKING

from paceline.analysis.findings import Report
from paceline.report.exporters._matplotlib.canvas import CLEAR, GRID, INK, PALETTE, QUIET, canvas, say
from paceline.report.tables.history import ChartPoints, chart_points

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_PANELS = 8
PANEL_IN, TITLE_IN = 2.2, 0.8


def panels(report: Report) -> Sequence[ChartPoints]:
    """Series with a change first: of many only so many are drawn."""
    return sorted(chart_points(report), key=lambda points: not points.marks)[:MOST_PANELS]


def draw(report: Report, found: Sequence[ChartPoints]) -> Figure:
    left_out = len(report.histories) - len(found)
    rest = f"; {left_out} more series in the tables only" if left_out else ""
    heights = (PANEL_IN + (TITLE_IN if first else 0.0) for first in (True, *[False] * (len(found) - 1)))
    figure, axes = canvas("Cells over time", f"one point per launch{rest}", *heights)
    for panel, points in zip(axes, found, strict=True):
        _panel(panel, points)
    return figure


def _panel(axes: Axes, points: ChartPoints) -> None:
    from matplotlib.dates import AutoDateLocator, ConciseDateFormatter

    axes.plot([_when(t) for t in points.times], points.values, "o", color=PALETTE[0], markersize=4)  # type: ignore[arg-type]
    for first, last, level in points.levels:
        axes.hlines(level, _when(first), _when(last), color=INK, linewidth=1.4)  # type: ignore[arg-type]
    for number, (at, text) in enumerate(points.marks):
        axes.axvline(_when(at), color=PALETTE[1], linewidth=1.2, linestyle="--")  # type: ignore[arg-type]
        how = {"color": PALETTE[1], "fontsize": 8, "ha": "right", "bbox": CLEAR}
        say(axes, text, (1, 0), (0, 7 + 12 * number), "axes fraction", **how)
    say(axes, points.title, (0, 1), (0, -4), "axes fraction", color=QUIET, fontsize=8.5, va="top", bbox=CLEAR)
    axes.margins(y=0.25)
    axes.grid(axis="y", color=GRID)
    locator = AutoDateLocator(tz=datetime.UTC)  # type: ignore[no-untyped-call]
    axes.xaxis.set_major_locator(locator)
    axes.xaxis.set_major_formatter(ConciseDateFormatter(locator, tz=datetime.UTC))  # type: ignore[no-untyped-call]
    axes.set_ylabel(points.unit)


def _when(timestamp: float) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(timestamp, datetime.UTC)
