"""What served tokens cost at the load that limits allow: in the hours it runs, and in all hours of the day."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from paceline.analysis.findings import Measurement, Report
from paceline.analysis.findings.cost import ServedCost
from paceline.host.prices import GIVEN, SPOT
from paceline.report.tables.cost import LIST_PRICES, PER_PROCESS
from paceline.report.tables.table import Cell, Column, Table
from paceline.report.text.cells import cell_name, varying_axes
from paceline.wording import MISSING, format_parts

ENERGY = "joules_per_output_token"
SPLIT = (
    "Prompts and answers are computed in the same batches and no clock divides them: per output token the whole cost "
    "lies on answered tokens, per token on asked and answered ones alike."
)


def tables(report: Report) -> tuple[Table, ...]:
    """Each cell at its lowest price that is not spot; other prices are in metrics.csv and are proportional. Then what
    energy tokens took, where it is known."""
    rows = _leads(report.served_costs)
    energy = [m for m in report.measurements if m.metric == ENERGY and m.value is not None]
    return (*((_table(report, rows),) if rows else ()), *((_energy(report, energy),) if energy else ()))


def _energy(report: Report, found: Sequence[Measurement]) -> Table:
    named = varying_axes(report)
    columns = (Column("what", prose=True), Column("per output token, J", numeric=True), Column("how", prose=True))
    rows = tuple((Cell(cell_name(report, m.cell, m.axes, named)), _number(m), Cell(m.note or "")) for m in found)
    note = "Of all devices of all replicas while the load was on, idle ones too, over the tokens it answered."
    return Table("Energy of served tokens", columns, rows, (note,), tuple((m.cell,) for m in found))


def _leads(costs: Sequence[ServedCost]) -> list[ServedCost]:
    by_cell: dict[str, list[ServedCost]] = {}
    for row in costs:
        by_cell.setdefault(row.cell, []).append(row)
    return [next((row for row in found if row.price.kind != SPOT), found[0]) for found in by_cell.values()]


def _table(report: Report, rows: Sequence[ServedCost]) -> Table:
    named = varying_axes(report)
    columns = (
        Column("what", prose=True),
        Column("load", priority=2),
        Column("limits"),
        Column("all devices, USD/h", numeric=True, priority=1),
        Column("busy per output, USD/Mtoken", numeric=True),
        Column("busy per token, USD/Mtoken", numeric=True, priority=2),
        Column("reserved per output, USD/Mtoken", numeric=True),
        Column("reserved per token, USD/Mtoken", numeric=True, priority=3),
    )
    shown = tuple(_row(cell_name(report, row.cell, row.axes, named), row) for row in rows)
    notes = tuple(dict.fromkeys(_notes(rows)))
    return Table("Cost of served tokens", columns, shown, notes, tuple((row.cell,) for row in rows))


def _row(label: str, row: ServedCost) -> tuple[Cell, ...]:
    words = {True: "kept" if row.is_proved else "kept, not proved", False: "not kept", None: "none set"}[row.is_kept]
    tone = {True: "good" if row.is_proved else "quiet", False: "bad", None: "quiet"}[row.is_kept]
    devices = f"{row.devices} device{'' if row.devices == 1 else 's'}"
    return (
        Cell(label),
        Cell(row.load or "the whole run"),
        Cell(words, row.kept if row.is_kept is not None else "", tone),
        Cell(format_parts(row.usd_per_hour, None, None)[0], devices),
        *(
            _number(m)
            for m in (
                row.usd_per_output_mtok,
                row.usd_per_mtok,
                row.reserved_usd_per_output_mtok,
                row.reserved_usd_per_mtok,
            )
        ),
    )


def _number(m: Measurement | None) -> Cell:
    return Cell(MISSING) if m is None else Cell(*format_parts(m.value, m.low, m.high))


def _notes(rows: Sequence[ServedCost]) -> Iterator[str]:
    for row in rows:
        yield f"{row.price.origin}."
    yield (
        f"Busy: the hours the load runs. Reserved: all hours of the day, of which {rows[0].busy_hours:g} run it; that "
        "is an assumption (--busy-hours)."
    )
    yield SPLIT
    if any(row.price.kind != GIVEN for row in rows):
        yield LIST_PRICES
    if any(row.axes.get("device") == "cpu" for row in rows):
        yield f"{PER_PROCESS} An endpoint that does not report its devices counts as one."
