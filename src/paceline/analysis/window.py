"""One run after warm-up: raw samples of all ranks laid out as one row per step and one row per launch.

A step's time is the maximum over ranks; rates divide by the wall time of the window, which is less where ranks are late
in turns. What one rank did not record is missing for the step, never 0.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

import numpy as np

from paceline import models
from paceline.analysis import statistics
from paceline.analysis.statistics import Array
from paceline.errors import RequestError
from paceline.findings import WarmUpOutcome
from paceline.records import RunRecord, StepSample

PHASES = ("data_wait_s", "h2d_s", "forward_s", "backward_s", "optimizer_s")
STEP_COLUMNS = ("seconds", "steps", "tokens", "samples", *PHASES, "wall")
_RAW = attrgetter("duration_s", *PHASES, "tokens", "samples")
_ONCE = ("exposed", "wire", "first", "last", "h2d_bytes", "h2d_seconds")
LAUNCH_COLUMNS = ("launches", "allocated", "reserved", "device", "resident", *_ONCE)


@dataclass(frozen=True, slots=True, eq=False)
class Window:
    """One run after warm-up: a row per step (STEP_COLUMNS), a row for the launch (LAUNCH_COLUMNS); NaN is missing."""

    run: str
    record: RunRecord
    warmup: WarmUpOutcome
    steps: Array
    launch: Array
    outliers: int

    @property
    def seconds(self) -> Array:
        return self.steps[:, STEP_COLUMNS.index("seconds")]


def samples_by_step(record: RunRecord, variant: int = 0) -> dict[int, list[StepSample]]:
    """The samples of every rank, by step in order."""
    found: defaultdict[int, list[StepSample]] = defaultdict(list)
    for sample in record.steps:
        if sample.variant == variant:
            found[sample.step].append(sample)
    return dict(sorted(found.items()))


def global_loss(samples: Sequence[StepSample]) -> float:
    """Mean over all tokens of the step: ranks' means weighted by their tokens."""
    tokens = sum(s.tokens for s in samples)
    return sum(s.loss * s.tokens for s in samples) / tokens if tokens else math.nan


def first_and_last_loss(by_step: Mapping[int, Sequence[StepSample]]) -> tuple[float, float]:
    """Of the whole run, warm-up included; NaN where there is no step."""
    ends = [by_step[step] for step in (min(by_step), max(by_step))] if by_step else [(), ()]
    return global_loss(ends[0]), global_loss(ends[1])


def open_window(record: RunRecord) -> Window:
    """Applies the warm-up rule to the slowest rank of every step and keeps what follows."""
    by_step = samples_by_step(record)
    rows = _step_rows(by_step)
    end = statistics.warm_up(rows[:, 0], record.spec.warmup)
    wall = _wall(list(by_step.values())[end.excluded :])
    steps = np.column_stack([rows[end.excluded :], wall])
    run = record.spec.run_id
    outcome = WarmUpOutcome(
        run=run,
        excluded_steps=end.excluded,
        measured_steps=len(steps),
        by_rule=end.by_rule,
        text=end.text,
    )
    launch = np.array([_launch_row(record, by_step, end.excluded)])
    return Window(run, record, outcome, steps, launch, int(statistics.outliers(steps[:, 0]).sum()))


def _step_rows(by_step: Mapping[int, Sequence[StepSample]]) -> Array:
    """STEP_COLUMNS without wall: times are maxima over ranks, amounts are sums; one None makes a NaN of both."""
    if not by_step:
        return np.empty((0, len(STEP_COLUMNS) - 1))
    raw = np.array([_RAW(s) for samples in by_step.values() for s in samples], dtype=np.float64)
    starts = np.cumsum([0, *(len(samples) for samples in by_step.values())])[:-1]
    slowest, total = np.maximum.reduceat(raw, starts), np.add.reduceat(raw, starts)
    seconds, phases = slowest[:, :1], slowest[:, 1 : 1 + len(PHASES)]
    return np.column_stack([seconds, np.ones(len(starts)), total[:, -2:], phases])


def _wall(measured: Sequence[Sequence[StepSample]]) -> Array:
    """Step times of the rank whose window lasted longest: they add up to wall time, as maxima over ranks do not."""
    totals: defaultdict[int, float] = defaultdict(float)
    for samples in measured:
        for s in samples:
            totals[s.rank] += s.duration_s
    longest = max(totals, key=lambda rank: totals[rank], default=0)
    return np.array([next((s.duration_s for s in samples if s.rank == longest), math.nan) for samples in measured])


def _launch_row(record: RunRecord, by_step: Mapping[int, Sequence[StepSample]], excluded: int) -> list[float]:
    peaks = [m for m in record.memory if m.moment == "steps"]
    return [
        1.0,
        *(_reduce(max, (getattr(m, f"{k}_bytes") for m in peaks)) for k in LAUNCH_COLUMNS[1:5]),
        _exposed_ratio(record),
        _wire_bytes(record, list(by_step)[excluded:]),
        *first_and_last_loss(by_step),
        _reduce(sum, (t.h2d_bytes for t in record.traces)),
        _reduce(sum, (t.h2d_s for t in record.traces)),
    ]


def _reduce(reduction: Callable[[Iterable[float]], float], values: Iterable[float | None]) -> float:
    """NaN as soon as one rank did not say: the maximum of those that did would be a number about other ranks."""
    known = [math.nan if value is None else float(value) for value in values]
    return reduction(known) if known and not any(math.isnan(v) for v in known) else math.nan


def _exposed_ratio(record: RunRecord) -> float:
    """Share of the profiled time in which a rank communicated and computed nothing; the worst rank's."""
    exposed: defaultdict[int, float] = defaultdict(float)
    wall: defaultdict[int, float] = defaultdict(float)
    for trace in record.traces:
        exposed[trace.rank] += trace.exposed_s
        wall[trace.rank] += trace.wall_s
    return max((exposed[rank] / wall[rank] for rank in wall if wall[rank] > 0), default=math.nan)


def _wire_bytes(record: RunRecord, measured: Sequence[int]) -> float:
    """Counted payload times the operation's factor, per step counted (in the window if any was); the busiest rank's."""
    if record.spec.topology.world_size == 1:
        return 0.0
    inside = set(measured)
    counted = [w for w in record.wire if w.step in inside] or record.wire
    moved: defaultdict[int, float] = defaultdict(float)
    steps: defaultdict[int, set[int]] = defaultdict(set)
    for w in counted:
        try:
            moved[w.rank] += w.payload_bytes * models.wire_factor(w.operation, w.group_size)
        except RequestError:
            return math.nan
        steps[w.rank].add(w.step)
    return max((total / len(steps[rank]) for rank, total in moved.items()), default=math.nan)
