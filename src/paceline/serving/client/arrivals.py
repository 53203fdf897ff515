"""When requests are due: whole schedules made beforehand from one seeded generator, in nanoseconds from the start."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Times = NDArray[np.int64]
NS = 1_000_000_000
# A request of a closed loop is due when the one before it has ended.
WHEN_FREE = -1


def poisson(rate_per_s: float, count: int, seed: int) -> Times:
    """Gaps are drawn from the exponential law and left as they are: rescaling them to an exact mean would take away the
    bursts that a server has to survive."""
    gaps = np.random.default_rng(seed).exponential(1 / rate_per_s, count)
    return np.round(np.cumsum(gaps) * NS).astype(np.int64)


def constant(rate_per_s: float, count: int) -> Times:
    """One request each period, by multiplication: adding periods would add their rounding."""
    return np.round(np.arange(count) * (NS / rate_per_s)).astype(np.int64)


def at_once(count: int) -> Times:
    return np.zeros(count, dtype=np.int64)


def closed_loop(count: int) -> Times:
    return np.full(count, WHEN_FREE, dtype=np.int64)


def trace(timestamps_s: NDArray[np.float64]) -> Times:
    """As recorded elsewhere, from the first one on."""
    ordered = np.sort(timestamps_s)
    return np.round((ordered - ordered[0]) * NS).astype(np.int64) if len(ordered) else at_once(0)
