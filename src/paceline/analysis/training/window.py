"""One run after warm-up: samples of all ranks as one row per step and one row per launch.

The time of a step is the maximum over ranks. Rates divide by the wall time of the window, which is less if ranks are
late in turn. A value that one rank did not record is missing for the step, never 0.
"""

from __future__ import annotations

import itertools
import math
from array import array
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.analysis.findings import Certificate, Goodput, WarmUpOutcome
from paceline.analysis.statistics import intervals
from paceline.analysis.statistics.intervals import Array
from paceline.analysis.training import energy, gauges
from paceline.analysis.training.goodput import goodput, resumed_at
from paceline.errors import RequestError
from paceline.models import arithmetic
from paceline.results.records import RunRecord
from paceline.results.samples import StepSeries

PHASES = ("data_wait_s", "h2d_s", "forward_s", "backward_s", "optimizer_s")
AMOUNTS = ("tokens", "samples", "positions", "label_tokens", "attended_keys")
STEP_COLUMNS = ("seconds", "steps", *AMOUNTS, "padding", *PHASES, "wall")
_ONCE = ("exposed", "wire", "first", "last", "h2d_bytes", "h2d_seconds", "joules", "energy_s", "energy_tokens")
_SPENT = ("counted_s", "span_s", "redone_s", "checkpoint_s", "down_s")
LAUNCH_COLUMNS = ("launches", "allocated", "reserved", "device", "resident", *_ONCE, *_SPENT)


@dataclass(frozen=True, slots=True, eq=False)
class Window:
    """One run after warm-up: a row per step (STEP_COLUMNS) and a row for the launch (LAUNCH_COLUMNS); NaN is missing.

    measured are the steps of the rows: those after warm-up, and after every restart those after its own warm-up.
    certificate: of a foreign script, once it was graded.
    """

    run: str
    record: RunRecord
    warmup: WarmUpOutcome
    steps: Array
    launch: Array
    outliers: int
    energy: energy.WindowEnergy | None = None
    throttling: gauges.Throttling | None = None
    measured: tuple[int, ...] = ()
    goodput: Goodput | None = None
    certificate: Certificate | None = None

    @property
    def seconds(self) -> Array:
        return self.steps[:, STEP_COLUMNS.index("seconds")]


@dataclass(frozen=True, eq=False)
class StepTable:
    """Step samples of every rank, ordered by step and within a step as recorded.

    Rows bounds[k] to bounds[k + 1] are those of step `steps[k]`. order: the row of the series of each row; None if the
    series has all steps of one rank after those of another. Formulas take lanes: a row for each place within a step,
    usually a rank, and a column for each step.
    """

    series: StepSeries
    steps: tuple[int, ...]
    bounds: tuple[int, ...]
    order: NDArray[np.intp] | None

    @cached_property
    def rows(self) -> NDArray[np.intp]:
        """The row of the series of each row."""
        if self.order is None:
            return np.arange(len(self.series)).reshape(self.shape).T.ravel()
        return self.order

    @cached_property
    def shape(self) -> tuple[int, int]:
        """That of lanes."""
        return int(np.diff(self.bounds).max(initial=0)), len(self.steps)

    @cached_property
    def absent(self) -> NDArray[np.bool_] | None:
        """The places of lanes that a step does not have; None if all steps have as many."""
        if self.order is None:
            return None
        missing = np.arange(self.shape[0])[:, None] >= np.diff(self.bounds)
        return missing if missing.any() else None

    def lanes(self, column: NDArray[Any]) -> NDArray[Any]:
        """A column of the series as lanes; absent places are 0."""
        if self.order is None:
            return column.reshape(self.shape)
        if self.absent is None:
            return np.ascontiguousarray(column[self.order].reshape(self.shape[::-1]).T)
        lanes = np.zeros(self.shape[::-1], column.dtype)
        lanes[~self.absent.T] = column[self.order]
        return np.ascontiguousarray(lanes.T)

    def numbers(self, field: str) -> Array:
        """The lanes of a field; missing is NaN."""
        column = self.series.column(field)
        if isinstance(column, list) and column.count(None) == len(column):
            return np.broadcast_to(math.nan, self.shape)
        return self.lanes(np.asarray(column, dtype=np.float64))

    def whole_numbers(self, field: str) -> NDArray[Any]:
        """The lanes of a field with whole numbers, exact: those beyond 63 bits as Python's own."""
        column = self.series.column(field)
        exact = isinstance(column, array) and column.typecode != "Q"
        return self.lanes(np.asarray(column, dtype=np.int64 if exact else object))

    def largest(self, lanes: Array) -> Array:
        """The largest number of each step."""
        return np.asarray((lanes if self.absent is None else np.where(self.absent, -math.inf, lanes)).max(axis=0))

    def totals(self, lanes: NDArray[Any]) -> NDArray[Any]:
        """The sum of each step, added one after the other: NumPy and newer versions of Python add floats in other
        orders, which changes the last digit."""
        total = np.zeros(lanes.shape[1], lanes.dtype)
        for lane in lanes:
            total += lane
        return total

    @cached_property
    def losses(self) -> Array:
        """By step, the mean over all trained tokens: means of ranks weighted by the tokens in them. These are the label
        tokens of a rank, or all its tokens if labels were not counted. NaN if no token was trained.

        Two ranks with losses 2 and 4 over 30 and 10 tokens have a mean of 2.5.
        """
        labels, tokens = self.numbers("label_tokens"), self.numbers("tokens")
        learned = np.where(np.isnan(labels), tokens, labels)
        with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
            total = self.totals(learned)
            return np.where(total == 0, math.nan, self.totals(self.numbers("loss") * learned) / total)

    def values(self, field: str) -> list[Any]:
        """One value per row, as recorded."""
        column = self.series.column(field)
        if isinstance(column, array):
            found: list[Any] = np.asarray(column)[self.rows].tolist()
            return found
        return [column[row] for row in self.rows.tolist()]

    def counts(self, field: str) -> dict[Any, int]:
        """How many rows have each value."""
        column = self.series.column(field)
        if not isinstance(column, array):
            return Counter(self.values(field))
        known = np.asarray(column) if self.order is None else np.asarray(column)[self.order]
        if len(known) and (least := known.min()) == known.max():
            return {least.item(): len(known)}
        if known.dtype.kind == "i" and len(known) and least >= 0 and known.max() < len(known):
            # Small numbers, such as ranks, are counted without sorting.
            times = np.bincount(known)
            return {int(value): int(times[value]) for value in np.flatnonzero(times)}
        values, counts = np.unique(known, return_counts=True)
        return dict(zip(values.tolist(), counts.tolist(), strict=True))

    def by_step(self, field: str) -> list[list[Any]]:
        values = self.values(field)
        return [values[a:b] for a, b in itertools.pairwise(self.bounds)]

    def at(self, step: int, field: str) -> list[Any]:
        """What the ranks recorded at one step."""
        column = self.series.column(field)
        index = bisect_left(self.steps, step)
        return [column[row] for row in self.rows[self.bounds[index] : self.bounds[index + 1]].tolist()]


