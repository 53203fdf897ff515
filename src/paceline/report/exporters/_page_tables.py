"""Pieces of the page as HTML: every text is escaped here, and here only."""

from __future__ import annotations

from collections.abc import Container, Iterable
from html import escape
from urllib.parse import quote

from paceline.report.tables.table import Cell, Table

OPEN_NOTES = 2
# Words no longer than this stay on one line.
SHORT_WORDS = 24


def paragraph(value: str, css: str = "") -> str:
    opening = f'<p class="{css}">' if css else "<p>"
    return f"{opening}{escape(value)}</p>" if value else ""


def bullets(lines: Iterable[str]) -> str:
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f'<ul class="notes">{items}</ul>' if items else ""


def folded(summary: str, content: Table | str | None, linked: Container[str] = ()) -> str:
    """Evidence on demand; nothing if there is none. A text is HTML already."""
    inner = render(content, linked) if isinstance(content, Table) else content
    return f"<details><summary>{escape(summary)}</summary>{inner}</details>" if inner else ""


def block(title: str, table: Table, linked: Container[str]) -> str:
    """A titled table that a filter may empty, and then hides."""
    return f'<div class="block"><h3>{escape(title)}</h3>{render(table, linked)}</div>'


def render(table: Table, linked: Container[str] = ()) -> str:
    """The first text of a row about one cell links to that cell."""
    kinds = []
    for i, column in enumerate(table.columns):
        # Columns of short words are not broken, however narrow the screen.
        short = all(len(row[i].text) <= SHORT_WORDS for row in table.rows)
        kind = "n" if column.numeric else "prose" if column.prose else "w" if short else ""
        kinds.append(f' class="{kind}"' if kind else "")
    units = [f"<small>{escape(column.unit)}</small>" if column.unit else "" for column in table.columns]
    names = [escape(column.name) for column in table.columns]
    head = "".join(f"<th{kind}>{name}{unit}</th>" for kind, name, unit in zip(kinds, names, units, strict=True))
    words = next((i for i, column in enumerate(table.columns) if not column.numeric), None)
    rows = []
    for row, cells in zip(table.rows, table.cells or [()] * len(table.rows), strict=True):
        target = cells[0] if len(cells) == 1 and cells[0] in linked else None
        shown = (_cell(cell, target if i == words else None) for i, cell in enumerate(row))
        filled = "".join(f"<td{kind}>{cell}</td>" for kind, cell in zip(kinds, shown, strict=True))
        rows.append(f"<tr{about(cells)}>{filled}</tr>")
    body = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    # The first notes are open; a long rest would bury the next table.
    count = len(table.notes) if len(table.notes) <= OPEN_NOTES + 1 else OPEN_NOTES
    notes, rest = bullets(table.notes[:count]), table.notes[count:]
    if rest:
        notes += f'<details class="more"><summary>{len(rest)} more notes</summary>{bullets(rest)}</details>'
    return f'<div class="scroll">{body}</div>{notes}'


def about(cells: Iterable[str]) -> str:
    """The attribute that the filter of the page uses to find rows about these cells."""
    names = " ".join(dict.fromkeys(cells))
    return f' data-cells="{escape(names)}"' if names else ""


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
