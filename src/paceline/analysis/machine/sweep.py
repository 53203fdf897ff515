"""Rows of a sweep to nccl-tests' definitions, from the samples of all ranks (method.md, section 4).

t is the slowest rank's: its wall time over its launches of the operation. The mean of per-iteration maxima would count
jitter twice where ranks are late in turns; percentiles are of those maxima, because they ask for the bad iteration.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from paceline.analysis.findings import HIGHER, LOWER, SHARED_GPU, CollectiveRow, Measurement
from paceline.analysis.statistics import intervals
from paceline.analysis.statistics.intervals import Array, Resampled
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
GLOO_REDUCE_SCATTER = "gloo's reduce_scatter moves as many bytes as its all_reduce: its busbw reads half of the link"
_WORST_FIRST = ("oom", "unsupported")


def factor_of(operation: str, group_size: int) -> float | None:
    """busbw = algbw * factor; None where nothing crosses a wire or the operation carries no payload (barrier)."""
    try:
        return arithmetic.wire_factor(operation, group_size) or None
    except RequestError:
        return None


@dataclass(frozen=True)
class Entry:
    """One row before its numbers: the samples of every rank, launch by launch, of one operation at one size."""

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
        """A row counts as measured only where every rank measured it."""
        found = {s.status for s in self.samples}
        return next((word for word in _WORST_FIRST if word in found), next(iter(found - {"ok"}), "ok"))

    @cached_property
    def seconds(self) -> list[Array]:
        """Per launch: iterations by ranks, seconds of one operation. Empty where the row was not measured."""
        if self.status != "ok":
            return []
        return [found for launch in self.launches if (found := _seconds(launch)).size]

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
        """t with its bootstrap over blocks of iterations, and over launches where there are several."""
        walls = [np.column_stack([_slowest(x), np.ones(len(x))]) for x in self.seconds]
        if not walls:
            return None
        s = self.first
        words = (s.operation, s.dtype, str(s.size_bytes), str(s.in_place), s.mode)
        sums = intervals.resample_sums(walls, intervals.seed_of(self.records[0].spec.cell, *words))
        return intervals.ratio_of_sums(walls, sums, 0, 1)


def _seconds(launch: Sequence[CollectiveSample]) -> Array:
    """Iterations that every rank timed; ranks side by side."""
    iterations = min(len(s.durations_s) for s in launch)
    columns = [np.asarray(s.durations_s[:iterations], dtype=np.float64) / s.batch for s in launch]
    return np.column_stack(columns)


def _slowest(seconds: Array) -> Array:
    """The iterations of the rank that took longest in all."""
    return np.asarray(seconds[:, int(seconds.sum(axis=0).argmax())])


def entries(records: Sequence[RunRecord]) -> list[Entry]:
    """Every row of every cell, in the order it was measured; repeats of a cell are launches of the same row."""
    found: dict[tuple[object, ...], dict[str, list[CollectiveSample]]] = {}
    by_run = {r.spec.run_id: r for r in records}
    for record in records:
        for s in record.collectives:
            if s.operation != PAIR:
                key = (record.spec.cell, s.operation, s.dtype, s.size_bytes, s.in_place, s.mode, s.group_size)
                found.setdefault(key, {}).setdefault(record.spec.run_id, []).append(s)
    return [
        Entry(tuple(by_run[run] for run in runs), tuple(tuple(samples) for samples in runs.values()))
        for runs in found.values()
    ]


def row_of(entry: Entry, time: Resampled | None) -> CollectiveRow:
    s = entry.first
    seconds = time.value if time else None
    algbw, busbw = _bandwidths(s, seconds)
    spec = entry.records[0].spec
    wrong = [sample.wrong for sample in entry.samples if sample.wrong is not None]
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
        **_percentiles(entry),
        algbw_bytes_per_s=algbw,
        busbw_bytes_per_s=busbw,
        wrong=sum(wrong) if wrong else None,
        **_skew(entry.rank_means),
        status="invalid" if any(wrong) else entry.status,
        error=_error(entry, sum(wrong)),
        axes=spec.axes(),
        note=_note(entry),
        launches=len(entry.launches),
    )


def _percentiles(entry: Entry) -> dict[str, Any]:
    maxima = np.concatenate([x.max(axis=1) for x in entry.seconds]) if entry.seconds else np.empty(0)
    return {f"p{q}_s": intervals.percentile(maxima, q) for q in (50, 95, 99)}


def _skew(means: Mapping[int, float]) -> dict[str, Any]:
    """Who was longest inside, who shortest; nobody where one rank took part or all took the same time."""
    least, most = (min(means.values()), max(means.values())) if len(means) > 1 else (0.0, 0.0)
    known, apart = least > 0, least < most
    return {
        "skew_ratio": most / least if known else None,
        "early_rank": max(means, key=lambda r: means[r]) if known and apart else None,
        "late_rank": min(means, key=lambda r: means[r]) if known and apart else None,
    }


def _bandwidths(s: CollectiveSample, seconds: float | None) -> tuple[float | None, float | None]:
    factor = factor_of(s.operation, s.group_size)
    if not seconds or not s.size_bytes or factor is None:
        return None, None
    return s.size_bytes / seconds, s.size_bytes / seconds * factor


def _error(entry: Entry, wrong: int) -> str | None:
    if wrong:
        ranks = sorted({s.rank for s in entry.samples if s.wrong})
        return f"{wrong} wrong elements on {'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}"
    return next((s.error for s in entry.samples if s.status == entry.status and s.error), None)


def _note(entry: Entry) -> str | None:
    on_gloo = entry.first.operation == "reduce_scatter" and entry.records[0].spec.topology.device == "cpu"
    notes = (SHARED_GPU if entry.shared_gpu else None, GLOO_REDUCE_SCATTER if on_gloo else None)
    return "; ".join(filter(None, notes)) or None


# --- measurements ---

_AXES = ("operation", "dtype", "size_bytes", "in_place", "mode")


def measurements(entry: Entry, row: CollectiveRow, time: Resampled | None) -> Iterable[Measurement]:
    """Time and both bandwidths of a measured row; a bandwidth is the size over the time, so are its bounds."""
    if time is None or row.status != "ok":
        return
    low, high = time.interval
    yield _measurement(entry, row, "collective_time_s", (time.value, low, high))
    factor = factor_of(row.operation, row.world_size)
    if row.size_bytes and factor is not None:
        for metric, payload in (("algbw_bytes_per_s", 1.0), ("busbw_bytes_per_s", factor)):
            moved = row.size_bytes * payload
            bounds = (moved / high, moved / low) if low and high else (None, None)
            yield _measurement(entry, row, metric, (moved / time.value, *bounds))


def _measurement(
    entry: Entry, row: CollectiveRow, metric: str, found: tuple[float, float | None, float | None]
) -> Measurement:
    unit, better = METRICS[metric]
    value, low, high = found
    axes: Mapping[str, object] = {name: getattr(row, name) for name in _AXES}
    launches = intervals.launches_note(row.launches) if low is not None else None
    return Measurement(
        metric=metric,
        unit=unit,
        better=better,
        cell=row.cell,
        value=value,
        low=low,
        high=high,
        n=row.iterations,
        launches=row.launches,
        axes={**row.axes, **axes, "world_size": row.world_size},  # type: ignore[dict-item]
        runs=entry.runs,
        note="; ".join(filter(None, (row.note, launches))) or None,
    )
