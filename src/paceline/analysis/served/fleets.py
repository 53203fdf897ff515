"""Several replicas under one load: what each did, what they gain together, and what the last one costs.

A replica's own rate comes from the same run (its tokens over its own time) or, better, from a paired run in which it
was used alone. The gain of a dynamic partition over a static one compares cells that differ in nothing else.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from paceline.analysis.findings import BETTER, HIGHER, WORSE, Measurement
from paceline.analysis.findings.served import UNDECIDED_GAIN, Fleet, PartitionGain, ReplicaShare
from paceline.analysis.served import measurements as measured
from paceline.analysis.served.loads import Served, Stretch
from paceline.analysis.served.token_times import spans_of_at_least, tokens_of
from paceline.analysis.statistics.intervals import Resampled, bounded, over_launches, quotient, ratio_between
from paceline.analysis.statistics.verdict import verdict_of
from paceline.results.records import RunRecord

NS = 1e9
# What a speed-up is relative to. A paired run gives one replica as many requests as it has beside the others.
PAIRED = "over the best replica alone with its share in flight, from a paired run"
OWN_TIME = "over the best replica's own rate in this run"
Alone = Mapping[int, Resampled]


# --- one replica ---


@dataclass(frozen=True, slots=True)
class Part:
    """What one replica did in one stretch, from its start. seconds: to its last answer, or to its death."""

    requests: int
    failed: int
    tokens: float
    prompt_tokens: float
    seconds: float
    busy_s: float
    died_s: float | None


def part_of(stretch: Stretch, replica: int) -> Part:
    ours = [request for request in stretch.requests if request.replica == replica]
    answered = [request for request in ours if request.error is None]
    # Seconds from the start of the stretch; a replica that outlived it did not die in it.
    deaths = [r.died_ns for r in stretch.record.replicas if r.replica == replica and r.died_ns is not None]
    after = [(moment - stretch.started_ns) / NS for moment in deaths]
    died = max(after[0], 0.0) if after and after[0] <= stretch.wall_s else None
    last = max((r.ended_ns for r in answered if r.ended_ns is not None), default=stretch.started_ns)
    prompts = [math.nan if r.prompt_tokens is None else r.prompt_tokens for r in answered]
    return Part(
        requests=len(ours),
        failed=len(ours) - len(answered),
        tokens=float(sum(map(tokens_of, answered))),
        prompt_tokens=float(sum(prompts)),
        seconds=(last - stretch.started_ns) / NS if died is None else died,
        busy_s=spans_of_at_least(ours, 1).seconds,
        died_s=died,
    )


def replicas_of(served: Served) -> list[int]:
    """All replicas, including those that answered nothing."""
    known = {replica.replica for record in served.records for replica in record.replicas}
    return sorted(known | {request.replica for request in served.requests if request.replica >= 0})


def share_of(served: Served, replica: int, alone: Alone) -> ReplicaShare:
    parts = [part_of(stretch, replica) for stretch in served.stretches]
    seconds, wall = sum(part.seconds for part in parts), served.wall_s()
    prompts = sum(part.prompt_tokens for part in parts)
    samples = [r for record in served.records for r in record.replicas if r.replica == replica]
    # Reassigned samples are counted over a run: with several loads they belong to the one in which the replica died.
    died_here = served.load is None or any(part.died_s is not None and part.died_s > 0 for part in parts)
    return ReplicaShare(
        replica=replica,
        host=", ".join(dict.fromkeys(sample.host for sample in samples)) or None,
        requests=sum(part.requests for part in parts),
        failed=sum(part.failed for part in parts),
        output_tokens_per_s=sum(part.tokens for part in parts) / seconds if seconds > 0 else None,
        prompt_tokens_per_s=prompts / seconds if seconds > 0 and math.isfinite(prompts) else None,
        busy_ratio=sum(part.busy_s for part in parts) / wall if wall > 0 else None,
        finished_s=max(part.seconds for part in parts),
        alone_tokens_per_s=alone[replica].value if replica in alone else None,
        died_s=next((part.died_s for part in parts if part.died_s is not None), None),
        reassigned=sum(sample.reassigned for sample in samples) if died_here else 0,
    )


# --- all of them ---


def fleet_of(served: Served, alone: Alone) -> Fleet | None:
    """None if only one replica was used: there is nothing to combine."""
    numbers = replicas_of(served)
    if len(numbers) < 2 or served.replica is not None:
        return None
    # The same kind of number for all: rates alone only if every replica has one.
    alone = alone if all(number in alone for number in numbers) else {}
    shares = tuple(share_of(served, number, alone) for number in numbers)
    comparable = [] if served.is_open else [share for share in shares if _by_itself(share)]
    best = max(comparable, key=lambda s: _by_itself(s) or 0.0, default=None)
    combined = measured.measurement(served, "output_tokens_per_s", bounded(_rate(served)))
    speedup, efficiency = _speedup(served, best, alone) if best else None, None
    if speedup:
        value, low, high = (None if x is None else x / len(numbers) for x in (speedup.value, speedup.low, speedup.high))
        bounds = (value, low, high)
        efficiency = measured.measurement(served, "replicas_efficiency_ratio", bounds, note=speedup.note)
    straggler_s, uneven = (None, None) if served.is_open else _straggling(served, numbers)
    wall, over, stage = served.wall_s(), "the best one's own rate", served.stretches[0].stage
    if alone:
        # A replica alone with all requests in flight would be faster than with its share, and the gain smaller.
        of_all = f" of the {stage.concurrency}" if stage and stage.concurrency and stage.concurrency > 1 else ""
        over = f"the best one alone with its share{of_all} in flight"
    return Fleet(
        cell=served.cell,
        axes=served.axes(),
        replicas=shares,
        combined=combined,
        speedup=speedup,
        efficiency=efficiency,
        best=best.replica if best else None,
        straggler_s=straggler_s,
        straggler_ratio=straggler_s / wall if straggler_s is not None and wall > 0 else None,
        uneven_ratio=uneven,
        text=" ".join(_sentences(served, shares, combined, speedup, over, best, straggler_s)),
        runs=served.runs,
        is_paired=bool(alone),
        over=over,
    )


def measurements_of(fleet: Fleet, served: Served) -> Iterator[Measurement]:
    """Measurements of each replica, and of all together relative to the best one."""
    for share in fleet.replicas:
        axes = {"replica": share.replica, "host": share.host}
        rows = [_counts(launch, share.replica) for launch in served.launches]
        for column, kind in enumerate(("output", "prompt")):
            name = f"replica_{kind}_tokens_per_s"
            rate = over_launches(rows, quotient(column, 2), served.cell, name, str(share.replica))
            yield measured.measurement(served, name, bounded(rate), n=share.requests, axes=axes)
    yield from (each for each in (fleet.speedup, fleet.efficiency) if each is not None)
    numbers = [share.replica for share in fleet.replicas]
    waits = [[_straggling(launch, numbers)[0], launch.wall_s()] for launch in served.launches]
    straggler = None if served.is_open else over_launches(waits, quotient(), served.cell, "straggler")
    yield measured.measurement(served, "straggler_ratio", bounded(straggler))


def _counts(launch: Served, replica: int) -> list[float]:
    """Tokens that a replica answered, prompt tokens it got, and the seconds it took."""
    parts = [part_of(stretch, replica) for stretch in launch.stretches]
    columns = zip(*((part.tokens, part.prompt_tokens, part.seconds) for part in parts), strict=True)
    return [float(sum(column)) for column in columns]


def _by_itself(share: ReplicaShare) -> float | None:
    return share.output_tokens_per_s if share.alone_tokens_per_s is None else share.alone_tokens_per_s


def _rate(served: Served) -> Resampled | None:
    rows = [[float(sum(map(tokens_of, each.answered))), each.wall_s()] for each in served.launches]
    return over_launches(rows, quotient(), served.cell, "combined")


def _speedup(served: Served, best: ReplicaShare, alone: Alone) -> Measurement | None:
    """Relative to the best replica alone if a paired run measured it, else to its own time in this run."""
    if best.alone_tokens_per_s is not None:
        together, single = _rate(served), alone[best.replica]
        if together is None:
            return None
        ratio = ratio_between([together], [single])
        speedup = (ratio.value, ratio.low, ratio.high) if ratio else (together.value / single.value, None, None)
        return measured.measurement(served, "replicas_speedup_ratio", speedup, note=PAIRED)
    rows = []
    for launch in served.launches:
        tokens, _, seconds = _counts(launch, best.replica)
        rows.append([float(sum(map(tokens_of, launch.answered))), launch.wall_s(), tokens, seconds])
    drawn = over_launches(rows, lambda s: s[..., 0] / s[..., 1] / (s[..., 2] / s[..., 3]), served.cell, "speedup")
    if drawn is None:
        return None
    return measured.measurement(served, "replicas_speedup_ratio", bounded(drawn), note=OWN_TIME)


def _straggling(served: Served, numbers: Sequence[int]) -> tuple[float, float | None]:
    """Seconds in which the last replica worked alone, summed, and the share of time in which not all had a request. A
    dead replica is not waited for."""
    alone = together = 0.0
    for stretch in served.stretches:
        parts = [part_of(stretch, number) for number in numbers]
        ends = sorted(part.seconds for part in parts if part.died_s is None)
        alone += ends[-1] - ends[-2] if len(ends) > 1 else 0.0
        # The time in which every replica had at least one request.
        edges: list[tuple[float, int]] = []
        for number in numbers:
            spans = spans_of_at_least([r for r in stretch.requests if r.replica == number], 1)
            edges += [*((start, 1) for start in spans.starts), *((end, -1) for end in spans.ends)]
        busy, since, all_busy = 0, 0.0, 0.0
        for moment, change in sorted(edges):
            if busy == len(numbers):
                all_busy += moment - since
            busy, since = busy + change, moment
        together += float(all_busy) / NS
    wall = served.wall_s()
    return alone, 1 - together / wall if wall > 0 else None


# --- sentences ---


def _sentences(
    served: Served,
    shares: Sequence[ReplicaShare],
    combined: Measurement,
    speedup: Measurement | None,
    over: str,
    best: ReplicaShare | None,
    straggler_s: float | None,
) -> Iterator[str]:
    beside, wall_s = "", served.wall_s()
    if speedup is not None and speedup.value is not None and best is not None:
        own = f"replica {best.replica}, {_by_itself(best):,.0f} tokens/s"
        beside = f", {speedup.value:.2f} times {over} ({own})"
    launches = f"{combined.launches} launch{'' if combined.launches == 1 else 'es'}"
    yield f"{len(shares)} replicas served {combined.value or 0.0:,.0f} tokens/s together{beside}; {launches}."
    if straggler_s is not None and wall_s > 0 and straggler_s / wall_s >= 0.01:
        last = max(shares, key=lambda share: share.finished_s)
        time = f"{straggler_s / wall_s:.0%} of the time"
        yield f"Replica {last.replica} worked alone for {time}, after the others had ended."
    for share in shares:
        where = f"replica {share.replica}" + (f" on {share.host}" if share.host else "")
        if share.died_s is not None:
            yield f"Failed: {where} died after {share.died_s:.1f} s; others took {share.reassigned} of its samples."
        silent = [r for record in served.records for r in record.replicas if r.replica == share.replica and r.silent_ns]
        if silent:
            took, began_s = sum(each.reassigned for each in silent), silent[0].silent_ns[0] / NS
            again = "answered again later" if len(silent[0].silent_ns) % 2 == 0 else "did not answer again"
            stopped = f"Failed: {where} stopped answering after {began_s:.1f} s and {again}"
            yield f"{stopped}; others took {took} of its samples."
    # Lost nodes, even if no replica's death shows it: late, when its requests were answered.
    runs = [record for record in served.records if record.lost_nodes]
    nodes = sorted({node for record in runs for node in record.lost_nodes})
    if nodes:
        hosts = {
            replica.rank // record.spec.topology.processes_per_node: replica.host
            for record in runs
            for replica in record.replicas
        }
        names = (f"{node} ({hosts[node]})" if node in hosts else str(node) for node in nodes)
        named = f"node{'' if len(nodes) == 1 else 's'} {', '.join(names)}"
        part = f"{len(runs)} of {len(served.records)} runs"
        yield f"In {part} {named} was lost before the end; the rest continued without it."


# --- dynamic over static ---


def alone_rates(served: Sequence[Served]) -> dict[str, dict[int, Resampled]]:
    """The rate of each replica alone, from paired runs, by configuration without its partition."""
    rates: dict[str, dict[int, Resampled]] = {}
    for each in served:
        if each.replica is not None and not each.is_open and (rate := _rate(each)):
            rates.setdefault(unpartitioned(each.records[0]), {})[each.replica] = rate
    return rates


def unpartitioned(record: RunRecord) -> str:
    """The same for cells that differ only in their partition."""
    serving = record.spec.serving
    assert serving is not None
    return dataclasses.replace(record.spec, serving=dataclasses.replace(serving, partition="static")).cell


def partition_gains(served: Sequence[Served]) -> Iterator[PartitionGain]:
    """Only for loads whose pace the replicas set: a scheduled load gains nothing."""
    by_key: dict[tuple[object, ...], dict[str, Served]] = {}
    for each in served:
        if not each.is_open and each.replica is None:
            key = unpartitioned(each.records[0]), each.load
            by_key.setdefault(key, {})[each.serving.partition] = each
    for pair in by_key.values():
        if "dynamic" in pair and "static" in pair and (gain := _gain(pair["dynamic"], pair["static"])) is not None:
            yield gain


_SHOWN = {BETTER: "faster", WORSE: "slower"}


def _gain(dynamic: Served, static: Served) -> PartitionGain | None:
    over, under = _rate(dynamic), _rate(static)
    if over is None or under is None or under.value <= 0:
        return None
    ratio = ratio_between([over], [under])
    low, high = (ratio.low, ratio.high) if ratio else (None, None)
    single = "one of them has a single launch, so the ratio has no confidence interval"
    verdict, reason = verdict_of(ratio, HIGHER) if ratio else (UNDECIDED_GAIN, single)
    value = over.value / under.value
    interval = f" (95 % interval {ratio.low:.2f} to {ratio.high:.2f})" if ratio else ""
    gain = f"The dynamic partition served {value:.2f} times the tokens/s of the static one{interval}"
    return PartitionGain(
        cell=dynamic.cell,
        other=static.cell,
        axes={name: value for name, value in dynamic.axes().items() if name != "partition"},
        ratio=value,
        low=low,
        high=high,
        verdict=verdict,
        reason=reason,
        text=f"{gain}: {_SHOWN.get(verdict, verdict)}{'' if ratio else f', {reason}'}.",
        runs=(*dynamic.runs, *static.runs),
    )