def step_table(record: RunRecord, variant: int = 0) -> StepTable:
    """The steps of a run, or of one variant of a reference; kept with its series."""
    series = StepSeries.of(record.steps)
    key = "table", variant
    if key not in series.derived:
        series.derived[key] = _step_table(series, variant)
    found: StepTable = series.derived[key]
    return found


def _step_table(series: StepSeries, variant: int) -> StepTable:
    chosen, recorded = np.asarray(series.column("variant")) == variant, np.asarray(series.column("step"))
    if chosen.all() and (steps := _of_each_rank(recorded)) is not None:
        bounds = range(0, len(recorded) + 1, len(recorded) // len(steps))
        return StepTable(series, tuple(steps.tolist()), tuple(bounds), None)
    rows = np.flatnonzero(chosen)
    order = np.argsort(recorded[rows], kind="stable")
    ascending = recorded[rows][order]
    starts = np.flatnonzero(np.diff(ascending, prepend=ascending[:1] - 1))
    return StepTable(series, tuple(ascending[starts].tolist()), (*starts.tolist(), len(rows)), rows[order])


def _of_each_rank(recorded: NDArray[Any]) -> NDArray[Any] | None:
    """The steps, if the series has them in order, once for each rank; None otherwise."""
    falls = np.flatnonzero(recorded[1:] <= recorded[:-1])
    steps = recorded[: falls[0] + 1] if len(falls) else recorded
    if not len(steps) or len(recorded) % len(steps):
        return None
    return steps if (recorded.reshape(-1, len(steps)) == steps).all() else None


def first_and_last_loss(table: StepTable) -> tuple[float, float]:
    """Losses of the whole run, including warm-up; NaN without a step."""
    losses = table.losses
    return (float(losses[0]), float(losses[-1])) if len(losses) else (math.nan, math.nan)


def open_window(record: RunRecord) -> Window:
    """Apply the warm-up rule to the slowest rank of every step and keep the rest."""
    table = step_table(record)
    rows = _step_rows(table)
    chosen, end = _settled(rows[:, 0], table.steps, record)
    measured = tuple(itertools.compress(table.steps, chosen))
    steps = np.column_stack([rows[chosen], _wall(table, chosen)])
    run = record.spec.run_id
    outcome = WarmUpOutcome(
        run=run,
        excluded_steps=end.excluded,
        measured_steps=len(steps),
        by_rule=end.by_rule,
        text=end.text,
    )
    used, spent = energy.window_energy(record, measured), goodput(record)
    peaks = [m for m in record.memory if m.moment == "steps"]
    # In the order of LAUNCH_COLUMNS. Joules, seconds and tokens of launches are added before anything is divided.
    once = [
        1.0,
        *(_reduce(max, (getattr(m, f"{k}_bytes") for m in peaks)) for k in LAUNCH_COLUMNS[1:5]),
        _exposed_ratio(record),
        _wire_bytes(record, measured),
        *first_and_last_loss(table),
        _reduce(sum, (t.h2d_bytes for t in record.traces)),
        _reduce(sum, (t.h2d_s for t in record.traces)),
    ]
    if used.joules is None or used.seconds is None:
        once += [math.nan] * 3
    else:
        once += [used.joules, used.seconds, float(steps[:, STEP_COLUMNS.index("tokens")].sum())]
    if spent is None:
        once += [math.nan] * 5
    else:
        once += [spent.counted_s, spent.span_s, spent.redone_s, spent.checkpoint_s, spent.down_s]
    outliers = int(intervals.outliers(steps[:, 0]).sum())
    slowed = gauges.throttling(record, measured)
    return Window(run, record, outcome, steps, np.array([once]), outliers, used, slowed, measured, spent)


def _settled(seconds: Array, steps: Sequence[int], record: RunRecord) -> tuple[NDArray[np.bool_], intervals.WarmUpEnd]:
    """Which steps are measured: caches are cold again after a restart, so the rule is applied after each."""
    bounds = [0, *(bisect_left(steps, step) for step in resumed_at(record)), len(steps)]
    ends = [intervals.warm_up(seconds[a:b], record.spec.warmup) for a, b in itertools.pairwise(bounds)]
    chosen = np.ones(len(steps), dtype=np.bool_)
    for begin, end in zip(bounds, ends, strict=False):
        chosen[begin : begin + end.excluded] = False
    again = sum(end.excluded for end in ends[1:])
    later = len(ends) - 1
    text = ends[0].text + (f"; {again} more after {later} restart{'' if later == 1 else 's'}" if later else "")
    return chosen, intervals.WarmUpEnd(ends[0].excluded + again, ends[0].by_rule, text)


def _step_rows(table: StepTable) -> Array:
    """STEP_COLUMNS without wall: times are maxima over ranks, amounts are sums; one missing value makes both NaN."""
    if not table.steps:
        return np.empty((0, len(STEP_COLUMNS) - 1))
    seconds, *phases = (table.largest(table.numbers(field)) for field in ("duration_s", *PHASES))
    total = {field: table.totals(table.numbers(field)) for field in AMOUNTS}
    padding = total["positions"] - total["tokens"]
    return np.column_stack([seconds, np.ones(len(seconds)), *total.values(), padding, *phases])


def _wall(table: StepTable, chosen: NDArray[np.bool_]) -> Array:
    """Step times of the rank with the longest window: they add up to wall time, unlike maxima over ranks."""
    ranks, seconds = table.whole_numbers("rank"), table.numbers("duration_s")
    if table.absent is None and chosen.any():
        places = ranks[:, 0]
        if (places == ranks.T).all() and len(set(places.tolist())) == len(places):
            own = np.ascontiguousarray(seconds[:, chosen].T)
            return own[:, np.argmax(own.sum(axis=0))]
    counts = np.diff(table.bounds)
    inside = np.repeat(chosen, counts)
    ranks, seconds = (np.array(table.values(field))[inside] for field in ("rank", "duration_s"))
    wall = np.full(int(chosen.sum()), math.nan)
    if not len(ranks):
        return wall
    _, number = np.unique(ranks, return_inverse=True)
    totals = np.bincount(number, weights=seconds)[number]
    # Of ranks with equal windows, the first.
    longest = ranks[np.argmax(totals)]
    # Backwards, so that the first of several samples of a rank at one step is kept.
    rows = np.flatnonzero(ranks == longest)[::-1]
    step_of_row = np.repeat(np.arange(len(wall)), counts[chosen])
    wall[step_of_row[rows]] = seconds[rows]
    return wall


def _reduce(reduction: Callable[[Iterable[float]], float], values: Iterable[float | None]) -> float:
    """NaN as soon as one rank is missing: the maximum of the others would be a number about other ranks."""
    known = [math.nan if value is None else float(value) for value in values]
    return reduction(known) if known and not any(math.isnan(v) for v in known) else math.nan


def _exposed_ratio(record: RunRecord) -> float:
    """Share of the profiled time in which a rank communicated without computing; worst rank."""
    exposed: defaultdict[int, float] = defaultdict(float)
    wall: defaultdict[int, float] = defaultdict(float)
    for trace in record.traces:
        exposed[trace.rank] += trace.exposed_s
        wall[trace.rank] += trace.wall_s
    return max((exposed[rank] / wall[rank] for rank in wall if wall[rank] > 0), default=math.nan)


def _wire_bytes(record: RunRecord, measured: Sequence[int]) -> float:
    """Counted payload times the factor of the operation, per counted step (in the window if any); busiest rank."""
    if record.spec.topology.world_size == 1:
        return 0.0
    inside = set(measured)
    counted = [w for w in record.wire if w.step in inside] or record.wire
    moved: defaultdict[int, float] = defaultdict(float)
    steps: defaultdict[int, set[int]] = defaultdict(set)
    for w in counted:
        try:
            moved[w.rank] += w.payload_bytes * arithmetic.wire_factor(w.operation, w.group_size)
        except RequestError:
            return math.nan
        steps[w.rank].add(w.step)
    return max((total / len(steps[rank]) for rank, total in moved.items()), default=math.nan)
