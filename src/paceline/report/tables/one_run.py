"""One run as text: what was requested, how it ended, what each rank observed, and its certificate."""

from __future__ import annotations

import time
from collections.abc import Iterator

from paceline.analysis.findings import Certificate
from paceline.results.records import RunRecord, TraceSample
from paceline.wording import MISSING, format_duration

GIB = 2**30
CLASSES = ("products", "attention", "dequantisation", "elementwise", "copies")


def record_lines(record: RunRecord, certificate: Certificate | None) -> Iterator[str]:
    spec = record.spec
    yield f"{spec.run_id}: {record.status}" + (f" ({record.error})" if record.error else "")
    started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.started_at))
    yield f"  started {started}, took {format_duration(record.ended_at - record.started_at)}; directory {record.path}"
    yield "  requested: " + ", ".join(f"{name} {value}" for name, value in spec.axes().items() if value is not None)
    yield from _machines(record)
    yield from _ranks(record)
    yield from _attempts(record)
    yield from _losses(record)
    yield from map(_profile, record.traces)
    for check in certificate.checks if certificate else ():
        yield f"  {'equal' if check.ok else 'UNEQUAL'} {check.name}: {check.observed}"


def _losses(record: RunRecord) -> Iterator[str]:
    """By their ranks where some of a node's were left: under Ray each has a process of its own."""
    topology, spoke = record.spec.topology, {outcome.rank for outcome in record.outcomes}
    for node in record.lost_nodes:
        first = node * topology.processes_per_node
        ranks = range(first, first + topology.processes_per_node)
        silent = [str(rank) for rank in ranks if rank not in spoke]
        who = f"node {node} of {topology.nodes}"
        if 0 < len(silent) < len(ranks):
            who = f"rank {', '.join(silent)} on {who}"
        yield f"  {who} was lost before the end; the run continued without it"


def _machines(record: RunRecord) -> Iterator[str]:
    for machine in record.machines:
        gpus = ", ".join(str(gpu["name"]) for gpu in machine["gpus"]) or "no GPU"
        versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
        yield f"  on {machine['host']}: {machine['cpu']}, {gpus}; {versions}"


def _attempts(record: RunRecord) -> Iterator[str]:
    """How those before the last one ended."""
    for attempt in record.attempts:
        reason = f" ({attempt.reason})" if attempt.reason else ""
        lasted = format_duration(attempt.ended_at - attempt.submitted_at)
        yield f"  attempt {attempt.attempt}: {attempt.status} after {lasted}{reason}"


def _profile(trace: TraceSample) -> str:
    """Time of the profiled steps, by class if the profile separates kernels."""
    known = [(name, getattr(trace, f"{name}_s")) for name in CLASSES]
    parts = [(name, seconds) for name, seconds in known if seconds is not None] or [("compute", trace.compute_s)]
    parts += [("exposed communication", trace.exposed_s), ("gap", trace.gap_s)]
    shares = ", ".join(f"{name} {seconds / trace.wall_s:.0%}" for name, seconds in parts)
    return f"  rank {trace.rank}, {trace.steps} profiled steps of {trace.wall_s / trace.steps * 1e3:,.4g} ms: {shares}"


def _ranks(record: RunRecord) -> Iterator[str]:
    """Ranks of an inference run have no steps; their results are listed by load."""
    for outcome in record.outcomes:
        if record.spec.serving is not None:
            yield f"  rank {outcome.rank}: {outcome.status}"
            continue
        steps = [s for s in record.steps if s.rank == outcome.rank and s.variant == 0]
        loss = f"loss {steps[0].loss:.4f} to {steps[-1].loss:.4f}" if steps else "no step"
        peaks = [m for m in record.memory if m.rank == outcome.rank and m.moment == "steps"]
        peak_bytes = next((m.allocated_bytes or m.resident_bytes for m in peaks), None)
        memory = MISSING if peak_bytes is None else f"{peak_bytes / GIB:.2f} GiB"
        yield f"  rank {outcome.rank}: {outcome.status}, {len(steps)} steps, {loss}, peak memory {memory}"
