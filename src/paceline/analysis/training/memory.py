"""Memory by component, predicted beside measured, and the largest micro batch that fits."""

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
from paceline.errors import Scalar
from paceline.experiment.spec import RunSpec
from paceline.results.memory_components import (
    COMPONENTS,
    MOMENTS,
    Held,
    components,
    goal_bytes,
    largest_fitting,
    predicted_peaks,
    room_bytes,
)
from paceline.results.records import AlternativeSample, MemorySample, RunRecord, Status

PEAK = "steps"


@dataclass(frozen=True, slots=True)
class Findings:
    """What the memory runs say."""

    rows: tuple[MemoryRow, ...] = ()
    frontier: tuple[FrontierPoint, ...] = ()
    measurements: tuple[Measurement, ...] = ()


def analyse(records: Sequence[RunRecord], runs: Sequence[RunFinding]) -> Findings:
    """records are all, because a probe that ran out of memory is a result too; runs say which of them are sound."""
    sound = {run.run for run in runs if run.status == Status.OK}
    cells: dict[str, list[RunRecord]] = {}
    searches: dict[str, list[RunRecord]] = {}
    for record in records:
        traits = record.spec.traits
        if traits.measures_memory and traits.probes_limit:
            searches.setdefault(_search_of(record.spec), []).append(record)
        elif traits.measures_memory and record.spec.run_id in sound:
            cells.setdefault(record.spec.cell, []).append(record)
    rows = tuple(_row(cell, launches) for cell, launches in cells.items())
    points = (_point(probes) for probes in searches.values())
    frontier = sorted((p for p in points if p), key=lambda p: (p.series, p.sequence_length))
    return Findings(rows, tuple(frontier), tuple(m for row in rows for m in _measurements(row)))


# --- components ---


def _row(cell: str, launches: Sequence[RunRecord]) -> MemoryRow:
    """The launch and rank with the highest peak speak for the cell: that is the one that runs out first."""
    found = [(record, rank) for record in launches for rank in {sample.rank for sample in record.memory}]
    record, rank = max(found, key=lambda pair: _measured(*pair)["peak"] or 0)
    measured, predicted = _measured(record, rank), _predicted(record)
    told, seen = predicted["peak"], measured["peak"]
    return MemoryRow(
        cell=cell,
        axes=record.spec.axes(),
        predicted=predicted,
        measured=measured,
        error_ratio=told / seen - 1 if told is not None and seen else None,
        capacity_bytes=_capacity(record),
        runs=tuple(r.spec.run_id for r in launches),
        note=_note(record),
    )


def _measured(record: RunRecord, rank: int) -> dict[str, int | None]:
    samples = {sample.moment: sample for sample in record.memory if sample.rank == rank}
    held = {s.component: s.bytes for s in record.components if s.rank == rank and s.source == "held"}
    known = {name: held[name] for name in Held.__dataclass_fields__ if name in held}
    moments = {name: samples[name].allocated_bytes for name in MOMENTS if name in samples}
    peak: MemorySample | None = samples.get(PEAK)
    allocated = peak.allocated_bytes if peak else None
    reserved = peak.reserved_bytes if peak else None
    return {
        **components(moments, allocated, Held(**known) if known else None),
        "reserved": reserved,
        "device": peak.device_bytes if peak else None,
        "fragmentation": reserved - allocated if reserved is not None and allocated is not None else None,
    }


def _predicted(record: RunRecord) -> dict[str, int | None]:
    own = record.spec.training.micro_batch
    told = {s.component: s.bytes for s in record.components if s.source == "predicted" and s.micro_batch == own}
    return {name: told.get(name) for name in (*COMPONENTS, "peak")}


def _capacity(record: RunRecord) -> int | None:
    """The smallest limit that a process was given, else the memory of the smallest GPU; None on a CPU."""
    given = [s.bytes for s in record.components if s.component == "capacity"]
    gpus = [gpu.get("memory_bytes") for machine in record.machines for gpu in machine.get("gpus") or ()]
    on_gpu = record.spec.topology.device == "cuda"
    return min(given or [int(size) for size in gpus if size and on_gpu], default=None)


