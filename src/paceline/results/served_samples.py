"""Sample types of an inference run: requests, answers, replicas and the client itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSample:
    """One request as the client observed it.

    Times are nanoseconds from the common start of the run on the client's monotonic clock: when it was due and sent,
    and when the kernel had the first byte, the first token (of the answer, of reasoning before it), the last token and
    the end. token_ns: the times of all events with content, as gaps from the one before. coalesced counts events that
    shared a read with the one before, so they have its time.

    tokens is the server's own count (None if it gives none), pieces the number of events with content. prompt_tokens is
    its count of the prompt, sent_ids how many token ids were sent (None for text). error is a class (timeout, reset,
    http_500, ...), None for a complete answer. attempt counts earlier sends of the sample to a replica.
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
    """One load of a run, in order; a plain scenario has one. Times are nanoseconds from the common start of the run;
    began_at_s is `time.time()` on the client's host. replica is the only one used, None if all were. planned counts its
    requests; capped: some waited for others to end. headroom: how far the load is from the limit of its client, known
    before it began, and its grade (good, tight, insufficient or unknown)."""

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
    headroom: str | None = None
    headroom_grade: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSample:
    """One replica as its engine started or found it: host, version, devices and settings. died_ns: when the client
    found it dead, None if it stayed alive. silent_ns: when it stopped answering and when a probe was answered again,
    alternating; it got no requests in between. reassigned counts its samples that others took. model is the name in
    requests, which the server listed or the user gave; answered_as are the names in its answers, if it gives any."""

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
    answered_as: tuple[str, ...] = ()
    silent_ns: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerSample:
    """A replica's answer outside the timed load, to a prompt that all replicas got: replicas of one model that answer
    greedily must agree."""

    kind: ClassVar[str] = "answer"
    rank: int
    replica: int
    sample: int
    tokens: int | None
    text: str
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadgenSample:
    """What LoadGen concluded from its own test over the same replicas, after this client's load: its words, units and
    rates. Like its logs it is a statement of another program; none of our numbers uses it. LoadGen does not know errors
    (failed requests by class) and cpu_ratio (the share of a core that sending took)."""

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
    """The delays of one client process during one load, over all its requests and reads."""

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
    """The highest accurate load of a client with so many processes on this host, measured before the run against a mock
    server: events per second over concurrent streams. measured_at_s is `time.time()` then. is_brief: a lower bound from
    few short tries, made before a load of a host without a self-test."""

    kind: ClassVar[str] = "ceiling"
    rank: int
    processes: int
    events_per_s: float
    streams: int
    measured_at_s: float
    is_brief: bool = False
