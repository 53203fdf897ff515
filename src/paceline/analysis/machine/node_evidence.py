"""Evidence against nodes without timing: wrong results, driver defects, throttling, and settings that differ."""

from __future__ import annotations

import statistics
import struct
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from paceline.analysis.findings import Differing
from paceline.analysis.findings.machine import FAIL, SUSPECT, NodeEvidence
from paceline.analysis.grouping import grouped
from paceline.analysis.machine.tournament import Place, places_of
from paceline.errors import Scalar
from paceline.host import machine
from paceline.results.machine_samples import ProductSample, TrajectorySample
from paceline.results.records import GaugeSample, RunRecord

DIAGNOSE = "dcgmi diag -r 4   (take the node out of service first)"
REPEAT = "paceline run nodes --set workload.node=process   (again, on this node only)"
# Formats of a stored result; bf16 is the upper half of an fp32.
_FORMATS = {"fp32": ("<f", "<I"), "fp16": ("<e", "<H")}

Found = tuple[int, NodeEvidence]


class Trajectory(NamedTuple):
    losses: tuple[float, ...]
    weights: str


def product_evidence(record: RunRecord) -> Iterator[Found]:
    """Every rank with a wrong known product, with its first wrong element; then kernels and copies whose own check
    failed.
    """
    tests = Counter(sample.rank for sample in record.products)
    for rank, samples in grouped((s for s in record.products if s.wrong), lambda s: s.rank).items():
        first = samples[0]
        count = f"{first.wrong} element{'s' if first.wrong > 1 else ''}"
        sides = " x ".join(map(str, first.sides))
        text = (
            f"a {first.dtype} product of {sides} with a known result is wrong on rank {rank} in {len(samples)} of "
            f"{tests[rank]} tests: {count} in repeat {first.repeat}, the first {_first_wrong(first)}"
        )
        yield rank, _evidence("wrong result", FAIL, text, DIAGNOSE)
    for s in record.kernels:
        if s.wrong or s.status == "failed":
            how = f"{s.wrong} wrong elements" if s.wrong else f"failed: {s.error}"
            text = f"{s.kernel} {s.dtype} ({s.label}) on rank {s.rank}, repeat {s.repeat}: {how}"
            yield s.rank, _evidence("wrong result", FAIL, text, DIAGNOSE)


def _first_wrong(sample: ProductSample) -> str:
    """Where the first wrong element is, and what it is. A defective node may have recorded less than that."""
    where = "at an unknown position"
    if sample.place is not None and len(sample.place) == 2:
        where = "at row {}, column {}".format(*sample.place)
    if sample.found is None or sample.expected is None:
        return f"{where} is unknown"
    bits = _flipped(sample.dtype, sample.found, sample.expected)
    return f"{where} is {sample.found:g} instead of {sample.expected:g}{bits}"


def _flipped(dtype: str, *numbers: float) -> str:
    """Which bits of two stored numbers differ, counted from the lowest; empty if they are not of that dtype."""
    value, word = _FORMATS.get(dtype, _FORMATS["fp32"])
    shift = 16 if dtype == "bf16" else 0
    try:
        found, expected = (struct.unpack(word, struct.pack(value, number))[0] for number in numbers)
    except (OverflowError, struct.error):
        return ""
    differs = (found ^ expected) >> shift
    bits = [str(i) for i in range(differs.bit_length()) if differs >> i & 1]
    return f" (bit{'s' if len(bits) > 1 else ''} {', '.join(bits)} flipped)" if bits else ""


# --- trajectories ---


