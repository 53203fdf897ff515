"""What the machine can reach: matrix products, copies, attention.

A rate is the stated work over the median iteration; with several ranks that of the median rank, with several launches
their mean. Intervals cover iterations (blocks of neighbouring ones) within a launch, and launches if they were
repeated. `achievable` is the best of all products of a dtype: measured, not from a datasheet.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from paceline.analysis.findings import HIGHER, SHARED_GPU, Measurement
from paceline.analysis.grouping import grouped
from paceline.analysis.statistics import intervals
from paceline.analysis.statistics.intervals import Array, Resampled
from paceline.results.records import RunRecord

FLOPS, BYTES = "FLOP/s", "bytes/s"
# kernel -> metric, unit
METRICS = {
    "matmul": ("matmul_flops_per_s", FLOPS),
    "attention_forward": ("attention_flops_per_s", FLOPS),
    "attention_backward": ("attention_flops_per_s", FLOPS),
    "copy": ("copy_bytes_per_s", BYTES),
    "h2d": ("h2d_bytes_per_s", BYTES),
    "d2h": ("d2h_bytes_per_s", BYTES),
}
ACHIEVABLE, DATASHEET, RIDGE = "achievable_flops_per_s", "datasheet_share_ratio", "ridge_flops_per_byte"
RESAMPLES = 400


class Key(NamedTuple):
    """What distinguishes one row of a sweep from another."""

    kernel: str
    dtype: str
    label: str
    variant: str


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a cell over its launches and ranks: durations by launch, then by rank, of those that ran."""

    key: Key
    size: int | None
    work: int
    launches: tuple[Mapping[int, Array], ...]
    refusals: tuple[str, ...]

    def of_rank(self, rank: int) -> Row:
        return replace(self, launches=tuple({rank: by[rank]} for by in self.launches if rank in by), refusals=())

    def rate(self) -> Resampled | None:
        """Work over time; None if no rank could run it."""
        launches = [list(by.values()) for by in self.launches if by]
        if not launches:
            return None
        values = [float(np.median([np.median(x) for x in ranks])) for ranks in launches]
        value = self.work / float(np.mean(values))
        rng = np.random.default_rng(intervals.seed_of(*self.key))
        if len(launches) == 1:
            blocks = min(intervals.block_count(len(x)) for x in launches[0])
            return intervals.from_replicates(value, self.work / _medians(launches[0], rng), blocks, 1)
        drawn = intervals.redrawn_sums(np.array(values)[:, None], rng, RESAMPLES)[:, 0] / len(launches)
        return intervals.from_replicates(value, self.work / drawn, len(launches), len(launches))


def _medians(ranks: Sequence[Array], rng: np.random.Generator) -> Array:
    """Bootstrap of the median rank's median: moving blocks of each rank's iterations, which wrap around the end."""
    medians = []
    for x in ranks:
        length = intervals.block_length(len(x))
        starts = rng.integers(len(x), size=(RESAMPLES, intervals.block_count(len(x)), 1))
        drawn = ((starts + np.arange(length)) % len(x)).reshape(RESAMPLES, -1)[:, : len(x)]
        medians.append(np.median(x[drawn], axis=1))
    return np.asarray(np.median(medians, axis=0))


# --- measurements ---


def analyse(records: Sequence[RunRecord]) -> tuple[Measurement, ...]:
    """One measurement per kernel, dtype, shape and variant of a cell, and what follows from them: the achievable peak
    per dtype, its share of the datasheet peak, the ridge point, and the ceilings of each rank if there are several.
    """
    # Repeats of a cell on another kind of device are a different ceiling, never averaged with the first.
    ours = [record for record in records if record.kernels and not record.spec.traits.tests_nodes]
    by_cell = grouped(ours, lambda record: (record.spec.cell, device_of(record)))
    return tuple(m for of_cell in by_cell.values() for m in _cell(of_cell))


def _cell(records: Sequence[RunRecord]) -> list[Measurement]:
    rows = rows_of(records)
    measured = [_measurement(records, row) for row in rows]
    peaks = achievable(measured)
    copies = _largest(measured, "copy")
    found = [*measured, *peaks]
    if not any(r.shares_gpu for r in records):
        gpus = [gpu for record in records for machine in record.machines for gpu in machine.get("gpus") or ()]
        limits: list[tuple[Measurement, set[Any]]] = [
            (m, {(gpu.get("peak_flops") or {}).get(str(m.axes["dtype"])) for gpu in gpus}) for m in peaks
        ]
        limits += [(m, {gpu.get("memory_bytes_per_s") for gpu in gpus}) for m in copies]
        for m, of_datasheet in limits:
            if len(of_datasheet) == 1 and None not in of_datasheet:
                found.append(_derived(m, DATASHEET, "ratio", 1 / float(of_datasheet.pop())))
    # Ridge point: the FLOPs per byte of memory traffic above which products, not memory, are the limit (roofline).
    if copies and copies[0].value:
        found += [_derived(m, RIDGE, "FLOP/byte", 1 / copies[0].value) for m in peaks]
    ranks = sorted({rank for row in rows for by in row.launches for rank in by})
    for rank in ranks if len(ranks) > 1 else ():
        own = [_measurement(records, row.of_rank(rank), rank) for row in rows]
        found += [
            *achievable(own),
            *(largest for kernel in ("copy", "h2d", "d2h") for largest in _largest(own, kernel)),
        ]
    return found


