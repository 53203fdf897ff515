"""Layouts: bytes over each mesh dimension beside their formula, and the bubble of pipelines."""

from __future__ import annotations

from paceline.analysis.findings import LayoutRow, Report
from paceline.analysis.findings.cell_axes import describe, distinguishing_axes
from paceline.report.tables.table import Column, Filled, Table, filled, numeric
from paceline.wording import MISSING, Scale, format_parts

WORDS = {
    "tp": "tensor parallel",
    "pp": "pipeline",
    "cp": "context parallel",
    "ep": "expert parallel",
    "shard": "sharding",
    "replicate": "replicas",
}
MIB = Scale("MiB", 2.0**-20)


def tables(report: Report) -> tuple[Table, ...]:
    """Empty without a layout."""
    rows = report.layouts
    named = distinguishing_axes([row.axes for row in rows]) if rows else ()
    columns: tuple[Filled[LayoutRow], ...] = (
        (Column("what", prose=True), lambda row: describe(row.axes, named)),
        (Column("dimension"), lambda row: WORDS.get(row.dimension, row.dimension)),
        (numeric("ranks"), lambda row: str(row.size)),
        (numeric("counted, MiB/step"), lambda row: _mib(row.counted_bytes)),
        (numeric("formula, MiB/step"), lambda row: _mib(row.formula_bytes)),
        (numeric("idle, %", 1), lambda row: _percent(row.idle_ratio)),
        (numeric("idle by formula, %", 1), lambda row: _percent(row.idle_formula_ratio)),
    )
    formulas = {row.dimension: row.formula for row in rows}
    notes = [
        "Bytes that the busiest rank sends per optimizer step. Idle: share of a pipeline's step in which a rank "
        "computes nothing, mean over ranks; the formula assumes stages that take equally long (docs/layouts.md).",
        *(f"{WORDS.get(name, name)}: {formula}." for name, formula in formulas.items()),
    ]
    table = filled("Traffic by mesh dimension", rows, columns, notes, lambda row: (row.cell,))
    return (table,) if table is not None else ()


def _mib(size: float | None) -> str:
    return format_parts(size, None, None, MIB)[0]


def _percent(ratio: float | None) -> str:
    return MISSING if ratio is None else f"{100 * ratio:.3g}"
