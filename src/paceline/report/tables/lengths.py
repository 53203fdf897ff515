"""Cells that differ in the length of their sequences: time per token and memory over it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from paceline.analysis.findings import Measurement, MemoryRow, Report
from paceline.analysis.findings.cell_axes import describe, distinguishing_axes
from paceline.errors import Scalar
from paceline.report.tables.memory import error_cell, scale
from paceline.report.tables.table import Column, Filled, Table, filled, numeric
from paceline.wording import MISSING, Scale, format_parts

RATE, PEAK = "tokens_per_s_per_gpu", "peak_memory_bytes"
LENGTH = "sequence_length"
# Two lengths are a comparison, more are a curve.
FEWEST = 3
# The same cell of two workloads differs in these.
_OTHER_RUN = ("workload", "steps")
MICROSECONDS = Scale("µs", 1e6)


@dataclass(frozen=True, slots=True)
class Row:
    """One length of one series: speed and peak of its training runs, memory of its memory runs."""

    axes: Mapping[str, Scalar]
    rate: Measurement | None = None
    peak: Measurement | None = None
    memory: MemoryRow | None = None

    @property
    def peak_bytes(self) -> float | None:
        """With its components where it was measured so."""
        return self.memory.measured.get("peak") if self.memory else self.peak.value if self.peak else None


def tables(report: Report) -> tuple[Table, ...]:
    """Empty unless training runs or memory runs of something differ in the length of their sequences alone."""
    found = rows(report)
    if not found:
        return ()
    named = [name for name in distinguishing_axes([row.axes for row in found]) if name not in (LENGTH, *_OTHER_RUN)]
    unit = scale([row.memory for row in found if row.memory])

    def time(row: Row) -> str:
        value = row.rate.value if row.rate else None
        return format_parts(1 / value if value else None, None, None, MICROSECONDS)[0]

    def size(value: float | None) -> str:
        return format_parts(value, None, None, unit)[0]

    columns: tuple[Filled[Row], ...] = (
        (Column("what", prose=True), lambda row: describe(row.axes, named)),
        (numeric("sequence"), lambda row: f"{row.axes[LENGTH]:,}"),
        (numeric("µs per token and process"), time),
        (numeric(f"peak, {unit.unit}"), lambda row: size(row.peak_bytes)),
        (
            numeric(f"predicted, {unit.unit}"),
            lambda row: size(row.memory.predicted.get("peak")) if row.memory else MISSING,
        ),
        (numeric("error, %"), lambda row: error_cell(row.memory.error_ratio if row.memory else None)),
    )
    note = "Time of one process per token: the step time times the processes over the tokens of a step."
    table = filled("Over the length of the sequence", found, columns, (note,), _cells)
    return (table,) if table is not None else ()


def rows(report: Report) -> list[Row]:
    """By series and length; series with fewer than FEWEST lengths are left out."""
    series: dict[str, dict[int, Row]] = {}

    def add(axes: Mapping[str, Scalar], **more: Measurement | MemoryRow) -> None:
        length = axes.get(LENGTH)
        if isinstance(length, int):
            key = repr(sorted((k, str(v)) for k, v in axes.items() if k not in (LENGTH, *_OTHER_RUN)))
            before = series.setdefault(key, {}).get(length, Row(axes))
            found = {"rate": before.rate, "peak": before.peak, "memory": before.memory, **more}
            series[key][length] = Row(before.axes, **found)  # type: ignore[arg-type]

    for row in report.memory:
        add(row.axes, memory=row)
    measured_so = {row.cell for row in report.memory}
    for one in report.measurements:
        if one.metric in (RATE, PEAK) and one.cell not in measured_so:
            add(one.axes, **{"rate" if one.metric == RATE else "peak": one})
    several = [lengths for lengths in series.values() if len(lengths) >= FEWEST]
    return [lengths[length] for lengths in several for length in sorted(lengths)]


def _cells(row: Row) -> tuple[str, ...]:
    return tuple(dict.fromkeys(one.cell for one in (row.rate, row.memory) if one is not None))