def rows_of(records: Iterable[RunRecord]) -> list[Row]:
    """Rows in the order they were measured."""
    runs, rows = [record.spec.run_id for record in records], []
    samples = ((record.spec.run_id, s) for record in records for s in record.kernels)
    by_key = grouped(samples, lambda each: Key(each[1].kernel, each[1].dtype, each[1].label, each[1].variant))
    for key, of_row in by_key.items():
        first = of_row[0][1]
        launches = tuple(
            {s.rank: np.asarray(s.durations_s) for of, s in of_row if of == run and s.status == "ok" and s.durations_s}
            for run in runs
        )
        refusals = dict.fromkeys(f"{s.status}: {s.error}" for _, s in of_row if s.status != "ok")
        rows.append(Row(key, first.size, first.flops or first.moved_bytes or 0, launches, tuple(refusals)))
    return rows


def _measurement(records: Sequence[RunRecord], row: Row, rank: int | None = None) -> Measurement:
    """The rate of a row, of one rank or of all. The note names the slowest and the fastest of several ranks."""
    spec, found, notes = records[0].spec, row.rate(), []
    metric, unit = METRICS[row.key.kernel]
    low, high = found.interval if found else (None, None)
    times = grouped((each for by in row.launches for each in by.items()), lambda each: each[0])
    if len(times) > 1:
        rates = sorted((row.work / float(np.mean([np.median(x) for _, x in own])), r) for r, own in times.items())
        (slow, slowest), (fast, fastest) = rates[0], rates[-1]
        notes.append(f"{len(rates)} ranks: lowest {slow:.4g} (rank {slowest}), highest {fast:.4g} (rank {fastest})")
    notes += row.refusals
    if any(record.shares_gpu for record in records):
        notes.append(SHARED_GPU)
    elif low is not None and (note := intervals.launches_note(len(records), "iterations")):
        notes.append(note)
    return Measurement(
        metric=metric,
        unit=unit,
        better=HIGHER,
        cell=spec.cell,
        value=found.value if found else None,
        low=low,
        high=high,
        n=sum(len(x) for by in row.launches for x in by.values()),
        launches=sum(bool(by) for by in row.launches),
        axes={**spec.axes(), **row.key._asdict(), "size": row.size, "rank": rank},
        runs=tuple(record.spec.run_id for record in records),
        note="; ".join(notes) or None,
    )


def achievable(measured: Iterable[Measurement]) -> list[Measurement]:
    """The fastest product of each dtype, with its shape in the axes: the maximum achievable matmul FLOP/s (MAMF)."""
    products = [m for m in measured if m.metric == METRICS["matmul"][0] and m.value is not None]
    by_dtype = grouped(products, lambda m: m.axes["dtype"]).values()
    return [replace(max(same, key=lambda m: m.value or 0.0), metric=ACHIEVABLE) for same in by_dtype]


def _largest(measured: Iterable[Measurement], kernel: str) -> list[Measurement]:
    """The largest size of each variant: smaller ones may show a cache or the latency instead of the memory or bus."""
    ours = [m for m in measured if m.axes["kernel"] == kernel and m.value is not None]
    by_variant = grouped(ours, lambda m: m.axes["variant"]).values()
    return [max(same, key=lambda m: float(m.axes["size"] or 0)) for same in by_variant]


def _derived(m: Measurement, metric: str, unit: str, factor: float) -> Measurement:
    value, low, high = (None if x is None else x * factor for x in (m.value, m.low, m.high))
    return replace(m, metric=metric, unit=unit, value=value, low=low, high=high)


# --- the peak that training is compared with ---

Device = tuple[str, str]
Peaks = Mapping[Device, Mapping[str, Measurement]]


def device_names(device: str, machines: Iterable[Mapping[str, Any]]) -> str:
    """Names of the GPUs, or of the processors, of these machines. A MIG slice is another kind than the whole GPU."""
    if device == "cuda":
        gpus = [gpu for machine in machines for gpu in machine.get("gpus") or ()]
        names = {f"{gpu.get('name')}{' (MIG)' if gpu.get('mig') else ''}" for gpu in gpus}
    else:
        names = {str(machine.get("cpu")) for machine in machines}
    return ", ".join(sorted(names)) or "unknown"


def device_of(record: RunRecord) -> Device:
    """The kind of device of one rank: a GPU by name; a CPU by name and threads per process."""
    device = record.spec.topology.device
    threads = {str((m.get("environment") or {}).get("OMP_NUM_THREADS")) for m in record.machines}
    return device_names(device, record.machines), "" if device == "cuda" else ", ".join(sorted(threads))


def peaks_by_device(records: Sequence[RunRecord], measured: Iterable[Measurement]) -> Peaks:
    """The best measured peak of each dtype on each kind of device, without shared GPUs."""
    devices = {r.spec.run_id: device_of(r) for r in records if r.kernels and not r.shares_gpu}
    peaks: dict[Device, dict[str, Measurement]] = {}
    for m in measured:
        if m.metric == ACHIEVABLE and m.axes["rank"] is None and m.runs[0] in devices:
            of_device, dtype = peaks.setdefault(devices[m.runs[0]], {}), str(m.axes["dtype"])
            of_device[dtype] = max(of_device.get(dtype, m), m, key=lambda one: one.value or 0.0)
    return peaks
