"""Goodput: how much of a run's time went into steps that counted, if it was restarted or wrote checkpoints.

Ranks report durations, and the controller reports when it first saw the ranks of each attempt: timestamps of different
clocks are never subtracted. See method.md, section 4.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence

from paceline.analysis.findings import Goodput
from paceline.results.attempts import INTERRUPTED
from paceline.results.records import RunRecord, StepSample
from paceline.results.samples import StepSeries


def resumed_at(record: RunRecord) -> list[int]:
    """The steps at which a later attempt took over for good, in order."""
    first_rank = min((start.rank for start in record.starts), default=0)
    starts = [s for s in sorted(record.starts, key=lambda s: s.attempt) if s.rank == first_rank]
    kept = kept_starts([(start.step, float(start.attempt)) for start in starts])
    return [step for step, attempt in kept if attempt > 1 and step > 0]


def kept_starts(starts: Iterable[tuple[int, float]]) -> list[tuple[int, float]]:
    """Starts (in the order of attempts) whose steps are kept: a later attempt that starts earlier replaces them.

    >>> kept_starts([(0, 1.0), (50, 2.0), (30, 3.0)])
    [(0, 1.0), (30, 3.0)]
    """
    kept: list[tuple[int, float]] = []
    for start in starts:
        while kept and kept[-1][0] >= start[0]:
            kept.pop()
        kept.append(start)
    return kept


def goodput(record: RunRecord) -> Goodput | None:
    """None if the run had no restart and no checkpoint, or its start was not recorded."""
    if not record.starts or not (record.attempts or record.checkpoints):
        return None
    last = max(start.attempt for start in record.starts)
    setups = {n: max(s.setup_s for s in record.starts if s.attempt == n) for n in {s.attempt for s in record.starts}}
    paused = {n: _longest((c.rank, c.duration_s) for c in record.checkpoints if c.attempt == n) for n in setups}
    counted_s, redone_s = _duration(record.steps), _duration(record.redone)
    checkpoint_s, start_s = sum(paused.values()), setups.get(1, 0.0)
    first_step = min(start.step for start in record.starts if start.attempt == last)
    at_last_s = setups[last] + paused[last] + _duration([s for s in record.steps if s.step >= first_step])
    # From the first sight of the first attempt's ranks to that of the last one's; 0 for one attempt. Excludes the time
    # without a controller, which is as long as the user stays away.
    span_s, attempts = at_last_s, record.attempts
    if attempts:
        began = {a.attempt: a.submitted_at if a.began_at is None else a.began_at for a in attempts}
        away_s = sum(
            max(following.submitted_at - attempt.ended_at, 0.0)
            for attempt, following in itertools.pairwise(attempts)
            if attempt.status == INTERRUPTED and following.attempt <= last
        )
        span_s = began.get(last, attempts[-1].ended_at) - began[min(began)] - away_s + at_last_s
    return Goodput(
        span_s=span_s,
        start_s=start_s,
        counted_s=counted_s,
        redone_s=redone_s,
        checkpoint_s=checkpoint_s,
        # The controller polls ten times per second, so it may see slightly less time than ranks report.
        down_s=max(span_s - start_s - counted_s - redone_s - checkpoint_s, 0.0),
        restarts=sum(attempt.status != INTERRUPTED for attempt in record.attempts[:-1]),
        interruptions=sum(attempt.status == INTERRUPTED for attempt in record.attempts[:-1]),
        checkpoints=len({(c.attempt, c.step) for c in record.checkpoints}),
    )


def _duration(steps: Sequence[StepSample]) -> float:
    series = StepSeries.of(steps)
    ranks = (int(rank) for rank in series.column("rank"))
    return _longest(zip(ranks, series.column("duration_s"), strict=True))


def _longest(durations: Iterable[tuple[int, float]]) -> float:
    """The sum of the slowest rank: ranks wait for each other, so it is the elapsed time."""
    totals: defaultdict[int, float] = defaultdict(float)
    for rank, seconds in durations:
        totals[rank] += seconds
    return max(totals.values(), default=0.0)
