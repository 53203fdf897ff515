"""Served runs whose every number is known: requests by hand, loads, replicas, launches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from paceline.experiment.choices import Choice
from paceline.experiment.serving import Serving
from paceline.experiment.spec import RunSpec, Topology, Training
from paceline.results.records import Evidence, Outcome, RunRecord, Status
from paceline.results.served_samples import ClientSample, ReplicaSample, RequestSample, StageSample

MS = 1_000_000
S = 1000 * MS


def request(number: int = 0, **more: Any) -> RequestSample:
    """Due at 0, sent after 2 ms, first token after 102, then three more 10 ms apart."""
    values = {"sample": number, "replica": 0, "due_ns": 0, "sent_ns": 2 * MS, "first_byte_ns": 100 * MS}
    values |= {"first_ns": 102 * MS, "last_ns": 132 * MS, "ended_ns": 140 * MS, "pieces": 4, "tokens": 4}
    values |= {"prompt_tokens": 10, "asked_tokens": 4, "coalesced": 0, "stamped": True, "token_ns": (10 * MS,) * 3}
    return RequestSample(rank=0, number=number, **{**values, **more})


def streamed(number: int, start_s: float, end_s: float, tokens: int = 10, **more: Any) -> RequestSample:
    """Sent at once; its tokens come evenly, the last one at its end, to a few nanoseconds."""
    start, end = round(start_s * S), round(end_s * S)
    gap = (end - start) // tokens
    values: dict[str, Any] = {"due_ns": start, "sent_ns": start, "first_byte_ns": start + gap, "first_ns": start + gap}
    values |= {"last_ns": start + tokens * gap, "ended_ns": end, "pieces": tokens, "tokens": tokens}
    values |= {"asked_tokens": tokens, "token_ns": (gap,) * (tokens - 1), "finish": "length"}
    return request(number, **{**values, **more})


def in_turns(
    replica: int, count: int, seconds_each: float, first: int = 0, tokens: int = 10, **more: Any
) -> list[RequestSample]:
    """One replica asked one request after the other."""
    return [
        streamed(first + n, n * seconds_each, (n + 1) * seconds_each, tokens, replica=replica, **more)
        for n in range(count)
    ]


def stage(number: int = 0, **more: Any) -> StageSample:
    values: dict[str, Any] = {"scenario": "concurrency", "rate_per_s": None, "concurrency": 1, "replica": None}
    values |= {"planned": 0, "started_ns": 0, "ended_ns": 0, "began_at_s": 0.0}
    return StageSample(rank=0, stage=number, **{**values, **more})


def replica(number: int, **more: Any) -> ReplicaSample:
    values: dict[str, Any] = {"host": f"node-{number}", "engine": "openai", "model": "tiny"}
    return ReplicaSample(rank=0, replica=number, **{**values, **more})


CLIENT = ClientSample(
    rank=0,
    shard=0,
    requests=1,
    reads=5,
    schedule_lag_p50_ns=1e4,
    schedule_lag_p99_ns=5e4,
    read_lag_p50_ns=1e4,
    read_lag_p99_ns=5e4,
    cpu_s=0.1,
    wall_s=1.0,
    most_in_flight=1,
    waited_for_cap=0,
    clock_doubt_ns=100,
    clock_drift_ns=0,
    plan="x",
)


def record(
    requests: Iterable[RequestSample],
    repeat: int = 0,
    stages: Sequence[StageSample] = (),
    replicas: Sequence[ReplicaSample] = (),
    clients: Sequence[ClientSample] = (),
    data: str = "synthetic",
    form: str | None = "token_ids",
    **serving: Any,
) -> RunRecord:
    spec = RunSpec(
        experiment="test",
        workload=Choice("inference"),
        model=Choice("tiny"),
        topology=Topology(device="cpu"),
        training=Training(sequence_length=1, micro_batch=1, data=Choice(data)),
        steps=1,
        repeat=repeat,
        engine=Choice("openai", {"url": "http://x"}),
        serving=Serving(**serving),
    )
    settings = {"prompts": form} if form else {}
    facts = Evidence(
        init_digest="",
        parameters=0,
        dtypes={},
        optimizer={},
        settings=settings,
        switches={},
        neighbours=None,
        window_wall_s=None,
    )
    ended = Outcome(
        rank=0, status=Status.OK, error=None, host="client", pid=1, started_at=0.0, ended_at=1.0, evidence=facts
    )
    return RunRecord(
        spec=spec,
        status=Status.OK,
        error=None,
        outcomes=(ended,),
        started_at=float(repeat),
        ended_at=repeat + 1.0,
        path="x",
        requests=tuple(requests),
        stages=tuple(stages),
        replicas=tuple(replicas),
        clients=tuple(clients),
    )
