"""Chart of cells over time: every launch as a share of the first level, the levels, and what changed between them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import fmean

from paceline.analysis.findings import HistorySeries, Report
from paceline.report.charts.chart import CURVE, LINES, LONE, Axis, Chart, Point, Rule, parts
from paceline.report.tables.comparison import differences_text
from paceline.report.tables.history import day, differs_text, size_text
from paceline.wording import format_number, metric_words, scale_of

DAY_S = 86_400.0
LAUNCH, LEVEL = parts(("launch", "level"))
# Series that changed are drawn first; the table has all.
MOST_PANELS = 12
LEAST_MOVE = 1e-3


def history(report: Report) -> Iterator[Chart]:
    return over_time(report.histories)


def over_time(histories: Sequence[HistorySeries]) -> Iterator[Chart]:
    """One chart per metric, a panel per cell. Shares of the first level put cells of any speed on one axis.

    What never moved by more than LEAST_MOVE, such as the peak memory of most cells, is in the table only.
    """
    moved = [series for series in histories if series.changes or _spread(series) > LEAST_MOVE]
    for metric in dict.fromkeys(series.metric for series in moved):
        ours = sorted((s for s in moved if s.metric == metric), key=lambda s: not s.changes)[:MOST_PANELS]
        began = min(p.started_at for s in ours for p in s.points)
        points = [point for series in ours for point in _panel(series, began)]
        yield Chart(
            name=f"history_{metric}",
            title=f"Over time: {metric_words(metric)}",
            subtitle="Each dot is one launch, the line its level. 100 % is the level at the beginning.",
            kind=LINES,
            x=Axis(label=f"days since {day(began)} UTC"),
            y=Axis(label="% of the first level", unit="%", zero=False),
            points=tuple(points),
            series=(LAUNCH, LEVEL),
            rules=tuple(rule for series in ours for rule in _annotations(series, began)),
            panel_px=380,
        )


def _spread(series: HistorySeries) -> float:
    values = [point.value for point in series.points]
    return max(values) / min(values) - 1 if min(values) > 0 else math.inf


def _annotations(series: HistorySeries, began: float) -> Iterator[Rule]:
    """A line at each change, named by what changed with the level."""
    for change in series.changes:
        size = size_text(change).partition(" (")[0]
        what = f"{size}: {differences_text(change.differences, most=1)}" if change.throughout else size
        yield Rule(y=(change.after_at - began) / DAY_S, label=what, group=series.label, upright=True)


def _panel(series: HistorySeries, began: float) -> Iterator[Point]:
    """Every launch and, for each level, both of its ends: the step between two levels is where the change is."""
    base = Point(y=100.0, group=series.label, cells=(series.cell,))
    scale = scale_of(series.unit, series.metric, [p.value for p in series.points])
    segments = sorted({p.segment for p in series.points})
    levels = [[p for p in series.points if p.segment == segment] for segment in segments]
    means = [fmean(p.value for p in ours) for ours in levels]

    def at(time: float, value: float) -> Point:
        return replace(base, x=(time - began) / DAY_S, y=100 * value / means[0])

    for p in series.points:
        value = p.value * scale.factor
        detail = f"{format_number(value, 3 if value < 100 else 0)} {scale.unit}\n{day(p.started_at)} UTC"
        yield replace(at(p.started_at, p.value), series=LAUNCH.name, drawn=LONE, detail=detail, runs=(p.run,))
    details = ["", *(f"{size_text(change)}; {differs_text(change)}" for change in series.changes)]
    for ours, mean, detail in zip(levels, means, details, strict=True):
        for time, text in ((ours[0].started_at, detail), (ours[-1].started_at, "")):
            yield replace(at(time, mean), series=LEVEL.name, drawn=CURVE, detail=detail, text=text)
