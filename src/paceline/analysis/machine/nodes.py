"""A verdict for every node of a test, with its evidence: speed, memory and temperature compared with peers or a
baseline, results that must be equal to the bit, defects known to the driver, and facts in which a node differs from the
others.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from paceline.analysis.findings import SHARED_GPU, Differing
from paceline.analysis.findings.machine import (
    FAIL,
    PASS,
    SUSPECT,
    UNDECIDED,
    WORST_FIRST,
    NodeEvidence,
    NodeMeasure,
    NodeVerdict,
    worst,
)
from paceline.analysis.grouping import grouped
from paceline.analysis.machine import node_evidence, peers, tournament
from paceline.analysis.machine.peers import Band
from paceline.analysis.machine.tournament import Place, places_of
from paceline.analysis.statistics.intervals import Array
from paceline.errors import require
from paceline.experiment.spec import RunSpec
from paceline.results.machine_samples import MEMORY_RATIO, SPEED_RATIO, TEMPERATURE_C, KernelSample
from paceline.results.records import RunRecord, Status

TRAINING, MEMORY, TEMPERATURE, CLOCK = "training", "peak memory", "temperature", "SM clock"
NAMES = {"matmul": "matmul", "copy": "memory copy", "h2d": "host to device", "d2h": "device to host"}


@dataclass(frozen=True, slots=True)
class Measure:
    """values by rank, one per repeat. key says exactly what was measured, so that it matches that of a baseline."""

    name: str
    unit: str
    key: str
    band: Band
    values: Mapping[int, Sequence[float]]
    logarithmic: bool = True

    def of(self, ranks: Iterable[int]) -> tuple[list[int], Array]:
        """The given ranks that have values, and their effects: the same number of repeats of each."""
        known = [rank for rank in ranks if self.values.get(rank)]
        repeats = min((len(self.values[rank]) for rank in known), default=0)
        table = np.array([list(self.values[rank])[:repeats] for rank in known], dtype=np.float64)
        # A defective node may have recorded no tokens, or a duration that no number can be divided by.
        limits = np.finfo(np.float64)
        return known, np.log(np.clip(table, limits.tiny, limits.max)) if self.logarithmic else table

    def relative(self, effect: float) -> float:
        return math.exp(effect) if self.logarithmic else effect


def limit_of(spec: RunSpec, name: str, otherwise: float) -> float:
    given = spec.workload.options.get(name, otherwise)
    return float(given) if isinstance(given, int | float) else otherwise


def measures_of(record: RunRecord) -> list[Measure]:
    """Everything a node test measured. Speeds are left out if ranks share a GPU."""
    spec = record.spec
    speed = Band(math.log(1 - limit_of(spec, "speed_ratio", SPEED_RATIO)), None)
    found = [] if record.shares_gpu else [*_kernels(record.kernels, speed), *_training(record, speed)]
    # The allocator's peak. A CPU has none: resident memory includes interpreter and libraries, and says nothing.
    ratio = limit_of(spec, "memory_ratio", MEMORY_RATIO)
    samples = [(s.rank, float(s.allocated_bytes)) for s in record.memory if s.moment == "steps" and s.allocated_bytes]
    if samples:
        band = Band(math.log(1 - ratio), math.log(1 + ratio))
        peaks = {rank: [peak for _, peak in own] for rank, own in grouped(samples, lambda s: s[0]).items()}
        found.append(Measure(MEMORY, "bytes", f"{MEMORY} {_work(spec)}", band, peaks))
    return [*found, *_gauges(record, speed)]


def _kernels(samples: Iterable[KernelSample], band: Band) -> Iterator[Measure]:
    """Work over the median iteration, as for the machine's ceilings."""
    timed = [s for s in samples if s.status == "ok" and s.durations_s and s.kernel in NAMES]
    usable = sorted((s for s in timed if s.flops or s.moved_bytes), key=lambda s: s.repeat)
    for key, row in grouped(usable, lambda s: (s.kernel, s.dtype, s.label)).items():
        kernel, dtype, _ = key
        name = f"{NAMES[kernel]} {dtype}" if kernel == "matmul" else NAMES[kernel]
        values = {
            rank: [(s.flops or s.moved_bytes or 0) / statistics.median(s.durations_s) for s in own]
            for rank, own in grouped(row, lambda s: s.rank).items()
        }
        yield Measure(name, "FLOP/s" if row[-1].flops else "bytes/s", " ".join(key), band, values)


def _training(record: RunRecord, band: Band) -> Iterator[Measure]:
    """Tokens over time of each window, a ratio of sums, without its first step, which follows other work."""
    values: defaultdict[int, list[float]] = defaultdict(list)
    for (rank, _), steps in sorted(grouped(record.steps, lambda step: (step.rank, step.variant)).items()):
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


