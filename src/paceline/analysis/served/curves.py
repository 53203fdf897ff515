"""Curves of load tests, from the raw requests: latency distributions, loads side by side, replicas over time.

Every curve has a bounded number of points, so a run with a million requests makes no larger report.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from paceline.analysis.findings import Report
from paceline.analysis.findings.served import (
    LATENCY,
    TPOT,
    TTFT,
    ClientAudit,
    LatencySpread,
    ReplicaTrace,
    ServedLoad,
    ServedShapes,
    ServedTrace,
)
from paceline.analysis.grouping import grouped
from paceline.analysis.served import latency_bounds, measurements
from paceline.analysis.served.loads import Served
from paceline.analysis.served.measurements import NS
from paceline.analysis.served.token_times import first_token_ns
from paceline.analysis.statistics.intervals import Bounded
from paceline.experiment.serving import MOST_CPU_RATIO, OPEN, SCENARIOS, Serving
from paceline.results import client_audit
from paceline.results.records import RunRecord, Status
from paceline.results.served_samples import RequestSample

# Points of a distribution: evenly spaced up to 90 %, then ever closer to 100 %.
BULK_SHARES, TAIL_SHARES = 46, 60


QUOTED = (50, 90, 99)


def spread(
    quantity: str, values: Sequence[float], limit_s: float | None = None, bounds: Sequence[Bounded] = ()
) -> LatencySpread | None:
    """The distribution of a latency; None if nothing was measured. bounds: those of the QUOTED percentiles, if
    known."""
    if not values:
        return None
    ordered = np.sort(np.asarray(values, dtype=float))
    # The shares up to the last single request, including the percentiles that people quote.
    count = len(ordered)
    last = 1 - 1 / count
    bulk = np.linspace(0.0, 0.9, BULK_SHARES)
    tail = 1 - np.logspace(-1, -np.log10(max(count, 10)), TAIL_SHARES)
    whole = np.concatenate([bulk, tail, (0.5, 0.95, 0.99, 0.999), (last,)])
    shares = np.unique(whole[whole <= last].round(9))
    # A microsecond is finer than any chart.
    seconds = np.quantile(ordered, shares).round(6)
    known = [(low, high) for _, low, high in bounds] or [(None, None)] * len(QUOTED)
    points = [latency_bounds.percentile(ordered, percent) for percent in QUOTED]
    p50, p90, p99 = ((value, *each) for value, each in zip(points, known, strict=True))
    return LatencySpread(
        quantity=quantity,
        n=len(ordered),
        shares=tuple(shares.tolist()),
        seconds=tuple(seconds.tolist()),
        p50=p50,
        p90=p90,
        p99=p99,
        limit_s=limit_s,
    )


# Time bins for requests in flight, and for rates: fewer of these, so that several requests end in each.
MOMENTS = 120
FEWEST_PACES, MOST_PACES, REQUESTS_PER_PACE = 8, 60, 6
# Cells with a chart over time: those with problems first, then those with the largest load.
MOST_TRACES = 6

Seconds = NDArray[np.float64]


def _trouble(trace: ServedTrace) -> tuple[int, int, float]:
    """Replicas lost, requests late or failed, and requests in flight summed over time: the more, the worse."""
    lost = sum(replica.died_s is not None for replica in trace.replicas)
    return lost, sum(trace.late), sum(sum(replica.in_flight) for replica in trace.replicas)


def _trace(record: RunRecord, is_believed: bool) -> ServedTrace:
    assert record.spec.serving is not None
    wall = max((r.ended_ns or 0 for r in record.requests), default=0) / NS
    # A request that found no replica alive has the number for any.
    used = {r.replica for r in record.requests if r.replica >= 0}
    replicas = sorted(used | {r.replica for r in record.replicas})
    paces = len(record.requests) // (REQUESTS_PER_PACE * max(1, len(replicas)))
    edges, pace_edges = _edges(wall, MOMENTS), _edges(wall, min(MOST_PACES, max(FEWEST_PACES, paces)))
    limits, ended = record.spec.serving.limits, [r for r in record.requests if r.ended_ns is not None]
    late_ends = [(r.ended_ns or 0) / NS for r in ended if not measurements.in_time(r, limits)]
    return ServedTrace(
        run=record.spec.run_id,
        cell=record.spec.cell,
        axes=record.axes(),
        scenario=record.spec.serving.scenario,
        wall_s=wall,
        seconds=_middles(edges),
        pace_seconds=_middles(pace_edges),
        replicas=tuple(_replica_trace(record, replica, edges, pace_edges) for replica in replicas),
        late=tuple(np.histogram(late_ends, edges)[0].tolist()),
        limited=any(limit is not None for limit in limits.values()),
        stages=tuple((s.started_ns / NS, s.rate_per_s, s.concurrency, s.replica) for s in record.stages),
        is_believed=is_believed,
    )


def _edges(wall_s: float, count: int) -> Seconds:
    """Edges of equal bins from the start to the end of the last request."""
    return np.linspace(0.0, max(wall_s, 1e-9), count + 1)


def _middles(edges: Seconds) -> tuple[float, ...]:
    return tuple(((edges[1:] + edges[:-1]) / 2).round(6).tolist())


def _replica_trace(record: RunRecord, replica: int, edges: Seconds, pace_edges: Seconds) -> ReplicaTrace:
    ours = [request for request in record.requests if request.replica == replica]
    answered = [request for request in ours if request.error is None]
    facts = next((found for found in record.replicas if found.replica == replica), None)
    first = [value for request in answered if (value := measurements.ttft_s(request)) is not None]
    by_pace: list[list[float]] = [[] for _ in pace_edges[1:]]
    for request in answered:
        at, value = first_token_ns(request), measurements.ttft_s(request)
        if at is not None and value:
            number = int(np.searchsorted(pace_edges, at / NS, side="right")) - 1
            by_pace[min(len(by_pace) - 1, number)].append(value)
    return ReplicaTrace(
        replica=replica,
        host=facts.host if facts else None,
        answered=len(answered),
        failed=len(ours) - len(answered),
        in_flight=in_flight(ours, edges),
        tokens_per_s=_tokens_per_s(answered, pace_edges),
        ttft_s=tuple(round(float(np.median(group)), 6) if group else None for group in by_pace),
        ttft=spread(TTFT, first),
        died_s=facts.died_ns / NS if facts and facts.died_ns is not None else None,
        reassigned=facts.reassigned if facts else 0,
    )


def in_flight(requests: Sequence[RequestSample], edges: Seconds) -> tuple[float, ...]:
    """The mean number of requests between sending and end within each bin: exact, however short the requests are."""
    spans = [(r.sent_ns / NS, r.ended_ns / NS) for r in requests if r.sent_ns is not None and r.ended_ns is not None]
    if not spans:
        return (0.0,) * (len(edges) - 1)
    began, ended = np.asarray(spans).T
    busy_s = _since(began, edges) - _since(ended, edges)
    return tuple((np.diff(busy_s) / np.diff(edges)).round(3).tolist())


def _since(times: Seconds, edges: Seconds) -> Seconds:
    """At each edge, the sum of seconds since all earlier times."""
    ordered = np.sort(times)
    before = np.searchsorted(ordered, edges)
    sums = np.concatenate([[0.0], np.cumsum(ordered)])
    passed: Seconds = before * edges - sums[before]
    return passed


def _tokens_per_s(answered: Sequence[RequestSample], edges: Seconds) -> tuple[float, ...]:
    """Token rate over time. Tokens of one event, or of an answer whose events were not timed, are spread evenly."""
    times, weights = [np.zeros(0)], [np.zeros(0)]
    for request in answered:
        first, tokens = first_token_ns(request), measurements.tokens_of(request)
        if first is None or request.last_ns is None or tokens < 1:
            continue
        if request.token_ns:
            gaps = np.asarray(request.token_ns, dtype=np.int64)
            times.append((first + np.concatenate([[0], np.cumsum(gaps)])) / NS)
        else:
            times.append(np.linspace(first, request.last_ns, tokens) / NS)
        weights.append(np.full(len(times[-1]), tokens / len(times[-1])))
    counted, _ = np.histogram(np.concatenate(times), edges, weights=np.concatenate(weights))
    return tuple((counted / np.diff(edges)).round(3).tolist())


QUANTITIES: dict[str, Callable[[RequestSample], float | None]] = {
    TTFT: measurements.ttft_s,
    TPOT: measurements.tpot_s,
    LATENCY: measurements.latency_s,
}


# All launches of one cell.
Launches = Sequence[RunRecord]


def added_to(report: Report, records: Sequence[RunRecord]) -> Report:
    """The report with the curves of its load tests; unchanged if there are none."""
    ended = {run.run: run.status for run in report.runs}
    tested = [record for record in records if record.requests]
    sound = [record for record in tested if ended.get(record.spec.run_id) == Status.OK]
    audited = [record for record in tested if record.clients]
    if not tested:
        return report
    reliable = {record.spec.cell for record in sound}
    # As in the verdicts: the invalid launches of a cell are shown only if it has no valid one.
    invalid = [r for r in tested if ended.get(r.spec.run_id) == Status.INVALID and r.spec.cell not in reliable]
    cells = _in_order([*sound, *invalid])
    # One launch of each cell over time: the one with the most problems, and of these the worst.
    worst = [max((_trace(r, r.spec.cell in reliable) for r in cell), key=_trouble) for cell in cells]
    chosen = sorted(range(len(worst)), key=lambda i: _trouble(worst[i]), reverse=True)[:MOST_TRACES]
    shapes = ServedShapes(
        loads=tuple(
            _served_load(load, reliable) for cell in cells for load in sorted(measurements.gather(cell), key=_size)
        ),
        traces=tuple(worst[i] for i in sorted(chosen)),
        audits=tuple(map(_audit, _in_order(audited))),
    )
    return replace(report, served_shapes=shapes)


def _in_order(records: Sequence[RunRecord]) -> list[Launches]:
    """Cells by scenario, the smallest load first; runs are in random order."""

    def order(cell: Launches) -> tuple[int, float, str]:
        serving = _serving(cell[0])
        load = serving.rate_per_s if serving.rate_per_s is not None else serving.concurrency or 0
        return SCENARIOS.index(serving.scenario), load, cell[0].spec.cell

    by_cell = grouped(sorted(records, key=lambda record: record.spec.repeat), lambda record: record.spec.cell)
    return sorted(by_cell.values(), key=order)


def _serving(record: RunRecord) -> Serving:
    assert record.spec.serving is not None
    return record.spec.serving


# --- loads ---


def _size(load: Served) -> tuple[float, int, int]:
    return load.rate_per_s or 0.0, load.concurrency or 0, load.replica or 0


def _served_load(load: Served, reliable: Container[str]) -> ServedLoad:
    wall, limits, spreads = load.wall_s(), load.limits, []
    for name, quantity in QUANTITIES.items():
        values = [value for request in load.answered if (value := quantity(request)) is not None]
        spreads.append(spread(name, values, limits.get(f"{name}_s"), latency_bounds.of_answers(load, quantity, QUOTED)))
    return ServedLoad(
        cell=load.cell,
        axes=load.stretches[0].record.axes(),
        runs=load.runs,
        scenario=load.serving.scenario,
        rate_per_s=load.rate_per_s,
        concurrency=load.concurrency,
        replica=load.replica,
        requests=len(load.requests),
        failed=len(load.requests) - len(load.answered),
        late=sum(not measurements.in_time(request, limits) for request in load.answered) if load.has_limits else None,
        output_tokens_per_s=load.output_tokens() / wall if wall > 0 else None,
        requests_per_s=len(load.answered) / wall if wall > 0 else None,
        spreads=tuple(each for each in spreads if each is not None),
        is_believed=load.cell in reliable and not measurements.load_problems(load),
    )


# --- the client ---


def _audit(cell: Launches) -> ClientAudit:
    """Delays of the client against the bounds of a valid run. The schedule's bound is the tightest of all launches."""
    spec = cell[0].spec
    clients = [client for record in cell for client in record.clients]
    answers = [r for record in cell for r in record.requests if r.first_byte_ns is not None]
    pieces = sum(r.pieces for r in answers)
    is_open = any(_serving(r).scenario in OPEN or any(s.rate_per_s is not None for s in r.stages) for r in cell)
    return ClientAudit(
        cell=spec.cell,
        axes=cell[0].axes(),
        runs=tuple(record.spec.run_id for record in cell),
        processes=len({(client.rank, client.shard) for client in clients}),
        schedule_lag_s=_worst(c.schedule_lag_p99_ns for c in clients) if is_open else None,
        schedule_bound_s=min(map(_schedule_bound_s, cell)),
        read_lag_s=_worst(c.read_lag_p99_ns for c in clients),
        read_bound_s=min(map(_read_bound_s, cell)),
        cpu_ratio=max((c.cpu_s / c.wall_s for c in clients if c.wall_s > 0), default=None),
        cpu_bound_ratio=MOST_CPU_RATIO,
        clock_drift_s=_worst(abs(c.clock_drift_ns) for c in clients),
        unstamped_ratio=sum(not r.stamped for r in answers) / len(answers) if answers else None,
        coalesced_ratio=sum(r.coalesced for r in answers) / pieces if pieces else None,
    )


def _schedule_bound_s(record: RunRecord) -> float:
    return client_audit.schedule_bound_s(_median_ttft_s(record))


def _read_bound_s(record: RunRecord) -> float:
    return client_audit.read_bound_s(_median_ttft_s(record))


def _median_ttft_s(record: RunRecord) -> float | None:
    return client_audit.median([s for request in record.requests if (s := measurements.ttft_s(request)) is not None])


def _worst(lags_ns: Iterable[float | None]) -> float | None:
    return max((lag / NS for lag in lags_ns if lag is not None), default=None)
