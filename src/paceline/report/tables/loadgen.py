"""The verdicts of LoadGen and of Paceline: two rows for each run with both loads."""

from __future__ import annotations

from paceline.analysis.findings import LoadgenVerdict, Opinion, Report
from paceline.analysis.findings.cell_axes import axis_text
from paceline.analysis.findings.served import VALID, verdict_text
from paceline.report.tables.table import Cell, Column, Filled, Table, filled, numeric
from paceline.wording import MISSING, Scale, format_parts

MS, TOKENS = Scale("ms", 1e3), Scale("tokens/s")
Side = tuple[LoadgenVerdict, Opinion]
NOTE = (
    "Two loads of one run on the same replicas: first from this client, then from LoadGen with its own schedule and "
    "clock. Its logs are in the run directory (loadgen-*). It reports no token times for Offline."
)


def tables(report: Report) -> tuple[Table, ...]:
    """Empty if LoadGen sent nothing."""
    sides = [(found, side) for found in report.loadgen for side in (found.theirs, found.ours)]
    reasons = (f"{s.source} says {verdict_text(s.verdict, s.reasons)}" for _, s in sides if s.reasons)
    labels = (f"{found.label}." for found in report.loadgen if found.label)
    notes = dict.fromkeys((*labels, NOTE, *reasons))
    table = filled("LoadGen beside Paceline", sides, _COLUMNS, notes, lambda row: (row[0].cell,))
    return (table,) if table else ()


def _load(row: Side) -> str:
    axes = row[0].axes
    load = [axis_text(name, axes) for name in ("rate_per_s", "concurrency") if axes.get(name) is not None]
    return ", ".join([str(axes.get("scenario")), *load])


def _figure(value: float | None, scale: Scale) -> Cell:
    return Cell(MISSING, tone="quiet") if value is None else Cell(format_parts(value, None, None, scale)[0])


_COLUMNS: tuple[Filled[Side], ...] = (
    (Column("scenario"), _load),
    (Column("load generator"), lambda row: row[1].source),
    (Column("verdict"), lambda row: Cell(row[1].verdict, tone="good" if row[1].verdict == VALID else "bad")),
    (numeric("output, tokens/s"), lambda row: _figure(row[1].output_tokens_per_s, TOKENS)),
    (numeric("TTFT p99, ms"), lambda row: _figure(row[1].ttft_p99_s, MS)),
    (numeric("TPOT p99, ms"), lambda row: _figure(row[1].tpot_p99_s, MS)),
    (numeric("latency p99, ms", 1), lambda row: _figure(row[1].latency_p99_s, MS)),
    (numeric("requests", 2), lambda row: f"{row[1].requests:,}"),
    (numeric("failed", 1), lambda row: f"{row[1].failed:,}"),
)
