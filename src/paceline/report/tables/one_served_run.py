"""One run of a served model as text: each load with its verdict, what failed and why, and each replica."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from paceline.analysis.findings.served import FailureClass, LoadOfRun, ReplicaOfRun
from paceline.wording import Scale, format_parts

MS = Scale("ms", 1e3)


def lines(loads: Sequence[LoadOfRun], replicas: Sequence[ReplicaOfRun]) -> Iterator[str]:
    for load in loads:
        yield from _load(load)
    yield from map(_replica, replicas)


def _load(load: LoadOfRun) -> Iterator[str]:
    called = f"{load.scenario}, {load.name}" if load.name else load.scenario
    late = f", {load.late:,} late or failed" if load.late is not None else ""
    counts = f"{load.requests:,} requests, {load.requests - load.failed:,} answered, {load.failed:,} failed{late}"
    yield f"  load {called}: {load.verdict}; {counts}"
    for reason in load.reasons:
        yield f"    because: {reason}"
    for failure in load.failures:
        yield f"    failed, {_failure(failure)}"
    if load.latencies:
        latencies = (f"{name} {_ms(median)} and {_ms(tail)}" for name, (median, tail) in load.latencies.items())
        yield f"    median and p99 of answered requests, ms: {', '.join(latencies)}"


def _failure(failure: FailureClass) -> str:
    times = "once" if failure.count == 1 else f"{failure.count:,} times"
    return f"{failure.name} {times}" + (f", such as: {failure.detail}" if failure.detail else "")


def _ms(seconds: float) -> str:
    return format_parts(seconds, None, None, MS)[0]


def _replica(each: ReplicaOfRun) -> str:
    facts = [f"{each.requests:,} requests", f"{each.failed:,} failed"]
    if each.died_s is not None:
        facts.append(f"gone after {each.died_s:.1f} s")
    if each.reassigned:
        facts.append(f"{each.reassigned:,} of its samples reassigned to others")
    return f"  replica {each.replica} on {each.host}, model {each.model}: {', '.join(facts)}"
