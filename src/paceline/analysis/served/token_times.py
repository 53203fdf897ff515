"""When the tokens of an answer arrived, and how many requests were in flight: the steady part of a load.

An event may hold several tokens, and a read several events; both have only one time. They count as one arrival of k
tokens at that time. If a server counts more tokens than events, each event holds the quotient.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from paceline.analysis.statistics.intervals import Array
from paceline.results.served_samples import RequestSample

NS = 1e9
STEADY_RATIO = 0.95
# In parts of a step: answers that end this close together ended in the same step.
SAME_STEP = 0.5
# The most gaps that are made by splitting longer ones: a server may claim any number of tokens.
MOST_PARTS = 10**7


def first_token_ns(request: RequestSample) -> int | None:
    """The first token of either kind: for a model that reasons first, the answer begins there."""
    known = [moment for moment in (request.first_ns, request.first_reasoning_ns) if moment is not None]
    return min(known, default=None)


def tokens_of(request: RequestSample) -> int:
    """The server's own count; if it reports none, the number of events with content."""
    return request.pieces if request.tokens is None else request.tokens


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Token arrivals of answers in the order of requests: time in nanoseconds, tokens, and whether it was the first of
    its answer. unknown counts answers whose event times were not stored."""

    times: Array
    tokens: Array
    first: NDArray[np.bool_]
    unknown: int


@dataclass(frozen=True, slots=True)
class _Events:
    """Events with content: time in nanoseconds, time since the previous one, where each answer begins, and its size."""

    answers: Sequence[RequestSample]
    times: NDArray[np.int64]
    gaps: NDArray[np.int64]
    starts: NDArray[np.int64]
    sizes: NDArray[np.int64]
    unknown: int


def _events(requests: Sequence[RequestSample]) -> _Events:
    streamed = [(r, first) for r in requests if r.pieces and (first := first_token_ns(r)) is not None]
    known = [(r, first) for r, first in streamed if len(r.token_ns) == r.pieces - 1]
    sizes = np.array([r.pieces for r, _ in known], dtype=np.int64)
    gaps = np.fromiter(chain.from_iterable((0, *r.token_ns) for r, _ in known), np.int64, count=int(sizes.sum()))
    starts = np.cumsum(sizes) - sizes
    elapsed = np.cumsum(gaps)
    times = elapsed + np.repeat(np.array([first for _, first in known], dtype=np.int64) - elapsed[starts], sizes)
    return _Events([r for r, _ in known], times, gaps, starts, sizes, len(streamed) - len(known))


def arrivals(requests: Sequence[RequestSample]) -> Arrivals:
    """The tokens of an answer sum to the server's count, unless that is below the number of events."""
    events = _events(requests)
    each = np.repeat([max(1.0, tokens_of(r) / r.pieces) for r in events.answers], events.sizes)
    begins = np.zeros(len(events.gaps), dtype=np.bool_)
    begins[events.starts] = True
    at = np.flatnonzero(begins | (events.gaps > 0))
    tokens = np.add.reduceat(each, at) if len(at) else np.zeros(0)
    return Arrivals(events.times[at].astype(np.float64), tokens, begins[at], events.unknown)


def busiest_second(requests: Sequence[RequestSample]) -> int | None:
    """The most events with content, of complete answers, within one second; None if no time was stored."""
    times = np.sort(_events([request for request in requests if request.error is None]).times)
    if not len(times):
        return None
    after = np.searchsorted(times, times + int(NS), side="left")
    return int((after - np.arange(len(times))).max())


@dataclass(frozen=True, slots=True)
class Gaps:
    """Times between tokens in seconds, and the number of the answer of each, by when its first token arrived. split
    counts gaps that are a part of a longer one, because several tokens arrived at its end."""

    seconds: Array
    answers: NDArray[np.int64]
    split: int


def gaps_between_tokens(requests: Sequence[RequestSample]) -> Gaps:
    """A gap at whose end k tokens arrived counts as k gaps of a k-th each. Tokens that arrived with the first have no
    gap. If these were too many in all, every gap counts once, as a k-th."""
    came = arrivals(requests)
    within = ~came.first[1:]
    tokens = came.tokens[1:][within]
    is_small = tokens.sum() <= MOST_PARTS + len(tokens)
    parts = np.rint(tokens).astype(np.int64) if is_small else np.ones(len(tokens), dtype=np.int64)
    seconds = np.repeat(np.diff(came.times)[within] / tokens, parts) / NS
    began = np.argsort(np.argsort(came.times[came.first], kind="stable"))
    answers = np.repeat(began[(np.cumsum(came.first) - 1)[1:][within]], parts)
    return Gaps(seconds, answers, int(parts[parts > 1].sum()))


# --- in flight ---


@dataclass(frozen=True, slots=True)
class Spans:
    """Disjoint spans of time in nanoseconds, ascending."""

    starts: Array
    ends: Array

    @property
    def seconds(self) -> float:
        return float((self.ends - self.starts).sum()) / NS

    def elapsed_before(self, times: Array) -> Array:
        """How much of the spans is before each time, in nanoseconds."""
        if not len(self.starts):
            return np.zeros(len(times))
        at = np.searchsorted(self.starts, times, side="right") - 1
        before = np.concatenate(([0.0], np.cumsum(self.ends - self.starts)))
        inside = np.minimum(times, self.ends[at]) - self.starts[at]
        return np.where(at < 0, 0.0, before[np.maximum(at, 0)] + inside)

    def contain(self, times: Array) -> NDArray[np.bool_]:
        at = np.searchsorted(self.starts, times, side="right") - 1
        return (at >= 0) & (times <= self.ends[np.maximum(at, 0)]) if len(self.starts) else np.zeros(len(times), bool)


