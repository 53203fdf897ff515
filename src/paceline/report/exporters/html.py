"""report.html: one page with everything inside, for people; opens from disk and loads nothing."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

from paceline.analysis.findings import Certificate, Measurement, Report, RunFinding
from paceline.analysis.findings.cell_axes import axis_text, describe
from paceline.errors import Scalar
from paceline.host.files import write_atomically
from paceline.report.charts import Chart, Point, charts
from paceline.report.exporters._page_parts import (
    about,
    block,
    bullets,
    document,
    figures,
    first_screen,
    folded,
    paragraph,
    policy,
    render,
    scripted,
)
from paceline.report.sections import Section, sections
from paceline.report.summary import summarise
from paceline.report.tables import table as tables
from paceline.report.tables.table import Cell, Column, Table, measured_cell, numeric
from paceline.report.text.cells import cell_name, throughput_comparisons, varying_axes
from paceline.wording import scale_of

OfCell = TypeVar("OfCell", RunFinding, Measurement, Certificate)
CELL_COLUMNS = (Column("metric"), numeric("value"), Column("unit"))
# A sweep has thousands of rows per cell; its own tables show them.
MOST_MEASUREMENTS = 60
# Beyond this many runs, valid certificates are one line each: 500 tables are megabytes.
MOST_CERTIFICATES = 200
DIGITS = 6  # far beyond what an axis shows
SCRIPTS = ("vendor/d3.min.js", "vendor/plot.umd.min.js", "charts.js", "page.js")
# Rows of a folded table; report.json has all.
MOST_ROWS = 1000
# More tables than these in a row are behind one line.
MOST_FOLDED = 6
# Tables of a section that are open; the ranking is open as a whole.
OPEN_TABLES = 1
# The section that follows the first screen: the first of these that the report has.
FIRST = ("effects", "ranking", "served", "nodes", "machine")


def export(report: Report, directory: Path) -> list[Path]:
    return [write_atomically(directory / "report.html", text(report))]


def text(report: Report, above: str = "") -> str:
    """The whole page. Only its own scripts may run, identified by their hashes; nothing may be loaded.

    above: HTML before the page, such as links to others.
    """
    found = charts(report)
    body = "\n".join(part for part in _parts(report, found) if part)
    return page(report.title, body, _data(report, found), above)


def page(title: str, body: str, data: str, above: str = "") -> str:
    """A page of this body with the data of its charts."""
    sources = [asset(name) for name in SCRIPTS]
    hashes = (base64.b64encode(hashlib.sha256(source.encode()).digest()).decode() for source in sources)
    allowed = " ".join(f"'sha256-{value}'" for value in hashes)
    rules = (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'; "
        "form-action 'none'"
    )
    head = f"{policy(rules)}\n<style>{asset('page.css')}</style>"
    below = scripted(data, "\n".join(f"<script>{source}</script>" for source in sources))
    return document(f"{title}: Paceline report", head, body, above, below)


@cache
def asset(name: str) -> str:
    """A file of the page's folder."""
    return resources.files(__package__).joinpath("page", *name.split("/")).read_text(encoding="utf-8")


def _parts(report: Report, found: tuple[Chart, ...]) -> Iterator[str]:
    """The first screen, the filters, what was measured, then everything that proves it, folded."""
    linked = {run.cell for run in report.runs if not run.proves_only}
    summary = summarise(report, found)
    rest = tuple(chart for chart in found if chart.name != summary.chart)
    every = [section for section in sections(report, rest) if section.name != "certificates"]
    answers = FIRST if report.comparisons else ("tradeoffs", *FIRST)
    first = next((name for name in answers if any(section.name == name for section in every)), "")
    every.sort(key=lambda section: (section.name != first, section.name != "charts"))
    shown = [
        (section.name, section.title, _section(section, linked), section.name not in (first, "charts"))
        for section in every
    ]
    if panels := "".join(_panels(report)):
        text = "How each cell ended, the command and experiment that repeat it, its measurements and its certificate."
        method = next((i for i, (name, *_) in enumerate(shown) if name == "method"), len(shown))
        shown.insert(method, ("cells", "Every cell", paragraph(text, "quiet") + panels, True))
    links = "".join(f'<a href="#{name}">{escape(title)}</a>' for name, title, _, _ in shown)
    main = next((chart for chart in found if chart.name == summary.chart), None)
    proof, nav = tables.certification(report), f'<nav aria-label="Sections">{links}</nav>'
    yield (
        f'<header><div class="top"><h1>{escape(report.title)}</h1><div class="badges">{"".join(_chips(report))}</div>'
        '<button type="button" id="theme" class="scripted">Dark</button></div>'
        f"{first_screen(summary, main, render(proof) if proof else '', nav)}</header>"
    )
    yield '<div id="filters" class="filters" role="group" aria-label="Filters" hidden></div>'
    for name, title, inner, is_folded in shown:
        if is_folded:
            head = f"<summary><h2>{escape(title)}</h2></summary>"
            yield f'<section><details class="part" id="{name}">{head}{inner}</details></section>'
        else:
            yield f'<section id="{name}"><h2>{escape(title)}</h2>{inner}</section>'
    made = f"Paceline {report.paceline_version}, {tables.created(report)}. Brackets are 95 % intervals."
    yield f'<footer>{escape(made)}<p class="printed">Collapsed sections are not printed.</p></footer>'


