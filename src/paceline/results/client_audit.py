"""Whether the client itself may have limited a result: its lags, CPU time and clocks against their bounds.

Used for both the self-test against a mock server and the record of a run.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.experiment.serving import MOST_CPU_RATIO, MOST_READ_LAG_S, MOST_SCHEDULE_LAG_OF_TTFT, MOST_SCHEDULE_LAG_S

# The wall clock, which the kernel uses for timestamps, was changed: times before and after it do not compare.
MOST_CLOCK_DRIFT_S = 1e-3
# Nothing is sent before it is due, and nothing is read before the kernel had it; smaller differences are clock error.
MOST_EARLY_S = 1e-3
# The error class of requests that failed because the client itself had no files, ports or buffers left.
LACKING = "client"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientFacts:
    """A client's observations about itself under one load, from its worst process. None is unknown: in a closed loop
    nothing is due before it is sent, and reads without kernel timestamps have no lag. early_s: how long before its due
    time a request was sent. read_lag_p50_s below 0: reads are before the kernel's times. lacking counts requests with
    error LACKING; held_back those that were due and waited for the cap on requests in flight."""

    ttft_p50_s: float | None
    schedule_lag_p99_s: float | None
    read_lag_p50_s: float | None
    read_lag_p99_s: float | None
    cpu_ratio: float | None
    clock_drift_s: float
    early_s: float = 0.0
    lacking: int = 0
    held_back: int = 0


def median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def schedule_bound_s(ttft_p50_s: float | None) -> float:
    """A slow server leaves more room: a delay of 1 % of its TTFT changes no result."""
    return max(MOST_SCHEDULE_LAG_S, MOST_SCHEDULE_LAG_OF_TTFT * (ttft_p50_s or 0.0))


def reasons(facts: ClientFacts) -> list[str]:
    """Why the client's times are unreliable; empty if they are reliable."""
    late, read, cpu = facts.schedule_lag_p99_s or 0.0, facts.read_lag_p99_s or 0.0, facts.cpu_ratio or 0.0
    bound, ahead = schedule_bound_s(facts.ttft_p50_s), -(facts.read_lag_p50_s or 0.0)
    early, drift = facts.early_s, abs(facts.clock_drift_s)
    # If requests waited for the cap, the cap was late, not the client's host.
    by_cap = facts.held_back > 0 and late > bound
    checks = {
        f"sent up to {late * 1e3:.1f} ms late (p99; at most {bound * 1e3:.1f} ms)": late > bound and not by_cap,
        f"delayed {facts.held_back} due requests by {late * 1e3:.1f} ms (p99) for the cap on requests in flight "
        "(concurrency: null removes it)": by_cap,
        f"sent up to {early * 1e3:.1f} ms before it was due": early > MOST_EARLY_S,
        f"read up to {read * 1e3:.1f} ms late (p99; at most {MOST_READ_LAG_S * 1e3:.0f} ms)": read > MOST_READ_LAG_S,
        f"read {ahead * 1e3:.1f} ms before the kernel had it (p50)": ahead > MOST_EARLY_S,
        f"used {cpu:.0%} of a core (at most {MOST_CPU_RATIO:.0%})": cpu > MOST_CPU_RATIO,
        f"its clocks drifted {drift * 1e3:.1f} ms apart (at most {MOST_CLOCK_DRIFT_S * 1e3:.0f} ms)": (
            drift > MOST_CLOCK_DRIFT_S
        ),
        f"ran out of files, ports or buffers for {facts.lacking} requests": facts.lacking > 0,
    }
    return [text for text, holds in checks.items() if holds]
