"""Whether a client may itself have been what was measured: its lags, processor time and clocks against their bounds.

One judge for both: a client that is tried out against a server of known law, and the record of a run.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.experiment.serving import MOST_CPU_RATIO, MOST_READ_LAG_S, MOST_SCHEDULE_LAG_OF_TTFT, MOST_SCHEDULE_LAG_S

# The wall clock, on which the kernel stamps, was set anew: stamps before and after it are of two clocks.
MOST_CLOCK_DRIFT_S = 1e-3
# Nothing is sent before it is due, and nothing read before the kernel had it; less is what two clocks differ by.
MOST_EARLY_S = 1e-3
# The class of requests that failed because the client itself had no files, ports or buffers left.
LACKING = "client"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientFacts:
    """What a client observed about itself under one load, of its worst process. None is unknown: of a closed loop
    nothing is due before it is sent, and reads that the kernel did not stamp have no lag. early_s is how long before it
    was due a request was sent; read_lag_p50_s below 0, that reads lie before the kernel's times of them. lacking counts
    requests of the class LACKING; held_back those that were due and waited for the cap of requests in flight."""

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
    """A slow server leaves more room: what is late by a hundredth of its TTFT changes no result."""
    return max(MOST_SCHEDULE_LAG_S, MOST_SCHEDULE_LAG_OF_TTFT * (ttft_p50_s or 0.0))


def reasons(facts: ClientFacts) -> list[str]:
    """Why its times cannot be believed; empty where they can."""
    late, read, cpu = facts.schedule_lag_p99_s or 0.0, facts.read_lag_p99_s or 0.0, facts.cpu_ratio or 0.0
    bound, ahead = schedule_bound_s(facts.ttft_p50_s), -(facts.read_lag_p50_s or 0.0)
    early, drift = facts.early_s, abs(facts.clock_drift_s)
    # Where requests waited for the cap it is the cap that was late, not the host of the client.
    by_cap = facts.held_back > 0 and late > bound
    told = {
        f"sent up to {late * 1e3:.1f} ms late (p99; at most {bound * 1e3:.1f} ms)": late > bound and not by_cap,
        f"held back {facts.held_back} requests that were due, by {late * 1e3:.1f} ms (p99), for the cap on those in "
        "flight (concurrency: null takes it away)": by_cap,
        f"sent up to {early * 1e3:.1f} ms before it was due": early > MOST_EARLY_S,
        f"read up to {read * 1e3:.1f} ms late (p99; at most {MOST_READ_LAG_S * 1e3:.0f} ms)": read > MOST_READ_LAG_S,
        f"read {ahead * 1e3:.1f} ms before the kernel had it (p50)": ahead > MOST_EARLY_S,
        f"used {cpu:.0%} of a core (at most {MOST_CPU_RATIO:.0%})": cpu > MOST_CPU_RATIO,
        f"its clocks moved {drift * 1e3:.1f} ms against each other (at most {MOST_CLOCK_DRIFT_S * 1e3:.0f} ms)": (
            drift > MOST_CLOCK_DRIFT_S
        ),
        f"had no files, ports or buffers left for {facts.lacking} requests": facts.lacking > 0,
    }
    return [text for text, holds in told.items() if holds]