def _chips(report: Report) -> Iterator[str]:
    """The runs, devices and hosts."""
    ours = [run for run in report.runs if not run.proves_only]
    statuses = Counter(run.status for run in ours)
    ended = ", ".join(f"{n} {status}" for status, n in statuses.items())
    runs = f"{len(ours)} run{'' if len(ours) == 1 else 's'}"
    devices = Counter(str(gpu.get("name")) for m in report.machines[:1] for gpu in m.get("gpus") or ())
    hosts = {str(machine.get("host")) for machine in report.machines}
    chips = [f"{runs}: {ended}" if set(statuses) - {"ok"} else runs]
    chips += [f"{n} \u00d7 {name}" for name, n in devices.items()]
    chips += [f"{len(hosts)} hosts"] if len(hosts) > 1 else []
    yield from (f'<span class="chip">{escape(words)}</span>' for words in chips)


def _section(section: Section, linked: set[str]) -> str:
    """The first table, the charts, the other tables, then what is folded."""
    blocks = [
        render(table, linked)
        if table.title == section.title
        else block(table.title.removeprefix(f"{section.title}: "), table, linked)
        for table in section.tables
    ]
    keep = len(blocks) if section.name == "ranking" else OPEN_TABLES
    further = (folded(table.title, table, linked) for table in section.tables[keep:])
    details = []
    for table in section.details:
        if len(table.rows) > MOST_ROWS:
            note = f"The first {MOST_ROWS:,} of {len(table.rows):,}; report.json has all."
            rows, cells = table.rows[:MOST_ROWS], table.cells[:MOST_ROWS]
            table = dataclasses.replace(table, rows=rows, cells=cells, notes=(note, *table.notes))
        details.append(folded(table.title, table, linked))
    if len(details) > MOST_FOLDED:
        details = [folded(f"Every row: {len(details)} tables", "".join(details))]
    parts = (
        paragraph(section.text) if section.name != "served" else "",
        *blocks[:1],
        figures(section.charts),
        *blocks[1:keep],
        *further,
        paragraph(section.note, "quiet"),
        *details,
        *(folded(title, bullets(lines)) for title, lines in section.bullets),
    )
    return "".join(parts)


# --- cells: how each ended, how to repeat it, its measurements and certificates ---


def _panels(report: Report) -> Iterator[str]:
    """Every requested cell by name, because runs are shuffled; references are left out."""
    named = varying_axes(report)
    runs = _by_cell(run for run in report.runs if not run.proves_only)
    measured, doubted = _by_cell(report.measurements), _by_cell(report.doubted)
    certificates = _by_cell(report.certificates)
    recipes = {recipe.cell: recipe for recipe in report.recipes}
    names = {cell: cell_name(report, cell, ours[0].axes, named) for cell, ours in runs.items()}
    for cell, ours in sorted(runs.items(), key=lambda item: names[item[0]]):
        parts = [paragraph(reason, "bad") for reason in dict.fromkeys(run.reason or "" for run in ours)]
        if recipe := recipes.get(cell):
            file = escape(recipe.file)
            parts += (
                f'<h4>Command</h4><div class="recipe"><pre tabindex="0">{escape(recipe.command)}</pre></div>',
                f'<h4>{file}</h4><div class="recipe" data-file="{file}">',
                f'<pre tabindex="0">{escape(recipe.experiment)}</pre></div>',
            )
        parts.append(_measurements(measured.get(cell, ())))
        if found := doubted.get(cell):
            parts += (paragraph("Unreliable, excluded from comparisons:", "bad"), _measurements(found))
        for certificate in certificates.get(cell, ()):
            level = f", {certificate.level_text}" if certificate.valid and certificate.level_text else ""
            title = f"{tables.TICK if certificate.valid else tables.CROSS} certificate of {certificate.run}{level}"
            # A run that is not certified always shows all its checks.
            if certificate.valid and len(report.certificates) > MOST_CERTIFICATES:
                parts.append(paragraph(f"{title}: {len(certificate.checks)} checks agree.", "quiet"))
            else:
                parts.append(folded(title, tables.checks(certificate)))
        counts = Counter(run.status for run in ours)
        ended = escape(", ".join(f"{n} {status}" for status, n in counts.items()))
        badge = f'<span class="{"quiet" if set(counts) == {"ok"} else "bad"}">{ended}</span>'
        opening = f'<details class="cell" id="cell-{escape(cell)}"{about((cell,))}>'
        yield f"{opening}<summary><b>{escape(names[cell])}</b>{badge}</summary>{''.join(parts)}</details>"


def _by_cell(found: Iterable[OfCell]) -> dict[str, list[OfCell]]:
    by_cell: dict[str, list[OfCell]] = {}
    for one in found:
        by_cell.setdefault(one.cell, []).append(one)
    return by_cell


