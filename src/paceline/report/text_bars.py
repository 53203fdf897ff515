"""Charts of block characters for a terminal: requests in flight of each replica over the run."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from paceline.analysis.findings import Report, ServedTrace
from paceline.report.tables.served import MS
from paceline.report.tables.table import Cell, Column, Table, numeric
from paceline.report.text.load_names import beside, cell_words, marked, replica_words
from paceline.wording import format_parts

BLOCKS = "▁▂▃▄▅▆▇█"
WIDTH = 20
# More rows are shown on the page only.
MOST_ROWS = 16
_COLUMNS = (
    Column("load", prose=True),
    Column("replica"),
    Column("in flight over the run"),
    numeric("at most", 1),
    numeric("TTFT p50, ms"),
    numeric("TTFT p99, ms", 1),
    numeric("answered", 2),
    numeric("failed", 2),
)


def strip(values: Sequence[float], top: float, width: int = WIDTH) -> str:
    """One block per moment, as high as the mean of its values; a mean above 0 is never blank."""
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
    shown: list[ServedTrace] = []
    for trace in found.traces:
        if shown and len(rows) + len(trace.replicas) > MOST_ROWS:
            continue
        shown.append(trace)
        top = max((max(replica.in_flight, default=0.0) for replica in trace.replicas), default=0.0)
        name = marked(cell_words(trace.axes, named), trace.is_believed)
        for replica in trace.replicas:
            died = "" if replica.died_s is None else f"gone after {replica.died_s:,.3g} s"
            ttft = replica.ttft
            latencies = (ttft.p50[0], ttft.p99[0]) if ttft else (None, None)
            rows.append(
                (
                    Cell(name if replica is trace.replicas[0] else ""),
                    Cell(replica_words(replica, trace), died),
                    Cell(strip(replica.in_flight, top)),
                    Cell(f"{max(replica.in_flight, default=0.0):,.0f}"),
                    *(Cell(format_parts(s, None, None, MS)[0], tone="quiet" if s is None else "") for s in latencies),
                    Cell(f"{replica.answered:,}"),
                    Cell(f"{replica.failed:,}", tone="bad" if replica.failed else ""),
                )
            )
    left = len(found.traces) - len(shown)
    notes = ("Blocks of one load have one scale; one launch of each cell.",)
    more = (f"{left} more load{'' if left == 1 else 's'} on the page.",) if left else ()
    cells = tuple((trace.cell,) for trace in shown for _ in trace.replicas)
    return (Table("Over the run", _COLUMNS, tuple(rows), (*notes, *more), cells),)
