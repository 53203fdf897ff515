"""How far a load is from the limit of this host's load generator, known before the load is sent.

The limit is the ceiling that `paceline selftest` stored for this host and number of client processes. If there is none,
a short climb measures one, within BRIEF_S seconds, and stores it for later runs.
"""

from __future__ import annotations

import contextlib
import math
import time
from dataclasses import dataclass
from datetime import UTC, datetime

from paceline.results.served_samples import CeilingSample
from paceline.serving import client_ceiling, selftest

GOOD, TIGHT, INSUFFICIENT, UNKNOWN = "good", "tight", "insufficient", "unknown"
LEVELS = {GOOD: "green", TIGHT: "amber", INSUFFICIENT: "red", UNKNOWN: "amber"}
# Up to half of its ceiling a client has room for bursts; above 80 % it is in its own way.
MOST_GOOD, MOST_TIGHT = 0.5, 0.8
# A climb in few steps, which ends after this time at the latest, but for the try in progress (about 2 s).
BRIEF_S = 6.0
BRIEF_EVENTS_PER_S = (1_000.0, 4_000.0, 16_000.0, 64_000.0)
BRIEF_STREAMS, BRIEF_TRY_S = 500, 1.0
IDLE = "stop other work on the client's host, then run `paceline selftest`"


@dataclass(frozen=True, slots=True, kw_only=True)
class Headroom:
    """The grade of one load, and the sentence that says it."""

    grade: str
    text: str

    @property
    def level(self) -> str:
        """green, amber or red."""
        return LEVELS[self.grade]


def headroom(
    needed_events_per_s: float | None,
    streams: int | None,
    ceiling: CeilingSample | None,
    *,
    processes: int = 1,
    cores: int = 1,
    answer_tokens: float | None = None,
) -> Headroom:
    """The share of the client's ceiling that a load needs. answer_tokens: the mean answer of a load with a rate, which
    is then stated in requests per second. Without it the need is an upper bound, which alone is never insufficient: the
    server may be slower.

    >>> ceiling = CeilingSample(rank=0, processes=1, events_per_s=25_000.0, streams=500, measured_at_s=0.0)
    >>> headroom(640.0, 16, ceiling, answer_tokens=16.0).text
    'client headroom: good (needs 40 of 1,562 requests/s; self-test of 1970-01-01)'
    >>> headroom(20_000.0, 64, ceiling, cores=8).text
    'client headroom: tight (needs up to 20,000 of 25,000 events/s; self-test of 1970-01-01): use 2 client processes \
(`--set workload.shards=2`)'
    """
    if ceiling is None:
        return _graded(UNKNOWN, "the client could not be measured: this host is too busy", IDLE)
    if needed_events_per_s is None:
        return _graded(UNKNOWN, "no warm-up answer says how fast tokens come", "set `warmup_requests` to 1 or more")
    share = needed_events_per_s / ceiling.events_per_s
    unit, scale = ("requests/s", 1 / answer_tokens) if answer_tokens else ("events/s", 1.0)
    most = "" if answer_tokens else "up to "
    needs = f"needs {most}{_count(needed_events_per_s * scale)} of {_count(ceiling.events_per_s * scale)} {unit}"
    day = datetime.fromtimestamp(ceiling.measured_at_s, UTC).strftime("%Y-%m-%d")
    how = "measured briefly on" if ceiling.is_brief else "self-test of"
    many = streams is not None and streams > ceiling.streams
    beyond = f" and {streams:,} streams, measured with {ceiling.streams:,}" if many else ""
    grade = GOOD if share <= MOST_GOOD and not many else TIGHT
    grade = INSUFFICIENT if share > MOST_TIGHT and answer_tokens else grade
    if grade == GOOD:
        what = ""
    elif many and share <= MOST_GOOD:
        what = f"run `paceline selftest --streams {streams}`"
    else:
        wanted = max(processes + 1, math.ceil(processes * share / MOST_GOOD))
        fits = wanted <= cores
        what = f"use {wanted} client processes (`--set workload.shards={wanted}`)"
        what = what if fits else "use a larger client host, or a lower rate or concurrency"
    return _graded(grade, f"{needs}{beyond}; {how} {day}", what)


def _count(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def _graded(grade: str, why: str, what: str) -> Headroom:
    return Headroom(grade=grade, text=f"client headroom: {grade} ({why}){f': {what}' if what else ''}")


def ceiling_for(processes: int) -> tuple[CeilingSample | None, bool]:
    """The stored ceiling of a client with so many processes on this host, or else a brief measurement, which is stored;
    and whether it was measured now. None if this host is too busy for an accurate load."""
    known = next((each for each in client_ceiling.known() if each.processes == processes), None)
    if known is not None:
        return known, False
    measured = measure_briefly(processes)
    if measured is not None:
        # A host without a writable home measures again next time.
        with contextlib.suppress(OSError, RuntimeError):
            client_ceiling.keep(measured)
    return measured, True


def measure_briefly(processes: int) -> CeilingSample | None:
    """A lower bound of the ceiling, from few and short tries. A try counts if the client was accurate, though the mock
    server on the same processors may have been late: the replicas are usually elsewhere."""
    began, best = time.monotonic(), None
    for events_per_s in BRIEF_EVENTS_PER_S:
        streams = min(BRIEF_STREAMS, round(events_per_s / 20))
        rung = selftest.one(events_per_s, streams, BRIEF_TRY_S, processes)
        if rung.client_reasons or not rung.events_per_s:
            break
        best = CeilingSample(
            rank=0,
            processes=processes,
            events_per_s=rung.events_per_s,
            streams=rung.streams,
            measured_at_s=time.time(),
            is_brief=True,
        )
        if time.monotonic() - began > BRIEF_S:
            break
    return best
