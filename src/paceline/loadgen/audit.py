"""Whether the client itself may have been what was measured: its own lags, processor time and drops against bounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paceline.loadgen.orders import Shift
from paceline.serving import MOST_CPU_RATIO, MOST_READ_LAG_S, MOST_SCHEDULE_LAG_OF_TTFT, MOST_SCHEDULE_LAG_S

MOST_CLOCK_DRIFT_S = 1e-3


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
    ttft_s = [(h.first_ns - h.due_ns) / 1e9 for h in handled if h.first_ns is not None]
    pieces = sum(h.pieces for h in handled)
    schedule_lag = _p99([lag for shift in shifts for lag in shift.schedule_lag_ns])
    read_lag = _p99([lag for shift in shifts for lag in shift.read_lag_ns])
    cpu = max((shift.cpu_s / shift.wall_s for shift in shifts if shift.wall_s > 0), default=0.0)
    drift = max((abs(shift.clock_drift_ns) for shift in shifts), default=0) / 1e9
    bound = max(MOST_SCHEDULE_LAG_S, MOST_SCHEDULE_LAG_OF_TTFT * float(np.median(ttft_s)) if ttft_s else 0.0)
    told = {
        f"99 % of requests left within {_ms(schedule_lag)} of their time, more than {_ms(bound)}": (
            schedule_lag is not None and schedule_lag > bound
        ),
        f"99 % of reads came within {_ms(read_lag)} of the kernel's time, more than {_ms(MOST_READ_LAG_S)}": (
            read_lag is not None and read_lag > MOST_READ_LAG_S
        ),
        f"a process of the client used {cpu:.0%} of a core, more than {MOST_CPU_RATIO:.0%}": cpu > MOST_CPU_RATIO,
        f"the clocks moved {_ms(drift)} against each other during the run": drift > MOST_CLOCK_DRIFT_S,
    }
    return Verdict(
        schedule_lag_p99_s=schedule_lag,
        read_lag_p99_s=read_lag,
        cpu_ratio=cpu,
        coalesced_ratio=sum(h.coalesced for h in handled) / pieces if pieces else None,
        unstamped=sum(not h.stamped for h in handled if h.first_byte_ns is not None),
        waited_for_cap=sum(shift.waited_for_cap for shift in shifts),
        clock_drift_s=drift,
        reasons=tuple(text for text, holds in told.items() if holds),
    )


def _p99(values_ns: Sequence[int]) -> float | None:
    return float(np.percentile(np.asarray(values_ns, dtype=np.int64), 99)) / 1e9 if values_ns else None


def _ms(seconds: float | None) -> str:
    return "nothing" if seconds is None else f"{seconds * 1e3:.2f} ms"
