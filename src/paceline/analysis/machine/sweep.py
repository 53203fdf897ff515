"""Rows of a sweep by nccl-tests' definitions, from the samples of all ranks (method.md, section 4).

t is that of the slowest rank: its wall time over its launches of the operation. The mean of per-iteration maxima would
count jitter twice if ranks are late in turn. Percentiles use those maxima, because they describe the bad iteration.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from paceline.analysis.findings import HIGHER, LOWER, SHARED_GPU, CollectiveRow, Measurement
from paceline.analysis.grouping import grouped
from paceline.analysis.machine.links import limiting_link
from paceline.analysis.statistics import intervals
from paceline.analysis.statistics.intervals import Array, Bounded, Resampled
from paceline.errors import RequestError
from paceline.models import arithmetic
from paceline.results.machine_samples import CollectiveSample
from paceline.results.records import RunRecord

PAIR = "pair"
# metric -> unit, direction
METRICS = {
    "collective_time_s": ("s", LOWER),
    "algbw_bytes_per_s": ("bytes/s", HIGHER),
    "busbw_bytes_per_s": ("bytes/s", HIGHER),
}
GLOO_REDUCE_SCATTER = "gloo's reduce_scatter moves as many bytes as its all_reduce, so its busbw is half of the link's"
_WORST_FIRST = ("oom", "unsupported")
# What distinguishes the rows of one cell.
_ROW = ("operation", "dtype", "size_bytes", "in_place", "mode", "group_size")


def factor_of(operation: str, group_size: int) -> float | None:
    """busbw = algbw * factor; None if nothing crosses a wire or the operation has no payload (barrier).

    >>> factor_of("all_reduce", 4), factor_of("barrier", 4)
    (1.5, None)
    """
    try:
        return arithmetic.wire_factor(operation, group_size) or None
    except RequestError:
        return None


@dataclass(frozen=True)
class Entry:
    """One row before its numbers are computed: the samples of every rank and launch of one operation at one size."""

    records: tuple[RunRecord, ...]
    launches: tuple[tuple[CollectiveSample, ...], ...]

    @property
    def first(self) -> CollectiveSample:
        return self.launches[0][0]

    @property
    def samples(self) -> list[CollectiveSample]:
        return [s for launch in self.launches for s in launch]

    @property
    def shared_gpu(self) -> bool:
        return any(r.shares_gpu for r in self.records)

    @property
    def runs(self) -> tuple[str, ...]:
        return tuple(r.spec.run_id for r in self.records)

    @cached_property
    def status(self) -> str:
        """A row counts as measured only if every rank measured it."""
        seen = {s.status for s in self.samples}
        return next((status for status in _WORST_FIRST if status in seen), next(iter(seen - {"ok"}), "ok"))

    @cached_property
    def seconds(self) -> list[Array]:
        """Per launch: seconds of one operation, iterations (those that every rank timed) by ranks. Empty if the row was
        not measured.
        """
        if self.status != "ok":
            return []
        tables = []
        for launch in self.launches:
            iterations = min(len(s.durations_s) for s in launch)
            columns = [np.asarray(s.durations_s[:iterations], dtype=np.float64) / s.batch for s in launch]
            tables.append(np.column_stack(columns))
        return [table for table in tables if table.size]

    @cached_property
    def rank_means(self) -> dict[int, float]:
        """Mean seconds of one operation by rank, over all launches."""
        if not self.seconds:
            return {}
        totals: defaultdict[int, float] = defaultdict(float)
        counts: defaultdict[int, int] = defaultdict(int)
        for s in self.samples:
            totals[s.rank] += sum(s.durations_s)
            counts[s.rank] += len(s.durations_s) * s.batch
        return {rank: totals[rank] / counts[rank] for rank in sorted(totals) if counts[rank]}

    def resampled_time(self) -> Resampled | None:
        """t with its bootstrap over blocks of iterations, and over launches if there are several."""
        # The iterations of the rank with the longest total time.
        walls = [np.column_stack([x[:, int(x.sum(axis=0).argmax())], np.ones(len(x))]) for x in self.seconds]
        if not walls:
            return None
        s = self.first
        words = (s.operation, s.dtype, str(s.size_bytes), str(s.in_place), s.mode)
        sums = intervals.resample_sums(walls, intervals.seed_of(self.records[0].spec.cell, *words))
        return intervals.ratio_of_sums(walls, sums, 0, 1)


def entries(records: Sequence[RunRecord]) -> list[Entry]:
    """Every row of every cell, in measured order; repeats of a cell are launches of the same row."""
    by_run = {r.spec.run_id: r for r in records}
    pairs = [(r.spec, s) for r in records for s in r.collectives if s.operation != PAIR]
    rows = []
    for row in grouped(pairs, lambda pair: (pair[0].cell, *(getattr(pair[1], name) for name in _ROW))).values():
        runs = grouped(row, lambda pair: pair[0].run_id)
        rows.append(Entry(tuple(by_run[run] for run in runs), tuple(tuple(s for _, s in own) for own in runs.values())))
    return rows


def row_of(entry: Entry, time: Resampled | None) -> CollectiveRow:
    """The finished row of an entry and its resampled time."""
    s, spec = entry.first, entry.records[0].spec
    seconds = time.value if time else None
    factor = factor_of(s.operation, s.group_size)
    algbw = None if not seconds or not s.size_bytes or factor is None else s.size_bytes / seconds
    wrong = [sample.wrong for sample in entry.samples if sample.wrong is not None]
    error = next((x.error for x in entry.samples if x.status == entry.status and x.error), None)
    if any(wrong):
        ranks = sorted({x.rank for x in entry.samples if x.wrong})
        error = f"{sum(wrong)} wrong elements on {'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}"
    maxima = np.concatenate([x.max(axis=1) for x in entry.seconds]) if entry.seconds else np.empty(0)
    means = entry.rank_means
    least, most = (min(means.values()), max(means.values())) if len(means) > 1 else (0.0, 0.0)
    skewed = 0 < least < most
    on_gloo = s.operation == "reduce_scatter" and spec.topology.device == "cpu"
    notes = (SHARED_GPU if entry.shared_gpu else None, GLOO_REDUCE_SCATTER if on_gloo else None)
    link = limiting_link(entry.records[0], s.operation, s.group_size) if algbw is not None else None
    return CollectiveRow(
        run=spec.run_id,
        cell=spec.cell,
        operation=s.operation,
        dtype=s.dtype,
        world_size=s.group_size,
        size_bytes=s.size_bytes,
        count=s.count,
        in_place=s.in_place,
        mode=s.mode,
        iterations=sum(len(x) for x in entry.seconds) * s.batch,
        time_s=seconds,
        p50_s=intervals.percentile(maxima, 50),
        p95_s=intervals.percentile(maxima, 95),
        p99_s=intervals.percentile(maxima, 99),
        algbw_bytes_per_s=algbw,
        busbw_bytes_per_s=None if algbw is None or factor is None else algbw * factor,
        wrong=sum(wrong) if wrong else None,
        skew_ratio=most / least if least > 0 else None,
        early_rank=max(means, key=lambda r: means[r]) if skewed else None,
        late_rank=min(means, key=lambda r: means[r]) if skewed else None,
        status="invalid" if any(wrong) else entry.status,
        error=error,
        axes=spec.axes(),
        note="; ".join(filter(None, notes)) or None,
        launches=len(entry.launches),
        link=link.name if link else None,
        link_bytes_per_s=link.bytes_per_s if link else None,
    )


# --- measurements ---

_AXES = ("operation", "dtype", "size_bytes", "in_place", "mode")


def measurements(entry: Entry, row: CollectiveRow, time: Resampled | None) -> Iterable[Measurement]:
    """Time and both bandwidths of a measured row. A bandwidth is size over time, and so are its bounds."""
    if time is None or row.status != "ok":
        return
    low, high = time.interval
    measured: dict[str, Bounded] = {"collective_time_s": (time.value, low, high)}
    factor = factor_of(row.operation, row.world_size)
    if row.size_bytes and factor is not None:
        for metric, payload in (("algbw_bytes_per_s", 1.0), ("busbw_bytes_per_s", factor)):
            moved = row.size_bytes * payload
            bounds = (moved / high, moved / low) if low and high else (None, None)
            measured[metric] = (moved / time.value, *bounds)
    axes: Mapping[str, object] = {name: getattr(row, name) for name in _AXES}
    for metric, (value, least, most) in measured.items():
        unit, better = METRICS[metric]
        launches = intervals.launches_note(row.launches) if least is not None else None
        yield Measurement(
            metric=metric,
            unit=unit,
            better=better,
            cell=row.cell,
            value=value,
            low=least,
            high=most,
            n=row.iterations,
            launches=row.launches,
            axes={**row.axes, **axes, "world_size": row.world_size},  # type: ignore[dict-item]
            runs=entry.runs,
            note="; ".join(filter(None, (row.note, launches))) or None,
        )
