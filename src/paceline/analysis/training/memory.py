"""Memory by component, predicted and measured, the largest micro batch that fits, and advice after out of memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from paceline.analysis.findings import (
    Alternative,
    FrontierPoint,
    Measurement,
    MemoryAdvice,
    MemoryRow,
    Probe,
    RunFinding,
)
from paceline.analysis.findings.cell_axes import axis_text
from paceline.analysis.grouping import grouped
from paceline.errors import Scalar
from paceline.experiment.spec import RunSpec
from paceline.results.memory_components import (
    COMPONENTS,
    MOMENTS,
    OwnedBytes,
    components,
    goal_bytes,
    largest_fitting,
    predicted_peaks,
    room_bytes,
)
from paceline.results.records import MemorySample, RunRecord, Status

PEAK = "steps"


@dataclass(frozen=True, slots=True)
class Findings:
    """Findings of the memory runs."""

    rows: tuple[MemoryRow, ...] = ()
    frontier: tuple[FrontierPoint, ...] = ()
    measurements: tuple[Measurement, ...] = ()


def analyse(records: Sequence[RunRecord], runs: Sequence[RunFinding]) -> Findings:
    """records are all runs, because a probe that ran out of memory is a result too; runs say which are valid."""
    sound = {run.run for run in runs if run.status == Status.OK}
    ours = [record for record in records if record.spec.traits.measures_memory]
    launches = [r for r in ours if not r.spec.traits.probes_limit and r.spec.run_id in sound]
    rows = tuple(_row(cell, own) for cell, own in grouped(launches, lambda r: r.spec.cell).items())
    # Probes of one search differ in the micro batch only.
    searches = grouped(
        (r for r in ours if r.spec.traits.probes_limit),
        lambda r: replace(r.spec, training=replace(r.spec.training, micro_batch=1)).run_id,
    )
    points = (_point(probes) for probes in searches.values())
    frontier = sorted((p for p in points if p), key=lambda p: (p.series, p.sequence_length))
    measurements = tuple(
        Measurement(
            metric=metric,
            unit="bytes",
            better="lower",
            cell=row.cell,
            value=None if value is None else float(value),
            low=None,
            high=None,
            n=1,
            launches=len(row.runs),
            axes=row.axes,
            runs=row.runs,
            note=row.note,
        )
        for row in rows
        for metric, value in (
            ("peak_memory_bytes", row.measured["peak"]),
            ("predicted_peak_memory_bytes", row.predicted["peak"]),
        )
    )
    return Findings(rows, tuple(frontier), measurements)


# --- components ---


def _row(cell: str, launches: Sequence[RunRecord]) -> MemoryRow:
    """The launch and rank with the highest peak represent the cell: that one runs out of memory first."""
    ranks = [(record, rank) for record in launches for rank in {sample.rank for sample in record.memory}]
    record, rank = max(ranks, key=lambda pair: _measured(*pair)["peak"] or 0)
    measured, own = _measured(record, rank), record.spec.training.micro_batch
    sizes = {s.component: s.bytes for s in record.components if s.source == "predicted" and s.micro_batch == own}
    predicted = {name: sizes.get(name) for name in (*COMPONENTS, "peak")}
    expected, seen = predicted["peak"], measured["peak"]
    state = str(record.evidence.settings.get("prediction", "made")) if record.evidence else "made"
    return MemoryRow(
        cell=cell,
        axes=record.spec.axes(),
        predicted=predicted,
        measured=measured,
        error_ratio=expected / seen - 1 if expected is not None and seen else None,
        capacity_bytes=_capacity(record),
        runs=tuple(r.spec.run_id for r in launches),
        note=f"no prediction ({state.removeprefix('none: ')})" if state.startswith("none") else None,
    )


def _measured(record: RunRecord, rank: int) -> dict[str, int | None]:
    samples = {sample.moment: sample for sample in record.memory if sample.rank == rank}
    held = {s.component: s.bytes for s in record.components if s.rank == rank and s.source == "held"}
    known = {name: held[name] for name in OwnedBytes.__dataclass_fields__ if name in held}
    moments = {name: samples[name].allocated_bytes for name in MOMENTS if name in samples}
    peak: MemorySample | None = samples.get(PEAK)
    allocated = peak.allocated_bytes if peak else None
    reserved = peak.reserved_bytes if peak else None
    return {
        **components(moments, allocated, OwnedBytes(**known) if known else None),
        "reserved": reserved,
        "device": peak.device_bytes if peak else None,
        "fragmentation": reserved - allocated if reserved is not None and allocated is not None else None,
    }


def _capacity(record: RunRecord) -> int | None:
    """The smallest limit that a process was given, else the memory of the smallest GPU; None on a CPU."""
    given = [s.bytes for s in record.components if s.component == "capacity"]
    gpus = [gpu.get("memory_bytes") for machine in record.machines for gpu in machine.get("gpus") or ()]
    on_gpu = record.spec.topology.device == "cuda"
    return min(given or [int(size) for size in gpus if size and on_gpu], default=None)


# --- frontier ---


def _point(records: Sequence[RunRecord]) -> FrontierPoint | None:
    """The result of the probes of one search. None if no probe completed or ran out of memory."""
    ended = {r.spec.training.micro_batch: r for r in records if r.status in (Status.OK, Status.OOM)}
    if not ended:
        return None
    fitting = max((size for size, r in ended.items() if r.status is Status.OK), default=None)
    failing = min((size for size, r in ended.items() if r.status is Status.OOM), default=None)
    spec = next(iter(ended.values())).spec
    most = spec.workload.options.get("most", 1024)
    bounded = failing == (fitting or 0) + 1 or (failing is None and fitting == most)
    axes = {name: value for name, value in spec.axes().items() if name not in ("micro_batch", "global_batch")}
    first = min(records, key=lambda r: r.started_at)  # its prediction was made before any other probe ran
    capacity, predicted, probes = _capacity(first), None, []
    if capacity is not None:
        limit = most if isinstance(most, int) else 1024
        predicted = largest_fitting(predicted_peaks(first.components), capacity, limit)
    for r in sorted(records, key=lambda r: r.started_at):
        peaks = [s.allocated_bytes for s in r.memory if s.moment == PEAK and s.allocated_bytes is not None]
        probes.append(
            Probe(
                run=r.spec.run_id,
                micro_batch=r.spec.training.micro_batch,
                status=str(r.status),
                peak_bytes=max(peaks, default=None),
            )
        )
    return FrontierPoint(
        series=_series(spec),
        sequence_length=spec.training.sequence_length,
        largest_fitting=fitting,
        smallest_failing=failing,
        predicted=predicted,
        settled=bounded,
        probes=tuple(probes),
        axes=axes,
    )


def _series(spec: RunSpec) -> str:
    """What all sequence lengths of one line have in common, in words."""
    t = spec.training
    limit: Scalar = spec.workload.options.get("limit_gib")
    words: Mapping[str, bool] = {
        str(spec.strategy_text): True,
        spec.model_text: True,
        axis_text("world_size", spec.axes()): True,
        t.precision.compute: True,
        f"checkpointing {t.checkpointing}": t.checkpointing != "none",
        f"accumulation {t.accumulation}": t.accumulation != 1,
        "compiled": bool(t.compile),
        f"limit {limit} GiB": limit is not None,
    }
    return ", ".join(word for word, shown in words.items() if shown)


def all_advice(records: Sequence[RunRecord]) -> tuple[MemoryAdvice, ...]:
    """Advice for each run that ran out of memory and recorded predictions."""
    return tuple(found for record in records if (found := advice(record)) is not None)


def advice(record: RunRecord) -> MemoryAdvice | None:
    """Advice for one run; None unless it ran out of memory, recorded its memory, and has alternatives."""
    room = room_bytes(record.components)
    if record.status is not Status.OOM or room is None or not record.alternatives:
        return None
    own = next((s for s in record.alternatives if not s.change), None)
    own_peak = own.bytes if own else None
    goal = goal_bytes(room, own_peak)
    return MemoryAdvice(
        run=record.spec.run_id,
        cell=record.spec.cell,
        axes=record.spec.axes(),
        room_bytes=room,
        own_peak_bytes=own_peak,
        own_note=own.note if own else None,
        goal_bytes=goal,
        alternatives=tuple(
            Alternative(
                change=s.change,
                settings=s.settings,
                keeps_work=s.keeps_work,
                peak_bytes=s.bytes,
                fits=None if s.bytes is None else s.bytes <= goal,
                origin=s.origin,
                note=s.note,
            )
            for s in record.alternatives
            if s.change
        ),
    )
