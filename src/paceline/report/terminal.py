"""Tables for a terminal, drawn with rich. Columns that do not fit are left out and named, never squeezed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Literal

from paceline.analysis.findings import Report
from paceline.report.sections import NOT_ON_TERMINAL, sections
from paceline.report.tables.table import Cell, Table
from paceline.report.text import trust

if TYPE_CHECKING:
    import rich.table
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
    from rich.text import Text

# Widths of a column of sentences, tried in this order; None is unlimited.
WORDS = (None, 56, 48, 40, 34, 28, 24)
_STYLES = {"good": "green", "bad": "red", "quiet": "dim", "code": "cyan"}


def section_group(report: Report, *names: str) -> RenderableType | None:
    """The tables of these sections, or of all that a terminal shows, below the trust light if something was disturbed;
    None if there are none."""
    from rich.console import Group
    from rich.text import Text

    found: list[RenderableType] = [] if names else [Text(line, style="yellow") for line in trust.lines(report)]
    for section in sections(report):
        if section.name not in names if names else section.name in NOT_ON_TERMINAL:
            continue
        found += map(Fitted, (*section.tables, *section.bars))
        if section.name == "ranking":
            found += [Text(section.text)] if section.text else []
            found += [Text(f"note: {note}", style="yellow") for note in report.notes]
    return Group(*found) if found else None


def drawn(found: Iterable[Table]) -> RenderableType:
    """Tables one below the other."""
    from rich.console import Group

    return Group(*map(Fitted, found))


class Fitted:
    """A table that wraps its sentences and then drops its least important columns until it fits the console."""

    def __init__(self, table: Table) -> None:
        self.table = table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.padding import Padding
        from rich.text import Text

        keep = list(range(len(self.table.columns)))
        while (fitting := self._fitting(keep, console, options)) is None:
            spare = max(keep, key=lambda i: self.table.columns[i].priority)
            if self.table.columns[spare].priority == 0:
                break
            keep.remove(spare)
        yield fitting or _draw(self.table, keep)
        gone = [column.name for i, column in enumerate(self.table.columns) if i not in keep]
        left_out = (f"Too narrow to show: {', '.join(gone)}.",) if gone else ()
        for note in (*self.table.notes, *left_out):
            yield Padding(Text(note, style="dim"), (0, 0, 0, 2))
        yield ""

    def _fitting(self, keep: Sequence[int], console: Console, options: ConsoleOptions) -> rich.table.Table | None:
        """These columns with sentences in the longest lines that fit; None if no width does."""
        from rich.measure import Measurement

        for words in WORDS:
            drawn = _draw(self.table, keep, words)
            if Measurement.get(console, options.update(width=10_000), drawn).maximum <= options.max_width:
                return drawn
        return None


def _draw(table: Table, keep: Sequence[int], words: int | None = None) -> rich.table.Table:
    """words is the maximum width of a column of sentences; None is unlimited."""
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    title = Text(table.title, style="bold")
    drawn = RichTable(title=title, title_justify="left", box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    for i in keep:
        column = table.columns[i]
        heading = "\n".join(filter(None, (column.name, column.unit)))
        widest = words if column.prose else None
        justify: Literal["left", "right"] = "right" if column.numeric else "left"
        drawn.add_column(Text(heading), justify=justify, overflow="fold", max_width=widest)
    for row in table.rows:
        drawn.add_row(*(_text(row[i]) for i in keep))
    return drawn


def _text(cell: Cell) -> Text:
    from rich.text import Text

    text = Text(cell.text, style=_STYLES.get(cell.tone, ""))
    return text.append(f"\n{cell.detail}", style="dim") if cell.detail else text
