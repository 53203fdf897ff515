"""What the processes of a client observed about themselves, for the judge of every client (`self_audit`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paceline.results import client_audit
from paceline.results.client_audit import LACKING, ClientFacts
from paceline.serving.client.orders import Handled, Shift
from paceline.serving.client.reading import first_token_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the client says of itself. Reasons are empty where its times can be believed."""

    schedule_lag_p99_s: float | None
    read_lag_p99_s: float | None
    cpu_ratio: float
    coalesced_ratio: float | None
    unstamped: int
    waited_for_cap: int
    clock_drift_s: float
    reasons: tuple[str, ...]

    @property
    def is_valid(self) -> bool:
        return not self.reasons


def judge(shifts: Sequence[Shift]) -> Verdict:
    """Over all processes of the client, from every single request and read."""
    handled = [each for shift in shifts for each in shift.handled]
    pieces = sum(h.pieces for h in handled)
    facts = _facts(shifts, handled)
    return Verdict(
        schedule_lag_p99_s=facts.schedule_lag_p99_s,
        read_lag_p99_s=facts.read_lag_p99_s,
        cpu_ratio=facts.cpu_ratio or 0.0,
        coalesced_ratio=sum(h.coalesced for h in handled) / pieces if pieces else None,
        unstamped=sum(not h.stamped for h in handled if h.first_byte_ns is not None),
        waited_for_cap=sum(shift.waited_for_cap for shift in shifts),
        clock_drift_s=facts.clock_drift_s,
        reasons=tuple(client_audit.reasons(facts)),
    )


def _facts(shifts: Sequence[Shift], handled: Sequence[Handled]) -> ClientFacts:
    ttft_s = [(first - h.due_ns) / 1e9 for h in handled if (first := first_token_ns(h)) is not None]
    reads = [lag for shift in shifts for lag in shift.read_lag_ns]
    return ClientFacts(
        ttft_p50_s=client_audit.median(ttft_s),
        schedule_lag_p99_s=_percentile([lag for shift in shifts for lag in shift.schedule_lag_ns], 99),
        read_lag_p50_s=_percentile(reads, 50),
        read_lag_p99_s=_percentile(reads, 99),
        cpu_ratio=max((shift.cpu_s / shift.wall_s for shift in shifts if shift.wall_s > 0), default=None),
        clock_drift_s=max((abs(shift.clock_drift_ns) for shift in shifts), default=0) / 1e9,
        early_s=max((h.due_ns - h.sent_ns for h in handled if h.sent_ns is not None), default=0) / 1e9,
        lacking=sum(h.error == LACKING for h in handled),
        held_back=sum(shift.waited_for_cap for shift in shifts),
    )


def _percentile(values_ns: Sequence[int], percent: int) -> float | None:
    return float(np.percentile(np.asarray(values_ns, dtype=np.int64), percent)) / 1e9 if values_ns else None
