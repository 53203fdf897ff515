"""What one process of the client shall do: requests with their times, ready to be sent, and where to."""

from __future__ import annotations

import re
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.serving.client.arrivals import Times

# A replica that is chosen when the request is due, by which one is free.
ANY_REPLICA = -1
# More than any answer of a model: some hundred thousand tokens, one to an event.
LONGEST_BODY = 32 << 20
# An event of one token is some hundred bytes; a head, an error's text or a usage are some thousand.
_BYTES_PER_TOKEN, _BYTES_BESIDES = 4096, 65_536
_KEY = re.compile(rb"^Authorization: *(?:Bearer +)?([^\r\n]+)", re.IGNORECASE | re.MULTILINE)


def stamps() -> array[int]:
    """Nanoseconds, eight bytes each: a list of whole numbers takes five times that."""
    return array("q")


def longest_body(tokens: int) -> int:
    """What an answer of so many tokens may have at most: with many in flight, one bound for all answers would let a
    server that never ends fill the memory."""
    return min(LONGEST_BODY, _BYTES_BESIDES + _BYTES_PER_TOKEN * tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One replica's endpoint. certificates is a file of authorities to trust instead of the system's. head is put
    before every payload that goes there: what only this replica may be told, such as its host and its key."""

    host: str
    port: int
    tls: bool = False
    certificates: str | None = None
    head: bytes = b""

    @property
    def secret(self) -> bytes | None:
        """The key in the head, which no record may have."""
        found = _KEY.search(self.head)
        return found[1] if found else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What an answer must keep to be in time, from when it was due; None where nothing is asked."""

    ttft_ns: int | None = None
    tpot_ns: int | None = None
    latency_ns: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """Requests of one process in the order they are due. due_ns counts from the common start; WHEN_FREE belongs to a
    closed loop of `concurrency` requests in flight. payloads are whole HTTP requests (after the target's head), each
    bytes or a tuple of one for every replica, made beforehand: nothing is serialised while the clock runs. cap: most
    requests in flight of an open loop (None: no cap); what waits for it is late by the schedule's clock.

    A request for ANY_REPLICA goes to the living replica with the fewest requests in flight. per_replica: most in
    flight on each replica; the others go on while one is full. reassigns: a request whose replica is gone is given to
    another one, with its due time unchanged. Once least_ns have passed and least_requests were given out (where either
    is above 0) no more are, and those never given out are no results. longest_body: bytes after which an answer is
    ended as too_long.
    """

    numbers: Sequence[int]
    due_ns: Times
    replicas: Sequence[int]
    payloads: Sequence[bytes | tuple[bytes, ...]]
    targets: Sequence[Target]
    concurrency: int = 0
    cap: int | None = None
    timeout_s: float = 600.0
    keeps_text: bool = False
    connections: int = 0
    per_replica: int | None = None
    reassigns: bool = False
    least_ns: int = 0
    least_requests: int = 0
    limits: Limits = Limits()
    longest_body: int = LONGEST_BODY

    def payload(self, index: int, replica: int) -> bytes:
        given = self.payloads[index]
        return self.targets[replica].head + (given if isinstance(given, bytes) else given[replica])


@dataclass(slots=True, kw_only=True)
class Handled:
    """One request as it was seen. All times are nanoseconds of the monotonic clock; *_ns of reads are the kernel's
    where `stamped`, else this process's. token_ns are the times of the events with content. attempt counts how
    often it was sent before: to replicas that were gone before they had answered, or over a kept connection that had
    been given up (retried). Times but due_ns are those of the last attempt."""

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
    stamped: bool = False
    retried: bool = False
    attempt: int = 0
    token_ns: array[int] = field(default_factory=stamps)
    text: str | None = None


@dataclass(slots=True, kw_only=True)
class Shift:
    """What one process did: its requests, and what it can say against itself. died_ns: when each replica was found
    gone (monotonic clock); reassigned: how many requests of each others were given."""

    handled: list[Handled]
    start_ns: int
    schedule_lag_ns: Sequence[int]
    read_lag_ns: Sequence[int]
    reads: int
    cpu_s: float
    wall_s: float
    most_in_flight: int
    waited_for_cap: int
    clock_doubt_ns: int
    clock_drift_ns: int
    died_ns: dict[int, int] = field(default_factory=dict)
    reassigned: dict[int, int] = field(default_factory=dict)
