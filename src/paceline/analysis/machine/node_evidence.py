"""Evidence against nodes without timing: wrong results, driver defects, throttling, settings that differ."""

from __future__ import annotations

import statistics
import struct
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from paceline.analysis.findings import Differing
from paceline.analysis.findings.machine import FAIL, SUSPECT, NodeEvidence
from paceline.analysis.machine.tournament import Place, places_of
from paceline.errors import Scalar
from paceline.host import machine
from paceline.results.machine_samples import ProductSample, TrajectorySample
from paceline.results.records import GaugeSample, RunRecord

DIAGNOSE = "dcgmi diag -r 4   (take the node out of service first)"
REPEAT = "paceline run nodes --set workload.node=process   (again, on this node alone)"
# Bits that a result's storage has, within those of an fp32 of the same value.
_FORMATS = {"fp32": ("<f", "<I"), "fp16": ("<e", "<H")}

Found = tuple[int, NodeEvidence]


class Trajectory(NamedTuple):
    losses: tuple[float, ...]
    weights: str


def product_evidence(record: RunRecord) -> Iterator[Found]:
    """Every rank whose known product came out wrong, with the first wrong element; then kernels and copies whose own
    check failed."""
    by_rank: defaultdict[int, list[ProductSample]] = defaultdict(list)
    for sample in record.products:
        if sample.wrong:
            by_rank[sample.rank].append(sample)
    proved = Counter(sample.rank for sample in record.products)
    for rank, samples in by_rank.items():
        yield rank, _evidence("wrong result", FAIL, _product_text(rank, samples, proved[rank]), DIAGNOSE)
    for s in record.kernels:
        if s.wrong or s.status == "failed":
            how = f"{s.wrong} wrong elements" if s.wrong else f"failed: {s.error}"
            text = f"{s.kernel} {s.dtype} ({s.label}) on rank {s.rank}, repeat {s.repeat}: {how}"
            yield s.rank, _evidence("wrong result", FAIL, text, DIAGNOSE)


def _product_text(rank: int, samples: list[ProductSample], proved: int) -> str:
    first = samples[0]
    many = f"{first.wrong} element{'s' if first.wrong > 1 else ''}"
    where = f"row {first.place[0]}, column {first.place[1]}" if first.place else "an unknown place"
    m, n, k = first.sides
    bits = _flipped(first)
    return (
        f"a {first.dtype} product of {m} x {n} x {k} with a known result is wrong on rank {rank} in {len(samples)} of "
        f"{proved} proofs: {many} in repeat {first.repeat}, the first at "
        f"{where} is {first.found:g} instead of {first.expected:g}{bits}"
    )


def _flipped(sample: ProductSample) -> str:
    """Which bits of the stored number differ, counted from the lowest; empty where the values cannot say."""
    if sample.found is None or sample.expected is None:
        return ""
    value, word = _FORMATS.get(sample.dtype, _FORMATS["fp32"])
    shift = 16 if sample.dtype == "bf16" else 0
    found, expected = (struct.unpack(word, struct.pack(value, x))[0] for x in (sample.found, sample.expected))
    differs = (found ^ expected) >> shift
    bits = [str(i) for i in range(differs.bit_length()) if differs >> i & 1]
    return f" (bit{'s' if len(bits) > 1 else ''} {', '.join(bits)} flipped)" if bits else ""


# --- trajectories ---


def trajectory_evidence(record: RunRecord, alike: Mapping[int, str]) -> tuple[list[Found], list[str]]:
    """alike: rank -> what its device and versions are; only ranks that agree in it must agree in their bits."""
    found: list[Found] = []
    notes: list[str] = []
    groups: defaultdict[str, list[TrajectorySample]] = defaultdict(list)
    for sample in record.trajectories:
        groups[alike.get(sample.rank, "")].append(sample)
    for samples in groups.values():
        evidence, note = _of_group(samples)
        found += evidence
        notes += [note] if note else []
    return found, notes