def in_flight(requests: Sequence[RequestSample]) -> tuple[Array, NDArray[np.int64]]:
    """Times at which the number of requests in flight changed, and the number from then on."""
    known = [(r.sent_ns, r.ended_ns) for r in requests if r.sent_ns is not None and r.ended_ns is not None]
    times = np.array([*(sent for sent, _ in known), *(ended for _, ended in known)], dtype=np.float64)
    change = np.repeat(np.array([1, -1], dtype=np.int64), len(known))
    # If one ends as another is sent, they were never in flight together.
    order = np.lexsort((change, times))
    return times[order], np.cumsum(change[order])


def most_in_flight(requests: Sequence[RequestSample]) -> int:
    return int(in_flight(requests)[1].max(initial=0))


def spans_of_at_least(requests: Sequence[RequestSample], level: float) -> Spans:
    """The time in which at least so many requests were in flight."""
    times, count = in_flight(requests)
    reached = np.concatenate(([0], (count >= level).astype(np.int8), [0]))
    edges = np.diff(reached)
    # Nothing is in flight after the last change, so every span ends at a known time.
    return _merged(times[np.flatnonzero(edges == 1)], times[np.flatnonzero(edges == -1)])


def _merged(starts: Array, ends: Array, bridged_ns: float = 0.0) -> Spans:
    """Drop empty spans, and join spans with no more than bridged_ns between them."""
    long = ends > starts
    starts, ends = starts[long], ends[long]
    apart = starts[1:] > ends[:-1] + bridged_ns
    return Spans(np.concatenate((starts[:1], starts[1:][apart])), np.concatenate((ends[:-1][apart], ends[-1:])))


# --- the steady part ---


@dataclass(frozen=True, slots=True)
class Steady:
    """The time with at least `level` requests in flight, and the tokens that arrived in it. times_s count only this
    time, from 0. reason: why there is none."""

    level: int
    seconds: float = 0.0
    times_s: Array | None = None
    tokens: Array | None = None
    reason: str | None = None

    @property
    def total(self) -> float:
        return 0.0 if self.tokens is None else float(self.tokens.sum())

    def slices(self, count: int) -> Array:
        """Tokens and seconds of equal parts of the steady time, as rows: the spread within one launch."""
        assert self.times_s is not None
        tokens, _ = np.histogram(self.times_s, bins=count, range=(0.0, self.seconds), weights=self.tokens)
        return np.column_stack((tokens, np.full(count, self.seconds / count)))


def steady(requests: Sequence[RequestSample], planned: int | None, of: Sequence[RequestSample] | None = None) -> Steady:
    """The time with at least 95 % of the planned concurrency, or of the most that was reached if none was planned. Only
    tokens of the requests `of` count, if given."""
    whole = planned or most_in_flight(requests)
    level = max(1, math.ceil(STEADY_RATIO * whole - 1e-9))
    spans = _full(requests, level)
    if spans.seconds <= 0:
        return Steady(
            level, reason=f"there were never {level} requests in flight at once ({STEADY_RATIO:.0%} of {whole})"
        )
    came = arrivals([request for request in (requests if of is None else of) if request.error is None])
    if came.unknown:
        return Steady(level, reason=f"the token times of {came.unknown} answers were not stored")
    inside = spans.contain(came.times)
    if not inside.any():
        return Steady(level, reason=f"no token arrived while {level} requests were in flight")
    elapsed = spans.elapsed_before(came.times[inside]) / NS
    return Steady(level, spans.seconds, elapsed, came.tokens[inside])


def _full(requests: Sequence[RequestSample], level: int) -> Spans:
    """The time with at least `level` requests in flight, including the moments a closed loop needs to send the next
    request.

    Answers of one step end together. At the first of these ends the load is no longer full; without the last tokens of
    the others, which arrive at the same time, the rate would be too low. So a span continues to the last end of the
    same step. It also continues to the next span if that follows within a step, or within so small a part of an answer
    that every slot is still busy for STEADY_RATIO of the time.
    """
    spans = spans_of_at_least(requests, level)
    if not len(spans.starts):
        return spans
    known = [(r.sent_ns, r.ended_ns) for r in requests if r.sent_ns is not None and r.ended_ns is not None]
    ends = np.sort(np.array([ended for _, ended in known], dtype=np.float64))
    came = arrivals(requests)
    gaps = np.diff(came.times)[~came.first[1:]]
    # The usual time between arrivals of one answer; 0 if no answer has two.
    step_ns = float(np.median(gaps)) if len(gaps) else 0.0
    answer_ns = float(np.median([ended - sent for sent, ended in known]))
    last = ends[np.searchsorted(ends, spans.ends + SAME_STEP * step_ns, side="right") - 1]
    return _merged(spans.starts, last, max(step_ns, (1 - STEADY_RATIO) * answer_ns))