def trajectory_evidence(record: RunRecord, alike: Mapping[int, str]) -> tuple[list[Found], list[str]]:
    """Ranks whose seeded steps gave different bits, and notes.

    alike: rank -> its device and versions; only ranks with equal ones must agree. Self-agreement comes first: one rank
    that repeats its own result shows that kernels are deterministic, so another that does not is faulty. Then the
    repeatable ranks are compared with each other, one vote each.
    """
    found: list[Found] = []
    notes: list[str] = []
    for group in grouped(record.trajectories, lambda sample: alike.get(sample.rank, "")).values():
        turns = grouped(sorted(group, key=lambda s: (s.rank, s.turn)), lambda s: s.rank)
        steady = {rank: _result(own[0]) for rank, own in turns.items() if len(set(map(_result, own))) == 1}
        if not steady and len(turns) == 1:
            found += [(rank, _wavering(own, 0, 1)) for rank, own in turns.items()]
            continue
        if not steady:
            different = len({_result(s) for own in turns.values() for s in own})
            notes.append(
                f"the seeded steps gave {different} different results on {len(turns)} alike ranks, and no rank repeats "
                "its own: kernels are not deterministic here, so only known products were checked for silent corruption"
            )
            continue
        usual, votes = Counter(steady.values()).most_common(1)[0]
        if 2 * votes <= len(steady):
            text = (
                f"{len(steady)} alike ranks compute {len(set(steady.values()))} different results from the same seeded "
                "steps, each repeats its own, and none has a majority: it is unknown which is right"
            )
            found += [(rank, _evidence("other bits", SUSPECT, text, REPEAT)) for rank in steady]
            found += [
                (rank, _wavering(own, len(steady), len(turns))) for rank, own in turns.items() if rank not in steady
            ]
            continue
        for rank, own in turns.items():
            other = next((s for s in own if _result(s) != usual), None)
            if other is not None and (rank in steady or votes > 1):
                when = "before the timed work" if other.turn == 0 else "after the timed work"
                text = (
                    f"rank {rank} computes other bits than most of {len(steady)} alike ranks that repeat theirs, "
                    f"{when}: {_difference(_result(other), usual, 'that of the majority')}"
                )
                found.append((rank, _evidence("other bits", FAIL, text, DIAGNOSE)))
            elif other is not None:
                found.append((rank, _wavering(own, len(steady), len(turns))))
    return found, notes


def _result(sample: TrajectorySample) -> Trajectory:
    return Trajectory(sample.losses, sample.weights)


def _wavering(own: list[TrajectorySample], steady: int, ranks: int) -> NodeEvidence:
    """A rank that disagrees with itself, given how many of the alike ranks repeat their own result."""
    first, other = own[0], next(s for s in own if _result(s) != _result(own[0]))
    text = (
        f"rank {first.rank} computes other bits after the timed work than before it, from the same seeded steps: "
        f"{_difference(_result(other), _result(first), 'before it')}; "
    )
    if not steady:
        text += "no alike rank shows whether kernels are deterministic here"
        return _evidence("other bits", SUSPECT, text, REPEAT)
    text += f"{steady} of {ranks} alike ranks repeat their own result, so kernels are deterministic here"
    return _evidence("other bits", FAIL, text, DIAGNOSE)


def _difference(result: Trajectory, expected: Trajectory, whose: str) -> str:
    """The first step whose loss differs."""
    for step, (loss, other) in enumerate(zip(result.losses, expected.losses, strict=False)):
        if loss != other:
            return f"the loss of step {step} is {loss!r}, {whose} {other!r}"
    return "weights differ"


def wrong_pairs(record: RunRecord) -> Iterator[Found]:
    """Data of the tournament that arrived corrupted: the fault may be at either end or between."""
    for s in record.collectives:
        if s.wrong and s.peer is not None:
            text = f"{s.wrong} elements sent by rank {s.peer} to rank {s.rank} arrived corrupted"
            for rank in (s.rank, s.peer):
                yield rank, _evidence("wrong result", SUSPECT, text, DIAGNOSE)


Facts = Mapping[str, Scalar]
# Hardware protection in more than one reading in ten is reported.
THROTTLED_SHARE = 0.1
# How much more often than its peers' median a GPU may be throttled by what also affects healthy ones (a power cap).
MORE_THAN_PEERS = 0.25
PROTECTION = ("hardware slowdown", "hardware thermal slowdown", "hardware power brake")
THERMAL = "software thermal slowdown"
# Facts of `health` that healthy peers share; the others are momentary readings.
_SHARED = (
    *("vbios", "power_limit_w", "power_limit_default_w", "sm_clock_max_hz", "sm_clock_application_hz"),
    *("memory_clock_max_hz", "pcie_generation_max", "pcie_width_max", "pcie_width", "nvlinks_up"),
)
_IGNORED = ("host", "environment.", "gpus.", "gpu.index")


# --- defects that need no peers ---


def condition_evidence(record: RunRecord) -> Iterator[Found]:
    """Defects that the driver reports, by rank."""
    gpus = local_ranks(places_of(record))
    for rank, facts in loaded_facts(record).items():
        for kind, verdict, text, command in _defects(facts):
            yield rank, _evidence(kind, verdict, f"rank {rank}: {text}", command.format(gpu=gpus.get(rank, 0)))


