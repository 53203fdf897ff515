"""What of a node test can be compared between devices: rates, peak memory, heat and clocks, by rank and repeat."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from paceline.analysis.machine.peers import Band
from paceline.analysis.machine.tournament import Place, places_of
from paceline.analysis.statistics.intervals import Array
from paceline.experiment.spec import RunSpec
from paceline.results.machine_samples import MEMORY_RATIO, SPEED_RATIO, TEMPERATURE_C, KernelSample
from paceline.results.records import GaugeSample, RunRecord, StepSample

TRAINING, MEMORY, TEMPERATURE, CLOCK = "training", "peak memory", "temperature", "SM clock"
NAMES = {"matmul": "matmul", "copy": "memory copy", "h2d": "host to device", "d2h": "device to host"}


@dataclass(frozen=True, slots=True)
class Measure:
    """values by rank, one per repeat. key tells what exactly was measured, so that a baseline's is the same."""

    name: str
    unit: str
    key: str
    band: Band
    values: Mapping[int, Sequence[float]]
    logarithmic: bool = True

    def of(self, ranks: Iterable[int]) -> tuple[list[int], Array]:
        """The ranks among these that have values, and their effects: as many repeats of each as all have."""
        known = [rank for rank in ranks if self.values.get(rank)]
        repeats = min((len(self.values[rank]) for rank in known), default=0)
        table = np.array([list(self.values[rank])[:repeats] for rank in known], dtype=np.float64)
        return known, np.log(table) if self.logarithmic else table

    def relative(self, effect: float) -> float:
        return math.exp(effect) if self.logarithmic else effect


def limit_of(spec: RunSpec, name: str, otherwise: float) -> float:
    given = spec.workload.options.get(name, otherwise)
    return float(given) if isinstance(given, int | float) else otherwise


def measures_of(record: RunRecord) -> list[Measure]:
    """Speeds are left out where ranks share a GPU: they say nothing there."""
    spec = record.spec
    speed = Band(math.log(1 - limit_of(spec, "speed_ratio", SPEED_RATIO)), None)
    found = [] if record.shares_gpu else [*_kernels(record.kernels, speed), *_training(record, speed)]
    return [*found, *_memory(record), *_gauges(record, speed)]


def _kernels(samples: Iterable[KernelSample], band: Band) -> Iterator[Measure]:
    """Work over the median iteration, as the machine's ceilings are told."""
    rows: defaultdict[tuple[str, str, str], dict[int, list[float]]] = defaultdict(dict)
    units = {}
    for s in sorted(samples, key=lambda s: s.repeat):
        work = s.flops or s.moved_bytes
        if s.status == "ok" and s.durations_s and work and s.kernel in NAMES:
            key = (s.kernel, s.dtype, s.label)
            rows[key].setdefault(s.rank, []).append(work / statistics.median(s.durations_s))
            units[key] = "FLOP/s" if s.flops else "bytes/s"
    for key, values in rows.items():
        kernel, dtype, _ = key
        name = f"{NAMES[kernel]} {dtype}" if kernel == "matmul" else NAMES[kernel]
        yield Measure(name, units[key], " ".join(key), band, values)


def _training(record: RunRecord, band: Band) -> Iterator[Measure]:
    """Tokens over time of each window, a ratio of sums; its first step, which follows other work, is left out."""
    windows: defaultdict[tuple[int, int], list[StepSample]] = defaultdict(list)
    for step in record.steps:
        windows[step.rank, step.variant].append(step)
    values: defaultdict[int, list[float]] = defaultdict(list)
    for (rank, _), steps in sorted(windows.items()):
        counted = sorted(steps, key=lambda s: s.step)[1 if len(steps) > 1 else 0 :]
        values[rank].append(sum(s.tokens for s in counted) / sum(s.duration_s for s in counted))
    if values:
        yield Measure(TRAINING, "tokens/s", f"{TRAINING} {_work(record.spec)}", band, values)


def _work(spec: RunSpec) -> str:
    """What one process trains: the same on any number of nodes."""
    t = spec.training
    parts: list[Any] = [spec.workload.options.get("training", "pretrain"), spec.model, t.sequence_length]
    parts += [t.micro_batch, t.accumulation, t.precision.compute, t.checkpointing, t.compile, spec.tuning]
    return " ".join(map(str, parts))


def _memory(record: RunRecord) -> Iterator[Measure]:
    """The allocator's peak. A CPU has none: resident memory holds interpreter and libraries, and says nothing."""
    ratio = limit_of(record.spec, "memory_ratio", MEMORY_RATIO)
    values: defaultdict[int, list[float]] = defaultdict(list)
    for s in record.memory:
        if s.moment == "steps" and s.allocated_bytes:
            values[s.rank].append(float(s.allocated_bytes))
    if values:
        band = Band(math.log(1 - ratio), math.log(1 + ratio))
        yield Measure(MEMORY, "bytes", f"{MEMORY} {_work(record.spec)}", band, values)


def _gauges(record: RunRecord, speed: Band) -> Iterator[Measure]:
    """One median per rank over the whole run: ranks of all nodes do the same at the same time."""
    degrees = limit_of(record.spec, "temperature_c", TEMPERATURE_C)
    temperatures: dict[int, list[float]] = {}
    clocks: dict[int, list[float]] = {}
    for rank, samples in gauges_by_rank(record).items():
        if warm := [s.temperature_c for s in samples if s.temperature_c is not None]:
            temperatures[rank] = [statistics.median(warm)]
        if ticking := [s.sm_clock_hz for s in samples if s.sm_clock_hz]:
            clocks[rank] = [statistics.median(ticking)]
    if temperatures:
        yield Measure(TEMPERATURE, "C", TEMPERATURE, Band(-degrees, degrees), temperatures, logarithmic=False)
    if clocks:
        yield Measure(CLOCK, "Hz", CLOCK, speed, clocks)


def gauges_by_rank(record: RunRecord) -> dict[int, list[GaugeSample]]:
    """One process of a node reads all its gauges: a rank's are those of its device there, on a CPU the host's."""
    places = places_of(record)
    devices = local_ranks(places) if record.spec.topology.device == "cuda" else dict.fromkeys(places)
    found: dict[int, list[GaugeSample]] = {}
    for rank, place in places.items():
        ours = [g for g in record.gauges if g.rank in places and places[g.rank].node == place.node]
        if samples := [g for g in ours if g.device == devices[rank]]:
            found[rank] = samples
    return found


def local_ranks(places: Mapping[int, Place]) -> dict[int, int]:
    """Each rank's number within its node, which is its GPU's index."""
    return {
        rank: sum(other < rank and places[other].node == place.node for other in places)
        for rank, place in places.items()
    }