def _measurements(found: Sequence[Measurement]) -> str:
    """Measurements with a value; the names of the others, so that nothing missing goes unnoticed."""
    if len(found) > MOST_MEASUREMENTS:
        return paragraph(f"{len(found):,} measurements: see the tables above and metrics.csv.", "quiet")
    known = [m for m in found if m.value is not None]
    missing = [m.metric for m in found if m.value is None]
    scales = [scale_of(m.unit, m.metric, (m.value,)) for m in known]
    rows = tuple(
        (Cell(m.metric), measured_cell(m, scale), Cell(scale.unit)) for m, scale in zip(known, scales, strict=True)
    )
    counts = dict.fromkeys(f"{m.n} samples of {m.launches} launch{'' if m.launches == 1 else 'es'}." for m in known)
    absent = (f"Not measured: {', '.join(missing)}.",) if missing else ()
    return render(Table("", CELL_COLUMNS, rows, (*counts, *absent))) if found else ""


# --- data of the page's script: charts, the axes to filter by, and the value of each cell on them ---


def chart_data(charts: Sequence[Chart], runs: Iterable[str] | None = None, **beside: Any) -> str:
    """The charts and what the script needs beside them, as JSON without `<`, so that it cannot end its element."""
    if runs is None:
        runs = dict.fromkeys(run for chart in charts for point in chart.points for run in point.runs)
    words, numbers = Words(), {run: i for i, run in enumerate(runs)}
    drawn = [
        _fields(chart)
        | {
            "points": [_point(point, words, numbers) for point in chart.points],
            "series": list(map(_fields, chart.series)),
        }
        for chart in charts
    ]
    known = {"axes": [], "cells": {}, "versus": {}, "names": {}} | beside
    value = {"charts": drawn, "runs": list(numbers), **known, "words": list(words.numbers)}
    return json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")


def _data(report: Report, charts: Sequence[Chart]) -> str:
    # Only axes that vary; of those that divide the cells alike only the first.
    cells = {run.cell: run for run in report.runs if not run.proves_only}
    axes, seen = [], set[tuple[int, ...]]()
    for name in dict.fromkeys(name for run in cells.values() for name in run.axes):
        # Numbers by size, then texts, missing values last.
        values = sorted({run.axes.get(name) for run in cells.values()}, key=_order)
        indexes = tuple(values.index(run.axes.get(name)) for run in cells.values())
        if len(values) > 1 and indexes not in seen:
            seen.add(indexes)
            axes.append((name, values, indexes))
    device = next((run.axes.get("device") for run in cells.values()), None)
    return chart_data(
        charts,
        [run.run for run in report.runs],
        axes=[
            {"name": name.replace("_", " "), "values": [_value_text(name, value, device) for value in values]}
            for name, values, _ in axes
        ],
        versus=_versus(report),
        names={cell: describe(run.axes, ()) for cell, run in cells.items()},
        cells={cell: [indexes[i] for _, _, indexes in axes] for i, cell in enumerate(cells)},
    )


def _versus(report: Report) -> dict[str, dict[str, tuple[str, str, str]]]:
    """By cell and other: the verdict on throughput, its interval and tone, for the baseline that a reader picks."""
    found: dict[str, dict[str, tuple[str, str, str]]] = {}
    for (cell, other), c in throughput_comparisons(report).items():
        text = tables.verdict_cell(c)
        found.setdefault(cell, {})[other] = text.text, text.detail, text.tone
    return found


def _order(value: Scalar) -> tuple[int, float, str]:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return 0, value, ""
    return (2, 0.0, "") if value is None else (1, 0.0, str(value))


def _value_text(name: str, value: Scalar, device: Scalar) -> str:
    if value is None:
        return "not set"
    if isinstance(value, bool):
        return "on" if value else "off"
    return axis_text(name, {name: value, "device": device}) if name == "world_size" else str(value)


class Words:
    """Texts by number: points of hundreds of cells share most of theirs, so each is written once."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def number(self, text: str) -> int:
        return self.numbers.setdefault(text, len(self.numbers))


def _point(point: Point, words: Words, numbers: Mapping[str, int]) -> dict[str, Any]:
    """Texts and runs as numbers; detail line by line."""
    fields = _fields(point)
    fields |= {name: words.number(fields[name]) for name in ("label", "group", "series") if name in fields}
    fields["cells"] = [words.number(cell) for cell in point.cells]
    if point.detail:
        fields["detail"] = [words.number(line) for line in point.detail.split("\n")]
    if point.runs:
        fields["runs"] = [numbers[run] for run in point.runs if run in numbers]
    return fields


def _fields(value: Any) -> dict[str, Any]:
    """Fields that differ from their defaults, which the script knows."""
    found = {field.name: (getattr(value, field.name), field.default) for field in dataclasses.fields(value)}
    return {name: _plain(inner) for name, (inner, default) in found.items() if inner != default}


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return _fields(value)
    if isinstance(value, tuple):
        return [_plain(inner) for inner in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value