def loaded_facts(record: RunRecord) -> dict[int, Facts]:
    """The last reading of each rank."""
    return {s.rank: s.facts for s in sorted(record.health, key=lambda s: s.moment == "loaded")}


def _defects(facts: Facts) -> Iterator[tuple[str, str, str, str]]:
    """Kind, verdict, text, next command."""
    ecc, reset = "nvidia-smi -q -d ECC,ROW_REMAPPER,PAGE_RETIREMENT -i {gpu}", "nvidia-smi --gpu-reset -i {gpu}"
    if count := facts.get("gpu.ecc_volatile_uncorrected"):
        yield "memory errors", FAIL, f"{count} uncorrected memory errors since the driver was loaded", ecc
    elif count := facts.get("gpu.ecc_aggregate_uncorrected"):
        yield "memory errors", SUSPECT, f"{count} uncorrected memory errors in the lifetime of the GPU", ecc
    if facts.get("gpu.remap_failed"):
        yield "memory errors", FAIL, "a memory row could not be remapped", ecc
    if facts.get("gpu.remap_pending") or facts.get("gpu.pages_retirement_pending"):
        yield "memory errors", FAIL, "memory waits for a GPU reset to be remapped or retired", reset
    if count := facts.get("gpu.rows_remapped_uncorrectable"):
        yield "memory errors", SUSPECT, f"{count} rows were remapped after uncorrectable errors", ecc
    bus = "nvidia-smi -q -i {gpu} | grep -A 9 'GPU Link Info'"
    for name, unit in (("width", "x"), ("generation", "generation ")):
        now, most = facts.get(f"gpu.pcie_{name}"), facts.get(f"gpu.pcie_{name}_max")
        if isinstance(now, int) and isinstance(most, int) and now < most:
            yield "PCIe", SUSPECT, f"PCIe runs at {unit}{now} of {unit}{most} under load", bus
    if facts.get("gpu.nvlinks_up") and (down := facts.get("gpu.nvlinks_down")):
        yield "NVLink", SUSPECT, f"NVLinks {down} are down while others are up", "nvidia-smi nvlink --status -i {gpu}"


# --- throttling ---


def gauges_by_rank(record: RunRecord) -> dict[int, list[GaugeSample]]:
    """Readings by rank: one process of a node reads all its gauges. On a GPU those of its device, on a CPU those of the
    host.
    """
    places = places_of(record)
    devices = local_ranks(places) if record.spec.topology.device == "cuda" else dict.fromkeys(places)
    by_rank: dict[int, list[GaugeSample]] = {}
    for rank, place in places.items():
        ours = [g for g in record.gauges if g.rank in places and places[g.rank].node == place.node]
        if samples := [g for g in ours if g.device == devices[rank]]:
            by_rank[rank] = samples
    return by_rank


def local_ranks(places: Mapping[int, Place]) -> dict[int, int]:
    """Each rank's number within its node, which is the index of its GPU."""
    return {
        rank: sum(other < rank and places[other].node == place.node for other in places)
        for rank, place in places.items()
    }


def throttle_evidence(record: RunRecord) -> Iterator[Found]:
    """Throttling by the share of readings with each reason; a power cap that all GPUs of a rack reach is no fault."""
    readings = {
        rank: known
        for rank, samples in gauges_by_rank(record).items()
        if (known := [s for s in samples if s.throttle_reasons is not None])
    }
    shares = {}
    for rank, known in readings.items():
        counts = Counter(reason for s in known for reason in s.throttle_reasons or ())
        shares[rank] = {reason: count / len(known) for reason, count in counts.items()}
    gpus = local_ranks(places_of(record))
    for rank, own in shares.items():
        for reason, share in own.items():
            usual = statistics.median(other.get(reason, 0.0) for other in shares.values())
            if reason in PROTECTION and share >= THROTTLED_SHARE:
                verdict = FAIL
            elif (reason == THERMAL and share >= THROTTLED_SHARE) or share - usual >= MORE_THAN_PEERS:
                verdict = SUSPECT
            else:
                continue
            parts = [f"{reason} in {share:.0%} of {len(readings[rank])} readings, {usual:.0%} for the median peer"]
            if clocks := [s.sm_clock_hz for s in readings[rank] if s.sm_clock_hz]:
                parts.append(f"median SM clock {statistics.median(clocks) / 1e6:.0f} MHz")
            if temperatures := [s.temperature_c for s in readings[rank] if s.temperature_c is not None]:
                parts.append(f"up to {max(temperatures):.0f} C")
            command = f"nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER,CLOCK -i {gpus[rank]}"
            yield rank, _evidence("throttled", verdict, f"rank {rank}: {'; '.join(parts)}", command)


