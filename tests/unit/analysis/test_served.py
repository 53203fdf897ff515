"""Numbers of served models, against hand-computed ones."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.analysis import served
from paceline.records import RunRecord, Status
from paceline.serving import ClientSample, RequestSample, Serving
from paceline.spec import Choice, RunSpec, Topology, Training

MS = 1_000_000


def request(number: int = 0, **more: Any) -> RequestSample:
    """Due at 0, sent after 2 ms, first token after 102, then three more 10 ms apart."""
    values = {"sample": number, "replica": 0, "due_ns": 0, "sent_ns": 2 * MS, "first_byte_ns": 100 * MS}
    values |= {"first_ns": 102 * MS, "last_ns": 132 * MS, "ended_ns": 140 * MS, "pieces": 4, "tokens": 4}
    values |= {"prompt_tokens": 10, "asked_tokens": 4, "coalesced": 0, "stamped": True, "token_ns": (10 * MS,) * 3}
    return RequestSample(rank=0, number=number, **{**values, **more})


def record(requests: list[RequestSample], repeat: int = 0, **serving: Any) -> RunRecord:
    spec = RunSpec(
        experiment="test",
        workload=Choice("inference"),
        model=Choice("tiny"),
        topology=Topology(device="cpu"),
        training=Training(sequence_length=1, micro_batch=1),
        steps=1,
        repeat=repeat,
        engine=Choice("openai", {"url": "http://x"}),
        serving=Serving(**serving),
    )
    return RunRecord(
        spec=spec, status=Status.OK, error=None, started_at=0.0, ended_at=1.0, path="x", requests=tuple(requests)
    )


def test_times_of_one_request() -> None:
    one = request()
    assert served.ttft_s(one) == 0.102
    assert served.service_ttft_s(one) == 0.1
    assert served.tpot_s(one) == pytest.approx(0.01)
    assert served.latency_s(one) == 0.14


def test_what_is_missing_is_none() -> None:
    assert served.tpot_s(request(tokens=1)) is None
    lost = request(first_ns=None, last_ns=None, error="reset", tokens=None, pieces=0)
    assert served.ttft_s(lost) is None
    assert served.tpot_s(lost) is None


def test_a_server_without_counts_is_counted_by_events() -> None:
    assert served.tpot_s(request(tokens=None)) == pytest.approx(0.01)


def test_percentile_bounds_are_order_statistics() -> None:
    """Of 1..100, the median's rank has a standard deviation of 5: ranks 40 and 60 bound it at 95 %."""
    value, low, high = served.percentile_bounds([float(n) for n in range(1, 101)], 50)
    assert (value, low, high) == (50.5, 40.0, 60.0)
    assert served.percentile_bounds([float(n) for n in range(1, 101)], 99)[2] is None


def by_name(records: list[RunRecord]) -> dict[str, Any]:
    (cell,) = served.gather(records)
    return {m.metric: m for m in served.measure(cell)}


def test_rates_are_of_what_was_completed() -> None:
    failed = request(2, error="http_500", first_ns=None, last_ns=None, tokens=None, pieces=0, ended_ns=500 * MS)
    found = by_name([record([request(0), request(1), failed])])
    assert found["output_tokens_per_s"].value == pytest.approx(8 / 0.5)
    assert found["requests_per_s"].value == pytest.approx(2 / 0.5)
    assert found["prompt_tokens_per_s"].value == pytest.approx(20 / 0.5)
    assert found["failed_ratio"].value == pytest.approx(1 / 3)
    assert found["goodput_ratio"].value is None
    assert found["ttft_p50_s"].value == pytest.approx(0.102)
    assert found["itl_p99_s"].value == pytest.approx(0.01)


def test_goodput_counts_what_kept_every_limit() -> None:
    late = request(1, first_ns=700 * MS, last_ns=730 * MS, ended_ns=1000 * MS)
    found = by_name([record([request(0), late], scenario="interactive", rate_per_s=1.0)])
    assert found["goodput_ratio"].value == 0.5
    assert found["goodput_requests_per_s"].value == pytest.approx(1.0)
    assert found["goodput_tokens_per_s"].value == pytest.approx(4.0)


def test_launches_are_merged_as_requests_not_as_percentiles() -> None:
    first = record([request(n, first_ns=(100 + n) * MS) for n in range(10)])
    second = record([request(n, first_ns=(200 + n) * MS) for n in range(10)], repeat=1)
    found = by_name([first, second])
    whole = sorted((r.first_ns or 0) / 1e9 for r in (*first.requests, *second.requests))
    assert found["ttft_p90_s"].value == pytest.approx(float(__import__("numpy").percentile(whole, 90)))
    assert found["ttft_p90_s"].launches == 2


def test_early_stopping_decides_about_limits() -> None:
    def problems(count: int, late: int) -> list[str]:
        slow = [request(n, first_ns=3000 * MS, last_ns=3030 * MS) for n in range(late)]
        good = [request(n) for n in range(late, count)]
        return served.rule_problems(served.Served((record([*slow, *good], scenario="server", rate_per_s=1.0),)))

    assert problems(459, 0) == []
    assert problems(662, 1) == []
    assert problems(661, 1) == ["1 of 661 requests were late or failed; 0 may be"]
    assert problems(458, 0) == ["458 requests tell nothing about the 99th percentile: at least 459 are needed"]
    assert served.rule_problems(served.Served((record([request()]),))) == []


CLIENT = ClientSample(
    rank=0,
    shard=0,
    requests=1,
    reads=5,
    schedule_lag_p50_ns=1e4,
    schedule_lag_p99_ns=5e4,
    read_lag_p50_ns=1e4,
    read_lag_p99_ns=5e4,
    cpu_s=0.1,
    wall_s=1.0,
    most_in_flight=1,
    waited_for_cap=0,
    clock_doubt_ns=100,
    clock_drift_ns=0,
    plan="x",
)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, None),
        ({"schedule_lag_p99_ns": 3e6}, "client: sent up to 3.0 ms late (p99; at most 1.0 ms)"),
        ({"read_lag_p99_ns": 6e6}, "client: read up to 6.0 ms late (p99; at most 5 ms)"),
        ({"cpu_s": 0.95}, "client: used 95% of a core (at most 80%)"),
    ],
)
def test_a_client_that_was_the_bottleneck_says_so(change: dict[str, float], words: str | None) -> None:
    import dataclasses

    requests = [request(0), request(1, due_ns=MS)]
    found = served.client_problems([dataclasses.replace(CLIENT, **change)], requests, "server")
    assert found == ([] if words is None else [words])


def test_a_sample_answered_twice_is_found() -> None:
    assert served.exactly_once(record([request(0), request(1)])) == []
    assert served.exactly_once(record([request(0), request(0)])) == ["requests 0 were answered more than once"]
    assert served.exactly_once(record([request(0, error="reset"), request(0)])) == []
