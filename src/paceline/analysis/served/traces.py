"""One launch of each served cell over its time: requests in flight, tokens a second and TTFT, replica by replica."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from paceline.analysis.findings.served import TTFT, ReplicaTrace, ServedTrace
from paceline.analysis.served import measurements
from paceline.analysis.served.measurements import NS
from paceline.analysis.served.percentile_curve import spread
from paceline.analysis.served.token_times import first_token_ns
from paceline.results.records import RunRecord
from paceline.results.served_samples import RequestSample

# Moments of what is in flight, and of rates: fewer of these, so that several requests end in each.
MOMENTS = 120
FEWEST_PACES, MOST_PACES, REQUESTS_PER_PACE = 8, 60, 6
# Cells whose launch is drawn over time: those in which something went wrong first, then those of the largest load.
MOST_TRACES = 6

Seconds = NDArray[np.float64]


def traces(cells: Sequence[Sequence[RunRecord]], believed: Container[str]) -> tuple[ServedTrace, ...]:
    """In the order of the cells; of several launches the one in which most went wrong. believed are the cells whose
    launches are."""
    found = [max((_trace(r, r.spec.cell in believed) for r in cell), key=_trouble) for cell in cells]
    told = sorted(range(len(found)), key=lambda i: _trouble(found[i]), reverse=True)[:MOST_TRACES]
    return tuple(found[i] for i in sorted(told))


def _trouble(trace: ServedTrace) -> tuple[int, int, float]:
    """Replicas lost, requests late or failed, requests in flight at all moments together."""
    lost = sum(replica.died_s is not None for replica in trace.replicas)
    return lost, sum(trace.late), sum(sum(replica.in_flight) for replica in trace.replicas)


def _trace(record: RunRecord, is_believed: bool) -> ServedTrace:
    assert record.spec.serving is not None
    wall = max((r.ended_ns or 0 for r in record.requests), default=0) / NS
    # A request that no replica was left for has the number that stands for any.
    asked = {r.replica for r in record.requests if r.replica >= 0}
    replicas = sorted(asked | {r.replica for r in record.replicas})
    paces = len(record.requests) // (REQUESTS_PER_PACE * max(1, len(replicas)))
    edges, pace_edges = _edges(wall, MOMENTS), _edges(wall, min(MOST_PACES, max(FEWEST_PACES, paces)))
    limits = record.spec.serving.limits
    return ServedTrace(
        run=record.spec.run_id,
        cell=record.spec.cell,
        axes=record.spec.axes(),
        scenario=record.spec.serving.scenario,
        wall_s=wall,
        seconds=_middles(edges),
        pace_seconds=_middles(pace_edges),
        replicas=tuple(_replica(record, replica, edges, pace_edges) for replica in replicas),
        late=_late(record.requests, limits, edges),
        limited=any(limit is not None for limit in limits.values()),
        stages=tuple((s.started_ns / NS, s.rate_per_s, s.concurrency, s.replica) for s in record.stages),
        is_believed=is_believed,
    )


def _edges(wall_s: float, count: int) -> Seconds:
    """Of equal moments from the start to the end of the last request."""
    return np.linspace(0.0, max(wall_s, 1e-9), count + 1)


def _middles(edges: Seconds) -> tuple[float, ...]:
    return tuple(((edges[1:] + edges[:-1]) / 2).round(6).tolist())


def _replica(record: RunRecord, replica: int, edges: Seconds, pace_edges: Seconds) -> ReplicaTrace:
    ours = [request for request in record.requests if request.replica == replica]
    answered = [request for request in ours if request.error is None]
    facts = next((found for found in record.replicas if found.replica == replica), None)
    first = [value for request in answered if (value := measurements.ttft_s(request)) is not None]
    return ReplicaTrace(
        replica=replica,
        host=facts.host if facts else None,
        answered=len(answered),
        failed=len(ours) - len(answered),
        in_flight=in_flight(ours, edges),
        tokens_per_s=_tokens_per_s(answered, pace_edges),
        ttft_s=_first_tokens(answered, pace_edges),
        ttft=spread(TTFT, first),
        died_s=facts.died_ns / NS if facts and facts.died_ns is not None else None,
        reassigned=facts.reassigned if facts else 0,
    )


def in_flight(requests: Sequence[RequestSample], edges: Seconds) -> tuple[float, ...]:
    """The mean number between sending and end within each moment: exact, however short the requests are."""
    spans = [(r.sent_ns / NS, r.ended_ns / NS) for r in requests if r.sent_ns is not None and r.ended_ns is not None]
    if not spans:
        return (0.0,) * (len(edges) - 1)
    began, ended = np.asarray(spans).T
    held = _since(began, edges) - _since(ended, edges)
    return tuple((np.diff(held) / np.diff(edges)).round(3).tolist())


def _since(times: Seconds, edges: Seconds) -> Seconds:
    """At each edge, the seconds that have passed since those of the times that lie before it, summed."""
    ordered = np.sort(times)
    before = np.searchsorted(ordered, edges)
    sums = np.concatenate([[0.0], np.cumsum(ordered)])
    passed: Seconds = before * edges - sums[before]
    return passed


def _tokens_per_s(answered: Sequence[RequestSample], edges: Seconds) -> tuple[float, ...]:
    """Tokens when they came; those of an event that held several, or of an answer whose events were not timed, share
    its times evenly."""
    times = [part for request in answered for part in _token_times(request)]
    at = np.concatenate([moments for moments, _ in times]) if times else np.zeros(0)
    weights = np.concatenate([np.full(len(moments), each) for moments, each in times]) if times else np.zeros(0)
    counted, _ = np.histogram(at, edges, weights=weights)
    return tuple((counted / np.diff(edges)).round(3).tolist())


def _token_times(request: RequestSample) -> Iterator[tuple[Seconds, float]]:
    """Times of the events with content, and the tokens that each stands for."""
    first = first_token_ns(request)
    if first is None or request.last_ns is None or measurements.tokens_of(request) < 1:
        return
    if request.token_ns:
        gaps = np.asarray(request.token_ns, dtype=np.int64)
        moments = (first + np.concatenate([[0], np.cumsum(gaps)])) / NS
    else:
        moments = np.linspace(first, request.last_ns, measurements.tokens_of(request)) / NS
    yield moments, measurements.tokens_of(request) / len(moments)


def _first_tokens(answered: Sequence[RequestSample], edges: Seconds) -> tuple[float | None, ...]:
    known = [(r, first) for r in answered if (first := first_token_ns(r)) is not None]
    pairs = [(first / NS, value) for r, first in known if (value := measurements.ttft_s(r))]
    groups: list[list[float]] = [[] for _ in edges[1:]]
    for at, value in pairs:
        groups[min(len(groups) - 1, int(np.searchsorted(edges, at, side="right")) - 1)].append(value)
    return tuple(round(float(np.median(group)), 6) if group else None for group in groups)


def _late(requests: Sequence[RequestSample], limits: dict[str, float | None], edges: Seconds) -> tuple[int, ...]:
    ends = [r.ended_ns / NS for r in requests if r.ended_ns is not None and not measurements.in_time(r, limits)]
    counted, _ = np.histogram(ends, edges)
    return tuple(counted.tolist())
