"""Memory by component and the frontier."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from paceline.analysis.findings import FrontierPoint, MemoryRow, Report
from paceline.analysis.findings.cell_axes import describe
from paceline.report.tables.table import CROSS, TICK, Cell, Column, Table
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
    """One row per cell: measured, and beneath it what was predicted where that differs."""
    if not rows:
        return None
    unit, names = scale(rows), labels(rows)
    shown = [name for name in (*COMPONENTS, "fragmentation") if any(row.measured.get(name) for row in rows)]
    columns = (
        Column("what", prose=True),
        *(Column(f"{name}, {unit.unit}", numeric=True, priority=i + 1) for i, name in enumerate(shown)),
        Column(f"peak, {unit.unit}", numeric=True),
        Column(f"predicted, {unit.unit}", numeric=True),
        Column("error, %", numeric=True),
    )
    ordered = sorted(rows, key=lambda row: names[row.cell])
    lines = tuple(
        (
            Cell(names[row.cell]),
            *(_beside(row.measured.get(name), row.predicted.get(name), unit) for name in shown),
            Cell(_number(row.measured.get("peak"), unit)),
            Cell(_number(row.predicted.get("peak"), unit)),
            _error(row.error_ratio),
        )
        for row in ordered
    )
    about = tuple((row.cell,) for row in ordered)
    return Table("Memory by component", columns, lines, _notes(ordered, names), about)


def _notes(rows: Sequence[MemoryRow], names: Mapping[str, str]) -> tuple[str, ...]:
    errors = _errors(rows)
    notes = [
        "The process with the highest peak of each cell; small print: predicted, if it differs. Each component is "
        "shown at its own maximum: gradients grow while activations are freed, so the sum may exceed the peak."
    ]
    if errors:
        ninth = errors[min(len(errors) - 1, -(-9 * len(errors) // 10) - 1)]
        median = statistics.median(errors)
        notes.append(
            f"Error of the predicted peak over {len(errors)} cells: median {_percent(median)}, "
            f"90th percentile {_percent(ninth)}, largest {_percent(errors[-1])}."
        )
    notes += dict.fromkeys(f"{names[row.cell]}: {row.note}" for row in rows if row.note)
    return tuple(notes)


def _percent(ratio: float) -> str:
    return f"{100 * ratio:.2g} %" if ratio >= 1e-4 else "under 0.01 %"


def _number(size: int | None, unit: Scale) -> str:
    return format_parts(size, None, None, unit)[0]


def _beside(measured: int | None, predicted: int | None, unit: Scale) -> Cell:
    if measured is None or predicted is None or abs(predicted - measured) <= SAME * max(measured, predicted):
        return Cell(_number(measured, unit))
    return Cell(_number(measured, unit), _number(predicted, unit))


def _error(ratio: float | None) -> Cell:
    if ratio is None:
        return Cell(MISSING)
    text = format_number(100 * ratio, 1)
    return Cell(text if ratio < 0 or text == "0.0" else f"+{text}", "", "bad" if abs(ratio) > GOOD_ERROR else "")


def frontier(points: Sequence[FrontierPoint]) -> Table | None:
    """One row per search: between which micro batches the limit lies, and every probe that says so."""
    columns = (
        Column("series", prose=True),
        Column("sequence", numeric=True),
        Column("largest that fits", numeric=True),
        Column("smallest that does not", numeric=True),
        Column("predicted", numeric=True, priority=1),
        Column("probes", prose=True, priority=2),
    )
    rows = tuple(
        (
            Cell(point.series),
            Cell(str(point.sequence_length)),
            Cell(_count(point.largest_fitting), "" if point.settled else "not settled"),
            Cell(_count(point.smallest_failing)),
            Cell(_count(point.predicted)),
            Cell(_probes(point)),
        )
        for point in points
    )
    notes = (
        "Each micro batch was tried in its own processes. If the two are neighbours, every size in between was tried.",
    )
    return Table("Largest micro batch that fits", columns, rows, notes) if rows else None


def _count(value: int | None) -> str:
    return MISSING if value is None else str(value)


def _probes(point: FrontierPoint) -> str:
    marks = {"ok": TICK, "oom": CROSS}
    return ", ".join(f"{probe.micro_batch} {marks.get(probe.status, probe.status)}" for probe in point.probes)