# --- facts that differ ---


def facts_of(record: RunRecord) -> dict[int, dict[str, str]]:
    """Facts of each rank's host and device by dotted path; unknown ones are absent."""
    hosts = {str(m.get("host")): m for m in record.machines}
    of_rank = {o.rank: hosts.get(o.host, {}) for o in record.outcomes}
    conditions, gpus = loaded_facts(record), local_ranks(places_of(record))
    by_rank = {}
    for rank, facts in of_rank.items():
        known = facts.get("gpus") or ()
        device = known[gpus[rank]] if gpus.get(rank, 0) < len(known) else {}
        own = {
            name: value
            for name, value in conditions.get(rank, {}).items()
            if name.partition(".")[0] == "host" or name.partition(".")[2] in _SHARED
        }
        paths = machine.fingerprint_diff({**facts, "gpu": device}, {})
        flat = {path: value for path, (value, _) in paths.items() if not path.startswith(_IGNORED)} | own
        by_rank[rank] = {path: _text(path, value) for path, value in flat.items() if value is not None}
    return by_rank


def _text(path: str, value: Any) -> str:
    """Memory of equal hosts differs by what their firmware reserves: two digits separate hosts that really differ."""
    if path == "memory_bytes":
        return f"{float(value) / 2**30:.2g} GiB"
    return {True: "on", False: "off"}.get(value, str(value)) if isinstance(value, bool) else str(value)


def usual_facts(facts: Mapping[int, Mapping[str, str]]) -> dict[str, tuple[str, int, int]]:
    """Path -> the value of more than half of the ranks that report it, how many have it, and how many report it."""
    values: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for ours in facts.values():
        for path, value in ours.items():
            values[path][value] += 1
    usual = {}
    for path, counts in values.items():
        value, often = counts.most_common(1)[0]
        if 2 * often > counts.total():
            usual[path] = (value, often, counts.total())
    return usual


def differences(
    facts: Mapping[int, Mapping[str, str]], usual: Mapping[str, tuple[str, int, int]]
) -> dict[int, list[Differing]]:
    """By rank: facts in which it differs from the majority."""
    return {
        rank: [
            Differing(path=path, first=value, second=usual[path][0])
            for path, value in ours.items()
            if path in usual and usual[path][0] != value
        ]
        for rank, ours in facts.items()
    }


def difference_evidence(
    by_rank: Mapping[int, list[Differing]], usual: Mapping[str, tuple[str, int, int]], whose: str
) -> Iterator[Found]:
    """Facts in which a rank differs from the majority, with a command to inspect the first."""
    for rank, differing in by_rank.items():
        if differing:
            parts = []
            for d in differing:
                _, often, of = usual[d.path]
                parts.append(f"{d.path} is {d.first}, but {d.second} on {often} of {of} ranks {whose}")
            path, command = differing[0].path, "paceline doctor"
            if path.startswith("versions."):
                command = f"pip show {path.removeprefix('versions.')}"
            elif path == "driver" or path.startswith("gpu."):
                command = "nvidia-smi -q | grep -E 'Driver Version|VBIOS Version|Power Limit|Link Width|Graphics'"
            yield rank, _evidence("differs", SUSPECT, "; ".join(parts), command)


def undecided_facts(facts: Mapping[int, Mapping[str, str]]) -> list[str]:
    """Facts in which two halves of the ranks differ: there is no odd one, but some may be wrong."""
    texts = []
    for path in sorted({path for ours in facts.values() for path in ours}):
        counts = Counter(ours[path] for ours in facts.values() if path in ours)
        if len(counts) == 2 and len(set(counts.values())) == 1:
            texts.append(f"{path} is {' on one half of the ranks and '.join(sorted(counts))} on the other")
    return texts


def _evidence(kind: str, verdict: str, text: str, command: str) -> NodeEvidence:
    return NodeEvidence(kind=kind, verdict=verdict, text=text, next_command=command)
