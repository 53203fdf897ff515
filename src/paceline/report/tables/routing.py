"""Mixture of experts: how evenly tokens are spread over experts and ranks."""

from __future__ import annotations

from paceline.analysis.findings import Report, RoutingRow
from paceline.analysis.findings.cell_axes import describe, distinguishing_axes
from paceline.report.tables.table import Column, Filled, Table, filled, numeric
from paceline.wording import MISSING


def tables(report: Report) -> tuple[Table, ...]:
    """Empty without a mixture of experts."""
    rows = report.routings
    named = distinguishing_axes([row.axes for row in rows]) if rows else ()
    columns: tuple[Filled[RoutingRow], ...] = (
        (Column("what", prose=True), lambda row: describe(row.axes, named)),
        (Column("experts per token"), lambda row: f"{row.experts_per_token} of {row.experts}"),
        (Column("products"), lambda row: row.products or MISSING),
        (numeric("busiest expert / mean"), lambda row: f"{row.imbalance_ratio:.3g}"),
        (numeric("worst layer / mean"), lambda row: f"{row.worst_layer_ratio:.3g}"),
        (numeric("busiest rank / mean"), lambda row: _ratio(row.rank_imbalance_ratio)),
        (numeric("balance term"), lambda row: f"{row.balance:.4g}"),
    )
    notes = [
        "Tokens of the busiest expert of a layer in a step over the mean of all experts: the mean over layers and "
        "steps, and for the layer with the largest mean. With expert parallelism, the same for the rows that ranks "
        "compute. The balance term equals the experts per token if all experts are chosen equally often (docs/moe.md)."
    ]
    table = filled("Tokens per expert", rows, columns, notes, lambda row: (row.cell,))
    return (table,) if table is not None else ()


def _ratio(value: float | None) -> str:
    return MISSING if value is None else f"{value:.3g}"
