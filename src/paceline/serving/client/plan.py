"""The whole load before it begins: which sample is due when, and at which replica; its digest stands in the result."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.serving.client.arrivals import Times
from paceline.serving.client.orders import ANY_REPLICA as ANY_REPLICA
from paceline.serving.client.orders import Orders, Target


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
        """The same for the same load, whoever sends it and over however many processes."""
        told = hashlib.sha256()
        for array in (self.due_ns, self.samples, self.replicas):
            told.update(np.ascontiguousarray(array, dtype="<i8").tobytes())
        return told.hexdigest()[:16]

    def shares(self, parts: int) -> list[NDArray[np.int64]]:
        """Entry k goes to part k mod parts: each part sees the same law of arrivals, at a fraction of its rate."""
        return [np.arange(part, len(self), parts) for part in range(parts)]


def permuted(available: int, count: int, seed: int) -> NDArray[np.int64]:
    """Samples in one recorded order: each once, and again in another order when more are asked than there are."""
    draws = np.random.default_rng([seed, 1])
    rounds = [draws.permutation(available) for _ in range(-(-count // available))]
    return np.concatenate(rounds)[:count].astype(np.int64)


def spread(count: int, replicas: int) -> NDArray[np.int64]:
    """One global schedule thinned over the replicas."""
    return np.arange(count, dtype=np.int64) % replicas


def orders_of(
    plan: Plan,
    part: NDArray[np.int64],
    payload_of: Callable[[int], bytes | tuple[bytes, ...]],
    targets: Sequence[Target],
    **more: Any,
) -> Orders:
    """What one process shall do of a plan; payload_of a sample, or one for each target. more: other fields."""
    return Orders(
        numbers=part.tolist(),
        due_ns=plan.due_ns[part],
        replicas=plan.replicas[part].tolist(),
        payloads=[payload_of(sample) for sample in plan.samples[part].tolist()],
        targets=targets,
        **more,
    )
