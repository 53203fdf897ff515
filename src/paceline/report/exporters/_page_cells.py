"""One panel per cell: how it ended, how to repeat it, everything measured of it, and its certificates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from typing import TypeVar

from paceline.analysis.findings import Certificate, Measurement, Recipe, Report, RunFinding
from paceline.report.exporters._page_tables import about, folded, paragraph, render
from paceline.report.tables import table
from paceline.report.tables.table import Cell, Column, Table
from paceline.report.text.cells import cell_name, varying_axes
from paceline.wording import format_parts, scale_of

COLUMNS = (Column("metric"), Column("value", True), Column("unit"))
# A sweep holds thousands of rows of one cell; its own tables show them.
MOST_MEASUREMENTS = 60
# Beyond this many runs, valid certificates are one line each: 500 tables are megabytes.
MOST_CERTIFICATES = 200

Found = TypeVar("Found", RunFinding, Measurement, Certificate)


def panels(report: Report) -> Iterator[str]:
    """Every requested cell by name, because runs are shuffled; references are left out."""
    named = varying_axes(report)
    runs = _by_cell(run for run in report.runs if not run.is_reference)
    measured, certified = _by_cell(report.measurements), _by_cell(report.certificates)
    doubted = _by_cell(report.doubted)
    brief = len(report.certificates) > MOST_CERTIFICATES
    recipes = {recipe.cell: recipe for recipe in report.recipes}
    names = {cell: cell_name(report, cell, ours[0].axes, named) for cell, ours in runs.items()}
    for cell, ours in sorted(runs.items(), key=lambda item: names[item[0]]):
        inner = (
            "".join(paragraph(reason, "bad") for reason in dict.fromkeys(run.reason or "" for run in ours)),
            _recipe(recipes.get(cell)),
            _measurements(measured.get(cell, ())),
            _doubted(doubted.get(cell, ())),
            "".join(_certificate(c, brief) for c in certified.get(cell, ())),
        )
        title = f"<b>{escape(names[cell])}</b>{_badge(ours)}"
        opening = f'<details class="cell" id="cell-{escape(cell)}"{about((cell,))}>'
        yield f"{opening}<summary>{title}</summary>{''.join(inner)}</details>"


def _by_cell(found: Iterable[Found]) -> dict[str, list[Found]]:
    by_cell: dict[str, list[Found]] = {}
    for one in found:
        by_cell.setdefault(one.cell, []).append(one)
    return by_cell


def _badge(runs: Sequence[RunFinding]) -> str:
    counts = Counter(run.status for run in runs)
    tone = "quiet" if set(counts) == {"ok"} else "bad"
    return f'<span class="{tone}">{escape(", ".join(f"{n} {status}" for status, n in counts.items()))}</span>'


def _recipe(recipe: Recipe | None) -> str:
    if recipe is None:
        return ""
    file, command = escape(recipe.file), escape(recipe.command)
    return (
        f'<h4>Command</h4><div class="recipe"><pre tabindex="0">{command}</pre></div>'
        f'<h4>{file}</h4><div class="recipe" data-file="{file}">'
        f'<pre tabindex="0">{escape(recipe.experiment)}</pre></div>'
    )


def _measurements(found: Sequence[Measurement]) -> str:
    """Measurements with a value; the names of the others, so that nothing missing goes unnoticed."""
    if len(found) > MOST_MEASUREMENTS:
        return paragraph(f"{len(found):,} measurements: see the tables above and metrics.csv.", "quiet")
    known = [m for m in found if m.value is not None]
    missing = [m.metric for m in found if m.value is None]
    rows = tuple(_measured(m) for m in known)
    stands = dict.fromkeys(f"{m.n} samples of {m.launches} launch{'' if m.launches == 1 else 'es'}." for m in known)
    absent = (f"Not measured: {', '.join(missing)}.",) if missing else ()
    return render(Table("", COLUMNS, rows, (*stands, *absent))) if found else ""


def _doubted(found: Sequence[Measurement]) -> str:
    return paragraph("Unreliable, excluded from comparisons:", "bad") + _measurements(found) if found else ""


def _measured(m: Measurement) -> tuple[Cell, ...]:
    scale = scale_of(m.unit, m.metric, (m.value,))
    value = Cell(*format_parts(m.value, m.low, m.high, scale))
    return Cell(m.metric), value, Cell(scale.unit)


def _certificate(certificate: Certificate, brief: bool) -> str:
    """A run that is not certified always shows all its checks."""
    mark = table.TICK if certificate.valid else table.CROSS
    if brief and certificate.valid:
        return paragraph(f"{mark} certificate of {certificate.run}: {len(certificate.checks)} checks agree.", "quiet")
    return folded(f"{mark} certificate of {certificate.run}", table.checks(certificate))
