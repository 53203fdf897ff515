"""Compilation: what it costs once beside what it saves per step."""

from __future__ import annotations

from paceline.analysis.findings import CompileCost, Report
from paceline.analysis.findings.cell_axes import describe, distinguishing_axes
from paceline.report.tables.table import Column, Filled, Table, filled, numeric
from paceline.report.tables.tradeoffs import SPEED_WORDS

_NOTE = (
    "Compile time: how much longer the first steps took than later ones, less the same of the cell without "
    "compilation; the longest launch, and the shortest, which may have found a filled cache. Pays after: compile time "
    "over the time saved per step."
)


def _pays(row: CompileCost) -> str:
    return "never" if row.pays_after_steps is None else f"{row.pays_after_steps:,}"


def tables(report: Report) -> tuple[Table, ...]:
    """Empty unless a compiled cell was compared with the same one without compilation."""
    rows = report.compilations
    named = distinguishing_axes([row.axes for row in rows]) if rows else ()
    columns: tuple[Filled[CompileCost], ...] = (
        (Column("what", prose=True), lambda row: describe(row.axes, [name for name in named if name != "compile"])),
        (Column("mode"), lambda row: row.mode if row.scope is None else f"{row.mode}, each {row.scope}"),
        (numeric("compile time, s"), lambda row: f"{row.compile_s:.3g}"),
        (numeric("shortest, s", 1), lambda row: f"{row.cached_s:.3g}"),
        (numeric("speed, times"), lambda row: f"{row.speed:.2f} {SPEED_WORDS[row.verdict]}"),
        (numeric("pays after, steps"), _pays),
    )
    found = filled("Compilation, and when it pays", rows, columns, [_NOTE], lambda row: (row.cell,))
    return (found,) if found is not None else ()
