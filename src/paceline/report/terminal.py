"""Tables for a terminal, through rich; what does not fit its width is left out and named, never squeezed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Literal

from paceline.analysis.findings import Report
from paceline.report import text_bars
from paceline.report.tables import advice, claims, cost, effects, finetuning, scaling, verdicts
from paceline.report.tables import table as tables
from paceline.report.tables.sections import machine_tables
from paceline.report.tables.table import Cell, Table

if TYPE_CHECKING:
    import rich.table
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
    from rich.text import Text

# How wide a column of sentences may be, tried in this order; None is as wide as they are.
WORDS = (None, 56, 48, 40, 34, 28, 24)
_STYLES = {"good": "green", "bad": "red", "quiet": "dim", "code": "cyan"}


def ranked_table(report: Report) -> RenderableType:
    """The effects of a design, the rankings, each with its notes, then the notes of the whole report."""
    from rich.console import Group
    from rich.text import Text

    found: list[RenderableType] = [Fitted(table) for table in (*effects.tables(report), *tables.ranking(report))]
    notes = [Text(f"note: {note}", style="yellow") for note in report.notes]
    empty = [Text("Nothing to rank: no run is both complete and certified.")] if tables.trains(report) else []
    return Group(*(found or empty), *notes)


def failures_table(report: Report) -> RenderableType | None:
    """Every run outside the ranking with its reason, and what would fit where memory did not do; None where all are
    ranked."""
    failed = tables.failures(report)
    found = (*((failed,) if failed else ()), *advice.tables(report))
    return drawn(found) if found else None


def scaling_table(report: Report) -> RenderableType | None:
    """Efficiencies beside their measured baseline and where the rest went; None where nothing was scaled."""
    from rich.console import Group

    found = [Fitted(table) for table in (scaling.efficiency(report), scaling.explanation(report)) if table]
    return Group(*found) if found else None


def machine_group(report: Report) -> RenderableType | None:
    """What the machine's fabric, memory and devices can do; None where only training was measured."""
    from rich.console import Group

    found = [Fitted(table) for table in (*machine_tables(report), *text_bars.tables(report))]
    return Group(*found) if found else None


def verdicts_group(report: Report) -> RenderableType | None:
    """How cells fine-tune, what holds each back, and what would fit elsewhere; None where nothing was trained."""
    found = (*finetuning.tables(report), *verdicts.tables(report))
    return drawn(found) if found else None


def cost_group(report: Report) -> RenderableType | None:
    """What a token costs, and what others claim; None where no device has a price and nothing was imported."""
    found = (*cost.tables(report), *claims.tables(report))
    return drawn(found) if found else None


def drawn(found: Iterable[Table]) -> RenderableType:
    """Any tables, one under the other."""
    from rich.console import Group

    return Group(*map(Fitted, found))


class Fitted:
    """A table that breaks its sentences into lines and then leaves out its least important columns until it fits the
    console it is printed on."""

    def __init__(self, table: Table) -> None:
        self.table = table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.padding import Padding
        from rich.text import Text

        keep = list(range(len(self.table.columns)))
        while (drawn := self._fitting(keep, console, options)) is None:
            spare = max(keep, key=lambda i: self.table.columns[i].priority)
            if self.table.columns[spare].priority == 0:
                break
            keep.remove(spare)
        yield drawn or _draw(self.table, keep)
        for note in (*self.table.notes, *_left_out(self.table, keep)):
            yield Padding(Text(note, style="dim"), (0, 0, 0, 2))
        yield ""

    def _fitting(self, keep: Sequence[int], console: Console, options: ConsoleOptions) -> rich.table.Table | None:
        """These columns with sentences in the longest lines that fit; None where none does."""
        from rich.measure import Measurement

        for words in WORDS:
            drawn = _draw(self.table, keep, words)
            if Measurement.get(console, options.update(width=10_000), drawn).maximum <= options.max_width:
                return drawn
        return None


def _left_out(table: Table, keep: Sequence[int]) -> tuple[str, ...]:
    gone = [column.name for i, column in enumerate(table.columns) if i not in keep]
    return (f"Too narrow to show: {', '.join(gone)}.",) if gone else ()


def _draw(table: Table, keep: Sequence[int], words: int | None = None) -> rich.table.Table:
    """words is how wide a column of sentences may be; None for as wide as they are."""
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
