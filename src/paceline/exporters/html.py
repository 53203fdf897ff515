"""report.html: one page with everything inside, for people; opens from disk and loads nothing."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from html import escape
from pathlib import Path
from string import Template

from paceline.exporters import _canvas, plots, write_atomically
from paceline.findings import Certificate, Report
from paceline.present import claims, cost, scaling, tables, verdicts
from paceline.present.answer import answer, grounds
from paceline.present.machine import machine_details, machine_tables
from paceline.present.tables import Cell, Column, Table

# What the charts draw in these colours follows the page's theme.
THEME = {
    _canvas.INK: "--ink",
    _canvas.QUIET: "--quiet",
    _canvas.GRID: "--line",
    _canvas.PAPER: "--paper",
    _canvas.PALETTE[0]: "--blue",
    _canvas.PALETTE[6]: "--purple",
}

STYLE = """
:root { color-scheme: light dark; --ink: #1f2328; --quiet: #59636e; --line: #d8dee4; --paper: #ffffff; --wash: #f6f8fa;
  --good: #1a7f37; --bad: #b42318; --blue: #0072b2; --purple: #8c6bb1; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --quiet: #9198a1; --line: #30363d; --paper: #0d1117;
  --wash: #161b22; --good: #4ac26b; --bad: #ff8f85; --blue: #3b9be0; --purple: #b093d3; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.55 system-ui, -apple-system, "Segoe UI",
  Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 2.5rem 1.25rem 4rem; }
h1 { font-size: 1rem; font-weight: 600; color: var(--quiet); margin: 0 0 .75rem; }
h2 { font-size: 1.25rem; margin: 3rem 0 .75rem; }
h3 { font-size: 1rem; margin: 1.75rem 0 .25rem; }
p, ul { margin: .5rem 0; max-width: 72ch; }
ul { padding-left: 1.2rem; }
.answer { font-size: clamp(1.25rem, 2.6vw, 1.7rem); line-height: 1.35; font-weight: 600; max-width: 46ch;
  text-wrap: pretty; }
