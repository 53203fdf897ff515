"""Pieces of the page as HTML: every text is escaped here, and here only."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from html import escape
from urllib.parse import quote

from paceline.report.tables.table import Cell, Column, Table

OPEN_NOTES = 2
# Words no longer than this stay on one line.
SHORT_WORDS = 24


def paragraph(value: str, css: str = "") -> str:
    opening = f'<p class="{css}">' if css else "<p>"
    return f"{opening}{escape(value)}</p>" if value else ""


def bullets(lines: Iterable[str]) -> str:
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f'<ul class="notes">{items}</ul>' if items else ""


def _notes(lines: Sequence[str]) -> str:
    """The first ones open; a long rest would bury the next table."""
    if len(lines) <= OPEN_NOTES + 1:
        return bullets(lines)
    rest = len(lines) - OPEN_NOTES
    more = f'<details class="more"><summary>{rest} more notes</summary>{bullets(lines[OPEN_NOTES:])}</details>'
    return bullets(lines[:OPEN_NOTES]) + more


def folded(summary: str, content: Table | str | None, linked: Container[str] = ()) -> str:
    """Evidence on demand; nothing if there is none. A text is HTML already."""
    inner = render(content, linked) if isinstance(content, Table) else content
    return f"<details><summary>{escape(summary)}</summary>{inner}</details>" if inner else ""


def block(title: str, table: Table, linked: Container[str]) -> str:
    """A titled table that a filter may empty, and then hides."""
    return f'<div class="block"><h3>{escape(title)}</h3>{render(table, linked)}</div>'


def render(table: Table, linked: Container[str] = ()) -> str:
    """The first text of a row about one cell links to that cell."""
    kinds = [_kind(column, [row[i] for row in table.rows]) for i, column in enumerate(table.columns)]
    head = "".join(f"<th{kind}>{_heading(column)}</th>" for kind, column in zip(kinds, table.columns, strict=True))
    cells: Sequence[tuple[str, ...]] = table.cells or [()] * len(table.rows)
    rows = "".join(_row(table, kinds, row, about, linked) for row, about in zip(table.rows, cells, strict=True))
    body = f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
    return body + _notes(table.notes)


def _row(
    table: Table, kinds: Sequence[str], row: Sequence[Cell], cells: tuple[str, ...], linked: Container[str]
) -> str:
    target = cells[0] if len(cells) == 1 and cells[0] in linked else None
    words = next((i for i, column in enumerate(table.columns) if not column.numeric), None)
    shown = "".join(
        f"<td{kind}>{_cell(cell, target if i == words else None)}</td>"
        for i, (kind, cell) in enumerate(zip(kinds, row, strict=True))
    )
    return f"<tr{about(cells)}>{shown}</tr>"


def about(cells: Iterable[str]) -> str:
    """The attribute that the filter of the page uses to find rows about these cells."""
    names = " ".join(dict.fromkeys(cells))
    return f' data-cells="{escape(names)}"' if names else ""


def _heading(column: Column) -> str:
    return escape(column.name) + (f"<small>{escape(column.unit)}</small>" if column.unit else "")


def _kind(column: Column, cells: Sequence[Cell]) -> str:
    """Numbers, sentences, or words: those of a column of short ones are not broken, however narrow the screen."""
    if column.numeric:
        return ' class="n"'
    if column.prose:
        return ' class="prose"'
    return ' class="w"' if all(len(cell.text) <= SHORT_WORDS for cell in cells) else ""


def _cell(cell: Cell, target: str | None) -> str:
    shown = escape(cell.text)
    if target is not None:
        shown = f'<a href="#cell-{escape(target)}">{shown}</a>'
    elif cell.link:
        # Quoted, a colon is no longer one: no link leads anywhere but to a file.
        shown = f'<a href="{quote(cell.link)}">{shown}</a>'
    elif cell.tone == "code":
        shown = f"<code>{shown}</code>"
    elif cell.tone:
        shown = f'<span class="{cell.tone}">{shown}</span>'
    return shown + (f"<small>{escape(cell.detail)}</small>" if cell.detail else "")
