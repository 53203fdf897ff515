"""report.md: the answer and its evidence, fit for a pull request."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from paceline.exporters import plots, write_atomically
from paceline.findings import Report
from paceline.present import claims, cost, history, scaling, tables, verdicts
from paceline.present.answer import answer, grounds
from paceline.present.machine import machine_details, machine_tables
from paceline.present.tables import Cell, Table


def export(report: Report, directory: Path) -> list[Path]:
    return [write_atomically(directory / "report.md", text(report))]


def text(report: Report) -> str:
    """The whole document; plots are linked where the report holds data for them."""
    return "\n\n".join(part for part in _parts(report) if part) + "\n"


def _parts(report: Report) -> Iterator[str]:
    yield f"# {escape(report.title)}"
    yield " ".join(f"**{escape(sentence)}**" for sentence in answer(report) if sentence)
    yield escape(grounds(report))
    ranking = tables.ranking(report)
    if tables.trains(report):
        yield "## Ranking"
        yield "" if ranking else "Nothing to rank: no run is both complete and certified."
    yield from (f"### {escape(table.title)}\n\n{render(table)}" for table in ranking)
    yield escape(tables.common(report))
    yield f"Read all of it with this in mind:\n\n{bullets(report.notes)}" if report.notes else ""
    yield section("Winners by category", tables.winners(report))
    yield section("Not ranked", tables.failures(report))
    yield section("Scaling", scaling.efficiency(report))
    yield section("Where the step time goes", scaling.explanation(report))
    yield from (section(table.title, table) for table in (*verdicts.tables(report), *machine_tables(report)))
    yield from (section(table.title, table) for table in (*cost.tables(report), *claims.tables(report)))
    yield from (folded(table.title, table) for table in machine_details(report))
    yield from (section(table.title, table) for table in history.tables(report.histories))
    drawn = plots.available(report)
    yield "## Plots" if drawn else ""
    yield from (f"![{name.replace('_', ' ').capitalize()}](plots/{name}.png)" for name in drawn)
    yield from _evidence(report)


def _evidence(report: Report) -> Iterator[str]:
    if tables.trains(report):
        yield f"## Certificates\n\n{tables.certified_sentence(report)}"
    yield folded("Certificates by cell", tables.certification(report))
    yield "## How it was measured"
    yield from (folded(table.title, table) for table in verdicts.details(report))
    yield folded("Comparisons, with the smallest effect the data could have shown", tables.comparisons(report))
    yield folded("Runs: warm-up, outliers and loss", tables.run_details(report))
    health = tables.health(report)
    yield f"Health notes:\n\n{bullets(health)}" if health else ""
    yield from (folded(f"Machine {table.title}", table) for table in tables.machine_facts(report))
    yield f"Folders that could not be read:\n\n{bullets(report.skipped)}" if report.skipped else ""
    made = f"Paceline {escape(report.paceline_version)}, {tables.created(report)}"
    yield f"<sub>{made}; brackets are 95 % intervals.</sub>"


def section(title: str, table: Table | None) -> str:
    return f"## {title}\n\n{render(table)}" if table else ""


def folded(summary: str, table: Table | None) -> str:
    """Evidence on demand: GitHub and most renderers fold it."""
    return f"<details><summary>{escape(summary)}</summary>\n\n{render(table)}\n\n</details>" if table else ""


def render(table: Table) -> str:
    lines = [
        _line(escape(column.heading) for column in table.columns),
        _line("---:" if column.numeric else "---" for column in table.columns),
        *(_line(map(_cell, row)) for row in table.rows),
    ]
    return "\n".join(lines) + (f"\n\n{bullets(table.notes)}" if table.notes else "")


def bullets(lines: Iterable[str]) -> str:
    return "\n".join(f"- {escape(line)}" for line in lines)


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(cell: Cell) -> str:
    shown = f"`{cell.text.replace('`', '')}`" if cell.tone == "code" else escape(cell.text)
    return f"{shown} {escape(cell.detail)}" if cell.detail else shown


def escape(value: str) -> str:
    """Text stays text: no tag, link, emphasis or table cell comes from a name."""
    one_line = " ".join(value.split()).replace("&", "&amp;").replace("<", "&lt;")
    for mark in ("\\", "|", "*", "`"):
        one_line = one_line.replace(mark, f"\\{mark}")
    return one_line.replace("](", "]\\(")
