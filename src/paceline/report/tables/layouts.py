"""Layouts: bytes over each mesh dimension beside their formula, and the bubble of pipelines."""

from __future__ import annotations

from paceline.analysis.findings import LayoutRow, Report
from paceline.analysis.findings.cell_axes import describe, distinguishing_axes
from paceline.experiment.layout import DIMENSIONS
from paceline.report.tables.table import Column, Filled, Table, filled, numeric
from paceline.wording import MISSING, Scale, format_parts

MIB = Scale("MiB", 2.0**-20)


def tables(report: Report) -> tuple[Table, ...]:
    """Empty without a layout."""
    rows = report.layouts
    named = distinguishing_axes([row.axes for row in rows]) if rows else ()
    columns: tuple[Filled[LayoutRow], ...] = (
        (Column("what", prose=True), lambda row: describe(row.axes, named)),
        (Column("dimension"), lambda row: DIMENSIONS.get(row.dimension, row.dimension)),
        (numeric("ranks"), lambda row: str(row.size)),
        (numeric("counted, MiB/step"), lambda row: _mib(row.counted_bytes)),
        (numeric("formula, MiB/step"), lambda row: _mib(row.formula_bytes)),
        (numeric("exposed, %", 1), lambda row: _percent(row.exposed_ratio)),
        (numeric("idle, %", 1), lambda row: _percent(row.idle_ratio)),
        (numeric("idle by formula, %", 1), lambda row: _percent(row.idle_formula_ratio)),
    )
    formulas = {row.dimension: row.formula for row in rows}
    notes = [
        "Bytes that the busiest rank sends per optimizer step. Exposed: share of a step in which something is sent "
        "over the dimension while the rank computes nothing; in a pipeline this contains waiting for other stages. "
        "Idle: share of a pipeline's step in which a rank computes nothing; the formula assumes stages that take "
        "equally long. Both are means over ranks (docs/layouts.md).",
        *(text for row in rows if (text := _balance(row, describe(row.axes, named)))),
        *(f"{DIMENSIONS.get(name, name)}: {formula}." for name, formula in formulas.items()),
    ]
    table = filled("Traffic by mesh dimension", rows, columns, notes, lambda row: (row.cell,))
    return (table,) if table is not None else ()


def _balance(row: LayoutRow, name: str) -> str:
    """The balance of a pipeline's stages, and a better split if there is one."""
    if row.balance_ratio is None or row.best_balance_ratio is None:
        return ""
    own = f"{name}: with {row.split} layers the slowest stage takes {row.balance_ratio:.3g} times the mean of all"
    if row.best_split == row.split:
        return f"{own}; no other split is faster, by measured forward times."
    better = f"with layers={row.best_split} it would take {row.best_balance_ratio:.3g} times"
    return f"{own}; {better}, by measured forward times."


def _mib(size: float | None) -> str:
    return format_parts(size, None, None, MIB)[0]


def _percent(ratio: float | None) -> str:
    return MISSING if ratio is None else f"{100 * ratio:.3g}"
