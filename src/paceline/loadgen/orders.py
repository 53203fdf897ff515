"""What one process of the client shall do: requests with their times, ready to be sent, and where to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.loadgen.arrivals import Times


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One replica's endpoint. certificates is a file of authorities to trust instead of the system's."""

    host: str
    port: int
    tls: bool = False
    certificates: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """Requests of one process in the order they are due. due_ns counts from the common start; WHEN_FREE belongs to a
    closed loop of `concurrency` requests in flight. payloads are whole HTTP requests, made beforehand: nothing is
    serialised while the clock runs. cap: most requests in flight of an open loop (None: no cap); what waits for it is
    late by the schedule's clock."""

    numbers: Sequence[int]
    due_ns: Times
    replicas: Sequence[int]
    payloads: Sequence[bytes]
    targets: Sequence[Target]
    concurrency: int = 0
    cap: int | None = None
    timeout_s: float = 600.0
    keeps_text: bool = False
    connections: int = 0


@dataclass(slots=True, kw_only=True)
class Handled:
    """One request as it was seen. All times are nanoseconds of the monotonic clock; *_ns of reads are the kernel's
    where `stamped`, else this process's. token_ns are the times of the events with content."""

    number: int
    replica: int
    due_ns: int
    sent_ns: int | None = None
    first_byte_ns: int | None = None
    first_reasoning_ns: int | None = None
    first_ns: int | None = None
    last_ns: int | None = None
    ended_ns: int | None = None
    status: int | None = None
    error: str | None = None
    detail: str | None = None
    pieces: int = 0
    coalesced: int = 0
    tokens_told: int | None = None
    prompt_tokens: int | None = None
    finish: str | None = None
    worst_lag_ns: int | None = None
    stamped: bool = False
    retried: bool = False
    token_ns: list[int] = field(default_factory=list)
    text: str | None = None


@dataclass(slots=True, kw_only=True)
class Shift:
    """What one process did: its requests, and what it can say against itself."""

    handled: list[Handled]
    start_ns: int
    schedule_lag_ns: list[int]
    read_lag_ns: list[int]
    reads: int
    cpu_s: float
    wall_s: float
    most_in_flight: int
    waited_for_cap: int
    clock_doubt_ns: int
    clock_drift_ns: int