def _of_group(samples: list[TrajectorySample]) -> tuple[list[Found], str | None]:
    """Self-agreement comes first: one steady rank shows that kernels are deterministic here, so that another which does
    not repeat itself is ill. Then steady ranks are compared with each other, one vote each."""
    turns: defaultdict[int, list[TrajectorySample]] = defaultdict(list)
    for sample in sorted(samples, key=lambda s: (s.rank, s.turn)):
        turns[sample.rank].append(sample)
    steady = {rank: _result(own[0]) for rank, own in turns.items() if len(set(map(_result, own))) == 1}
    if not steady:
        return _nobody_steady(turns)
    usual, votes = Counter(steady.values()).most_common(1)[0]
    if 2 * votes <= len(steady):
        wavering = [
            (rank, _wavering(own, len(steady), len(turns))) for rank, own in turns.items() if rank not in steady
        ]
        return [*_undecided(steady), *wavering], None
    found = []
    for rank, own in turns.items():
        other = next((s for s in own if _result(s) != usual), None)
        if other is not None:
            known = rank in steady or votes > 1
            evidence = _odd(other, usual, len(steady)) if known else _wavering(own, len(steady), len(turns))
            found.append((rank, evidence))
    return found, None


def _result(sample: TrajectorySample) -> Trajectory:
    return Trajectory(sample.losses, sample.weights)


def _nobody_steady(turns: Mapping[int, list[TrajectorySample]]) -> tuple[list[Found], str | None]:
    if len(turns) == 1:
        return [(rank, _wavering(own, 0, 1)) for rank, own in turns.items()], None
    different = len({_result(s) for own in turns.values() for s in own})
    return [], (
        f"the seeded steps gave {different} different results on {len(turns)} alike ranks, none of which repeats its "
        "own: kernels are not deterministic here, so silent corruption was looked for in known products only"
    )


def _undecided(steady: Mapping[int, Trajectory]) -> list[Found]:
    text = (
        f"{len(steady)} alike ranks compute {len(set(steady.values()))} different results from the same seeded steps, "
        "each always its own, none in the majority: which is right is open"
    )
    return [(rank, _evidence("other bits", SUSPECT, text, REPEAT)) for rank in steady]


def _wavering(own: list[TrajectorySample], steady: int, ranks: int) -> NodeEvidence:
    """A rank that disagrees with itself, beside so many steady ones of all alike."""
    first, other = own[0], next(s for s in own if _result(s) != _result(own[0]))
    text = (
        f"rank {first.rank} computes other bits after the timed work than before it, from the same seeded steps: "
        f"{_difference(_result(other), _result(first), 'before it')}; "
    )
    if not steady:
        text += "no alike rank tells whether kernels are deterministic here"
        return _evidence("other bits", SUSPECT, text, REPEAT)
    text += f"{steady} of {ranks} alike ranks repeat their own, so kernels are deterministic here"
    return _evidence("other bits", FAIL, text, DIAGNOSE)


def _odd(sample: TrajectorySample, usual: Trajectory, steady: int) -> NodeEvidence:
    when = "before the timed work" if sample.turn == 0 else "after the timed work"
    what = _difference(_result(sample), usual, "the majority's")
    text = (
        f"rank {sample.rank} computes other bits than most of {steady} alike ranks that repeat theirs, {when}: {what}"
    )
    return _evidence("other bits", FAIL, text, DIAGNOSE)


def _difference(found: Trajectory, expected: Trajectory, whose: str) -> str:
    """The first step whose loss differs."""
    for step, (loss, other) in enumerate(zip(found.losses, expected.losses, strict=False)):
        if loss != other:
            return f"the loss of step {step} is {loss!r}, {whose} {other!r}"
    return "weights differ"


def wrong_pairs(record: RunRecord) -> Iterator[Found]:
    """Data of the tournament that arrived wrong: the fault may lie at either end or between."""
    for s in record.collectives:
        if s.wrong and s.peer is not None:
            text = f"{s.wrong} elements that rank {s.peer} sent to rank {s.rank} arrived wrong"
            for rank in (s.rank, s.peer):
                yield rank, _evidence("wrong result", SUSPECT, text, DIAGNOSE)


def all_proofs(record: RunRecord) -> Iterable[Found]:
    yield from product_evidence(record)
    yield from wrong_pairs(record)


Facts = Mapping[str, Scalar]
# Readings that a hardware's own protection may show before it is told: one in ten.
THROTTLED_SHARE = 0.1
# How much more often than its peers' median a GPU may be held back by what healthy ones also meet (a power cap).
MORE_THAN_PEERS = 0.25
PROTECTION = ("hardware slowdown", "hardware thermal slowdown", "hardware power brake")
THERMAL = "software thermal slowdown"
# Facts of `health` that healthy peers share; the others are readings, which differ by the moment.
_SHARED = (
    *("vbios", "power_limit_w", "power_limit_default_w", "sm_clock_max_hz", "sm_clock_application_hz"),
    *("memory_clock_max_hz", "pcie_generation_max", "pcie_width_max", "pcie_width", "nvlinks_up"),
)
_IGNORED = ("host", "environment.", "gpus.", "gpu.index")