def _note(record: RunRecord) -> str | None:
    state = str(record.evidence.settings.get("prediction", "made")) if record.evidence else "made"
    return f"no prediction ({state.removeprefix('none: ')})" if state.startswith("none") else None


def _measurements(row: MemoryRow) -> list[Measurement]:
    values = {"peak_memory_bytes": row.measured["peak"], "predicted_peak_memory_bytes": row.predicted["peak"]}
    return [
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
        for metric, value in values.items()
    ]


# --- frontier ---


def _search_of(spec: RunSpec) -> str:
    """Same for all probes of one search, which differ in the micro batch only."""
    return replace(spec, training=replace(spec.training, micro_batch=1)).run_id


def _point(records: Sequence[RunRecord]) -> FrontierPoint | None:
    """What the probes of one search say together. None when none of them ran through or out of memory."""
    ended = {r.spec.training.micro_batch: r for r in records if r.status in (Status.OK, Status.OOM)}
    if not ended:
        return None
    fitting = max((size for size, r in ended.items() if r.status is Status.OK), default=None)
    failing = min((size for size, r in ended.items() if r.status is Status.OOM), default=None)
    spec = next(iter(ended.values())).spec
    most = spec.workload.options.get("most", 1024)
    bounded = failing == (fitting or 0) + 1 or (failing is None and fitting == most)
    axes = {name: value for name, value in spec.axes().items() if name not in ("micro_batch", "global_batch")}
    return FrontierPoint(
        series=_series(spec),
        sequence_length=spec.training.sequence_length,
        largest_fitting=fitting,
        smallest_failing=failing,
        predicted=_predicted_largest(records, most if isinstance(most, int) else 1024),
        settled=bounded,
        probes=tuple(_probe(r) for r in sorted(records, key=lambda r: r.started_at)),
        axes=axes,
    )


def _probe(record: RunRecord) -> Probe:
    peaks = [s.allocated_bytes for s in record.memory if s.moment == PEAK and s.allocated_bytes is not None]
    return Probe(
        run=record.spec.run_id,
        micro_batch=record.spec.training.micro_batch,
        status=str(record.status),
        peak_bytes=max(peaks, default=None),
    )


def _predicted_largest(records: Sequence[RunRecord], most: int) -> int | None:
    """As the first probe told it, before any other had run."""
    first = min(records, key=lambda r: r.started_at)
    capacity = _capacity(first)
    return None if capacity is None else largest_fitting(predicted_peaks(first.components), capacity, most)


def _series(spec: RunSpec) -> str:
    """What all sequence lengths of one line have in common, in words."""
    t = spec.training
    unit = "GPU" if spec.topology.device == "cuda" else "process"
    plural = "" if spec.topology.world_size == 1 else "s" if unit == "GPU" else "es"
    limit: Scalar = spec.workload.options.get("limit_gib")
    words: Mapping[str, bool] = {
        str(spec.strategy): True,
        spec.model_text: True,
        f"{spec.topology.world_size} {unit}{plural}": True,
        t.precision.compute: True,
        f"checkpointing {t.checkpointing}": t.checkpointing != "none",
        f"accumulation {t.accumulation}": t.accumulation != 1,
        "compiled": t.compile,
        f"limit {limit} GiB": limit is not None,
    }
    return ", ".join(word for word, said in words.items() if said)


def all_advice(records: Sequence[RunRecord]) -> tuple[MemoryAdvice, ...]:
    """One for each run out of memory that left predictions."""
    return tuple(found for record in records if (found := advice(record)) is not None)


def advice(record: RunRecord) -> MemoryAdvice | None:
    """None unless the run was out of memory, told its room, and was advised."""
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
        alternatives=tuple(_alternative(s, goal) for s in record.alternatives if s.change),
    )


def _alternative(sample: AlternativeSample, goal: int) -> Alternative:
    return Alternative(
        change=sample.change,
        settings=sample.settings,
        keeps_work=sample.keeps_work,
        peak_bytes=sample.bytes,
        fits=None if sample.bytes is None else sample.bytes <= goal,
        origin=sample.origin,
        note=sample.note,
    )
