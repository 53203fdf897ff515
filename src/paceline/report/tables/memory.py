"""Memory by component and the frontier."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from paceline.analysis.findings import FrontierPoint, MemoryRow, Report
from paceline.analysis.findings.cell_axes import describe
from paceline.report.tables.table import CROSS, TICK, Cell, Column, Filled, Table, filled, numeric
from paceline.results.memory_components import COMPONENTS
from paceline.wording import MISSING, Scale, format_number, format_parts

GIB, MIB = Scale("GiB", 2.0**-30), Scale("MiB", 2.0**-20)
# Errors above this are marked; it is also the goal for the median.
GOOD_ERROR = 0.05
# A prediction is shown beside the measurement if the two differ by more than this.
SAME = 0.005


def tables(report: Report) -> tuple[Table, ...]:
    """Empty if the report has no such runs."""
    found = (components(report.memory), frontier(report.frontier))
    return tuple(table for table in found if table is not None)


def sentence(report: Report) -> str:
    """How well peaks were predicted, and the largest micro batch of each search."""
    errors = _errors(report.memory)
    said = []
    if errors:
        said.append(
            f"Predicted peaks are off by {_percent(statistics.median(errors))} at the median of {len(errors)} cells, "
            f"by {_percent(errors[-1])} at worst."
        )
    for point in report.frontier:
        if point.largest_fitting is not None:
            where = f"{point.series}, sequence {point.sequence_length}"
            said.append(f"The largest micro batch that fits is {point.largest_fitting} ({where}).")
    return " ".join(said)


def _errors(rows: Sequence[MemoryRow]) -> list[float]:
    return sorted(abs(row.error_ratio) for row in rows if row.error_ratio is not None)


def labels(rows: Sequence[MemoryRow]) -> dict[str, str]:
    """Each cell by its strategy and the axes in which the rows differ."""
    names = [name for name in (rows[0].axes if rows else ()) if name not in ("strategy", "workload", "steps", "seed")]
    differing = [n for n in names if len({repr(row.axes.get(n)) for row in rows}) > 1 and n != "global_batch"]
    return {row.cell: describe(row.axes, differing) for row in rows}


def scale(rows: Sequence[MemoryRow]) -> Scale:
    """GiB, or MiB where some peak is below one GiB: all rows must read well."""
    peaks = [size for row in rows for size in (row.measured.get("peak"), row.predicted.get("peak")) if size]
    return GIB if min(peaks, default=0) >= 2**30 else MIB


def components(rows: Sequence[MemoryRow]) -> Table | None:
    """One row per cell: the measured sizes, and below them the predicted ones if they differ."""
    unit, names, errors = scale(rows), labels(rows), _errors(rows)
    shown = [name for name in (*COMPONENTS, "fragmentation") if any(row.measured.get(name) for row in rows)]

    def number(size: int | None) -> str:
        return format_parts(size, None, None, unit)[0]

    def component(name: str, priority: int) -> Filled[MemoryRow]:
        def cell(row: MemoryRow) -> Cell:
            measured, predicted = row.measured.get(name), row.predicted.get(name)
            if measured is None or predicted is None or abs(predicted - measured) <= SAME * max(measured, predicted):
                return Cell(number(measured))
            return Cell(number(measured), number(predicted))

        return numeric(f"{name}, {unit.unit}", priority), cell

    columns: tuple[Filled[MemoryRow], ...] = (
        (Column("what", prose=True), lambda row: names[row.cell]),
        *(component(name, i + 1) for i, name in enumerate(shown)),
        (numeric(f"peak, {unit.unit}"), lambda row: number(row.measured.get("peak"))),
        (numeric(f"predicted, {unit.unit}"), lambda row: number(row.predicted.get("peak"))),
        (numeric("error, %"), lambda row: error_cell(row.error_ratio)),
    )
    ordered = sorted(rows, key=lambda row: names[row.cell])
    notes = [
        "The process with the highest peak of each cell; small print: predicted, if it differs. Each component is "
        "shown at its own maximum: gradients grow while activations are freed, so the sum may exceed the peak."
    ]
    if errors:
        ninth = errors[min(len(errors) - 1, -(-9 * len(errors) // 10) - 1)]
        notes.append(
            f"Error of the predicted peak over {len(errors)} cells: median {_percent(statistics.median(errors))}, "
            f"90th percentile {_percent(ninth)}, largest {_percent(errors[-1])}."
        )
    notes += dict.fromkeys(f"{names[row.cell]}: {row.note}" for row in ordered if row.note)
    return filled("Memory by component", ordered, columns, notes, lambda row: (row.cell,))


def error_cell(ratio: float | None) -> Cell:
    """The error of a prediction with its sign, marked if it is large."""
    if ratio is None:
        return Cell(MISSING)
    text = format_number(100 * ratio, 1)
    sign = "" if ratio < 0 or text == "0.0" else "+"
    return Cell(f"{sign}{text}", "", "bad" if abs(ratio) > GOOD_ERROR else "")


def _percent(ratio: float) -> str:
    return f"{100 * ratio:.2g} %" if ratio >= 1e-4 else "under 0.01 %"


def frontier(points: Sequence[FrontierPoint]) -> Table | None:
    """One row per search: the micro batches around the limit, and every probe."""
    marks = {"ok": TICK, "oom": CROSS}
    columns: tuple[Filled[FrontierPoint], ...] = (
        (Column("series", prose=True), lambda point: point.series),
        (numeric("sequence"), lambda point: str(point.sequence_length)),
        (
            numeric("largest that fits"),
            lambda point: Cell(_count(point.largest_fitting), "" if point.settled else "not settled"),
        ),
        (numeric("smallest that does not"), lambda point: _count(point.smallest_failing)),
        (numeric("predicted", 1), lambda point: _count(point.predicted)),
        (
            Column("probes", prose=True, priority=2),
            lambda point: ", ".join(f"{p.micro_batch} {marks.get(p.status, p.status)}" for p in point.probes),
        ),
    )
    note = (
        "Each micro batch was tried in its own processes. If the two are neighbours, every size in between was tried."
    )
    return filled("Largest micro batch that fits", points, columns, (note,))


def _count(value: int | None) -> str:
    return MISSING if value is None else str(value)