# --- defects that need no peers ---


def condition_evidence(record: RunRecord) -> Iterator[Found]:
    gpus = local_ranks(places_of(record))
    for rank, facts in loaded_facts(record).items():
        for kind, verdict, text, command in _defects(facts):
            words = f"rank {rank}: {text}"
            yield rank, _evidence(kind, verdict, words, command.format(gpu=gpus.get(rank, 0)))


def loaded_facts(record: RunRecord) -> dict[int, Facts]:
    """The last reading of each rank."""
    return {s.rank: s.facts for s in sorted(record.health, key=lambda s: s.moment == "loaded")}


def _defects(facts: Facts) -> Iterator[tuple[str, str, str, str]]:
    """Kind, verdict, text, next command."""
    ecc, reset = "nvidia-smi -q -d ECC,ROW_REMAPPER,PAGE_RETIREMENT -i {gpu}", "nvidia-smi --gpu-reset -i {gpu}"
    if count := facts.get("gpu.ecc_volatile_uncorrected"):
        yield "memory errors", FAIL, f"{count} uncorrected memory errors since the driver was loaded", ecc
    elif count := facts.get("gpu.ecc_aggregate_uncorrected"):
        yield "memory errors", SUSPECT, f"{count} uncorrected memory errors in the life of the GPU", ecc
    if facts.get("gpu.remap_failed"):
        yield "memory errors", FAIL, "a row of memory could not be remapped", ecc
    if facts.get("gpu.remap_pending") or facts.get("gpu.pages_retirement_pending"):
        yield "memory errors", FAIL, "memory waits to be remapped or retired until the GPU is reset", reset
    if count := facts.get("gpu.rows_remapped_uncorrectable"):
        yield "memory errors", SUSPECT, f"{count} rows were remapped after uncorrectable errors", ecc
    yield from _narrow_links(facts)


def _narrow_links(facts: Facts) -> Iterator[tuple[str, str, str, str]]:
    bus = "nvidia-smi -q -i {gpu} | grep -A 9 'GPU Link Info'"
    for name, unit in (("width", "x"), ("generation", "generation ")):
        now, most = facts.get(f"gpu.pcie_{name}"), facts.get(f"gpu.pcie_{name}_max")
        if isinstance(now, int) and isinstance(most, int) and now < most:
            yield "PCIe", SUSPECT, f"PCIe runs at {unit}{now} of {unit}{most} under load", bus
    if facts.get("gpu.nvlinks_up") and (down := facts.get("gpu.nvlinks_down")):
        yield "NVLink", SUSPECT, f"NVLinks {down} are down while others are up", "nvidia-smi nvlink --status -i {gpu}"


# --- throttling ---


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


def throttle_evidence(record: RunRecord) -> Iterator[Found]:
    """By the share of readings with each reason; a power cap that all GPUs of a rack meet is nobody's fault."""
    readings = {
        rank: told
        for rank, samples in gauges_by_rank(record).items()
        if (told := [s for s in samples if s.throttle_reasons is not None])
    }
    shares = {rank: _shares(told) for rank, told in readings.items()}
    gpus = local_ranks(places_of(record))
    for rank, ours in shares.items():
        for reason, share in ours.items():
            usual = statistics.median(other.get(reason, 0.0) for other in shares.values())
            if verdict := _throttle_verdict(reason, share, usual):
                text = f"rank {rank}: {_throttle_text(reason, share, usual, readings[rank])}"
                command = f"nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER,CLOCK -i {gpus[rank]}"
                yield rank, _evidence("throttled", verdict, text, command)


def _shares(told: list[GaugeSample]) -> dict[str, float]:
    counts = Counter(reason for s in told for reason in s.throttle_reasons or ())
    return {reason: count / len(told) for reason, count in counts.items()}


def _throttle_verdict(reason: str, share: float, usual: float) -> str | None:
    if reason in PROTECTION and share >= THROTTLED_SHARE:
        return FAIL
    held_back = reason == THERMAL and share >= THROTTLED_SHARE
    return SUSPECT if held_back or share - usual >= MORE_THAN_PEERS else None


