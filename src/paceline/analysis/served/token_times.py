"""When the tokens of an answer came, and how many requests were in flight meanwhile: the steady part of a load.

An event may hold several tokens, and a read several events; both are known by one time only. They count as one arrival
of k tokens at that time. Of a server whose count is above its events, each event holds their quotient.
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
# Of a step: answers that end so close together ended in the same one.
SAME_STEP = 0.5


def first_token_ns(request: RequestSample) -> int | None:
    """The first one of either kind: a model that reasons first has answered from then on."""
    known = [moment for moment in (request.first_ns, request.first_reasoning_ns) if moment is not None]
    return min(known, default=None)


def tokens_of(request: RequestSample) -> int:
    """The server's own count; where it gives none, the events with content."""
    return request.pieces if request.tokens is None else request.tokens


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Tokens of answers in the order of requests: when each arrival came in nanoseconds, how many tokens it held, and
    whether it was the first of its answer. unknown counts answers the times of whose events were not kept."""

    times: Array
    tokens: Array
    first: NDArray[np.bool_]
    unknown: int


@dataclass(frozen=True, slots=True)
class _Events:
    """Events with content of answers whose times were kept: when each came in nanoseconds, the time since the one
    before, where each answer begins, and how many each has."""

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
    """The tokens of an answer sum up to its own count, where the server counts no fewer than there were events."""
    found = _events(requests)
    each = np.repeat([max(1.0, tokens_of(r) / r.pieces) for r in found.answers], found.sizes)
    begins = np.zeros(len(found.gaps), dtype=np.bool_)
    begins[found.starts] = True
    at = np.flatnonzero(begins | (found.gaps > 0))
    held = np.add.reduceat(each, at) if len(at) else np.zeros(0)
    return Arrivals(found.times[at].astype(np.float64), held, begins[at], found.unknown)


def busiest_second(requests: Sequence[RequestSample]) -> int | None:
    """The most events with content, of answers that came whole, within one second; None where no time was kept."""
    times = np.sort(_events([request for request in requests if request.error is None]).times)
    if not len(times):
        return None
    after = np.searchsorted(times, times + int(NS), side="left")
    return int((after - np.arange(len(times))).max())


@dataclass(frozen=True, slots=True)
class Gaps:
    """Times between tokens in seconds, and the number of the answer that each is of, by when its first token came;
    split counts those that are a share of a longer one, because several tokens came at its end."""

    seconds: Array
    answers: NDArray[np.int64]
    split: int


def gaps_between_tokens(requests: Sequence[RequestSample]) -> Gaps:
    """A gap at whose end k tokens came is k gaps of its k-th part. Tokens that came with the first have no gap."""
    found = arrivals(requests)
    within = ~found.first[1:]
    tokens = found.tokens[1:][within]
    parts = np.rint(tokens).astype(np.int64)
    seconds = np.repeat(np.diff(found.times)[within] / tokens, parts) / NS
    began = np.argsort(np.argsort(found.times[found.first], kind="stable"))
    answers = np.repeat(began[(np.cumsum(found.first) - 1)[1:][within]], parts)
    return Gaps(seconds, answers, int(parts[parts > 1].sum()))


# --- in flight ---


@dataclass(frozen=True, slots=True)
class Spans:
    """Stretches of time in nanoseconds, ascending, none touching the next."""

    starts: Array
    ends: Array

    @property
    def seconds(self) -> float:
        return float((self.ends - self.starts).sum()) / NS

    def elapsed_before(self, times: Array) -> Array:
        """How much of the spans lies before each time, in nanoseconds."""
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
    # Of one that ends as another is sent, they were never in flight together.
    order = np.lexsort((change, times))
    return times[order], np.cumsum(change[order])


def most_in_flight(requests: Sequence[RequestSample]) -> int:
    return int(in_flight(requests)[1].max(initial=0))


def spans_of_at_least(requests: Sequence[RequestSample], level: float) -> Spans:
    """The time in which at least so many requests were in flight."""
    times, count = in_flight(requests)
    reached = np.concatenate(([0], (count >= level).astype(np.int8), [0]))
    edges = np.diff(reached)
    # Nothing is in flight after the last change, so that every stretch ends at a time that is known.
    return _merged(times[np.flatnonzero(edges == 1)], times[np.flatnonzero(edges == -1)])


def _merged(starts: Array, ends: Array, bridged_ns: float = 0.0) -> Spans:
    """Without stretches of no length, and joined where one begins as the other ends, or no more than so much later."""
    long = ends > starts
    starts, ends = starts[long], ends[long]
    apart = starts[1:] > ends[:-1] + bridged_ns
    return Spans(np.concatenate((starts[:1], starts[1:][apart])), np.concatenate((ends[:-1][apart], ends[-1:])))


# --- the steady part ---


@dataclass(frozen=True, slots=True)
class Steady:
    """The time in which at least `level` requests were in flight, and the tokens that came in it; times of tokens are
    of that time alone, counted from 0 in seconds. reason says why there is none."""

    level: int
    seconds: float = 0.0
    times_s: Array | None = None
    tokens: Array | None = None
    reason: str | None = None

    @property
    def total(self) -> float:
        return 0.0 if self.tokens is None else float(self.tokens.sum())

    def slices(self, count: int) -> Array:
        """Tokens and seconds of equal parts of the steady time, as rows: what one launch shows of its own spread."""
        assert self.times_s is not None
        held, _ = np.histogram(self.times_s, bins=count, range=(0.0, self.seconds), weights=self.tokens)
        return np.column_stack((held, np.full(count, self.seconds / count)))


def steady(requests: Sequence[RequestSample], planned: int | None, of: Sequence[RequestSample] | None = None) -> Steady:
    """At least 95 % of the planned concurrency; of a load without one, of the most that was reached. Tokens are those
    of some of the requests where they are given, else of all."""
    whole = planned or most_in_flight(requests)
    level = max(1, math.ceil(STEADY_RATIO * whole - 1e-9))
    spans = _full(requests, level)
    if spans.seconds <= 0:
        return Steady(level, reason=f"{level} requests were never in flight at once, {STEADY_RATIO:.0%} of {whole}")
    found = arrivals([request for request in (requests if of is None else of) if request.error is None])
    if found.unknown:
        return Steady(level, reason=f"the times of the tokens of {found.unknown} answers were not kept")
    inside = spans.contain(found.times)
    if not inside.any():
        return Steady(level, reason=f"no token came while {level} requests were in flight")
    elapsed = spans.elapsed_before(found.times[inside]) / NS
    return Steady(level, spans.seconds, elapsed, found.tokens[inside])


def _full(requests: Sequence[RequestSample], level: int) -> Spans:
    """The time in which so many were in flight, without the moments that a closed loop needs to put the next request in
    the place of an answer. Answers of one step end together: at the first of those ends the load is no longer full, and
    without the others' last tokens, which come in no time, the rate would be too low. So a stretch goes on to the last
    end of the same step, and to the next stretch where that follows within a step, or within so small a part of an
    answer that every place is still taken for STEADY_RATIO of the time."""
    spans = spans_of_at_least(requests, level)
    if not len(spans.starts):
        return spans
    known = [(r.sent_ns, r.ended_ns) for r in requests if r.sent_ns is not None and r.ended_ns is not None]
    ends = np.sort(np.array([ended for _, ended in known], dtype=np.float64))
    step_ns, answer_ns = _step_ns(requests), float(np.median([ended - sent for sent, ended in known]))
    last = ends[np.searchsorted(ends, spans.ends + SAME_STEP * step_ns, side="right") - 1]
    return _merged(spans.starts, last, max(step_ns, (1 - STEADY_RATIO) * answer_ns))


def _step_ns(requests: Sequence[RequestSample]) -> float:
    """The usual time between arrivals of one answer; 0 where no answer has two."""
    found = arrivals(requests)
    gaps = np.diff(found.times)[~found.first[1:]]
    return float(np.median(gaps)) if len(gaps) else 0.0
