"""What driver, kernel and gauges say of a node: defects, throttling, and facts that differ from its peers'."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from paceline.analysis.findings import Differing
from paceline.analysis.findings.nodes import FAIL, SUSPECT, NodeEvidence
from paceline.analysis.machine.node_measures import gauges_by_rank, local_ranks
from paceline.analysis.machine.tournament import places_of
from paceline.errors import Scalar
from paceline.host import machine
from paceline.results.records import GaugeSample, RunRecord

Found = tuple[int, NodeEvidence]
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