def _gauges(record: RunRecord, speed: Band) -> Iterator[Measure]:
    """One median per rank over the whole run: ranks of all nodes do the same at the same time."""
    degrees = limit_of(record.spec, "temperature_c", TEMPERATURE_C)
    readings = node_evidence.gauges_by_rank(record)
    temperatures = {r: [s.temperature_c for s in own if s.temperature_c is not None] for r, own in readings.items()}
    clocks = {r: [s.sm_clock_hz for s in own if s.sm_clock_hz] for r, own in readings.items()}
    for name, unit, band, values in (
        (TEMPERATURE, "C", Band(-degrees, degrees), temperatures),
        (CLOCK, "Hz", speed, clocks),
    ):
        medians = {rank: [statistics.median(own)] for rank, own in values.items() if own}
        if medians:
            yield Measure(name, unit, name, band, medians, logarithmic=name == CLOCK)


PEERS = "peers"
# Suggested command for an unusual measure, on a GPU and on a CPU.
_NEXT = {
    "matmul": "nvidia-smi -q -d CLOCK,PERFORMANCE,POWER,TEMPERATURE",
    "training": "nvidia-smi -q -d CLOCK,PERFORMANCE,POWER,TEMPERATURE",
    "memory": "nvidia-smi -q -d ECC,ROW_REMAPPER,CLOCK",
    "host": "nvidia-smi -q | grep -A 9 'GPU Link Info'; nvidia-smi topo -m; numactl --hardware",
    "device": "nvidia-smi -q | grep -A 9 'GPU Link Info'; nvidia-smi topo -m; numactl --hardware",
    "peak": "nvidia-smi --query-compute-apps=pid,used_memory --format=csv; pip freeze",
    "temperature": "nvidia-smi -q -d TEMPERATURE,POWER; ipmitool sdr type Fan",
    "SM": "nvidia-smi -q -d CLOCK,PERFORMANCE",
}
_NEXT_ON_CPU = "lscpu; uptime; cat /sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"
_NEXT_FOR_PAIRS = "paceline run fabric --set workload.operations=pairs"


