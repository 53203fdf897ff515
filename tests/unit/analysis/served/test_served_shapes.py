"""Curves of served models, against hand-computed ones and against counting one by one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import simulated_serving as made
from simulated_serving import NS, TWO, Replica

from paceline.analysis.findings import ServedShapes
from paceline.analysis.report import build
from paceline.analysis.served import curves, measurements
from paceline.analysis.served.curves import spread
from paceline.results.records import RunRecord
from paceline.results.served_samples import RequestSample, StageSample


def shapes_of(*records: RunRecord) -> ServedShapes:
    found = build(records, title="served").served_shapes
    assert found is not None
    return found


# --- spreads ---


def test_a_spread_is_the_quantiles_of_all_requests() -> None:
    values = [float(n) for n in range(1, 1001)]
    found = spread("ttft", values, 2.0)
    assert found is not None
    assert found.n == 1000
    at = dict(zip(found.shares, found.seconds, strict=True))
    for share in (0.0, 0.5, 0.9, 0.99):
        assert at[share] == pytest.approx(np.quantile(values, share))
    assert found.p99[0] == pytest.approx(np.percentile(values, 99))
    assert found.limit_s == 2.0


@pytest.mark.parametrize("count", [1, 2, 9, 24, 1000, 200_000])
def test_a_spread_is_short_and_ends_where_one_request_is_left(count: int) -> None:
    found = spread("ttft", [0.1] * count)
    assert found is not None
    assert len(found.shares) == len(found.seconds) <= 200
    assert list(found.shares) == sorted(set(found.shares))
    assert found.shares[-1] == pytest.approx(1 - 1 / count, abs=1e-8)


def test_nothing_measured_has_no_spread() -> None:
    assert spread("ttft", []) is None


# --- loads ---


def test_launches_of_one_load_are_merged_as_raw_requests() -> None:
    first = made.asked(200, in_flight=2, seed=1)
    second = made.asked(260, in_flight=2, seed=2)
    asked: dict[str, Any] = {"scenario": "concurrency", "concurrency": 2}
    (load,) = shapes_of(made.record(first, **asked), made.record(second, repeat=1, **asked)).loads
    assert load.requests == 460
    assert len(load.runs) == 2
    ttft = load.spreads[0]
    assert ttft.p99[0] == pytest.approx(np.percentile([measurements.ttft_s(r) for r in (*first, *second)], 99))
    walls = [max(r.ended_ns or 0 for r in part) / NS for part in (first, second)]
    assert load.output_tokens_per_s == pytest.approx(460 * made.TOKENS / sum(walls))


def test_stages_of_a_sweep_are_loads_of_their_own() -> None:
    record = made.sweep((4.0, 16.0), requests=50)
    loads = shapes_of(record).loads
    assert [load.rate_per_s for load in loads] == [4.0, 16.0]
    for load, stage in zip(loads, record.stages, strict=True):
        ours = [r for r in record.requests if r.stage == stage.stage]
        assert load.requests == len(ours) == 50
        lasted = (max(r.ended_ns or 0 for r in ours) - stage.started_ns) / NS
        assert load.requests_per_s == pytest.approx(50 / lasted)
        assert load.late == sum(not measurements.in_time(r, record.spec.serving.limits) for r in ours)  # type: ignore[union-attr]


def test_loads_stand_in_order_whatever_the_order_of_the_runs() -> None:
    records = made.closed_loops((16, 1, 4), requests=20)
    assert [load.concurrency for load in shapes_of(*records).loads] == [1, 4, 16]


def stage(number: int, started_ns: int, **more: Any) -> StageSample:
    values: dict[str, Any] = {"scenario": "offline", "rate_per_s": None, "concurrency": 512, "replica": None}
    values |= {"planned": 20, "ended_ns": started_ns, "began_at_s": 0.0}
    return StageSample(rank=0, stage=number, started_ns=started_ns, **{**values, **more})


def test_the_load_of_a_plain_scenario_is_what_was_asked_for_not_the_cap() -> None:
    (load,) = shapes_of(made.record(made.asked(20), stages=[stage(0, 0)], scenario="offline")).loads
    assert load.concurrency is None


def test_replicas_that_were_asked_one_after_the_other_are_loads_of_their_own() -> None:
    """A B B A: the same load twice is one."""
    requests, stages, start = [], [], 0
    for number, replica in enumerate((0, 1, 1, 0)):
        ours = made.asked(20, in_flight=2, start_ns=start, stage=number)
        requests += [replace(r, replica=replica) for r in ours]
        stages.append(stage(number, start, replica=replica))
        start = max(r.ended_ns or 0 for r in ours) + NS
    found = shapes_of(made.record(requests, TWO, stages=stages, scenario="offline", partition="paired"))
    assert [(load.replica, load.requests) for load in found.loads] == [(0, 40), (1, 40)]
    assert [replica for *_, replica in found.traces[0].stages] == [0, 1, 1, 0]


def test_a_request_that_no_replica_was_left_for_belongs_to_none() -> None:
    requests = made.asked(20, in_flight=2)
    requests[19] = replace(requests[19], replica=-1, sent_ns=None, first_ns=None, last_ns=None, error="no_replica")
    found = shapes_of(made.record(requests, scenario="concurrency", concurrency=2))
    assert [r.replica for r in found.traces[0].replicas] == [0]
    assert found.loads[0].failed == sum(found.traces[0].late) == 1


def test_failed_requests_are_counted_and_have_no_latency() -> None:
    requests = made.asked(10, in_flight=1)
    requests[3] = replace(requests[3], error="http_500", first_ns=None, last_ns=None, tokens=None, pieces=0)
    (load,) = shapes_of(made.record(requests, scenario="concurrency", concurrency=1)).loads
    assert (load.requests, load.failed, load.late) == (10, 1, None)
    assert load.spreads[0].n == 9


# --- over time ---


def test_requests_in_flight_are_what_counting_finds() -> None:
    requests = made.asked(50, in_flight=4, seed=3)
    wall = max(r.ended_ns or 0 for r in requests) / NS
    edges = np.linspace(0.0, wall, 8)
    found = curves.in_flight(requests, edges)
    moments = np.linspace(0.0, wall, 7 * 2000, endpoint=False)
    counted = [sum((r.sent_ns or 0) / NS <= at < (r.ended_ns or 0) / NS for r in requests) for at in moments]
    assert found == pytest.approx(np.asarray(counted).reshape(7, 2000).mean(axis=1), abs=0.02)


def test_a_trace_loses_no_token() -> None:
    requests = made.asked(80, TWO, in_flight=4)
    (trace,) = shapes_of(made.record(requests, TWO, scenario="concurrency", concurrency=4)).traces
    each = trace.wall_s / len(trace.pace_seconds)
    assert sum(sum(r.tokens_per_s) for r in trace.replicas) * each == pytest.approx(80 * made.TOKENS, rel=1e-4)
    assert [r.host for r in trace.replicas] == ["node-a", "node-b"]
    assert [r.answered for r in trace.replicas] == [40, 40]
    assert all(len(r.in_flight) == len(trace.seconds) for r in trace.replicas)


def test_tokens_without_times_of_their_own_are_spread_evenly() -> None:
    untimed = [replace(r, token_ns=()) for r in made.asked(30, in_flight=2)]
    assert tokens_traced(untimed) == pytest.approx(30 * made.TOKENS, rel=1e-4)


def test_an_event_of_several_tokens_counts_for_all_of_them() -> None:
    gap = (made.asked(1)[0].token_ns[0] * 2,) * (made.TOKENS // 2 - 1)
    paired = [replace(r, token_ns=gap, pieces=made.TOKENS // 2) for r in made.asked(30, in_flight=2)]
    assert tokens_traced(paired) == pytest.approx(30 * made.TOKENS, rel=1e-4)


def tokens_traced(requests: list[RequestSample]) -> float:
    (trace,) = shapes_of(made.record(requests, scenario="concurrency", concurrency=2)).traces
    return sum(trace.replicas[0].tokens_per_s) * trace.wall_s / len(trace.pace_seconds)


def test_a_lost_replica_and_late_requests_are_marked() -> None:
    replicas = (Replica("node-a"), Replica("node-b", died_s=2.0))
    requests = made.asked(80, replicas, rate_per_s=20)
    asked: dict[str, Any] = {"scenario": "server", "rate_per_s": 20.0, "ttft_limit_s": 0.1}
    record = made.record(requests, replicas, **asked)
    (trace,) = shapes_of(record).traces
    assert [r.died_s for r in trace.replicas] == [None, 2.0]
    assert trace.replicas[1].failed > 0
    assert sum(trace.late) == sum(not measurements.in_time(r, record.spec.serving.limits) for r in requests)  # type: ignore[union-attr]
    gone = [held for at, held in zip(trace.seconds, trace.replicas[1].in_flight, strict=True) if at > 2.1]
    assert not any(gone)


def test_of_many_cells_those_in_which_something_went_wrong_are_traced() -> None:
    lost = (Replica("node-a"), Replica("node-b", died_s=0.5))
    asked: dict[str, Any] = {"scenario": "server", "rate_per_s": 20.0}
    bad = made.record(made.asked(40, lost, rate_per_s=20), lost, **asked)
    traces = shapes_of(*made.closed_loops((1, 2, 3, 4, 5, 6, 7, 8), requests=16), bad).traces
    assert len(traces) == curves.MOST_TRACES
    assert bad.spec.run_id in {trace.run for trace in traces}


def test_no_report_grows_with_the_number_of_requests() -> None:
    (trace,) = shapes_of(
        made.record(made.asked(4000, TWO, in_flight=16), TWO, scenario="concurrency", concurrency=16)
    ).traces
    assert len(trace.seconds) <= 200
    assert len(trace.pace_seconds) <= 200


# --- the client ---


def test_the_audit_shows_the_worst_process_of_all_launches_even_of_rejected_runs() -> None:
    requests = made.asked(20, rate_per_s=10)
    asked: dict[str, Any] = {"scenario": "server", "rate_per_s": 10.0}
    good = made.record(requests, clients=[made.client(), made.client(shard=1, read_lag_p99_ns=2e6)], **asked)
    late = made.record(requests, repeat=1, clients=[made.client(schedule_lag_p99_ns=9e6)], **asked)
    found = shapes_of(good, late)
    (audit,) = found.audits
    assert audit.schedule_lag_s == pytest.approx(9e-3)
    assert audit.read_lag_s == pytest.approx(2e-3)
    assert audit.cpu_ratio == pytest.approx(0.12)
    assert audit.processes == 2
    assert found.loads[0].runs == (good.spec.run_id,)


def test_the_audit_shows_values_without_a_limit_of_their_own() -> None:
    first, *others = made.asked(20, rate_per_s=10)
    requests = [replace(first, stamped=False, coalesced=first.pieces), *others]
    clients = [made.client(clock_drift_ns=-2_000)]
    (audit,) = shapes_of(made.record(requests, clients=clients, scenario="server", rate_per_s=10.0)).audits
    assert audit.unstamped_ratio == pytest.approx(1 / 20)
    assert audit.coalesced_ratio == pytest.approx(first.pieces / sum(r.pieces for r in requests))
    assert audit.clock_drift_s == pytest.approx(2e-6)


def test_nothing_is_due_in_a_closed_loop() -> None:
    record = made.record(made.asked(20, in_flight=1), scenario="concurrency", concurrency=1)
    assert shapes_of(record).audits[0].schedule_lag_s is None


def test_what_was_not_served_has_no_shape() -> None:
    assert build([], title="empty").served_shapes is None
