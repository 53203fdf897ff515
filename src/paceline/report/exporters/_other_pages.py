"""Pages of `paceline compare` and `paceline history`: the same first screen, charts and tables as report.html."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from html import escape
from pathlib import Path

from paceline.analysis.findings import BETTER, EQUAL, INCONCLUSIVE, WORSE, Between, Change, ChangePoint, HistorySeries
from paceline.report.charts import Chart, Point, Rule
from paceline.report.charts.chart import SPANS, WRONG, Axis, Series, parts, thinned, used
from paceline.report.charts.time import LAUNCH, over_time
from paceline.report.exporters._page_parts import block, bullets, figures, first_screen, folded
from paceline.report.exporters.html import chart_data, page
from paceline.report.summary import AMBER, GREEN, RED, Light, Summary, brief
from paceline.report.tables import comparison, history
from paceline.report.text.cells import THROUGHPUT, without_shared
from paceline.report.tiles import BARS, MOST_POINTS, Tile, Trend
from paceline.wording import direction, format_own, metric_words, places, short_percent, verdict_text

MOST_LANES = 40
WORDS = {BETTER: "better", WORSE: "worse", EQUAL: "equal", INCONCLUSIVE: "inconclusive", None: "no verdict"}
SERIES = (Series(name=WORDS[WORSE], colour=WRONG), *parts(word for word in WORDS.values() if word != WORDS[WORSE]))
NONE = "none"


# --- compare ---


def compare_page(found: Between, lines: Sequence[str] = (), above: str = "") -> str:
    """Two directories: how many cells changed, by how much, and what else differs between them."""
    names, shared = without_shared({c.label for c in found.changes})
    found = replace(found, changes=tuple(replace(c, label=names[c.label]) for c in found.changes))
    changes = comparison.distinct(found.changes)
    # What makes it doubtful is in the light beside it.
    answer = comparison.sentence(replace(found, occasions="", disturbed=""))
    chart = changes_chart(changes)
    summary = Summary(
        headline=brief(answer),
        support=(answer, f"A is {found.first}, B is {found.second}.", *_in_all(shared)),
        tiles=_change_tiles(changes),
        light=_light(found),
        chart=chart.name if chart else None,
    )
    tables = [block(table.title, table, ()) for table in comparison.tables(found, brief=True)]
    if same := comparison.equal_table(found):
        tables.append(folded(f"{same.title}: {len(same.rows)} rows", same))
    rest = (*comparison.lines(found), *lines)
    body = [*tables, folded("Notes", bullets(rest)) if rest else ""]
    title = f"{Path(found.second).name} against {Path(found.first).name}"
    return _page(title, summary, [chart] if chart else [], body, above)


def changes_chart(changes: Sequence[Change]) -> Chart | None:
    """The change of every metric of every cell with its interval, around no change; None without changes."""
    metrics = list(dict.fromkeys(c.metric for c in changes))
    metrics.sort(key=lambda metric: metric != THROUGHPUT)
    points = [_lane(c) for metric in metrics for c in changes if c.metric == metric][:MOST_LANES]
    if not points:
        return None
    left = len(changes) - len(points)
    more = f" The first {len(points)} of {len(changes)}; the tables have all that were decided." if left > 0 else ""
    return Chart(
        name="changes",
        title="B over A",
        subtitle=f"Dots are changes in %, lines their 95 % intervals.{more}",
        kind=SPANS,
        y=Axis(label="change, %", unit="%", zero=False),
        points=tuple(points),
        series=used(SERIES, points),
        rules=(Rule(y=0.0, label="no change"),),
    )


def _lane(c: Change) -> Point:
    def percent(ratio: float | None) -> float | None:
        return None if ratio is None else 100 * (ratio - 1)

    word = direction(c.metric, c.ratio)
    text, interval = verdict_text(c.verdict, c.ratio, c.low, c.high, word, c.detectable_ratio)
    return Point(
        y=percent(c.ratio) or 0.0,
        low=percent(c.low),
        high=percent(c.high),
        label=c.label if c.row is None else f"{c.row} ({c.label})",
        group=metric_words(c.metric, c.unit),
        series=WORDS[c.verdict],
        text=text,
        detail="\n".join(filter(None, (interval, c.reason, comparison.differences_text(c.differences)))),
        cells=(c.cell,),
        runs=(*c.runs_first, *c.runs_second),
    )


def _change_tiles(changes: Sequence[Change]) -> tuple[Tile, ...]:
    total = f"of {len(changes)} comparisons"

    def tile(name: str, *verdicts: str | None) -> Tile:
        """How many, the largest with its interval, and all of them as bars."""
        side = [c for c in changes if c.verdict in verdicts]
        sizes = sorted((abs(100 * (c.ratio - 1)) for c in side), reverse=True)
        bars = Trend(
            values=tuple(sizes), name="change of each, %", kind=BARS, colours=(colours[WORDS[verdicts[0]]],) * len(side)
        )
        found = Tile(name=name, value=str(len(side)), unit=total, trend=bars if sizes[1:] and sizes[0] else None)
        if not side or EQUAL in verdicts:
            return found
        c = max(side, key=lambda c: abs(c.ratio - 1))
        size = verdict_text(c.verdict, c.ratio, c.low, c.high, direction(c.metric, c.ratio))[0]
        interval = percent_interval(c)
        if INCONCLUSIVE in verdicts:
            unseen = max((c.detectable_ratio for c in side if c.detectable_ratio), default=None)
            note = f"smallest detectable difference {short_percent(unseen)}" if unseen else ""
            return replace(found, interval=interval, note=note)
        return replace(found, interval=interval, note=f"at most {size}: {c.label.partition(', ')[0]}")

    colours = {one.name: one.colour for one in SERIES}
    return (
        tile("Worse", WORSE),
        tile("Better", BETTER),
        tile("Equal", EQUAL),
        tile("Inconclusive", INCONCLUSIVE, None),
    )


def percent_interval(c: Change) -> str:
    """`[-19.0, -14.3] %`: the interval of a change; empty if it has none."""
    if c.low is None or c.high is None:
        return ""
    low, high = 100 * (c.low - 1), 100 * (c.high - 1)
    digits = places(100 * (c.ratio - 1), low, high)
    return f"[{format_own(low, digits)}, {format_own(high, digits)}] %"


def _light(found: Between) -> Light:
    lost = f"{len(found.lost)} cells of A missing or not ok in B" if found.lost else ""
    doubts = tuple(filter(None, (found.disturbed, found.occasions)))
    level = RED if lost else AMBER if doubts else GREEN
    equal = "equal work certified on both sides" if found.changes else "nothing was compared"
    text = "; ".join(filter(None, (lost, *doubts, equal)))
    shared = tuple(comparison.differing_text(d) for d in found.shared)
    differs = f"Differs in every cell: {'; '.join(shared)}." if shared else "Nothing recorded differs in all cells."
    return Light(level=level, text=text, reasons=(differs, *found.notes))


# --- history ---


def history_page(
    title: str, found: Sequence[HistorySeries], names: str, lines: Iterable[str] = (), above: str = ""
) -> str:
    """Cells over time: their levels, where these changed, and what changed with them."""
    short, shared = without_shared({series.label for series in found})
    found = [replace(series, label=short[series.label]) for series in found]
    answer = history.sentence(found)
    drawn = tuple(over_time(found))
    changes = [change for series in found for change in series.changes]
    worse = [change for change in changes if change.verdict == WORSE]
    searched = [series for series in found if series.note is None]
    launches = {(p.run, p.started_at) for series in found for p in series.points}
    first = min((p.started_at for series in found for p in series.points), default=None)
    since = f"since {history.day(first)}" if first else ""
    tiles = (
        *_newest_tiles(found),
        Tile(name="Changes of level", value=str(len(changes)), unit=f"{len(worse)} for the worse", note=_newest(found)),
        Tile(
            name="Series", value=str(len(found)), unit="cells and metrics", note=f"{len(searched)} searched for changes"
        ),
        Tile(name="Launches", value=str(len(launches)), unit="launches", note=since),
    )
    level = RED if worse else GREEN if searched else AMBER
    text = "a level changed for the worse" if worse else "no change for the worse" if searched else "too few launches"
    summary = Summary(
        headline=brief(_newest_change(found) or answer),
        support=(answer, names, *_in_all(shared)),
        tiles=tiles,
        light=Light(name="Status", level=level, text=text, reasons=tuple(lines)),
        chart=drawn[0].name if drawn else None,
    )
    tables = [block(table.title, table, ()) for table in history.tables(found)]
    body = [*tables, figures(drawn[1:])]
    return _page(title, summary, drawn, body, above)


def _leading(found: Sequence[HistorySeries]) -> tuple[HistorySeries, ChangePoint] | None:
    """The newest change for the worse, else the newest change."""
    changes = [(series, change) for series in found for change in series.changes]
    worse = [pair for pair in changes if pair[1].verdict == WORSE]
    return max(worse or changes, key=lambda pair: pair[1].after_at, default=None)


def _newest_tiles(found: Sequence[HistorySeries]) -> Iterator[Tile]:
    """The size of the change that the headline is about, with its series as the trend."""
    if (newest := _leading(found)) is None:
        return
    series, change = newest
    size, interval = comparison.percent_text(change.ratio, change.low, change.high)
    values = tuple(thinned([p.value for p in series.points], MOST_POINTS))
    yield Tile(
        name=metric_words(series.metric, series.unit),
        value=size.removesuffix(" %"),
        unit="% lower" if change.ratio < 1 else "% higher",
        interval=interval,
        note=f"{series.label.partition(', ')[0]}, since {history.day(change.after_at).partition(' ')[0]}",
        trend=Trend(values=values, name=f"over {len(series.points)} launches", colours=(LAUNCH.colour,)),
    )


def _newest_change(found: Sequence[HistorySeries]) -> str:
    """`tokens/s of ddp: 16.7 % lower since 2026-11-20 (driver 580 -> 590)`; empty without a change."""
    newest = _leading(found)
    if newest is None:
        return ""
    series, change = newest
    name, size = series.label.partition(", ")[0], history.size_text(change).partition(" (")[0]
    day = history.day(change.after_at).partition(" ")[0]
    why = f" ({comparison.differences_text(change.differences, most=1)})" if change.throughout else ""
    return f"{metric_words(series.metric, series.unit)} of {name}: {size} since {day}{why}"


def _newest(found: Sequence[HistorySeries]) -> str:
    changes = [(series, change) for series in found for change in series.changes]
    if not changes:
        return NONE
    series, change = max(changes, key=lambda pair: pair[1].after_at)
    return f"newest {history.day(change.after_at)}: {series.label.partition(', ')[0]}"


# --- both ---


def _in_all(shared: str) -> Iterator[str]:
    if shared:
        yield f"In all cells: {shared}."


def _page(title: str, summary: Summary, drawn: Sequence[Chart], body: Sequence[str], above: str) -> str:
    main = next((chart for chart in drawn if chart.name == summary.chart), None)
    header = (
        f'<header><div class="top"><h1>{escape(title)}</h1>'
        '<button type="button" id="theme" class="scripted">Dark</button></div>'
        f"{first_screen(summary, main, '', '')}</header>"
    )
    parts = "".join(f"<section>{part}</section>" for part in body if part)
    return page(title, f"{header}\n{parts}\n<footer>Brackets are 95 % intervals.</footer>", chart_data(drawn), above)
