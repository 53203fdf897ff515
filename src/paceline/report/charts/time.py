"""Chart of cells over time: every launch as a share of the first level, the levels, and what changed between them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from paceline.analysis.findings import HistorySeries, Report
from paceline.report.charts.chart import CURVE, LINES, LONE, Axis, Chart, Point, Series
from paceline.report.tables.history import ChartPoints, day, points_of
from paceline.wording import format_number

DAY_S = 86_400.0
LAUNCH, LEVEL = Series(name="launch", colour=0), Series(name="level", colour=1)
# Series that changed are drawn first; the table has all.
MOST_PANELS = 12


def history(report: Report) -> Iterator[Chart]:
    """One chart per metric, a panel per cell. Shares of the first level put cells of any speed on one axis.

    What never moved is in the table only.
    """
    moved = [series for series in report.histories if len({point.value for point in series.points}) > 1]
    for metric in dict.fromkeys(series.metric for series in moved):
        ours = sorted((s for s in moved if s.metric == metric), key=lambda s: not s.changes)[:MOST_PANELS]
        began = min(p.started_at for s in ours for p in s.points)
        points = [point for series in ours for point in _panel(series, points_of(series), began)]
        yield Chart(
            name=f"history_{metric}",
            title=f"Over time: {metric}",
            subtitle="Each dot is one launch, the line its level. 100 % is the level at the beginning.",
            kind=LINES,
            x=Axis(label=f"days since {day(began)} UTC"),
            y=Axis(label="% of the first level", unit="%", zero=False),
            points=tuple(points),
            series=(LAUNCH, LEVEL),
        )


def _panel(series: HistorySeries, drawn: ChartPoints, began: float) -> Iterator[Point]:
    base = Point(y=100.0, group=series.label, cells=(series.cell,))
    first = drawn.levels[0][2]
    for at, value, run in zip(drawn.times, drawn.values, drawn.runs, strict=True):
        detail = f"{format_number(value, 3 if value < 100 else 0)} {drawn.unit}\n{day(at)} UTC"
        x, y = (at - began) / DAY_S, 100 * value / first
        yield replace(base, x=x, y=y, series=LAUNCH.name, drawn=LONE, detail=detail, runs=(run,))
    # Both ends of each level, joined to the next: the step between two levels is where the change is.
    details = ["", *(text for _, text in drawn.marks)]
    for (start, end, level), detail in zip(drawn.levels, details, strict=True):
        for at, text in ((start, detail), (end, "")):
            x, y = (at - began) / DAY_S, 100 * level / first
            yield replace(base, x=x, y=y, series=LEVEL.name, drawn=CURVE, detail=detail, text=text)