@dataclass(frozen=True, slots=True)
class Judged:
    """Verdicts on every node of the given runs, and notes for the reader."""

    verdicts: tuple[NodeVerdict, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Baseline:
    """Healthy devices of another result: their values by device and measure, and the facts that most of them share."""

    name: str
    healthy: Mapping[tuple[str, str], Array]
    usual: Mapping[str, tuple[str, int, int]]


@dataclass(slots=True)
class _Case:
    """Evidence against each rank of one run, collected source by source."""

    record: RunRecord
    places: Mapping[int, Place]
    kinds: Mapping[int, str]
    evidence: defaultdict[int, list[NodeEvidence]] = field(default_factory=lambda: defaultdict(list))
    measures: list[NodeMeasure] = field(default_factory=list)
    differences: Mapping[int, list[Differing]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add(self, found: Iterator[tuple[int, NodeEvidence]] | Sequence[tuple[int, NodeEvidence]]) -> None:
        for rank, evidence in found:
            self.evidence[rank].append(evidence)


def analyse(records: Sequence[RunRecord], baseline: Baseline | None = None) -> Judged:
    """Verdicts of all node tests among the records that ended ok."""
    judged = [judge(record, baseline) for record in _tests(records)]
    notes = dict.fromkeys(note for one in judged for note in one.notes)
    return Judged(tuple(v for one in judged for v in one.verdicts), tuple(notes))


def _tests(records: Sequence[RunRecord]) -> list[RunRecord]:
    return [r for r in records if r.spec.traits.tests_nodes and r.status is Status.OK]


def baseline_of(records: Sequence[RunRecord], name: str) -> Baseline:
    """A baseline from the ranks whose node passed among its own peers; an error if there is none."""
    tests = _tests(records)
    values: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    facts: dict[int, Mapping[str, str]] = {}
    for record in tests:
        passed = {r for v in judge(record).verdicts if v.verdict == PASS for r in v.ranks}
        kinds = _kinds(places_of(record))
        for measure in measures_of(record):
            ranks, table = measure.of(sorted(passed))
            for rank, row in zip(ranks, table, strict=True):
                values[kinds[rank], measure.key].append(float(np.median(row)))
        known = node_evidence.facts_of(record)
        facts |= {len(facts) + i: known[rank] for i, rank in enumerate(sorted(passed)) if rank in known}
    require(bool(values), "--baseline", name, "a result of `paceline run nodes` in which a node passed")
    healthy = {key: np.array(found) for key, found in values.items()}
    return Baseline(name, healthy, node_evidence.usual_facts(facts))


def judge(record: RunRecord, baseline: Baseline | None = None) -> Judged:
    places = places_of(record)
    case = _Case(record, places, _kinds(places))
    for measure in measures_of(record):
        for kind in dict.fromkeys(case.kinds.values()):
            _compare(case, measure, kind, baseline)
    case.add(list(node_evidence.product_evidence(record)))
    case.add(list(node_evidence.wrong_pairs(record)))
    # Ranks that agree in device, processor and versions must compute the same bits.
    hosts, alike = {str(m.get("host")): m for m in record.machines}, {}
    for outcome in record.outcomes:
        host = hosts.get(outcome.host, {})
        versions = sorted((host.get("versions") or {}).items())
        alike[outcome.rank] = f"{case.kinds.get(outcome.rank)} {host.get('cpu')} {versions}"
    evidence_of_bits, notes = node_evidence.trajectory_evidence(record, alike)
    case.add(evidence_of_bits)
    case.notes += notes
    case.add(node_evidence.condition_evidence(record))
    case.add(node_evidence.throttle_evidence(record))
    facts = node_evidence.facts_of(record)
    usual = baseline.usual if baseline and baseline.usual else node_evidence.usual_facts(facts)
    whose = f"of {baseline.name}" if baseline and baseline.usual else "here"
    case.differences = node_evidence.differences(facts, usual)
    case.add(node_evidence.difference_evidence(case.differences, usual, whose))
    if not (baseline and baseline.usual):
        texts = node_evidence.undecided_facts(facts)
        case.notes += [f"nodes differ, and there is no majority to say which is right: {text}" for text in texts]
    # A node or rank that is slow with all others fails if both turns agree; a slow link makes two suspects.
    for suspect in tournament.judge_run(record).suspects:
        verdict = FAIL if suspect.kind != tournament.LINK and suspect.confirmed else SUSPECT
        slow = f"slow {suspect.kind}"
        evidence = NodeEvidence(kind=slow, verdict=verdict, text=suspect.text, next_command=_NEXT_FOR_PAIRS)
        case.add([(rank, evidence) for rank in suspect.ranks])
    if record.shares_gpu:
        case.notes.append(f"nodes: {SHARED_GPU}, so their speed is not judged")
    for kind, count in Counter(case.kinds.values()).items() if baseline is None else ():
        if count < peers.FEWEST_PEERS:
            many = f"{count} rank{'s' if count > 1 else ''} of {kind}"
            case.notes.append(f"{many}: too few to find an outlier; --baseline compares with a healthy result")
    return Judged(tuple(_verdicts(case, baseline)), tuple(dict.fromkeys(case.notes)))


def _kinds(places: Mapping[int, Place]) -> dict[int, str]:
    """Device name without its number: only equal kinds are peers."""
    return {rank: place.device.partition(" ")[2] or place.device.partition(":")[0] for rank, place in places.items()}


# --- measures ---


def _compare(case: _Case, measure: Measure, kind: str, baseline: Baseline | None) -> None:
    ranks, table = measure.of(rank for rank, own in case.kinds.items() if own == kind)
    if not ranks:
        return
    healthy = baseline.healthy.get((kind, measure.key)) if baseline else None
    if healthy is None:
        against = f"the median of {len(ranks)} ranks"
        results = peers.among_peers(table, measure.band)
        if baseline:
            case.notes.append(f"{baseline.name} has no {measure.name} of this kind: ranks are compared with peers")
    else:
        against = f"the median of {len(healthy)} devices of {baseline.name if baseline else ''}"
        results = peers.beside_baseline(table, healthy, measure.band)
    doubt = float(np.median([s.doubt for s in results]))
    if doubt > measure.band.width and measure.logarithmic:
        case.notes.append(
            f"{measure.name}: repeats scatter, so only a node worse by {_certain(measure, doubt)} is detected for "
            "certain; use more repeats or steps"
        )
    for rank, row, result in zip(ranks, table, results, strict=True):
        half, effect = result.half, result.effect
        interval = (None, None) if half is None else (effect - half, effect + half)
        ends = (*interval, measure.band.low, measure.band.high)
        low, high, *accepted = (None if end is None else measure.relative(end) for end in ends)
        case.measures.append(
            NodeMeasure(
                measure=measure.name,
                unit=measure.unit,
                rank=rank,
                value=measure.relative(float(np.median(row))),
                relative=measure.relative(effect),
                low=low,
                high=high,
                accepted=(accepted[0], accepted[1]),
                z=result.z,
                verdict=result.verdict,
            )
        )
        if result.verdict != PASS:
            case.add([(rank, _evidence(case, measure, rank, result, against, len(row)))])


def _certain(measure: Measure, doubt: float) -> str:
    """How much worse than the others a node must be for its whole interval to lie outside the band."""
    return f"{1 - measure.relative(-measure.band.width - doubt):.0%}"


def _evidence(
    case: _Case, measure: Measure, rank: int, result: peers.PeerResult, against: str, repeats: int
) -> NodeEvidence:
    """Why this rank did not pass. If that is undecided: how many repeats would decide."""
    why = {
        peers.ODD: "",
        peers.PAIR: "; two ranks cannot show which is wrong: add a third one or --baseline",
        peers.SPLIT: "; a group of ranks is faster, so there is no single outlier: --baseline shows which is healthy",
        peers.SPREAD: "; its peers are spread as far, so it is no outlier, but it is outside the band",
        peers.SCATTER: "; repeats scatter more than the band is wide, so only a node worse by "
        f"{_certain(measure, result.doubt)} is detected for certain",
        peers.EDGE: "; it is outside the band, but its whole interval is not",
    }[result.reason]
    text = f"{measure.name} of rank {rank} ({case.places[rank].device}) is {_distance(measure, result)} {against}{why}"
    kind = measure.name if measure.unit in ("bytes", "C", "Hz") else f"slow {measure.name}"
    on_gpu = case.record.spec.topology.device == "cuda"
    command = _NEXT.get(measure.name.split()[0], "") if on_gpu else _NEXT_ON_CPU
    if result.verdict == UNDECIDED:
        enough, kind = peers.repeats_for(result, repeats, measure.band), f"{measure.name} undecided"
        advice = f"even {peers.MOST_REPEATS} are not enough: find what disturbs it"
        if enough:
            advice, command = f"it needs about {enough}", f"paceline run nodes --set workload.repeats={enough}"
        text += f"; {repeats} repeats were run, {advice}"
    return NodeEvidence(kind=kind, verdict=result.verdict, text=text, next_command=command)


def _distance(measure: Measure, result: peers.PeerResult) -> str:
    """`12.0 % [11.0, 13.0] under`. An interval that includes 0 starts on the other side, with a minus."""
    side, sign = ("under", -1) if result.effect < 0 else ("over", 1)
    if not measure.logarithmic:
        return f"{abs(result.effect):.0f} {measure.unit} {side}"
    interval = ""
    if result.half is not None:
        ends = (result.effect - result.half, result.effect + result.half)
        percents = [sign * (measure.relative(end) - 1) * 100 for end in ends]
        interval = f" [{min(percents):.1f}, {max(percents):.1f}]"
    return f"{abs(measure.relative(result.effect) - 1) * 100:.1f} %{interval} {side}"


# --- nodes ---


def _verdicts(case: _Case, baseline: Baseline | None) -> Iterator[NodeVerdict]:
    """Ranks of one host as one node, or each rank as its own; the worst evidence decides."""
    spec = case.record.spec
    single = spec.workload.options.get("node", "host") == "process"
    facts = node_evidence.loaded_facts(case.record)
    for ranks in grouped(case.places, lambda rank: rank if single else case.places[rank].node).values():
        host = case.places[ranks[0]].host
        evidence = tuple(dict.fromkeys(e for rank in ranks for e in case.evidence[rank]))
        # Every fact once, with the values of all ranks if they differ.
        condition: dict[str, dict[str, None]] = {}
        for rank in ranks:
            for name, value in facts.get(rank, {}).items():
                condition.setdefault(name, {}).update({str(value): None} if value not in (None, "") else {})
        measures = tuple(m for m in case.measures if m.rank in ranks)
        trained = [m.value for m in measures if m.measure == TRAINING]
        tokens_per_s = sum(trained) if len(trained) == len(ranks) else None
        is_fixed = spec.workload.options.get("training", "pretrain") == "pretrain" and tokens_per_s is not None
        yield NodeVerdict(
            run=spec.run_id,
            cell=spec.cell,
            node=f"{host}, rank {ranks[0]}" if single else host,
            host=host,
            ranks=tuple(ranks),
            devices=tuple(case.places[rank].device for rank in ranks),
            verdict=worst(tuple(e.verdict for e in evidence)),
            against=baseline.name if baseline else PEERS,
            evidence=tuple(sorted(evidence, key=lambda e: WORST_FIRST.index(e.verdict))),
            measures=measures,
            tokens_per_s=tokens_per_s,
            samples_per_s=(tokens_per_s or 0.0) / spec.training.sequence_length if is_fixed else None,
            differences=tuple(dict.fromkeys(d for rank in ranks for d in case.differences.get(rank, ()))),
            condition=tuple((name, ", ".join(values)) for name, values in condition.items() if values),
        )