.quiet, .notes, footer { color: var(--quiet); font-size: .875rem; }
.mind { border-left: 3px solid var(--blue); padding: .1rem 0 .1rem .9rem; margin: 1.25rem 0; font-size: .9375rem; }
.scroll { overflow-x: auto; margin: .5rem 0; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th { text-align: left; font-weight: 600; font-size: .8125rem; color: var(--quiet); vertical-align: bottom;
  border-bottom: 1px solid var(--line); padding: .35rem 1.25rem .35rem 0; white-space: nowrap; }
td { vertical-align: top; border-bottom: 1px solid var(--line); padding: .5rem 1.25rem .5rem 0; }
td.prose { min-width: 17rem; max-width: 60ch; }
th.n, td.n { text-align: right; white-space: nowrap; }
th small, td small { display: block; font-weight: 400; color: var(--quiet); font-size: .8125rem; white-space: nowrap; }
.good { color: var(--good); } .bad { color: var(--bad); } td > span { white-space: nowrap; }
td.prose > span { white-space: normal; }
code { white-space: nowrap; font: .8125rem/1.4 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
figure { margin: 1.75rem 0; overflow-x: auto; }
figure svg { display: block; width: 100%; min-width: 34rem; max-width: 52rem; height: auto; overflow: visible; }
figure svg text { font-family: inherit !important; }
details { border: 1px solid var(--line); border-radius: 6px; margin: .6rem 0; padding: 0 .9rem; }
details details { border-width: 1px 0 0; border-radius: 0; margin: 0; padding: 0; }
summary { cursor: pointer; padding: .6rem 0; font-size: .9375rem; }
details[open] > summary { border-bottom: 1px solid var(--line); margin-bottom: .4rem; }
footer { margin-top: 3.5rem; border-top: 1px solid var(--line); padding-top: 1rem; }
@media (max-width: 600px) { main { padding: 1.5rem 1rem 3rem; } h2 { margin-top: 2.25rem; } }
@media print { details > :not(summary) { display: block; } main { max-width: none; } figure { break-inside: avoid; } }
"""

PAGE = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<title>$title</title>
<style>$style</style>
</head>
<body>
<main>
$body
</main>
</body>
</html>
""")


def export(report: Report, directory: Path) -> list[Path]:
    return [write_atomically(directory / "report.html", text(report))]


def text(report: Report) -> str:
    """The whole page."""
    body = "\n".join(part for part in _parts(report) if part)
    return PAGE.substitute(title=escape(f"{report.title}: Paceline report"), style=STYLE, body=body)


def _parts(report: Report) -> Iterator[str]:
    said = paragraph(" ".join(filter(None, answer(report))), "answer")
    yield f"<header><h1>{escape(report.title)}</h1>{said}{paragraph(grounds(report))}</header>"
    yield f'<div class="mind">{"".join(map(paragraph, report.notes))}</div>' if report.notes else ""
    ranking = tables.ranking(report)
    if tables.trains(report):
        yield "<h2>Ranking</h2>"
        yield "" if ranking else paragraph("Nothing to rank: no run is both complete and certified.")
    yield from (f"<h3>{escape(table.title)}</h3>{render(table)}" for table in ranking)
    yield paragraph(tables.common(report), "quiet")
    yield from (figure(report, name) for name in plots.available(report))
    yield section("Scaling", scaling.efficiency(report))
    yield section("Where the step time goes", scaling.explanation(report))
    yield from (section(table.title, table) for table in (*verdicts.tables(report), *machine_tables(report)))
    yield from (section(table.title, table) for table in (*cost.tables(report), *claims.tables(report)))
    yield from (folded(table.title, table) for table in machine_details(report))
    yield section("Winners by category", tables.winners(report))
    yield section("Not ranked", tables.failures(report))
    yield from _evidence(report)
    made = f"Paceline {report.paceline_version}, {tables.created(report)}. Brackets are 95 % intervals."
    yield f"<footer>{escape(made)}</footer>"


def _evidence(report: Report) -> Iterator[str]:
    if tables.trains(report):
        yield f"<h2>Equal work</h2>{paragraph(tables.certified_sentence(report))}"
    certification = tables.certification(report)
    yield render(certification) if certification else ""
    checks = "".join(map(_checks, report.certificates))
    yield folded("Every check of every run", checks)
    yield "<h2>How it was measured</h2>"
    yield bullets(tables.health(report))
    yield from (folded(table.title, table) for table in verdicts.details(report))
    yield folded("Comparisons, with the smallest effect the data could have shown", tables.comparisons(report))
    yield folded("Runs: warm-up, outliers and loss", tables.run_details(report))
    yield from (folded(f"Machine {table.title}", table) for table in tables.machine_facts(report))
    yield folded("Folders that could not be read", bullets(report.skipped))


def section(title: str, table: Table | None) -> str:
    return f"<h2>{escape(title)}</h2>{render(table)}" if table else ""


def folded(summary: str, content: Table | str | None) -> str:
    """Evidence on demand; nothing where there is none. A text is HTML already."""
    inner = render(content) if isinstance(content, Table) else content
    return f"<details><summary>{escape(summary)}</summary>{inner}</details>" if inner else ""


def _checks(certificate: Certificate) -> str:
    mark = tables.TICK if certificate.valid else tables.CROSS
    return folded(f"{mark} {certificate.run}", tables.checks(certificate))


def render(table: Table) -> str:
    head = "".join(f"<th{_kind(column)}>{_heading(column)}</th>" for column in table.columns)
    rows = "".join(_row(table, row) for row in table.rows)
    body = f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
    return body + bullets(table.notes)


def _row(table: Table, row: Iterable[Cell]) -> str:
    pairs = zip(table.columns, row, strict=True)
    return f"<tr>{''.join(f'<td{_kind(column)}>{_cell(cell)}</td>' for column, cell in pairs)}</tr>"


def _heading(column: Column) -> str:
    return escape(column.name) + (f"<small>{escape(column.unit)}</small>" if column.unit else "")


def _kind(column: Column) -> str:
    return ' class="n"' if column.numeric else ' class="prose"' if column.prose else ""


def _cell(cell: Cell) -> str:
    shown = escape(cell.text)
    if cell.tone == "code":
        shown = f"<code>{shown}</code>"
    elif cell.tone:
        shown = f'<span class="{cell.tone}">{shown}</span>'
    return shown + (f"<small>{escape(cell.detail)}</small>" if cell.detail else "")


def paragraph(value: str, css: str = "") -> str:
    opening = f'<p class="{css}">' if css else "<p>"
    return f"{opening}{escape(value)}</p>" if value else ""


def bullets(lines: Iterable[str]) -> str:
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f'<ul class="notes">{items}</ul>' if items else ""


def figure(report: Report, name: str) -> str:
    """One chart inside the page: its ids made unique, its neutral colours those of the theme, nothing to load."""
    svg = plots.image(report, name, "svg").decode()
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    tag, rest = svg.split(">", 1)
    box = re.search(r'viewBox="[^"]*"', tag)
    rest = re.sub(r'( id="|url\(#|href="#)', rf"\g<1>{name}-", rest)
    for colour, variable in THEME.items():
        rest = rest.replace(colour, f"var({variable})")
    label = escape(name.replace("_", " "))
    return f'<figure><svg role="img" aria-label="{label}" {box.group() if box else ""}>{rest}</figure>'
