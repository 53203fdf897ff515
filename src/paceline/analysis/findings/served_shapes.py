"""Served models as curves: how latencies spread, what each load gave, what replicas did over a run, and how much of its
bounds the client used. Bounded in size whatever the number of requests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from paceline.errors import Scalar

TTFT, TPOT, LATENCY = "ttft", "tpot", "latency"


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencySpread:
    """How one quantity (ttft, tpot or latency) spreads over the answered requests of a load: `seconds[i]` is what the
    share `shares[i]` of them took at most. Shares grow and end where a single request is left: beyond it the data says
    nothing. Percentiles are of all requests, with bounds where these are known."""

    quantity: str
    n: int
    shares: tuple[float, ...]
    seconds: tuple[float, ...]
    p50: tuple[float, float | None, float | None]
    p90: tuple[float, float | None, float | None]
    p99: tuple[float, float | None, float | None]
    limit_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedLoad:
    """One load of a cell, over all launches: a plain scenario has one, a sweep or a search one for each it went
    through. replica is the only one that was asked, None where all were. late counts requests beyond a limit, None
    where there is no limit. is_believed is that of its verdict."""

    cell: str
    axes: Mapping[str, Scalar]
    runs: tuple[str, ...]
    scenario: str
    rate_per_s: float | None
    concurrency: int | None
    replica: int | None
    requests: int
    failed: int
    late: int | None
    output_tokens_per_s: float | None
    requests_per_s: float | None
    spreads: tuple[LatencySpread, ...]
    is_believed: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaTrace:
    """What one replica did over a run, on the grids of its `ServedTrace`: requests in flight (mean of each moment),
    tokens a second, and the median TTFT of the requests whose first token came then (None where none did)."""

    replica: int
    host: str | None
    answered: int
    failed: int
    in_flight: tuple[float, ...]
    tokens_per_s: tuple[float, ...]
    ttft_s: tuple[float | None, ...]
    ttft: LatencySpread | None
    died_s: float | None = None
    reassigned: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedTrace:
    """One launch of a cell over its time, from its start. seconds are the middles of equal moments for what is in
    flight, pace_seconds those of longer ones for rates. late counts by moment the requests that ended beyond a limit or
    failed. stages are the loads by when they began, with their rate, their concurrency, and the only replica that was
    asked. is_believed is that of the whole launch."""

    run: str
    cell: str
    axes: Mapping[str, Scalar]
    scenario: str
    wall_s: float
    seconds: tuple[float, ...]
    pace_seconds: tuple[float, ...]
    replicas: tuple[ReplicaTrace, ...]
    late: tuple[int, ...]
    limited: bool
    stages: tuple[tuple[float, float | None, int | None, int | None], ...] = ()
    is_believed: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientAudit:
    """The worst process of the client over all launches of a cell beside its bounds, of runs that are believed and of
    those that for this reason are not. schedule_lag_s is None in a closed loop, where nothing is due before it is
    sent. unstamped_ratio is of the answers whose times are not the kernel's, coalesced_ratio of the events that shared
    a read with the one before; clock_drift_s is what its clocks moved by against each other."""

    cell: str
    axes: Mapping[str, Scalar]
    runs: tuple[str, ...]
    processes: int
    schedule_lag_s: float | None
    schedule_bound_s: float
    read_lag_s: float | None
    read_bound_s: float
    cpu_ratio: float | None
    cpu_bound_ratio: float
    clock_drift_s: float | None = None
    unstamped_ratio: float | None = None
    coalesced_ratio: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedShapes:
    """All of it, for charts; the numbers to quote are measurements."""

    loads: tuple[ServedLoad, ...]
    traces: tuple[ServedTrace, ...]
    audits: tuple[ClientAudit, ...]
