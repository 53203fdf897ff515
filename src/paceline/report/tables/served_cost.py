"""What served tokens cost at the load that limits allow: in the hours it runs, and in all hours of the day."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from paceline.analysis.findings import Measurement, Report
from paceline.analysis.findings.cost import ServedCost
from paceline.host.prices import GIVEN, SPOT
from paceline.report.tables.cost import LIST_PRICES, PER_PROCESS
from paceline.report.tables.table import Cell, Column, Filled, Table, filled, measured_cell, numeric
from paceline.report.text.cells import cell_name, varying_axes
from paceline.wording import format_parts

ENERGY = "joules_per_output_token"
SPLIT = (
    "Prompts and answers are computed in the same batches, so their costs cannot be separated: per output token, the "
    "whole cost counts for output tokens; per token, it is spread over prompt and output tokens."
)


def tables(report: Report) -> tuple[Table, ...]:
    """Each cell at its lowest price that is not spot; other prices are in metrics.csv and are proportional. Then the
    energy of tokens, if it is known."""
    named = varying_axes(report)
    by_cell: dict[str, list[ServedCost]] = {}
    for row in report.served_costs:
        by_cell.setdefault(row.cell, []).append(row)
    rows = [next((row for row in found if row.price.kind != SPOT), found[0]) for found in by_cell.values()]
    costs: tuple[Filled[ServedCost], ...] = (
        (Column("what", prose=True), lambda row: cell_name(report, row.cell, row.axes, named)),
        (Column("load", priority=2), lambda row: row.load or "the whole run"),
        (Column("limits"), _limits),
        (
            numeric("all devices, USD/h", 1),
            lambda row: Cell(
                format_parts(row.usd_per_hour, None, None)[0], f"{row.devices} device{'' if row.devices == 1 else 's'}"
            ),
        ),
        (numeric("busy per output, USD/Mtoken"), lambda row: measured_cell(row.usd_per_output_mtok)),
        (numeric("busy per token, USD/Mtoken", 2), lambda row: measured_cell(row.usd_per_mtok)),
        (numeric("reserved per output, USD/Mtoken"), lambda row: measured_cell(row.reserved_usd_per_output_mtok)),
        (numeric("reserved per token, USD/Mtoken", 3), lambda row: measured_cell(row.reserved_usd_per_mtok)),
    )
    energy: tuple[Filled[Measurement], ...] = (
        (Column("what", prose=True), lambda m: cell_name(report, m.cell, m.axes, named)),
        (numeric("per output token, J"), measured_cell),
        (Column("how", prose=True), lambda m: m.note or ""),
    )
    known = [m for m in report.measurements if m.metric == ENERGY and m.value is not None]
    note = "Energy of all devices of all replicas during the load, idle ones included, divided by the output tokens."
    found = (
        filled("Cost of served tokens", rows, costs, dict.fromkeys(_notes(rows)), lambda row: (row.cell,)),
        filled("Energy of served tokens", known, energy, (note,), lambda m: (m.cell,)),
    )
    return tuple(table for table in found if table)


def _limits(row: ServedCost) -> Cell:
    words = {True: "kept" if row.is_proved else "kept, not proved", False: "not kept", None: "none set"}[row.is_kept]
    tone = {True: "good" if row.is_proved else "quiet", False: "bad", None: "quiet"}[row.is_kept]
    return Cell(words, row.kept if row.is_kept is not None else "", tone)


def _notes(rows: Sequence[ServedCost]) -> Iterator[str]:
    if not rows:
        return
    yield from (f"{row.price.origin}." for row in rows)
    yield (
        f"Busy: the hours the load runs. Reserved: all hours of the day, of which {rows[0].busy_hours:g} run it; that "
        "is an assumption (--busy-hours)."
    )
    yield SPLIT
    if any(row.price.kind != GIVEN for row in rows):
        yield LIST_PRICES
    if any(row.axes.get("device") == "cpu" for row in rows):
        yield f"{PER_PROCESS} An endpoint that does not report its devices counts as one."
