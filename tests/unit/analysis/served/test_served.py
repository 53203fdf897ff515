"""Numbers of served models, against hand-computed ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from served_records import CLIENT, MS, S, record, request, stage, streamed

from paceline.analysis.served import measurements
from paceline.analysis.served.verdicts import verdict_of
from paceline.experiment.serving import OPEN
from paceline.results import client_audit
from paceline.results.records import RunRecord


def test_times_of_one_request() -> None:
    one = request()
    assert measurements.ttft_s(one) == 0.102
    assert measurements.service_ttft_s(one) == 0.1
    assert measurements.tpot_s(one) == pytest.approx(0.01)
    assert measurements.latency_s(one) == 0.14


def test_what_is_missing_is_none() -> None:
    assert measurements.tpot_s(request(tokens=1)) is None
    lost = request(first_ns=None, last_ns=None, error="reset", tokens=None, pieces=0)
    assert measurements.ttft_s(lost) is None
    assert measurements.tpot_s(lost) is None


def test_a_server_without_counts_is_counted_by_events() -> None:
    assert measurements.tpot_s(request(tokens=None)) == pytest.approx(0.01)


def by_name(records: list[RunRecord]) -> dict[str, Any]:
    (cell,) = measurements.gather(records)
    return {m.metric: m for m in measurements.measure(cell)}


def test_rates_are_of_what_was_completed() -> None:
    failed = request(7, error="http_500", first_ns=None, last_ns=None, tokens=None, pieces=0, ended_ns=500 * MS)
    found = by_name([record([*map(request, range(7)), failed])])
    assert found["output_tokens_per_s"].value == pytest.approx(28 / 0.5)
    assert found["requests_per_s"].value == pytest.approx(7 / 0.5)
    assert found["prompt_tokens_per_s"].value == pytest.approx(70 / 0.5)
    assert found["failed_ratio"].value == pytest.approx(1 / 8)
    assert [m.value for name, m in found.items() if name.startswith("goodput")] == [None] * 3
    assert found["ttft_p50_s"].value == pytest.approx(0.102)
    assert found["itl_p50_s"].value == pytest.approx(0.01)


@pytest.mark.parametrize(("percent", "needed"), [(50, 7), (90, 44), (95, 90), (99, 459)])
def test_a_percentile_is_reported_from_enough_requests_only(percent: int, needed: int) -> None:
    """The fewest n of which all are below it with a probability under 1 %: percent^n < 0.01."""
    assert (percent / 100) ** needed < 0.01 <= (percent / 100) ** (needed - 1)
    for count, value in ((needed - 1, None), (needed, 0.102)):
        asked = record(map(request, range(count)), scenario="concurrency", concurrency=4)
        found = by_name([asked])[f"ttft_p{percent}_s"]
        assert found.value == (None if value is None else pytest.approx(value))
        assert found.n == count
        assert found.note == (None if value else f"p{percent} needs {needed} requests, got {count}")


def test_gaps_of_few_answers_bound_nothing() -> None:
    long = request(tokens=1001, pieces=1001, asked_tokens=1001, token_ns=(10 * MS,) * 1000)
    found = by_name([record([long])])["itl_p50_s"]
    assert (found.n, found.low, found.high) == (1000, None, None)


def test_goodput_counts_what_kept_every_limit() -> None:
    late = request(1, first_ns=700 * MS, last_ns=730 * MS, ended_ns=1000 * MS)
    found = by_name([record([request(0), late], scenario="interactive", rate_per_s=1.0)])
    assert found["goodput_ratio"].value == 0.5
    assert found["goodput_requests_per_s"].value == pytest.approx(1.0)
    assert found["goodput_tokens_per_s"].value == pytest.approx(4.0)


def test_launches_are_merged_as_requests_not_as_percentiles() -> None:
    first = record([request(n, first_ns=(100 + n) * MS) for n in range(22)])
    second = record([request(n, first_ns=(200 + n) * MS) for n in range(22)], repeat=1)
    found = by_name([first, second])
    whole = sorted((r.first_ns or 0) / 1e9 for r in (*first.requests, *second.requests))
    assert found["ttft_p90_s"].value == pytest.approx(float(np.percentile(whole, 90)))
    assert found["ttft_p90_s"].launches == 2


def test_early_stopping_decides_about_limits(golden: object) -> None:
    def problems(count: int, late: int) -> list[str]:
        slow = [request(n, first_ns=3000 * MS, last_ns=3030 * MS) for n in range(late)]
        good = [request(n) for n in range(late, count)]
        return measurements.rule_problems(
            measurements.gather([record([*slow, *good], scenario="server", rate_per_s=1.0)])[0]
        )

    assert problems(459, 0) == []
    assert problems(662, 1) == []
    assert problems(661, 1) == golden
    assert problems(458, 0) == golden
    assert measurements.rule_problems(measurements.gather([record([request()])])[0]) == []


def client_problems(clients: list[Any], requests: list[Any], scenario: str) -> list[str]:
    facts = measurements.client_facts(clients, requests, scenario in OPEN)
    return [f"client: {text}" for text in client_audit.reasons(facts)]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, None),
        (
            {"schedule_lag_p99_ns": 3e6},
            "client: sent up to 3.0 ms late (p99; at most 1.0 ms), which can raise TTFT by 3.0 %",
        ),
        (
            {"schedule_lag_p99_ns": 3e6, "waited_for_cap": 5},
            "client: delayed 5 due requests by 3.0 ms (p99) for the cap on requests in flight "
            "(concurrency: null removes it)",
        ),
        (
            {"read_lag_p99_ns": 6e6},
            "client: read up to 6.0 ms late (p99; at most 5.1 ms), which can raise TTFT by 5.9 % where tokens share a "
            "read (25.0 % of them do)",
        ),
        ({"cpu_s": 0.95}, "client: used 95% of a core (at most 80%)"),
        ({"clock_drift_ns": -300_000_000}, "client: its clocks drifted 300.0 ms apart (at most 1 ms)"),
        (
            {"read_lag_p50_ns": 3e6},
            "client: read 3.0 ms late (p50; at most 1.0 ms), which delays what follows an answer",
        ),
        ({"read_lag_p50_ns": -4e6}, "client: read 4.0 ms before the kernel had it (p50)"),
    ],
)
def test_a_client_that_was_the_bottleneck_says_so(change: dict[str, float], words: str | None) -> None:
    requests = [request(0, coalesced=1), request(1, due_ns=MS, coalesced=1)]
    found = client_problems([replace(CLIENT, **change)], requests, "server")
    assert found == ([] if words is None else [words])


@pytest.mark.parametrize(
    ("ttft_ms", "lag_ms", "coalesced", "counts"),
    [(100, 5.1, 1, False), (500, 24, 1, True), (500, 26, 1, False), (100, 5.1, 0, True), (100, 50, 0, True)],
)
def test_a_read_that_is_late_by_little_of_the_latency_does_no_harm(
    ttft_ms: int, lag_ms: float, coalesced: int, counts: bool
) -> None:
    """At most 5 ms or 5 % of the median TTFT: what tokens that share a read can be late by, if there are any."""
    times = {"first_ns": ttft_ms * MS, "last_ns": (ttft_ms + 30) * MS, "coalesced": coalesced}
    asked = [request(n, **times) for n in range(3)]
    client = replace(CLIENT, read_lag_p99_ns=lag_ms * MS)
    (load,) = measurements.gather([record(asked, clients=[client], scenario="concurrency", concurrency=3)])
    assert (measurements.load_problems(load) == []) == counts
    verdict = verdict_of(load)
    assert (verdict.verdict, len(verdict.advice)) == (("VALID", 0) if counts else ("INVALID(client)", 1))


@pytest.mark.parametrize(
    ("change", "asked", "word"),
    [
        ({"cpu_s": 0.95}, {}, "shards=0"),
        ({"clock_drift_ns": 3_000_000}, {}, "clock"),
        ({}, {"error": "http_500"}, "paceline show"),
        ({}, {"error": "client"}, "ulimit -n"),
    ],
)
def test_what_is_invalid_says_what_to_do(change: dict[str, float], asked: dict[str, Any], word: str) -> None:
    found = record([request(0), request(1, **asked)], clients=[replace(CLIENT, **change)])
    (load,) = measurements.gather([found])
    verdict = verdict_of(load)
    assert verdict.reasons
    assert any(word in step for step in verdict.advice), verdict.advice


def test_a_request_sent_before_it_was_due_is_the_clients_fault(golden: object) -> None:
    found = client_problems([CLIENT], [request(0, due_ns=8 * MS)], "server")
    assert found == golden


def test_of_several_processes_the_worst_is_reported_once(golden: object) -> None:
    clients = [replace(CLIENT, read_lag_p99_ns=lag) for lag in (6e6, 9e6, None)]
    assert client_problems(clients, [request(coalesced=1)], "offline") == golden


def test_a_sample_answered_twice_is_found(golden: object) -> None:
    assert measurements.exactly_once(record([request(0), request(1)])) == []
    assert measurements.exactly_once(record([request(0), request(0)])) == golden
    assert measurements.exactly_once(record([request(0, error="reset"), request(0)])) == []


# --- loads ---


def test_a_sweep_is_measured_load_by_load() -> None:
    """Two loads, each of its own start: 1 request in flight for 1 s, then 2 for 1 s."""
    first = [streamed(0, 0, 1)]
    second = [streamed(0, 2, 3, stage=1), streamed(1, 2, 3, stage=1)]
    stages = (stage(0, concurrency=1), stage(1, concurrency=2, started_ns=2 * S))
    loads = measurements.gather([record([*first, *second], stages=stages, scenario="sweep")])
    rates = {
        m.axes["concurrency"]: m
        for load in loads
        for m in measurements.measure(load)
        if m.metric == "output_tokens_per_s"
    }
    assert {key: m.value for key, m in rates.items()} == {1: pytest.approx(10), 2: pytest.approx(20)}
    assert {key: m.axes["stage"] for key, m in rates.items()} == {1: 0, 2: 1}


def test_launches_of_a_search_are_merged_by_rate_not_by_place() -> None:
    def launch(repeat: int, rates: tuple[float, float]) -> RunRecord:
        asked = [streamed(0, 2 * n, 2 * n + 1, stage=n) for n in (0, 1)]
        stages = [stage(n, scenario="server", rate_per_s=rates[n], started_ns=2 * n * S) for n in (0, 1)]
        return record(asked, repeat, stages, scenario="search", rate_per_s=1.0)

    loads = measurements.gather([launch(0, (1.0, 4.0)), launch(1, (4.0, 1.0))])
    assert [load.load.rate_per_s for load in loads if load.load] == [1.0, 4.0]
    assert [len(load.requests) for load in loads] == [2, 2]
    assert [load.limits["ttft_s"] for load in loads] == [2.0, 2.0]


def test_the_guess_of_a_search_has_no_limits_to_keep() -> None:
    stages = (stage(0, concurrency=4), stage(1, scenario="server", concurrency=None, rate_per_s=2.0))
    asked = [request(0), request(1, stage=1)]
    guess, trial = measurements.gather([record(asked, stages=stages, scenario="search")])
    assert (guess.has_limits, trial.has_limits) == (False, True)


def test_records_of_before_there_were_loads_are_one() -> None:
    (load,) = measurements.gather([record([request(0)])])
    assert load.load is None
    assert "stage" not in load.axes()


def test_the_interval_of_a_rate_is_of_launches() -> None:
    """10 tokens in 1 s and in 2 s: 20 tokens in 3 s; one launch alone has no interval."""
    launches = [record([streamed(0, 0, seconds)], repeat) for repeat, seconds in enumerate((1.0, 2.0, 1.5))]
    rate = by_name(launches)["output_tokens_per_s"]
    assert rate.value == pytest.approx(30 / 4.5)
    assert rate.low < 30 / 4.5 < rate.high
    alone = by_name(launches[:1])["output_tokens_per_s"]
    assert (alone.low, alone.high) == (None, None)


# --- tokens ---


def test_a_chunk_of_two_tokens_is_two_gaps_and_marked() -> None:
    """Two events of two tokens 20 ms apart: one gap of 20 ms, told as two of 10. Four such answers."""
    pairs = [request(n, tokens=4, pieces=2, last_ns=122 * MS, token_ns=(20 * MS,)) for n in range(4)]
    found = by_name([record(pairs)])
    assert found["itl_p50_s"].value == pytest.approx(0.01)
    assert found["itl_p50_s"].n == 8
    assert found["itl_split_ratio"].value == 1.0
    assert by_name([record([request()])])["itl_split_ratio"].value == 0.0


def test_reasoning_and_answer_begin_at_times_of_their_own() -> None:
    times = {"first_reasoning_ns": 62 * MS, "token_ns": (40 * MS, 10 * MS, 20 * MS)}
    found = by_name([record([request(n, **times) for n in range(7)])])
    assert found["ttft_p50_s"].value == pytest.approx(0.062)
    assert found["first_reasoning_p50_s"].value == pytest.approx(0.062)
    assert found["first_answer_p50_s"].value == pytest.approx(0.102)
    assert found["tpot_p50_s"].value == pytest.approx(0.07 / 3)
    assert "first_reasoning_p50_s" not in by_name([record([request()])])


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        ({"finish": "length"}, 0.0),
        ({"finish": "length", "tokens": 3}, 1.0),
        ({"finish": "stop", "tokens": 4, "pieces": 3, "token_ns": (10 * MS,) * 2}, 0.0),
        ({"finish": "stop", "tokens": 3}, 1.0),
        ({"finish": "stop", "tokens": 5}, 1.0),
        ({"tokens": None}, None),
    ],
)
def test_the_servers_count_is_audited(change: dict[str, Any], wrong: float | None) -> None:
    found = by_name([record([request(**change)])])["token_count_mismatch_ratio"]
    assert found.value == wrong
    assert found.note


# --- exactly once, and long enough ---


def test_a_sample_of_two_requests_and_one_that_is_nowhere_are_found(golden: object) -> None:
    assert measurements.exactly_once(record([request(0), request(1, sample=0)])) == golden
    assert measurements.exactly_once(record([request(0), request(1, sample=0)], least_s=1.0)) == []
    planned = (stage(planned=3, scenario="offline"),)
    for least_s in (0.0, 1.0):
        assert measurements.exactly_once(record([request(0), request(1)], stages=planned, least_s=least_s)) == golden
    scheduled = (stage(planned=3, scenario="server"),)
    assert measurements.exactly_once(
        record([request(0)], stages=scheduled, least_s=1.0, scenario="server", rate_per_s=1.0)
    )


def test_a_load_that_ended_early_says_so(golden: object) -> None:
    (load,) = measurements.gather([record([streamed(0, 0, 2)], least_s=3.0)])
    assert measurements.duration_problems(load) == golden
    (load,) = measurements.gather([record([streamed(0, 0, 3)], least_s=3.0)])
    assert measurements.duration_problems(load) == []


def test_a_late_client_is_rejected_in_a_search_too(golden: object) -> None:
    late = replace(CLIENT, schedule_lag_p99_ns=5e6)
    stages = (stage(scenario="server", rate_per_s=2.0),)
    found = measurements.problems(
        record([request()], stages=stages, clients=(late,), scenario="search", rate_per_s=2.0)
    )
    assert found == golden


def test_a_search_counts_until_its_client_was_late(golden: object) -> None:
    """The second load is the client's own limit: the first one stands."""
    late = replace(CLIENT, stage=1, schedule_lag_p99_ns=5e6)
    stages = [stage(n, scenario="server", rate_per_s=2.0 + n) for n in (0, 1)]
    asked = [request(0), request(1, stage=1)]
    searched = record(asked, stages=stages, clients=(CLIENT, late), scenario="search", rate_per_s=2.0)
    assert measurements.problems(searched) == []
    first, second = measurements.gather([searched])
    assert [load.rate_per_s for load in measurements.reliable_loads([searched])] == [first.rate_per_s] == [2.0]
    assert measurements.unreliable_client(second) == golden
