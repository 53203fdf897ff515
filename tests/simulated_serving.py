"""Served runs by a simple law: each replica answers at most `slots` requests at once, and slower the more it has."""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence
from typing import Any, NamedTuple

from paceline.experiment.choices import Choice
from paceline.experiment.serving import Serving
from paceline.experiment.spec import RunSpec, Topology, Training
from paceline.results.records import RunRecord, Status
from paceline.results.served_samples import ClientSample, ReplicaSample, RequestSample, StageSample

NS = 1_000_000_000
TOKENS = 32


class Replica(NamedTuple):
    """slowness multiplies all of its times. died_s: from then on it answers nothing."""

    host: str
    slowness: float = 1.0
    died_s: float | None = None
    slots: int = 16


ONE = (Replica("node-a"),)
TWO = (Replica("node-a"), Replica("node-b", slowness=1.6))


def client(**more: Any) -> ClientSample:
    values: dict[str, Any] = {"requests": 1, "reads": 1, "schedule_lag_p50_ns": 5e4, "schedule_lag_p99_ns": 3e5}
    values |= {"read_lag_p50_ns": 1e4, "read_lag_p99_ns": 8e5, "cpu_s": 1.2, "wall_s": 10.0, "most_in_flight": 8}
    values |= {"waited_for_cap": 0, "clock_doubt_ns": 10, "clock_drift_ns": 10, "plan": "abc", "shard": 0}
    return ClientSample(rank=0, **{**values, **more})


def spec_of(repeat: int = 0, engine: str = "openai", **serving: Any) -> RunSpec:
    return RunSpec(
        experiment="served",
        workload=Choice("inference"),
        model=Choice("tiny"),
        topology=Topology(device="cpu"),
        training=Training(sequence_length=1, micro_batch=1),
        steps=1,
        repeat=repeat,
        engine=Choice(engine, {"url": "http://x"}),
        serving=Serving(**serving),
    )


def asked(
    requests: int,
    replicas: Sequence[Replica] = ONE,
    rate_per_s: float | None = None,
    in_flight: int = 0,
    seed: int = 0,
    start_ns: int = 0,
    stage: int = 0,
) -> list[RequestSample]:
    """Poisson arrivals at a rate, else a closed loop of `in_flight`; requests go round the replicas that live."""
    draws, due_s, found = random.Random(seed), 0.0, []
    free = [[0.0] * replica.slots for replica in replicas]
    loop = [0.0] * in_flight
    for number in range(stage * requests, (stage + 1) * requests):
        due_s = due_s + draws.expovariate(rate_per_s) if rate_per_s else heapq.heappop(loop) if loop else 0.0
        alive = [i for i, replica in enumerate(replicas) if replica.died_s is None or replica.died_s > due_s]
        place = alive[number % len(alive)]
        began = max(due_s, heapq.heappop(free[place]))
        busy = sum(end > began for end in free[place])
        slowness = replicas[place].slowness * (1 + 0.06 * busy) * draws.lognormvariate(0.0, 0.15)
        first, gap = began + 0.08 * slowness, 0.012 * slowness
        ended = first + gap * (TOKENS - 1)
        heapq.heappush(free[place], ended)
        if not rate_per_s and in_flight:
            heapq.heappush(loop, ended)
        found.append(_sample(number, place, start_ns, (due_s, first, gap), stage, replicas[place].died_s))
    return found


def _sample(
    number: int, replica: int, start_ns: int, times: tuple[float, float, float], stage: int, died_s: float | None
) -> RequestSample:
    due_s, first_s, gap_s = times
    due, first, gap = (int(value * NS) for value in (due_s, first_s, gap_s))
    last = first + gap * (TOKENS - 1)
    lost = died_s is not None and last > died_s * NS
    whole = not lost
    return RequestSample(
        rank=0,
        number=number,
        sample=number,
        replica=replica,
        due_ns=start_ns + due,
        sent_ns=start_ns + due + 100_000,
        first_byte_ns=start_ns + first if whole else None,
        first_ns=start_ns + first if whole else None,
        last_ns=start_ns + last if whole else None,
        ended_ns=start_ns + (last if whole else int((died_s or 0.0) * NS)),
        pieces=TOKENS if whole else 0,
        tokens=TOKENS if whole else None,
        prompt_tokens=64,
        asked_tokens=TOKENS,
        coalesced=0,
        stamped=True,
        error=None if whole else "closed",
        token_ns=(gap,) * (TOKENS - 1) if whole else (),
        stage=stage,
    )


def record(
    requests: Sequence[RequestSample],
    replicas: Sequence[Replica] = ONE,
    repeat: int = 0,
    clients: Sequence[ClientSample] | None = None,
    stages: Sequence[StageSample] = (),
    **serving: Any,
) -> RunRecord:
    seen = tuple(
        ReplicaSample(
            rank=0,
            replica=i,
            host=replica.host,
            engine="openai",
            model="tiny",
            died_ns=None if replica.died_s is None else int(replica.died_s * NS),
        )
        for i, replica in enumerate(replicas)
    )
    return RunRecord(
        spec=spec_of(repeat=repeat, **serving),
        status=Status.OK,
        error=None,
        started_at=100.0 + repeat,
        ended_at=160.0 + repeat,
        path="x",
        requests=tuple(requests),
        clients=tuple((client(),) if clients is None else clients),
        stages=tuple(stages),
        replicas=seen,
    )


def closed_loops(loads: Sequence[int] = (1, 4, 16, 64), requests: int = 120) -> list[RunRecord]:
    """One cell for each number of requests in flight, over two replicas of different speed."""
    return [
        record(asked(requests, TWO, in_flight=n, seed=n), TWO, scenario="concurrency", concurrency=n) for n in loads
    ]


def sweep(rates: Sequence[float] = (4.0, 8.0, 16.0, 32.0), requests: int = 150) -> RunRecord:
    """One run that goes through several rates."""
    found: list[RequestSample] = []
    stages: list[StageSample] = []
    start = 0
    for number, rate in enumerate(rates):
        ours = asked(requests, TWO, rate_per_s=rate, seed=number, start_ns=start, stage=number)
        end = max(request.ended_ns or 0 for request in ours)
        stages.append(
            StageSample(
                rank=0,
                stage=number,
                scenario="sweep",
                rate_per_s=rate,
                concurrency=None,
                replica=None,
                planned=requests,
                started_ns=start,
                ended_ns=end,
                began_at_s=0.0,
            )
        )
        found += ours
        start = end + NS // 2
    return record(found, TWO, stages=stages, scenario="sweep", rate_per_s=rates[0], ttft_limit_s=1.0, tpot_limit_s=0.05)
