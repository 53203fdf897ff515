"""Whether the client itself may have limited a result: its lags, CPU time and clocks against their bounds.

Used for both the self-test against a mock server and the record of a run.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.experiment.serving import (
    MOST_CPU_RATIO,
    MOST_READ_LAG_OF_TTFT,
    MOST_READ_LAG_S,
    MOST_SCHEDULE_LAG_OF_TTFT,
    MOST_SCHEDULE_LAG_S,
)

# The wall clock, which the kernel uses for timestamps, was changed: times before and after it do not compare.
MOST_CLOCK_DRIFT_S = 1e-3
# Nothing is sent before it is due, and nothing is read before the kernel had it; smaller differences are clock error.
MOST_EARLY_S = 1e-3
# Tokens have the kernel's times. Reading late changes the times of tokens that then share a read with later ones; if no
# more than one in a hundred does, no percentile up to the 99th is theirs.
MOST_COALESCED = 0.01
# The error class of requests that failed because the client itself had no files, ports or buffers left.
LACKING = "client"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientFacts:
    """A client's observations about itself under one load, from its worst process. None is unknown: in a closed loop
    nothing is due before it is sent, and reads without kernel timestamps have no lag. early_s: how long before its due
    time a request was sent. read_lag_p50_s below 0: reads are before the kernel's times. lacking counts requests with
    error LACKING; held_back those that were due and waited for the cap on requests in flight. coalesced_ratio: the
    share of tokens that shared a read with an earlier one, which then has the time of the later one."""

    ttft_p50_s: float | None
    schedule_lag_p99_s: float | None
    read_lag_p50_s: float | None
    read_lag_p99_s: float | None
    cpu_ratio: float | None
    clock_drift_s: float
    early_s: float = 0.0
    lacking: int = 0
    held_back: int = 0
    coalesced_ratio: float | None = None


def median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def schedule_bound_s(ttft_p50_s: float | None) -> float:
    """A slow server leaves more room: a delay of 1 % of its TTFT changes no result."""
    return max(MOST_SCHEDULE_LAG_S, MOST_SCHEDULE_LAG_OF_TTFT * (ttft_p50_s or 0.0))


def read_bound_s(ttft_p50_s: float | None) -> float:
    """Tokens have the kernel's times, so reading late changes only those that then share a read with later ones."""
    return max(MOST_READ_LAG_S, MOST_READ_LAG_OF_TTFT * (ttft_p50_s or 0.0))


# What to do about a client that limits the result.
LESS_LOAD = (
    "give the client more processes (`--set workload.shards=0`: one per core), fewer streams, or a larger or idle host"
)
STEADY_CLOCK = "let nothing set the clock of the client's host during a load, then repeat it"
MORE_FILES = (
    "raise `ulimit -n` and `net.ipv4.ip_local_port_range` on the client's host, or keep fewer requests in flight"
)
NO_CAP = "remove the cap (`concurrency: null`), or use a closed loop"


def reasons(facts: ClientFacts) -> list[str]:
    """Why the client's times are unreliable; empty if they are reliable."""
    return [text for text, _ in findings(facts)]


def advice(facts: ClientFacts) -> list[str]:
    """What to do next about each reason, each advice once."""
    return list(dict.fromkeys(what for _, what in findings(facts)))


def findings(facts: ClientFacts) -> list[tuple[str, str]]:
    """Each reason, with by how much its bound was exceeded and what that can change, and what to do about it."""
    late, read, cpu = facts.schedule_lag_p99_s or 0.0, facts.read_lag_p99_s or 0.0, facts.cpu_ratio or 0.0
    bound, read_bound = schedule_bound_s(facts.ttft_p50_s), read_bound_s(facts.ttft_p50_s)
    early, drift, ahead = facts.early_s, abs(facts.clock_drift_s), -(facts.read_lag_p50_s or 0.0)
    # If requests waited for the cap, the cap was late, not the client's host.
    by_cap = facts.held_back > 0 and late > bound

    shared = "an unknown share" if facts.coalesced_ratio is None else f"{100 * facts.coalesced_ratio:.1f} %"

    def effect(lag_s: float, where: str = "") -> str:
        """How much the delay can change the reported TTFT; empty if there is none."""
        return f", which can raise TTFT by {100 * lag_s / facts.ttft_p50_s:.1f} %{where}" if facts.ttft_p50_s else ""

    checks = {
        f"sent up to {late * 1e3:.1f} ms late (p99; at most {bound * 1e3:.1f} ms){effect(late)}": (
            late > bound and not by_cap,
            LESS_LOAD,
        ),
        f"delayed {facts.held_back} due requests by {late * 1e3:.1f} ms (p99) for the cap on requests in flight "
        "(concurrency: null removes it)": (by_cap, NO_CAP),
        f"sent up to {early * 1e3:.1f} ms before it was due": (early > MOST_EARLY_S, STEADY_CLOCK),
        f"read up to {read * 1e3:.1f} ms late (p99; at most {read_bound * 1e3:.1f} ms)"
        f"{effect(read, f' where tokens share a read ({shared} of them do)')}": (
            read > read_bound and (facts.coalesced_ratio is None or facts.coalesced_ratio > MOST_COALESCED),
            LESS_LOAD,
        ),
        f"read {-ahead * 1e3:.1f} ms late (p50; at most {bound * 1e3:.1f} ms), which delays what follows an answer": (
            -ahead > bound,
            LESS_LOAD,
        ),
        f"read {ahead * 1e3:.1f} ms before the kernel had it (p50)": (ahead > MOST_EARLY_S, STEADY_CLOCK),
        f"used {cpu:.0%} of a core (at most {MOST_CPU_RATIO:.0%})": (cpu > MOST_CPU_RATIO, LESS_LOAD),
        f"its clocks drifted {drift * 1e3:.1f} ms apart (at most {MOST_CLOCK_DRIFT_S * 1e3:.0f} ms)": (
            drift > MOST_CLOCK_DRIFT_S,
            STEADY_CLOCK,
        ),
        f"ran out of files, ports or buffers for {facts.lacking} requests": (facts.lacking > 0, MORE_FILES),
    }
    return [(text, what) for text, (holds, what) in checks.items() if holds]
