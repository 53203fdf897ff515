"""Served runs whose every time is known: answers of so many tokens, so many seconds apart, by so many replicas."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from paceline.experiment.choices import Choice
from paceline.experiment.serving import Serving
from paceline.experiment.spec import RunSpec, Topology, Training
from paceline.results.records import RunRecord, Status
from paceline.results.served_samples import AnswerSample, ReplicaSample, RequestSample, StageSample

NS = 1_000_000_000
TOKENS = 5


def build_spec(engine: str = "openai:url=http://x", repeat: int = 0, device: str = "cpu", **serving: Any) -> RunSpec:
    return RunSpec(
        experiment="test",
        workload=Choice("inference"),
        model=Choice("tiny"),
        topology=Topology(device=device),
        training=Training(sequence_length=1, micro_batch=1),
        steps=1,
        repeat=repeat,
        engine=Choice.parse(engine),
        serving=Serving(**{"scenario": "concurrency", "concurrency": 1, **serving}),
    )


def build_request(number: int, due_s: float, seconds: float, **more: Any) -> RequestSample:
    """The first of its tokens after a fifth of its time, the last at the end."""
    due, end = round(due_s * NS), round((due_s + seconds) * NS)
    first = round((due_s + seconds / TOKENS) * NS)
    usual: dict[str, Any] = {"sample": number, "replica": 0, "due_ns": due, "sent_ns": due, "first_byte_ns": first}
    usual |= {"first_ns": first, "last_ns": end, "ended_ns": end, "pieces": TOKENS, "tokens": TOKENS}
    usual |= {"prompt_tokens": 15, "asked_tokens": TOKENS, "coalesced": 0, "stamped": True}
    return RequestSample(rank=0, number=number, **{**usual, **more})


def build_replica(replica: int, host: str, **more: Any) -> ReplicaSample:
    return ReplicaSample(rank=replica, replica=replica, host=host, engine="openai", model="tiny", **more)


def build_answer(replica: int, sample: int, text: str) -> AnswerSample:
    return AnswerSample(rank=0, replica=replica, sample=sample, tokens=TOKENS, text=text)


def build_stage(stage: int, started_s: float, ended_s: float, **more: Any) -> StageSample:
    usual: dict[str, Any] = {"scenario": "concurrency", "rate_per_s": None, "concurrency": 1, "replica": None}
    usual |= {"planned": 1, "began_at_s": 1e6 + started_s, **more}
    return StageSample(rank=0, stage=stage, started_ns=round(started_s * NS), ended_ns=round(ended_s * NS), **usual)


def build_record(spec: RunSpec, requests: Sequence[RequestSample], **more: Any) -> RunRecord:
    path = f"results/{spec.run_id}"
    usual = {"status": Status.OK, "error": None, "started_at": 1e6, "ended_at": 1e6 + 100, "path": path}
    return RunRecord(spec=spec, requests=tuple(requests), **{**usual, **more})


def one_by_one(
    seconds: Callable[[int, float], float] | float, count: int = 100, start_s: float = 0.0, **more: Any
) -> list[RequestSample]:
    """Requests one after the other; seconds may depend on the number and on the moment."""
    found: list[RequestSample] = []
    at = start_s
    for number in range(count):
        took = seconds(number, at) if callable(seconds) else seconds
        found.append(build_request(number, at, took, **more))
        at += took
    return found


def in_stages(spec: RunSpec, parts: Sequence[Sequence[RequestSample]], **stage: Any) -> RunRecord:
    """One stage for each part, each as long as its requests; a request is numbered through the whole run."""
    requests, stages, number = [], [], 0
    for index, part in enumerate(parts):
        for request in part:
            requests.append(dataclasses.replace(request, stage=index, number=number))
            number += 1
        own = {name: values[index] for name, values in stage.items()}
        stages.append(build_stage(index, part[0].due_ns / NS, (part[-1].ended_ns or 0) / NS, **own))
    return build_record(spec, requests, stages=tuple(stages))