def _throttle_text(reason: str, share: float, usual: float, told: list[GaugeSample]) -> str:
    clocks = [s.sm_clock_hz for s in told if s.sm_clock_hz]
    warm = [s.temperature_c for s in told if s.temperature_c is not None]
    beside = [f"SM clock {statistics.median(clocks) / 1e6:.0f} MHz at the median"] if clocks else []
    beside += [f"up to {max(warm):.0f} C"] if warm else []
    often = f"{reason} in {share:.0%} of {len(told)} readings, {usual:.0%} at the peers' median"
    return "; ".join((often, *beside))


# --- facts that differ ---


def facts_of(record: RunRecord) -> dict[int, dict[str, str]]:
    """By rank: what its host and device are, by dotted path; what is not known is absent."""
    hosts = {str(m.get("host")): m for m in record.machines}
    of_rank = {o.rank: hosts.get(o.host, {}) for o in record.outcomes}
    conditions, gpus = loaded_facts(record), local_ranks(places_of(record))
    found = {}
    for rank, facts in of_rank.items():
        known = facts.get("gpus") or ()
        device = known[gpus[rank]] if gpus.get(rank, 0) < len(known) else {}
        own = {name: value for name, value in conditions.get(rank, {}).items() if _is_shared(name)}
        paths = machine.fingerprint_diff({**facts, "gpu": device}, {})
        flat = {path: value for path, (value, _) in paths.items() if not path.startswith(_IGNORED)} | own
        found[rank] = {path: _text(path, value) for path, value in flat.items() if value is not None}
    return found


def _is_shared(name: str) -> bool:
    place, _, fact = name.partition(".")
    return place == "host" or fact in _SHARED


def _text(path: str, value: Any) -> str:
    """Memory of equal hosts differs by what their firmware keeps: two digits tell hosts apart that are not equal."""
    if path == "memory_bytes":
        return f"{float(value) / 2**30:.2g} GiB"
    return {True: "on", False: "off"}.get(value, str(value)) if isinstance(value, bool) else str(value)


def usual_facts(facts: Mapping[int, Mapping[str, str]]) -> dict[str, tuple[str, int, int]]:
    """Path -> the value of more than half of the ranks that know it, how many have it, and of how many."""
    values: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for ours in facts.values():
        for path, value in ours.items():
            values[path][value] += 1
    found = {}
    for path, counts in values.items():
        value, often = counts.most_common(1)[0]
        if 2 * often > counts.total():
            found[path] = (value, often, counts.total())
    return found


def differences(
    facts: Mapping[int, Mapping[str, str]], usual: Mapping[str, tuple[str, int, int]]
) -> dict[int, list[Differing]]:
    """By rank: where it stands apart from the majority."""
    return {
        rank: [
            Differing(path=path, first=value, second=usual[path][0])
            for path, value in ours.items()
            if path in usual and usual[path][0] != value
        ]
        for rank, ours in facts.items()
    }


def difference_evidence(
    apart: Mapping[int, list[Differing]], usual: Mapping[str, tuple[str, int, int]], whose: str
) -> Iterator[Found]:
    for rank, found in apart.items():
        if found:
            parts = [f"{d.path} is {d.first}, {_majority(usual[d.path], whose)} {d.second}" for d in found]
            yield rank, _evidence("differs", SUSPECT, "; ".join(parts), _inspect(found[0].path))


def _majority(usual: tuple[str, int, int], whose: str) -> str:
    _, often, of = usual
    return f"{often} of {of} ranks {whose} have"


def undecided_facts(facts: Mapping[int, Mapping[str, str]]) -> list[str]:
    """Facts in which two halves differ: nobody is odd, but somebody may be wrong."""
    found = []
    for path in sorted({path for ours in facts.values() for path in ours}):
        counts = Counter(ours[path] for ours in facts.values() if path in ours)
        if len(counts) == 2 and len(set(counts.values())) == 1:
            found.append(f"{path} is {' on one half of the ranks and '.join(sorted(counts))} on the other")
    return found


def _inspect(path: str) -> str:
    if path.startswith("versions."):
        return f"pip show {path.removeprefix('versions.')}"
    if path == "driver" or path.startswith("gpu."):
        return "nvidia-smi -q | grep -E 'Driver Version|VBIOS Version|Power Limit|Link Width|Graphics'"
    return "paceline doctor"


def _evidence(kind: str, verdict: str, text: str, command: str) -> NodeEvidence:
    return NodeEvidence(kind=kind, verdict=verdict, text=text, next_command=command)
