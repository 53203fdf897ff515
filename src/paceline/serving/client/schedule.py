"""The load before it starts: when each request is due, which sample it sends, and to which replica.

Times are nanoseconds from the start, drawn from one seeded generator. The digest of the plan is stored with the result.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.serving.client.requests import ANY_REPLICA as ANY_REPLICA
from paceline.serving.client.requests import NS as NS
from paceline.serving.client.requests import WHEN_FREE as WHEN_FREE
from paceline.serving.client.requests import Assignment, Target
from paceline.serving.client.requests import Times as Times


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
        for array in (self.due_ns, self.samples, self.replicas):
            sha.update(np.ascontiguousarray(array, dtype="<i8").tobytes())
        return sha.hexdigest()[:16]

    def shares(self, parts: int) -> list[NDArray[np.int64]]:
        """Entry k goes to part k mod parts, so each part has the same arrival distribution at a fraction of the
        rate."""
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
