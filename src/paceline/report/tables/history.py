"""Cells over time as text: one sentence, every series with its latest level, every change with what else changed."""

from __future__ import annotations

import datetime
import math
from collections.abc import Sequence

from paceline.analysis.findings import WORSE, ChangePoint, HistorySeries
from paceline.report.tables.comparison import differences_text, percent_text
from paceline.report.tables.table import Cell, Column, Filled, Table, filled, numeric
from paceline.wording import MISSING, format_parts, metric_words, scale_of

# Smaller changes of level are not searched for either.
RECOVERED_WITHIN = 0.01
NOTHING_SEPARATES = "no recorded fact changed with the level"


def day(timestamp: float) -> str:
    return datetime.datetime.fromtimestamp(timestamp, datetime.UTC).strftime("%Y-%m-%d %H:%M")


# --- text ---


def sentence(found: Sequence[HistorySeries]) -> str:
    """How many series were searched, and the newest change: one for the worse that lasts, else any for the worse."""
    if not found:
        return "No certified launch to show over time."
    searched = [series for series in found if series.note is None]
    changes = [(series, change) for series in found for change in series.changes]
    if not searched:
        return f"{_count(len(found), 'series', 'series')}, all with too few launches to look for a change."
    if not changes:
        return f"No change of level in {_count(len(searched), 'searched series', 'searched series')}."
    worse = [each for each in changes if each[1].verdict == WORSE]
    lasting = [each for each in worse if each[1] is each[0].changes[-1]]
    series, newest = max(lasting or worse or changes, key=lambda each: each[1].after_at)
    counts = f"{_count(len(changes), 'change', 'changes')} of level in {len(searched)} searched series"
    which = "the newest" + " for the worse" * bool(worse) + " that lasts" * bool(lasting)
    return f"{counts}; {which}: {_change_text(series, newest)}; {differs_text(newest)}."


def _change_text(series: HistorySeries, change: ChangePoint) -> str:
    """The change as a clause, in the present tense if it is the last one."""
    what = f"{metric_words(series.metric, series.unit)} of {series.label}"
    later = series.changes[series.changes.index(change) + 1 :]
    if not later:
        return f"{what} is {size_text(change)} since {day(change.after_at)} UTC"
    then = f"{what} was {size_text(change)} from {day(change.after_at)} to {day(later[0].before_at)} UTC"
    now = math.prod(each.ratio for each in (change, *later))
    if (now < 1) != (change.ratio < 1) or abs(now - 1) < RECOVERED_WITHIN:
        return f"{then}; recovered since"
    return f"{then}; now {percent_text(now, None, None)[0]} {_way(now)} than before"


def _count(count: int, one: str, many: str) -> str:
    return f"{count} {one if count == 1 else many}"


def size_text(change: ChangePoint) -> str:
    size, interval = percent_text(change.ratio, change.low, change.high)
    return f"{size} {_way(change.ratio)} ({interval})"


def _way(ratio: float) -> str:
    return "lower" if ratio < 1 else "higher"


def differs_text(change: ChangePoint) -> str:
    """What separates before from after; where nothing does, what differs between the two launches around the change."""
    named = differences_text(change.differences)
    if change.throughout:
        return named
    return f"{NOTHING_SEPARATES}; around it {named}" if named else NOTHING_SEPARATES


# --- tables ---


def tables(found: Sequence[HistorySeries]) -> tuple[Table, ...]:
    """Changes first, the newest on top, then every series; none if there is no series."""
    return tuple(table for table in (_changes(found), _series(found)) if table)


def _changes(found: Sequence[HistorySeries]) -> Table | None:
    def size(pair: tuple[HistorySeries, ChangePoint]) -> Cell:
        change = pair[1]
        percent, interval = percent_text(change.ratio, change.low, change.high)
        tone = "bad" if change.verdict == WORSE else "good"
        return Cell(f"{percent} {_way(change.ratio)}, {change.verdict}", interval, tone)

    columns: tuple[Filled[tuple[HistorySeries, ChangePoint]], ...] = (
        (Column("cell", prose=True), lambda pair: pair[0].label),
        (Column("metric"), lambda pair: metric_words(pair[0].metric, pair[0].unit)),
        (Column("between"), lambda pair: f"{day(pair[1].before_at)} and {day(pair[1].after_at)}"),
        (Column("change"), size),
        (Column("differs", prose=True), lambda pair: differs_text(pair[1])),
        (numeric("chance", 2), lambda pair: f"{pair[1].p_value:.2g}"),
    )
    pairs = [(series, change) for series in found for change in series.changes]
    note = "Welch intervals. They are slightly too narrow, because each change is placed where it is largest."
    return filled("Changes of level", sorted(pairs, key=lambda pair: -pair[1].after_at), columns, (note,))


def _series(found: Sequence[HistorySeries]) -> Table | None:
    def level(series: HistorySeries) -> Cell:
        latest = [p.value for p in series.points if p.segment == series.points[-1].segment]
        scale = scale_of(series.unit, series.metric, latest)
        mean = format_parts(sum(latest) / len(latest), None, None, scale)[0]
        return Cell(f"{mean} {scale.unit}", f"mean of {len(latest)}")

    columns: tuple[Filled[HistorySeries], ...] = (
        (Column("cell", prose=True), lambda series: series.label),
        (Column("metric"), lambda series: metric_words(series.metric, series.unit)),
        (numeric("launches"), lambda series: str(len(series.points))),
        (numeric("campaigns", 2), lambda series: str(len({p.campaign for p in series.points}))),
        (Column("first", priority=3), lambda series: day(series.points[0].started_at)),
        (Column("last", priority=1), lambda series: day(series.points[-1].started_at)),
        (numeric("latest level"), level),
        (
            Column("changes", prose=True),
            lambda series: Cell(series.note or str(len(series.changes) or MISSING), "", "quiet"),
        ),
    )
    return filled("Cells over time", found, columns)
