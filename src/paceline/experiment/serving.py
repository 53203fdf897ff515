"""Served models: what is asked of one (part of a run spec), and what a client observed (part of a record)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from paceline.experiment.choices import require

# Those of one load, and those that go through several while the replicas stay up.
PLAIN_SCENARIOS = ("offline", "server", "interactive", "single_stream", "concurrency", "constant", "trace")
STAGED_SCENARIOS = ("sweep", "search")
SCENARIOS = (*PLAIN_SCENARIOS, *STAGED_SCENARIOS)
# Requests of these are due by a schedule, so that sending one late is the client's own fault.
OPEN = ("server", "interactive", "constant", "trace")
# static: the plan says which replica has a sample. dynamic: the one that is free takes it. paired: every replica has
# every sample, one after the other, there and back again (A B B A), so that replicas can be compared.
PARTITIONS = ("static", "dynamic", "paired")
LOADGENS = ("own", "mlcommons")
APIS = ("completions", "chat")
# p99 limits of the scenarios that have them, seconds: first token, each further token. A search is one for `server`.
LIMITS = {"server": (2.0, 0.1), "interactive": (0.5, 0.03), "search": (2.0, 0.1)}
PERCENTILE = 0.99
# Of a checkpoint whose architecture is none that numbers can be computed of.
UNKNOWN_SHAPE = "not known"
# Bounds of a client that is believed: sending later than planned, reading later than the kernel had it, time to spare.
MOST_SCHEDULE_LAG_S = 1e-3
MOST_SCHEDULE_LAG_OF_TTFT = 0.01
MOST_READ_LAG_S = 5e-3
MOST_CPU_RATIO = 0.8
# Of its ceiling, beyond which a reader is warned: bounds above decide whether a client is believed, not this.
MOST_CEILING_RATIO = 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """How a served model is asked, and what counts as in time.

    requests: None is all samples of a file. rate_per_s is of all replicas together, for open scenarios; concurrency is
    of all replicas together, for closed ones and as the cap of `offline`. least_s: a load goes on, with samples used
    again, until it has lasted so long. loads: those of a sweep ("1+2+4+8"), as concurrency, or as rates where
    rate_per_s says where to begin a search or a sweep without them. full_set: samples of the whole set, for which the
    time is told from those that were asked. Limits that are None are those of the scenario, or none.
    """

    scenario: str = "offline"
    requests: int | None = None
    rate_per_s: float | None = None
    concurrency: int | None = None
    max_tokens: int = 128
    api: str = "completions"
    partition: str = "static"
    ttft_limit_s: float | None = None
    tpot_limit_s: float | None = None
    latency_limit_s: float | None = None
    request_timeout_s: float = 600.0
    warmup_requests: int = 4
    keeps_text: bool = False
    least_s: float = 0.0
    loads: str | None = None
    full_set: int | None = None
    loadgen: str = "own"

    def __post_init__(self) -> None:
        require(self.scenario in SCENARIOS, "scenario", self.scenario, ", ".join(SCENARIOS))
        require(self.api in APIS, "api", self.api, " or ".join(APIS))
        require(self.partition in PARTITIONS, "partition", self.partition, " or ".join(PARTITIONS))
        require(self.loadgen in LOADGENS, "loadgen", self.loadgen, " or ".join(LOADGENS))
        require(0 <= self.least_s < math.inf, "least_s", self.least_s, "a number from 0")
        for name in ("requests", "concurrency", "max_tokens", "full_set"):
            value = getattr(self, name)
            require(value is None or value >= 1, name, value, "a whole number from 1")
        require(self.warmup_requests >= 0, "warmup_requests", self.warmup_requests, "a whole number from 0")
        for name in ("rate_per_s", "ttft_limit_s", "tpot_limit_s", "latency_limit_s", "request_timeout_s"):
            value = getattr(self, name)
            require(value is None or 0 < value < math.inf, name, value, "a positive number")
        needs_rate = self.scenario in ("server", "interactive", "constant")
        require(not needs_rate or self.rate_per_s is not None, "rate_per_s", None, f"a rate with {self.scenario}")
        closed = self.scenario == "concurrency"
        require(not closed or self.concurrency is not None, "concurrency", None, f"a number with {self.scenario}")

    @property
    def limits(self) -> dict[str, float | None]:
        """What a request must keep to be in time: given, else the scenario's own."""
        ttft, tpot = LIMITS.get(self.scenario, (None, None))
        return {
            "ttft_s": self.ttft_limit_s if self.ttft_limit_s is not None else ttft,
            "tpot_s": self.tpot_limit_s if self.tpot_limit_s is not None else tpot,
            "latency_s": self.latency_limit_s,
        }


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
