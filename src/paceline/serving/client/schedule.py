"""A load: when each request is due, what one client process sends (`Assignment`), and what it returns (`ShardResult`).

Times are nanoseconds. Due times count from the start of the load and are drawn from one seeded generator. The digest of
the plan is stored with the result.
"""

from __future__ import annotations

import hashlib
import re
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Times = NDArray[np.int64]
NS = 1_000_000_000
# The due time of requests in a closed loop: each is sent when the one before it has ended.
WHEN_FREE = -1
# The replica is chosen when the request is due: the one with the fewest requests in flight.
ANY_REPLICA = -1
# Longer than any model's answer: some hundred thousand tokens, one per event.
LONGEST_BODY = 32 << 20
# An event with one token has some hundred bytes; headers, an error text or the usage have some thousand.
_BYTES_PER_TOKEN, _BYTES_BESIDES = 4096, 65_536
_KEY = re.compile(rb"^Authorization: *(?:Bearer +)?([^\r\n]+)", re.IGNORECASE | re.MULTILINE)


def timestamps() -> array[int]:
    """Nanoseconds in 8 bytes each, a fifth of a list of ints."""
    return array("q")


def longest_body(tokens: int) -> int:
    """The most bytes of an answer, so that a server that never ends its answers does not fill the client's memory."""
    return min(LONGEST_BODY, _BYTES_BESIDES + _BYTES_PER_TOKEN * tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The endpoint of one replica. certificates: a file of certificate authorities to trust instead of the system's.
    head: the request line and headers that only this replica gets, such as its host and its API key."""

    host: str
    port: int
    tls: bool = False
    certificates: str | None = None
    head: bytes = b""

    @property
    def secret(self) -> bytes | None:
        """The API key in the head. It must not appear in any record."""
        match = _KEY.search(self.head)
        return match[1] if match else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Latency limits of an answer, counted from when it was due; None means no limit."""

    ttft_ns: int | None = None
    tpot_ns: int | None = None
    latency_ns: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """The requests of one client process, in the order they are due.

    due_ns counts from the common start; WHEN_FREE marks a closed loop with `concurrency` requests in flight. payloads
    are complete HTTP requests without the target's head, each bytes or a tuple with one for every replica. They are
    built beforehand: nothing is serialised while the clock runs. cap: the most requests in flight of an open loop
    (None: no cap). A request that waits for the cap counts as late.

    per_replica: the most requests in flight on each replica; a full replica does not block the others. reassigns: if a
    replica dies, its requests go to another replica with their due times unchanged. Sending stops once least_ns have
    passed and least_requests were sent (if either is above 0); requests that were never sent have no result.
    longest_body: an answer with more bytes ends as too_long.
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
        payload = self.payloads[index]
        return self.targets[replica].head + (payload if isinstance(payload, bytes) else payload[replica])


@dataclass(slots=True, kw_only=True)
class RequestResult:
    """One request as the client observed it, in nanoseconds of the monotonic clock.

    Times of reads are the kernel's if `stamped`, otherwise this process's. token_ns: the times of the events with
    content. attempt counts earlier sends: to replicas that died before they answered, or over an idle connection that
    the server had closed (retried). All times except due_ns belong to the last attempt. model: its name in the answer.
    """

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
    reported_tokens: int | None = None
    prompt_tokens: int | None = None
    finish: str | None = None
    model: str | None = None
    stamped: bool = False
    retried: bool = False
    attempt: int = 0
    token_ns: array[int] = field(default_factory=timestamps)
    text: str | None = None

    @property
    def first_token_ns(self) -> int | None:
        """The first token of the reasoning or of the answer, whichever came first. TTFT ends here."""
        return min((at for at in (self.first_ns, self.first_reasoning_ns) if at is not None), default=None)

    def is_late(self, limits: Limits) -> bool:
        """Whether the answer exceeded a limit, counted from when it was due."""
        first, last, ended = self.first_token_ns, self.last_ns, self.ended_ns
        if first is None or last is None or ended is None:
            return False
        tokens = self.pieces if self.reported_tokens is None else self.reported_tokens
        spans = (
            (first - self.due_ns, limits.ttft_ns),
            ((last - first) / (tokens - 1) if tokens > 1 else 0, limits.tpot_ns),
            (ended - self.due_ns, limits.latency_ns),
        )
        return any(limit is not None and span > limit for span, limit in spans)


@dataclass(slots=True, kw_only=True)
class ShardResult:
    """The results of one client process and its own delays. died_ns: when each replica was found dead (monotonic
    clock). reassigned: how many requests of each replica went to others."""

    results: list[RequestResult]
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


# --- the plan of a load ---


def poisson(rate_per_s: float, count: int, seed: int) -> Times:
    """Due times with exponential gaps. The gaps are not rescaled to the exact mean: that would remove bursts."""
    gaps = np.random.default_rng(seed).exponential(1 / rate_per_s, count)
    return np.round(np.cumsum(gaps) * NS).astype(np.int64)


def constant(rate_per_s: float, count: int) -> Times:
    """Due times one period apart, multiplied rather than summed so that rounding errors do not add up.

    >>> constant(4.0, 3).tolist()
    [0, 250000000, 500000000]
    """
    return np.round(np.arange(count) * (NS / rate_per_s)).astype(np.int64)


def at_once(count: int) -> Times:
    return np.zeros(count, dtype=np.int64)


def closed_loop(count: int) -> Times:
    return np.full(count, WHEN_FREE, dtype=np.int64)


def trace(timestamps_s: NDArray[np.float64]) -> Times:
    """Recorded times, sorted and counted from the first one."""
    ordered = np.sort(timestamps_s)
    return np.round((ordered - ordered[0]) * NS).astype(np.int64) if len(ordered) else at_once(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One entry per request, in the order of the schedule."""

    due_ns: Times
    samples: NDArray[np.int64]
    replicas: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.due_ns)

    @property
    def digest(self) -> str:
        """A digest of the load that does not depend on the number of client processes."""
        sha = hashlib.sha256()
        for column in (self.due_ns, self.samples, self.replicas):
            sha.update(np.ascontiguousarray(column, dtype="<i8").tobytes())
        return sha.hexdigest()[:16]

    def shares(self, parts: int) -> list[NDArray[np.int64]]:
        """Entry k goes to part k mod parts: the same arrival distribution in each, at a fraction of the rate."""
        return [np.arange(part, len(self), parts) for part in range(parts)]


def permuted(available: int, count: int, seed: int) -> NDArray[np.int64]:
    """Sample numbers in a seeded order: each once, then each again in another order until there are `count`."""
    draws = np.random.default_rng([seed, 1])
    rounds = [draws.permutation(available) for _ in range(-(-count // available))]
    return np.concatenate(rounds)[:count].astype(np.int64)


def spread(count: int, replicas: int) -> NDArray[np.int64]:
    """Replica numbers, round robin over the schedule."""
    return np.arange(count, dtype=np.int64) % replicas


def assignment_of(
    plan: Plan,
    part: NDArray[np.int64],
    payload_of: Callable[[int], bytes | tuple[bytes, ...]],
    targets: Sequence[Target],
    **more: Any,
) -> Assignment:
    """The assignment of one client process. payload_of(sample) returns one payload, or one for each target."""
    return Assignment(
        numbers=part.tolist(),
        due_ns=plan.due_ns[part],
        replicas=plan.replicas[part].tolist(),
        payloads=[payload_of(sample) for sample in plan.samples[part].tolist()],
        targets=targets,
        **more,
    )
