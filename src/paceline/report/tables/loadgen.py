"""The verdicts of LoadGen and of Paceline: two rows for each run with both loads."""

from __future__ import annotations

from paceline.analysis.findings import LoadgenVerdict, Opinion, Report
from paceline.analysis.findings.cell_axes import axis_text
from paceline.analysis.findings.served import VALID, verdict_text
from paceline.report.tables.table import Cell, Column, Table
from paceline.wording import MISSING, Scale, format_parts

MS, TOKENS = Scale("ms", 1e3), Scale("tokens/s")
_COLUMNS = (
    Column("scenario"),
    Column("load generator"),
    Column("verdict"),
    Column("output, tokens/s", numeric=True),
    Column("TTFT p99, ms", numeric=True),
    Column("TPOT p99, ms", numeric=True),
    Column("latency p99, ms", numeric=True, priority=1),
    Column("requests", numeric=True, priority=2),
    Column("failed", numeric=True, priority=1),
)
NOTE = (
    "Two loads of one run on the same replicas: first from this client, then from LoadGen with its own schedule and "
    "clock. Its logs are in the run directory (loadgen-*). It reports no token times for Offline."
)


def tables(report: Report) -> tuple[Table, ...]:
    """Empty if LoadGen sent nothing."""
    if not report.loadgen:
        return ()
    rows = tuple(_row(found, side) for found in report.loadgen for side in (found.theirs, found.ours))
    cells = tuple((found.cell,) for found in report.loadgen for _ in range(2))
    labels = dict.fromkeys(f"{found.label}." for found in report.loadgen if found.label)
    return (Table("LoadGen beside Paceline", _COLUMNS, rows, (*labels, NOTE, *_reasons(report)), cells),)


def _reasons(report: Report) -> list[str]:
    """Each once, however many runs have it."""
    sides = [side for found in report.loadgen for side in (found.theirs, found.ours) if side.reasons]
    return list(dict.fromkeys(f"{side.source} says {verdict_text(side.verdict, side.reasons)}" for side in sides))


def _row(found: LoadgenVerdict, side: Opinion) -> tuple[Cell, ...]:
    load = [axis_text(name, found.axes) for name in ("rate_per_s", "concurrency") if found.axes.get(name) is not None]
    return (
        Cell(", ".join([str(found.axes.get("scenario")), *load])),
        Cell(side.source),
        Cell(side.verdict, tone="good" if side.verdict == VALID else "bad"),
        _figure(side.output_tokens_per_s, TOKENS),
        *(_figure(value, MS) for value in (side.ttft_p99_s, side.tpot_p99_s, side.latency_p99_s)),
        Cell(f"{side.requests:,}"),
        Cell(f"{side.failed:,}"),
    )


def _figure(value: float | None, scale: Scale) -> Cell:
    return Cell(MISSING, tone="quiet") if value is None else Cell(format_parts(value, None, None, scale)[0])
