"""Whether the client's own measurements are reliable, from what its processes recorded about themselves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paceline.results import client_audit
from paceline.results.client_audit import LACKING, ClientFacts
from paceline.serving.client.schedule import ShardResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The client's delays under one load. No reasons: its times are reliable."""

    schedule_lag_p99_s: float | None
    read_lag_p99_s: float | None
    cpu_ratio: float
    coalesced_ratio: float | None
    unstamped: int
    reasons: tuple[str, ...]

    @property
    def is_valid(self) -> bool:
        return not self.reasons


def judge(shards: Sequence[ShardResult]) -> Verdict:
    """The verdict over all client processes, from every single request and read."""
    results = [result for shard in shards for result in shard.results]
    pieces = sum(result.pieces for result in results)
    ttft_s = [(first - r.due_ns) / 1e9 for r in results if (first := r.first_token_ns) is not None]
    read_lags = [lag for shard in shards for lag in shard.read_lag_ns]
    facts = ClientFacts(
        ttft_p50_s=client_audit.median(ttft_s),
        schedule_lag_p99_s=_percentile([lag for shard in shards for lag in shard.schedule_lag_ns], 99),
        read_lag_p50_s=_percentile(read_lags, 50),
        read_lag_p99_s=_percentile(read_lags, 99),
        cpu_ratio=max((shard.cpu_s / shard.wall_s for shard in shards if shard.wall_s > 0), default=None),
        clock_drift_s=max((abs(shard.clock_drift_ns) for shard in shards), default=0) / 1e9,
        early_s=max((r.due_ns - r.sent_ns for r in results if r.sent_ns is not None), default=0) / 1e9,
        lacking=sum(result.error == LACKING for result in results),
        held_back=sum(shard.waited_for_cap for shard in shards),
        coalesced_ratio=sum(result.coalesced for result in results) / pieces if pieces else None,
    )
    return Verdict(
        schedule_lag_p99_s=facts.schedule_lag_p99_s,
        read_lag_p99_s=facts.read_lag_p99_s,
        cpu_ratio=facts.cpu_ratio or 0.0,
        coalesced_ratio=facts.coalesced_ratio,
        unstamped=sum(not result.stamped for result in results if result.first_byte_ns is not None),
        reasons=tuple(client_audit.reasons(facts)),
    )


def _percentile(values_ns: Sequence[int], percent: int) -> float | None:
    return float(np.percentile(np.asarray(values_ns, dtype=np.int64), percent)) / 1e9 if values_ns else None
