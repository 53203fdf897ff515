"""Curves for a terminal: a block per moment, and what replicas of served models did over a run as such strips."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from paceline.analysis.findings import ReplicaTrace, Report, ServedTrace
from paceline.report.tables.served import MS
from paceline.report.tables.table import Cell, Column, Table
from paceline.report.text.load_names import beside, cell_words, marked, replica_words
from paceline.wording import MISSING, format_parts

BLOCKS = "▁▂▃▄▅▆▇█"
WIDTH = 20
# Loads beyond so many rows are looked at on the page.
MOST_ROWS = 16
_COLUMNS = (
    Column("load", prose=True),
    Column("replica"),
    Column("in flight over the run"),
    Column("at most", numeric=True, priority=1),
    Column("TTFT p50, ms", numeric=True),
    Column("TTFT p99, ms", numeric=True, priority=1),
    Column("answered", numeric=True, priority=2),
    Column("failed", numeric=True, priority=2),
)


def strip(values: Sequence[float], top: float, width: int = WIDTH) -> str:
    """One block per moment, its height the mean of those it stands for; what is not 0 is never blank."""
    if not values or top <= 0:
        return ""
    edges = [round(i * len(values) / width) for i in range(width + 1)]
    parts = [values[a:b] for a, b in pairwise(edges) if b > a]
    means = [sum(part) / len(part) for part in parts]
    return "".join(BLOCKS[min(int(mean / top * len(BLOCKS)), len(BLOCKS) - 1)] if mean > 0 else " " for mean in means)


def tables(report: Report) -> tuple[Table, ...]:
    """Requests in flight of each replica; empty if nothing was served."""
    found = report.served_shapes
    if found is None or not found.traces:
        return ()
    named = beside(found)
    rows: list[tuple[Cell, ...]] = []
    told: list[ServedTrace] = []
    for trace in found.traces:
        if not told or len(rows) + len(trace.replicas) <= MOST_ROWS:
            rows += _rows(trace, marked(cell_words(trace.axes, named), trace.is_believed))
            told.append(trace)
    left = len(found.traces) - len(told)
    notes = ("Blocks of one load have one scale; one launch of each cell.",)
    more = (f"{left} more load{'' if left == 1 else 's'} on the page.",) if left else ()
    cells = tuple((trace.cell,) for trace in told for _ in trace.replicas)
    return (Table("Over the run", _COLUMNS, tuple(rows), (*notes, *more), cells),)


def _rows(trace: ServedTrace, name: str) -> Iterator[tuple[Cell, ...]]:
    top = max((max(replica.in_flight, default=0.0) for replica in trace.replicas), default=0.0)
    for i, replica in enumerate(trace.replicas):
        yield (
            Cell("" if i else name),
            Cell(
                replica_words(replica, trace),
                (f"gone after {replica.died_s:,.3g} s" if replica.died_s is not None else ""),
            ),
            Cell(strip(replica.in_flight, top)),
            Cell(f"{max(replica.in_flight, default=0.0):,.0f}"),
            *_first_token(replica),
            Cell(f"{replica.answered:,}"),
            Cell(f"{replica.failed:,}", tone="bad" if replica.failed else ""),
        )


def _first_token(replica: ReplicaTrace) -> tuple[Cell, Cell]:
    if replica.ttft is None:
        return Cell(MISSING, tone="quiet"), Cell(MISSING, tone="quiet")
    (p50, _), (p99, _) = (format_parts(value, None, None, MS) for value in (replica.ttft.p50[0], replica.ttft.p99[0]))
    return Cell(p50), Cell(p99)
