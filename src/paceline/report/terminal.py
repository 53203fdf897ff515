"""Tables for a terminal, drawn with rich. What does not fit is broken into lines, shortened, then transposed."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Sequence, Set
from typing import TYPE_CHECKING, Literal

from paceline.analysis.findings import Report
from paceline.report import answer, summary
from paceline.report.sections import NOT_ON_TERMINAL, sections
from paceline.report.tables import served
from paceline.report.tables.table import Cell, Table, without_empty
from paceline.report.text import trust
from paceline.wording import DETECTABLE, MISSING, short_percent

if TYPE_CHECKING:
    import rich.table
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
    from rich.text import Text

# Widths of a column of sentences, tried in this order; None is unlimited.
WORDS = (None, 56, 48, 40, 34, 28, 24)
# The least width of the names of rows beside numbers.
NAMES = 18
# Widths of other columns of words and of headings, tried if that does not suffice: no word is broken.
TIGHT = (24, 18, 12)
# Widths to which long names, such as those of runs, are then broken after a hyphen, comma or colon.
JOINTS = (34, 24, 18)
# Shorter headings stay on one line.
SHORT_HEADING = 8
# A table of so many rows is transposed and keeps every column. One of up to MOST_ROWS becomes a card per row; longer
# ones leave out the least important columns instead.
MOST_TRANSPOSED = 12
# Of a transposed table: the least width of a column, and the largest of the names before them.
NARROWEST, LONGEST_NAME = 12, 20
# Columns up to this priority matter: without --verbose, others are left out.
MATTERS = 4
# Without --verbose: tables of a ranking, and rows of a table.
MOST_TABLES, MOST_ROWS = 3, 16
# Shown without --verbose too: what failed, and what would fit instead.
_FAILURES = ("not-ranked", "advice")
_LIGHTS = {summary.GREEN: "green", summary.AMBER: "yellow", summary.RED: "red", summary.UNKNOWN: "dim"}
_STYLES = {"good": "green", "bad": "red", "quiet": "dim", "code": "cyan"}


def section_group(report: Report, *names: str) -> RenderableType | None:
    """The tables of these sections, or of all that a terminal shows, below the trust light if something was disturbed;
    None if there are none."""
    from rich.console import Group
    from rich.text import Text

    launches = (line for line in trust.lines(report) if line.startswith("  "))
    found: list[RenderableType] = []
    if not names:
        *first, end = _first_lines(report)
        found = [*first, *(Text(line, style="yellow") for line in launches), end]
    for section in sections(report):
        if section.name not in names if names else section.name in NOT_ON_TERMINAL:
            continue
        found += map(Fitted, (*section.tables, *section.bars))
        if section.name == "ranking":
            found += [Text(section.text)] if section.text else []
            found += [Text(f"note: {note}", style="yellow") for note in report.notes]
    return Group(*found) if found else None


def brief_group(report: Report, *, with_cost: bool = False) -> RenderableType:
    """The headline, one line of trust, the table that answers the question, what failed, and what was left out.

    with_cost: the user asked for costs.
    """
    from rich.console import Group
    from rich.padding import Padding
    from rich.text import Text

    found = [*_first_lines(report)]
    known = {section.name: section for section in sections(report) if section.name not in NOT_ON_TERMINAL}
    lead = next((section for section in known.values() if section.tables), None)
    shown: list[Table] = []
    more = (*(("cost",) if with_cost else ()), *_FAILURES)
    for section in (lead, *(known.get(name) for name in more if lead is None or name != lead.name)):
        if section is not None:
            most = MOST_TABLES if section.name in ("ranking", "nodes", "tradeoffs", *more) else 1
            shown += section.tables[:most]
    if (ranking := known.get("ranking")) is not None and ranking.text:
        found += (Text(ranking.text), Text(""))
    warnings = served.warnings(report)
    found += (Fitted(essential(table, warnings)) for table in shown)
    for line in _differences(report):
        found += (Padding(Text(line), (0, 0, 0, 2)), Text(""))
    # Why there is no answer to an option of the command line.
    answers = [note for note in report.notes if note.startswith("--")]
    found += (Padding(Text(note, style="yellow"), (0, 0, 1, 2)) for note in answers)
    tables = sum(len(section.tables) + len(section.bars) for section in known.values())
    notes = sum(note not in warnings for table in shown for note in table.notes) + len(report.notes) - len(answers)
    parts = [f"{n} more {noun}{'s' if n > 1 else ''}" for n, noun in ((tables - len(shown), "table"),) if n]
    parts += [f"{notes} note{'s' if notes > 1 else ''}"] if notes else []
    if parts:
        found.append(
            Padding(Text(f"{' and '.join(parts)} with --verbose and in the report.", style="dim"), (0, 0, 0, 2))
        )
    return Group(*found)


def _differences(report: Report) -> list[str]:
    """Why the step of the second and of the slowest cell takes longer than that of the fastest, for the group of the
    headline."""
    lead = answer.headline(report)
    ours = [found.text for found in report.step_differences if lead and found.group_key == lead.group_key]
    return [*ours[:1], *ours[1:][-1:]]


def essential(table: Table, warnings: Set[str] = frozenset()) -> Table:
    """The columns that matter and the first rows of a table; of its notes only warnings, and one about missing rows.

    >>> from paceline.report.tables.table import Column
    >>> wide = Table("", (Column("a"), Column("b", priority=9)), ((Cell("1"), Cell("2")),), ("a note",))
    >>> essential(wide).rows, essential(wide).notes
    (((Cell(text='1', detail='', tone='', link=''),),), ())
    """
    keep = [i for i, column in enumerate(table.columns) if column.priority <= MATTERS]
    left = len(table.rows) - MOST_ROWS
    missing = (f"{left} more row{'s' if left > 1 else ''}.",) if left > 0 else ()
    return without_empty(
        dataclasses.replace(
            table,
            columns=tuple(table.columns[i] for i in keep),
            rows=tuple(tuple(row[i] for i in keep) for row in table.rows[:MOST_ROWS]),
            notes=(*missing, *(note for note in table.notes if note in warnings)),
        )
    )[0]


def _first_lines(report: Report) -> Iterator[RenderableType]:
    """The headline, and the trust light in one line."""
    from rich.text import Text

    light = summary.light(report)
    yield Text(summary.headline(report), style="bold")
    yield Text(f"Trust: {light.level}. {light.text}.", style=_LIGHTS[light.level])
    yield Text("")


def drawn(found: Iterable[Table]) -> RenderableType:
    """Tables one below the other."""
    from rich.console import Group

    return Group(*map(Fitted, found))


class Fitted:
    """A table that wraps its sentences, then its other words, then shortens its intervals.

    If it still does not fit the console, it is transposed, or a card per row if it has sentences or many rows. A very
    long table drops its least important columns instead.
    """

    def __init__(self, table: Table) -> None:
        self.table = table

    @property
    def has_sentences(self) -> bool:
        return any(column.prose for column in self.table.columns[1:])

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.padding import Padding
        from rich.text import Text

        keep = list(range(len(self.table.columns)))
        if self._fitting(keep, console, options) is None and Fitted(short := shortened(self.table)).fits(
            console, options
        ):
            self.table = short
        while (fitting := self._fitting(keep, console, options)) is None:
            spare = max(keep, key=lambda i: self.table.columns[i].priority)
            if self.table.columns[spare].priority == 0:
                break
            keep.remove(spare)
        gone = [column.name for i, column in enumerate(self.table.columns) if i not in keep]
        is_short = len(self.table.rows) <= MOST_TRANSPOSED
        if fitting is not None and not (gone and len(self.table.rows) <= MOST_ROWS):
            yield fitting
        else:
            by_card = self.has_sentences or not is_short
            yield from _cards(self.table) if by_card else _transposed(self.table, options.max_width)
            gone = []
        left_out = (f"Too narrow to show: {', '.join(gone)}.",) if gone else ()
        for note in (*self.table.notes, *left_out):
            yield Padding(Text(note, style="dim"), (0, 0, 0, 2))
        yield ""

    def fits(self, console: Console, options: ConsoleOptions) -> bool:
        return self._fitting(range(len(self.table.columns)), console, options) is not None

    def _fitting(self, keep: Sequence[int], console: Console, options: ConsoleOptions) -> rich.table.Table | None:
        """These columns with sentences in the longest lines that fit; None if no width does."""
        from rich.measure import Measurement

        # Words beside sentences are not broken: those need the room themselves.
        tighter: list[tuple[int, int | None, int | None]] = []
        if not self.has_sentences:
            tighter = [(NAMES, None, None), *((WORDS[-1], tight, None) for tight in TIGHT)]
            tighter += [(WORDS[-1], TIGHT[-1], joint) for joint in JOINTS]
        for words, tight, joint in (*((words, None, None) for words in WORDS), *tighter):
            drawn = _draw(self.table, keep, words, tight, joint)
            if Measurement.get(console, options.update(width=10_000), drawn).maximum <= options.max_width:
                return drawn
        return None


def shortened(table: Table) -> Table:
    """The table with half widths instead of intervals and ratios without theirs.

    >>> from paceline.report.tables.table import Column
    >>> row = (Cell("100", "[98, 102]"), Cell("no verdict", "0.98x [0.97, 0.99]"))
    >>> [cell.detail for cell in shortened(Table("", (Column("a"), Column("b")), (row,))).rows[0]]
    ['\u00b12 %', '0.98x']
    """
    # A share of a percentage would be read as percentage points.
    shares = [column.unit == "%" for column in table.columns]
    rows = tuple(
        tuple(cell if share else cell._replace(detail=_short(cell)) for cell, share in zip(row, shares, strict=True))
        for row in table.rows
    )
    return dataclasses.replace(table, rows=rows)


def _short(cell: Cell) -> str:
    if ratio := re.fullmatch(r"(\S+x) \[.*", cell.detail):
        return ratio[1]
    interval = re.fullmatch(r"\[(-?[\d,.]+), (-?[\d,.]+)\]", cell.detail)
    value = re.fullmatch(r"-?[\d,.]+", cell.text)
    if interval is None or value is None:
        return cell.detail
    low, high, middle = (float(text.replace(",", "")) for text in (*interval.groups(), value[0]))
    if not middle:
        return cell.detail
    half = short_percent((high - low) / 2 / abs(middle))
    return f"\u00b1{half}" if half[0].isdigit() else "\u00b11,000+ %"


def _cards(table: Table) -> Iterator[RenderableType]:
    """Each row as its name and, below it, every value with its heading: sentences need the whole width."""
    from rich.padding import Padding
    from rich.text import Text

    yield Text(table.title, style="bold")
    title = next((i for i, column in enumerate(table.columns) if not column.numeric), 0)
    for row in table.rows:
        first = table.columns[0]
        rank = f"{row[0].text}. " if first.heading == "#" and row[0].text.isdigit() else ""
        yield Text(f"{rank}{row[title].text}", style="bold")
        text = Text()
        for i, (column, cell) in enumerate(zip(table.columns, row, strict=True)):
            if i == title or column.heading == "#" or not cell.text:
                continue
            value = Text(f"{column.name} " if column.numeric else f"{column.name}: ", style="dim")
            value.append(cell.text, style=_STYLES.get(cell.tone, ""))
            value.append(f" {column.unit}" if column.unit and cell.text != MISSING else "")
            value.append(f" {cell.detail}" if cell.detail else "", style="dim")
            text.append("; " if text else "").append_text(value)
        yield Padding(text, (0, 0, 0, 2))


def _transposed(table: Table, width: int) -> Iterator[RenderableType]:
    """Columns as lines and rows as columns, in as many parts as the width needs."""
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    table = shortened(table)
    title = next((i for i, column in enumerate(table.columns) if not column.numeric), 0)
    lines = [i for i, column in enumerate(table.columns) if i != title and column.heading != "#"]
    names = [", ".join(filter(None, (table.columns[i].name, table.columns[i].unit))) for i in lines]
    first = max((min(len(name), LONGEST_NAME) for name in names), default=0)
    room = width - first - 2
    parts = -(-len(table.rows) // max(1, min(len(table.rows), room // (NARROWEST + 2))))
    count = -(-len(table.rows) // parts)
    for begin in range(0, len(table.rows), count):
        rows = table.rows[begin : begin + count]
        part = Text(table.title, style="bold") if begin == 0 else None
        drawn = RichTable(title=part, title_justify="left", box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
        drawn.add_column("", max_width=first, overflow="fold")
        for row in rows:
            rank = f"{row[0].text}. " if table.columns[0].heading == "#" and row[0].text.isdigit() else ""
            widest = max(1, room // count - 2)
            heading = Text(broken(f"{rank}{row[title].text}", widest))
            drawn.add_column(heading, justify="right", overflow="fold", max_width=widest)
        for i, name in zip(lines, names, strict=True):
            drawn.add_row(Text(name), *(_text(row[i]) for row in rows))
        yield drawn


def broken(text: str, width: int) -> str:
    """Text whose words that are longer than this end their lines after a hyphen, comma or colon.

    >>> broken("run zero-stage-1-tiny-llama-2x-r0-1e2ec36d9e", 18).split("\\n")
    ['run zero-stage-1-tiny-', 'llama-2x-r0-', '1e2ec36d9e']
    """

    def lines(word: re.Match[str]) -> str:
        found = [""]
        for part in re.findall(r"[^-,:]*[-,:]?", word[0]):
            if found[-1] and len(found[-1] + part) > width:
                found.append("")
            found[-1] += part
        return "\n".join(found)

    return re.sub(rf"\S{{{width + 1},}}", lines, text)


def _draw(
    table: Table, keep: Sequence[int], words: int | None = None, tight: int | None = None, joint: int | None = None
) -> rich.table.Table:
    """words is the maximum width of a column of sentences, tight that of other words, where joint does not break them;
    None is unlimited."""
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    title = Text(table.title, style="bold")
    drawn = RichTable(title=title, title_justify="left", box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    widths = []
    for i in keep:
        column = table.columns[i]
        name = column.name
        if tight is not None and len(name) > SHORT_HEADING:
            name = name.replace(" ", "\n")
        heading = "\n".join(filter(None, (name, column.unit)))
        widest = words if column.prose else None
        if tight is not None and not column.numeric and not column.prose:
            longest = max((len(word) for row in table.rows for word in row[i].text.split()), default=0)
            widest = joint or max(tight, longest)
        justify: Literal["left", "right"] = "right" if column.numeric else "left"
        drawn.add_column(Text(heading), justify=justify, overflow="fold", max_width=widest)
        widths.append(widest)
    for row in table.rows:
        drawn.add_row(*(_text(row[i], widest) for i, widest in zip(keep, widths, strict=True)))
    return drawn


def _text(cell: Cell, widest: int | None = None) -> Text:
    from rich.text import Text

    text = Text(cell.text if widest is None else broken(cell.text, widest), style=_STYLES.get(cell.tone, ""))
    # What could have been seen has its own line: the interval before it is as long as the others.
    detail = cell.detail.replace(f", {DETECTABLE} ", "\ndetectable: ")
    return text.append(f"\n{detail}", style="dim") if detail else text
