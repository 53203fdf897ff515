"""The load test part of a run spec: scenario, load, limits."""

from __future__ import annotations

import math
from dataclasses import dataclass

from paceline.errors import require

# Scenarios with one load, and those with several while the replicas stay up.
PLAIN_SCENARIOS = ("offline", "server", "interactive", "single_stream", "concurrency", "constant", "trace")
STAGED_SCENARIOS = ("sweep", "search")
SCENARIOS = (*PLAIN_SCENARIOS, *STAGED_SCENARIOS)
# Requests are due on a schedule, so sending one late is the client's own fault.
OPEN = ("server", "interactive", "constant", "trace")
# static: the plan assigns samples to replicas. dynamic: a free replica takes the next sample. paired: every replica
# gets every sample, one replica after the other and back (A B B A), so that replicas can be compared.
PARTITIONS = ("static", "dynamic", "paired")
LOADGENS = ("own", "mlcommons")
APIS = ("completions", "chat")
# p99 limits by scenario, in seconds: first token, each further token. A search uses those of `server`.
LIMITS = {"server": (2.0, 0.1), "interactive": (0.5, 0.03), "search": (2.0, 0.1)}
PERCENTILE = 0.99
# For a checkpoint with an architecture that Paceline has no formulas for.
UNKNOWN_SHAPE = "not known"
# Bounds of a reliable client: sending late, reading late after the kernel had the data, and CPU time. Up to a share of
# the median TTFT a delay does not matter: sending late adds to the TTFT of every request, reading late only to that of
# tokens that share a read with later ones.
MOST_SCHEDULE_LAG_S = 1e-3
MOST_SCHEDULE_LAG_OF_TTFT = 0.01
MOST_READ_LAG_S = 5e-3
MOST_READ_LAG_OF_TTFT = 0.05
MOST_CPU_RATIO = 0.8
# Share of the ceiling above which a reader is warned; only the bounds above make a client unreliable.
MOST_CEILING_RATIO = 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """How a model server is load-tested, and what counts as in time.

    requests: None means all samples of a file. rate_per_s is over all replicas together, for open scenarios;
    concurrency too, for closed ones and as the cap of `offline`. least_s: minimum duration; samples are repeated if
    needed. loads: those of a sweep ("1+2+4+8"), as concurrency, or as rates if rate_per_s is given; rate_per_s is also
    where a search, or a sweep without loads, begins. full_set: samples of the full set, for which the time is
    extrapolated. Limits that are None are those of the scenario, or none.
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
        """The limits of a request: given ones, else the scenario's own."""
        ttft, tpot = LIMITS.get(self.scenario, (None, None))
        return {
            "ttft_s": self.ttft_limit_s if self.ttft_limit_s is not None else ttft,
            "tpot_s": self.tpot_limit_s if self.tpot_limit_s is not None else tpot,
            "latency_s": self.latency_limit_s,
        }
