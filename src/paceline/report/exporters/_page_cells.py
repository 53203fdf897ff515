"""One panel per cell: how it ended, how to repeat it, everything measured of it, and its certificates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from typing import TypeVar

from paceline.analysis.findings import Certificate, Measurement, Report, RunFinding
from paceline.report.exporters._page_tables import about, folded, paragraph, render
from paceline.report.tables import table
from paceline.report.tables.table import Cell, Column, Table, measured_cell
from paceline.report.text.cells import cell_name, varying_axes
from paceline.wording import scale_of

COLUMNS = (Column("metric"), Column("value", True), Column("unit"))
# A sweep has thousands of rows per cell; its own tables show them.
MOST_MEASUREMENTS = 60
# Beyond this many runs, valid certificates are one line each: 500 tables are megabytes.
MOST_CERTIFICATES = 200

Found = TypeVar("Found", RunFinding, Measurement, Certificate)


def panels(report: Report) -> Iterator[str]:
    """Every requested cell by name, because runs are shuffled; references are left out."""
    named = varying_axes(report)
    runs = _by_cell(run for run in report.runs if not run.is_reference)
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
            title = f"{table.TICK if certificate.valid else table.CROSS} certificate of {certificate.run}"
            # A run that is not certified always shows all its checks.
            if certificate.valid and len(report.certificates) > MOST_CERTIFICATES:
                parts.append(paragraph(f"{title}: {len(certificate.checks)} checks agree.", "quiet"))
            else:
                parts.append(folded(title, table.checks(certificate)))
        counts = Counter(run.status for run in ours)
        ended = escape(", ".join(f"{n} {status}" for status, n in counts.items()))
        badge = f'<span class="{"quiet" if set(counts) == {"ok"} else "bad"}">{ended}</span>'
        opening = f'<details class="cell" id="cell-{escape(cell)}"{about((cell,))}>'
        yield f"{opening}<summary><b>{escape(names[cell])}</b>{badge}</summary>{''.join(parts)}</details>"


def _by_cell(found: Iterable[Found]) -> dict[str, list[Found]]:
    by_cell: dict[str, list[Found]] = {}
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
    return render(Table("", COLUMNS, rows, (*counts, *absent))) if found else ""
