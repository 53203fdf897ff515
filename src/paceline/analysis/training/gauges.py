"""Gauges and steps: the source of each reading, when each step ran by wall clock, and which steps ran while
throttled.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from operator import is_not
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from paceline.analysis.grouping import grouped
from paceline.analysis.statistics import intervals
from paceline.analysis.statistics.intervals import Array
from paceline.analysis.training.goodput import kept_starts
from paceline.host.gauges import SLOWING_REASONS
from paceline.results.records import CheckpointSample, GaugeSample, Outcome, RunRecord, StartSample
from paceline.results.samples import StepSeries

Kept = TypeVar("Kept")
Ranked = TypeVar("Ranked", StartSample, CheckpointSample, Outcome)


class Source(NamedTuple):
    """What was read: a GPU, or a host (device None). rank did the reading, and timestamps are by its clock."""

    rank: int
    host: str
    device: int | None


class Timeline(NamedTuple):
    """Steps of one rank by its host's clock: steps[k] ran from begins[k] to ends[k]. Checkpoints and lost attempts lie
    between them.
    """

    steps: NDArray[Any]
    begins: Array
    ends: Array


@dataclass(frozen=True, slots=True)
class Throttling:
    """How many of the measured steps ran while a GPU of the job was throttled, and why."""

    steps: int
    measured: int
    reasons: tuple[str, ...]

    @property
    def ratio(self) -> float:
        return self.steps / self.measured if self.measured else 0.0

    @property
    def text(self) -> str:
        return f"{self.steps} of {self.measured} steps while throttled: {', '.join(self.reasons)}"


def sources(record: RunRecord) -> dict[Source, tuple[GaugeSample, ...]]:
    """Samples of each GPU and host, oldest first. If several ranks read a host, the first of them counts."""
    return _kept(StepSeries.of(record.steps), record.gauges, lambda: _sources(record))


def _sources(record: RunRecord) -> dict[Source, tuple[GaugeSample, ...]]:
    ordered = sorted(record.gauges, key=lambda s: (s.rank, s.at_s))
    readers: dict[str, int] = {}
    ours = [s for s in ordered if s.device is not None or readers.setdefault(s.host, s.rank) == s.rank]
    by_source = grouped(ours, lambda s: Source(s.rank, s.host, s.device))
    return {source: tuple(samples) for source, samples in by_source.items()}


def _rows_of_ranks(series: StepSeries) -> dict[int, NDArray[np.intp]]:
    """The rows of each rank, for all of thousands of ranks at once; kept with the series."""
    key = ("rows of ranks",)
    if key not in series.derived:
        rows = np.flatnonzero(np.asarray(series.column("variant")) == 0)
        ranks = np.asarray(series.column("rank"))[rows]
        order = np.argsort(ranks, kind="stable")
        known, starts = np.unique(ranks[order], return_index=True)
        own = np.split(rows[order], starts[1:]) if len(rows) else []
        series.derived[key] = dict(zip(known.tolist(), own, strict=True))
    found: dict[int, NDArray[np.intp]] = series.derived[key]
    return found


def _of_rank(series: StepSeries, samples: tuple[Ranked, ...], rank: int) -> list[Ranked]:
    """The samples of one rank, in order, by an index of all ranks that is kept with the series of the run."""
    by_rank = _kept(series, samples, lambda: grouped(samples, lambda sample: sample.rank))
    return by_rank.get(rank, [])


def _kept(series: StepSeries, samples: Sequence[object], compute: Callable[[], Kept]) -> Kept:
    """What was computed from other samples of the run, or from the numbers of steps, kept with the series."""
    key = "other samples", id(samples)
    # With the samples themselves: a record with others has another index.
    if key not in series.derived or series.derived[key][0] is not samples:
        series.derived[key] = samples, compute()
    found: Kept = series.derived[key][1]
    return found


def timeline(record: RunRecord, rank: int) -> Timeline | None:
    """Steps by wall clock; None if the rank did not record the start of its window, or has no step."""
    series = StepSeries.of(record.steps)
    own, anchors = _rows_of_ranks(series).get(rank), _anchors(record, rank)
    if not anchors or own is None:
        return None
    steps = np.asarray(series.column("step"))[own]
    order = np.argsort(steps, kind="stable")
    steps, seconds = steps[order], np.asarray(series.column("duration_s"), dtype=np.float64)[own][order]
    pauses = {c.step - 1: c.duration_s for c in _of_rank(series, record.checkpoints, rank)}
    paused = np.array([pauses.get(step, 0.0) for step in steps.tolist()]) if pauses else np.zeros(len(steps))
    edges = anchors[0][1] + np.concatenate([[0.0], np.cumsum(seconds + paused)])
    begins, ends = edges[:-1].copy(), edges[1:] - paused
    for step, at_s in anchors[1:]:
        first = int(np.searchsorted(steps, step))
        if first < len(steps):
            shift = at_s - begins[first]
            begins[first:] += shift
            ends[first:] += shift
    return Timeline(steps, begins, ends)


def _anchors(record: RunRecord, rank: int) -> list[tuple[int, float]]:
    """Steps at which a kept attempt began, and when; records without restarts know only the first."""
    series = StepSeries.of(record.steps)
    own_starts = sorted(_of_rank(series, record.starts, rank), key=lambda s: s.attempt)
    starts = [(s.step, s.at_s) for s in own_starts]
    began = next((o.evidence.window_began_at_s for o in _of_rank(series, record.outcomes, rank) if o.evidence), None)
    return kept_starts(starts) if starts else [] if began is None else [(0, began)]


def _has_timeline(record: RunRecord, rank: int) -> bool:
    return bool(_anchors(record, rank)) and rank in _rows_of_ranks(StepSeries.of(record.steps))


def stretches(record: RunRecord, rank: int, measured: Sequence[int]) -> list[tuple[float, float]] | None:
    """Start and end of the measured steps by the rank's clock, one pair per uninterrupted interval.

    Kept with the series of the run: energy, gauges and trust ask for it, each for every rank.
    """
    derived, key = StepSeries.of(record.steps).derived, ("stretches", rank)
    source = record.outcomes, record.starts, record.checkpoints, measured
    if key not in derived or any(map(is_not, derived[key][0], source)):
        derived[key] = source, _stretches(record, rank, measured)
    found: list[tuple[float, float]] | None = derived[key][1]
    return found


def _stretches(record: RunRecord, rank: int, measured: Sequence[int]) -> list[tuple[float, float]] | None:
    line = timeline(record, rank)
    if line is None or not measured or measured[0] not in line.steps or measured[-1] not in line.steps:
        return None
    wanted = _kept(StepSeries.of(record.steps), measured, lambda: np.array(measured))
    inside = np.flatnonzero(np.isin(line.steps, wanted))
    begins, ends = line.begins[inside], line.ends[inside]
    # Consecutive steps touch, up to rounding of large timestamps.
    breaks = np.flatnonzero(begins[1:] - ends[:-1] > 1e-5)
    firsts, lasts = [0, *(breaks + 1).tolist()], [*breaks.tolist(), len(inside) - 1]
    return [(float(begins[a]), float(ends[b])) for a, b in zip(firsts, lasts, strict=True)]


def window_of(record: RunRecord, rank: int, measured: Sequence[int]) -> tuple[float, float] | None:
    """From the start of the first measured step to the end of the last, by the rank's clock."""
    spans = stretches(record, rank, measured)
    return (spans[0][0], spans[-1][1]) if spans else None


