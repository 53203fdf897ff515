"""What a served run records: requests, answers, replicas and the client itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSample:
    """One request as the client saw it. Times are nanoseconds from the common start of the run on the client's
    monotonic clock: when it was due, when it was sent, and when the kernel had the first byte, the first token (of an
    answer, of reasoning before it), the last one and the end. token_ns are the times of all events with content, as
    gaps from the one before; coalesced counts those that shared a read with the one before, so have its time.

    tokens is the server's own count (None where it gives none), pieces the events with content. prompt_tokens is its
    count of what it was asked, sent_ids how many token ids that was (None where it was text). error is a class
    (timeout, reset, http_500, ...), None for an answer that came whole. attempt counts how often the sample was given
    to a replica before.
    """

    kind: ClassVar[str] = "request"
    rank: int
    number: int
    sample: int
    replica: int
    due_ns: int
    sent_ns: int | None
    first_byte_ns: int | None
    first_ns: int | None
    last_ns: int | None
    ended_ns: int | None
    pieces: int
    tokens: int | None
    prompt_tokens: int | None
    asked_tokens: int
    coalesced: int
    stamped: bool
    error: str | None = None
    detail: str | None = None
    first_reasoning_ns: int | None = None
    finish: str | None = None
    attempt: int = 0
    token_ns: tuple[int, ...] = ()
    text: str | None = None
    reference: str | None = None
    stage: int = 0
    sent_ids: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSample:
    """One load of a run, in the order they were put on: a run of a plain scenario has one. Times are nanoseconds from
    the common start of the run, like those of requests; began_at_s is `time.time()` of the client's host. replica is
    the only one that was asked, None where all were. planned counts its requests; capped says that some waited for
    others to end."""

    kind: ClassVar[str] = "stage"
    rank: int
    stage: int
    scenario: str
    rate_per_s: float | None
    concurrency: int | None
    replica: int | None
    planned: int
    started_ns: int
    ended_ns: int
    began_at_s: float
    capped: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSample:
    """One replica as its engine started or found it: where, of which version, over how many devices, and what it was
    told. died_ns: when the client found it gone, None where it stayed; reassigned counts its samples that others
    took."""

    kind: ClassVar[str] = "replica"
    rank: int
    replica: int
    host: str
    engine: str
    model: str
    version: str | None = None
    devices: int | None = None
    tensor_parallel: int = 1
    ready_s: float | None = None
    died_ns: int | None = None
    reassigned: int = 0
    settings: Mapping[str, str | int | float | bool | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerSample:
    """What a replica answered outside the timed load, to a question that all replicas were asked: replicas of one model
    that answer greedily must agree."""

    kind: ClassVar[str] = "answer"
    rank: int
    replica: int
    sample: int
    tokens: int | None
    text: str
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadgenSample:
    """What LoadGen concluded of its own test over the same replicas, after the load of this client had ended: its
    words, its units, its rates. It is a statement of another program, like its logs beside this record, and no number
    of ours is made from it. errors counts the requests it caused that failed, by class, cpu_ratio is the share of a
    core that asking took: it knows neither."""

    kind: ClassVar[str] = "loadgen"
    rank: int
    version: str
    scenario: str
    verdict: str
    reasons: tuple[str, ...]
    asked: int
    errors: Mapping[str, int]
    settings: Mapping[str, str | int | float | bool | None]
    numbers: Mapping[str, float]
    cpu_ratio: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientSample:
    """One process of the client during one load, about itself: what it was late by, over all its requests and reads."""

    kind: ClassVar[str] = "client"
    rank: int
    shard: int
    requests: int
    reads: int
    schedule_lag_p50_ns: float | None
    schedule_lag_p99_ns: float | None
    read_lag_p50_ns: float | None
    read_lag_p99_ns: float | None
    cpu_s: float
    wall_s: float
    most_in_flight: int
    waited_for_cap: int
    clock_doubt_ns: int
    clock_drift_ns: int
    plan: str
    stage: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CeilingSample:
    """What the client of so many processes was believed at on this host, before the run: events a second over as many
    answers at once, against a server of known law beside it. measured_at_s is `time.time()` then."""

    kind: ClassVar[str] = "ceiling"
    rank: int
    processes: int
    events_per_s: float
    streams: int
    measured_at_s: float
