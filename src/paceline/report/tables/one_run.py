"""One run as text: what was requested, how it ended, what each rank observed, and its certificate."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Iterator, Sequence

from paceline.analysis.findings import Certificate, LaunchTrust
from paceline.analysis.findings.served import LoadOfRun, ReplicaOfRun
from paceline.host import links
from paceline.results.records import RunRecord, TraceSample
from paceline.results.samples import StepSeries
from paceline.wording import MISSING, Scale, format_duration, format_parts, listed

GIB = 2**30
CLASSES = ("products", "attention", "dequantisation", "elementwise", "copies")


def record_lines(
    record: RunRecord,
    certificate: Certificate | None,
    light: LaunchTrust | None = None,
    loads: Sequence[LoadOfRun] = (),
) -> Iterator[str]:
    """The run as lines; the first says how it ended and names everything below it that is not as it should be."""
    spec = record.spec
    end = f"{record.status}" + (f" ({record.error})" if record.error else "")
    objections = _objections(certificate, light, loads)
    yield f"{spec.run_id}: {end}" + (f", but {listed(objections)}" if objections else "")
    started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.started_at))
    yield f"  started {started}, took {format_duration(record.ended_at - record.started_at)}; directory {record.path}"
    if light is not None:
        times = (
            f", after {light.repeated} disturbed launch{'' if light.repeated == 1 else 'es'}" if light.repeated else ""
        )
        yield f"  trust: {light.level}{times}" + (f": {'; '.join(light.reasons)}" if light.reasons else "")
    yield "  requested: " + ", ".join(f"{name} {value}" for name, value in spec.axes().items() if value is not None)
    if spec.reduction is not None:
        yield f"  on {spec.reduction.text}: it only proves others, and its speed is not measured"
    for machine in record.machines:
        # A node may have recorded any part of them.
        gpus = ", ".join(str(gpu.get("name")) for gpu in machine.get("gpus") or ()) or "no GPU"
        versions = ", ".join(f"{name} {version}" for name, version in (machine.get("versions") or {}).items())
        yield f"  on {machine.get('host')}: {machine.get('cpu')}, {gpus}; {versions}"
        if connected := links.summary(machine):
            yield f"    {connected}"
    # Once for all ranks: a run may have thousands.
    first, last, counts = _losses_by_rank(StepSeries.of(record.steps)) if spec.serving is None else ({}, {}, {})
    peaks: dict[int, int | None] = {}
    for m in record.memory:
        if m.moment == "steps":
            peaks.setdefault(m.rank, m.allocated_bytes or m.resident_bytes)
    for outcome in record.outcomes:
        # Ranks of an inference run have no steps; their results are listed by load.
        if spec.serving is not None:
            yield f"  rank {outcome.rank}: {outcome.status}"
            continue
        rank, steps = outcome.rank, counts.get(outcome.rank, 0)
        loss = f"loss {first[rank]:.4f} to {last[rank]:.4f}" if steps else "no step"
        peak_bytes = peaks.get(outcome.rank)
        memory = MISSING if peak_bytes is None else f"{peak_bytes / GIB:.2f} GiB"
        yield f"  rank {outcome.rank}: {outcome.status}, {steps} steps, {loss}, peak memory {memory}"
    for attempt in record.attempts:
        reason = f" ({attempt.reason})" if attempt.reason else ""
        lasted = format_duration(attempt.ended_at - attempt.submitted_at)
        yield f"  attempt {attempt.attempt}: {attempt.status} after {lasted}{reason}"
    per_node, reported = spec.topology.processes_per_node, {outcome.rank for outcome in record.outcomes}
    for node in record.lost_nodes:
        ranks = range(node * per_node, (node + 1) * per_node)
        silent = [str(rank) for rank in ranks if rank not in reported]
        who = f"node {node} of {spec.topology.nodes}"
        # Under Ray each rank has its own process, so only some ranks of a node may be lost.
        if 0 < len(silent) < len(ranks):
            who = f"rank {', '.join(silent)} on {who}"
        yield f"  {who} was lost before the end; the run continued without it"
    yield from map(_profile, record.traces)
    if certificate is None:
        return
    verdict = (certificate.level_text or "certified") if certificate.valid else "NOT certified"
    yield f"  {verdict}: {certificate.compared_steps} of {certificate.steps} steps compared"
    width = max((len(check.name) for check in certificate.checks), default=0)
    for check in certificate.checks:
        yield f"    {'ok  ' if check.ok else 'FAIL'}  {check.name:{width}}  {check.basis:8}  {check.observed}"
        if not check.ok:
            yield f"    {'':4}  {'':{width}}  {'expected':8}  {check.expected}"


def _losses_by_rank(steps: StepSeries) -> tuple[dict[int, float], dict[int, float], Counter[int]]:
    """The first and the last loss, and the number of steps, in the order of the records; without other variants."""
    first: dict[int, float] = {}
    last: dict[int, float] = {}
    # By columns: a run of thousands of ranks has millions of steps, and an object for each takes most of the time.
    ranks, losses = steps.column("rank"), steps.column("loss")
    if any(steps.column("variant")):
        kept = [variant == 0 for variant in steps.column("variant")]
        ranks, losses = list(itertools.compress(ranks, kept)), list(itertools.compress(losses, kept))
    for rank, loss in zip(ranks, losses, strict=True):
        first.setdefault(rank, loss)
        last[rank] = loss
    return first, last, Counter(ranks)


def _objections(certificate: Certificate | None, light: LaunchTrust | None, loads: Sequence[LoadOfRun]) -> list[str]:
    """What a reader must know before using a run that ended."""
    failed = [check.name for check in certificate.checks if not check.ok] if certificate else []
    found = [f"not certified ({', '.join(failed)})"] if certificate is not None and not certificate.valid else []
    invalid = sum(load.verdict != "VALID" for load in loads)
    found += [f"{invalid} of {len(loads)} loads not valid"] if invalid else []
    return [*found, *(["trust is red"] if light is not None and light.level == "red" else [])]


def _profile(trace: TraceSample) -> str:
    """Time of the profiled steps, by class if the profile separates kernels."""
    known = [(name, getattr(trace, f"{name}_s")) for name in CLASSES]
    parts = [(name, seconds) for name, seconds in known if seconds is not None] or [("compute", trace.compute_s)]
    parts += [("exposed communication", trace.exposed_s), ("gap", trace.gap_s)]
    shares = ", ".join(f"{name} {seconds / trace.wall_s:.0%}" for name, seconds in parts)
    return f"  rank {trace.rank}, {trace.steps} profiled steps of {trace.wall_s / trace.steps * 1e3:,.4g} ms: {shares}"


def served_lines(loads: Sequence[LoadOfRun], replicas: Sequence[ReplicaOfRun]) -> Iterator[str]:
    """Each load of an inference run with its verdict, what failed and why, and each replica."""

    def ms(seconds: float | None) -> str:
        return format_parts(seconds, None, None, Scale("ms", 1e3))[0]

    for load in loads:
        name = f"{load.scenario}, {load.name}" if load.name else load.scenario
        late = f", {load.late:,} late or failed" if load.late is not None else ""
        counts = f"{load.requests:,} requests, {load.requests - load.failed:,} answered, {load.failed:,} failed{late}"
        yield f"  load {name}: {load.verdict}; {counts}"
        yield from (f"    because: {reason}" for reason in load.reasons)
        yield from (f"    next: {step}" for step in load.advice)
        for failure in load.failures:
            times = "once" if failure.count == 1 else f"{failure.count:,} times"
            example = f", such as: {failure.detail}" if failure.detail else ""
            yield f"    failed, {failure.name} {times}{example}"
        if load.few and not any(value for pair in load.latencies.values() for value in pair):
            yield f"    no latency percentile: {'; '.join(load.few)}"
        elif load.latencies:
            latencies = (f"{name} {ms(median)} and {ms(tail)}" for name, (median, tail) in load.latencies.items())
            few = f" ({'; '.join(load.few)})" if load.few else ""
            yield f"    median and p99 of answered requests, ms: {', '.join(latencies)}{few}"
    for each in replicas:
        facts = [f"{each.requests:,} requests", f"{each.failed:,} failed"]
        facts += [f"gone after {each.died_s:.1f} s"] if each.died_s is not None else []
        for began, ended in itertools.zip_longest(each.silent_s[::2], each.silent_s[1::2]):
            until = "the end" if ended is None else f"{ended:.1f} s"
            facts.append(f"silent from {began:.1f} s to {until}")
        facts += [f"{each.reassigned:,} of its samples reassigned to others"] if each.reassigned else []
        yield f"  replica {each.replica} on {each.host}, model {each.model}: {', '.join(facts)}"