def spoken_for(samples: Sequence[GaugeSample]) -> tuple[Array, Array]:
    """The time each sample covers: half way to its neighbours, at most one usual interval, so a pause of the reader
    covers nothing.
    """
    at = np.array([sample.at_s for sample in samples])
    gaps = np.diff(at)
    usual = intervals.median(gaps) if len(gaps) else 0.0
    half = np.minimum(gaps / 2, usual)
    return at - np.concatenate([[usual / 2], half]), at + np.concatenate([half, [usual / 2]])


def slowing(sample: GaugeSample) -> tuple[str, ...]:
    """The reasons of the driver that reduce speed; an idle GPU or a clock set by a user is none."""
    if not sample.throttle_reasons:
        return ()
    return tuple(reason for reason in sample.throttle_reasons if reason in SLOWING_REASONS)


def throttled_spans(samples: Sequence[GaugeSample]) -> list[tuple[float, float]]:
    """Start and end of every interval of throttled samples."""
    slowed = [i for i, sample in enumerate(samples) if slowing(sample)]
    if not slowed:
        return []
    begins, ends = spoken_for(samples)
    found: list[tuple[float, float]] = []
    for i in slowed:
        begin, end = float(begins[i]), float(ends[i])
        # Neighbours touch half way, up to rounding of large timestamps.
        joined = bool(found) and begin <= found[-1][1] + 1e-6
        found[-1:] = [(found[-1][0], end)] if joined else [*found[-1:], (begin, end)]
    return found


def throttling(record: RunRecord, measured: Sequence[int]) -> Throttling | None:
    """Count measured steps that overlap a throttled sample of any GPU of the job; None if no GPU reports throttling."""
    tagged: set[int] = set()
    reasons: dict[str, None] = {}
    reported = False
    for source, samples in sources(record).items():
        known = [sample for sample in samples if sample.throttle_reasons is not None]
        if not known or not _has_timeline(record, source.rank):
            continue
        reported = True
        spans = throttled_spans(known)
        when = timeline(record, source.rank) if spans else None
        if when is None:
            continue
        # A step overlaps the first span that ends after it begins, if that begins before it ends.
        begins, ends = (np.array(side) for side in zip(*spans, strict=True))
        first = np.searchsorted(ends, when.begins, side="right")
        overlapping = (first < len(spans)) & (begins[np.minimum(first, len(spans) - 1)] < when.ends)
        wanted = overlapping & np.isin(when.steps, measured)
        if wanted.any():
            tagged |= set(when.steps[wanted].tolist())
            low, high = when.begins[wanted].min(), when.ends[wanted].max()
            for sample, begin, end in zip(known, *spoken_for(known), strict=True):
                if begin < high and end > low:
                    reasons |= dict.fromkeys(slowing(sample))
    return Throttling(len(tagged), len(measured), tuple(reasons)) if reported and measured else None


def known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def within(samples: Sequence[GaugeSample], window: tuple[float, float] | None) -> Sequence[GaugeSample]:
    """Samples read during the window; all if no window is known."""
    return samples if window is None else [s for s in samples if window[0] <= s.at_s <= window[1]]


def hosts(record: RunRecord) -> Collection[str]:
    return {outcome.host for outcome in record.outcomes}
