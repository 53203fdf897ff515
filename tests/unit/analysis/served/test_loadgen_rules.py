"""Rule by rule: what is kept, what is not, and what a record cannot tell."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from served_records import CLIENT, MS, S, record, replica, request

from paceline.analysis.findings.served import KEPT, LOADGEN_LABEL, NOT_KEPT, UNDECIDED, Accuracy, Rule
from paceline.analysis.served import measurements, mlperf_rules
from paceline.results.served_samples import RequestSample
from paceline.serving.client import schedule

LONG = {"least_s": 600.0}


def at(number: int, due_ns: int, **more: Any) -> RequestSample:
    times = {"due_ns": due_ns, "sent_ns": due_ns, "first_ns": due_ns + 100 * MS, "last_ns": due_ns + 130 * MS}
    return request(number, **{**times, "ended_ns": due_ns + 140 * MS, **more})


def outcomes(requests: list[RequestSample], accuracy: Rule | None = None, **more: Any) -> dict[str, str]:
    (load,) = measurements.gather([record(requests, **LONG, **more)])
    return {rule.name: rule.outcome for rule in mlperf_rules.checklist(load, accuracy)}


def by_poisson(count: int, rate: float = 1.0) -> list[RequestSample]:
    return [at(n, due) for n, due in enumerate(schedule.poisson(rate, count, seed=7).tolist())]


def test_only_runs_that_were_asked_for_by_the_rules_carry_the_label() -> None:
    def label(**serving: Any) -> str | None:
        (load,) = measurements.gather([record([request()], **serving)])
        return mlperf_rules.label_of(load)

    assert label(least_s=600.0) == LOADGEN_LABEL == "LoadGen-rule run, not an MLPerf(R) result"
    assert label(least_s=599.0) is None
    assert label(scenario="concurrency", concurrency=2, least_s=600.0) is None


def test_a_server_run_keeps_the_rules_that_can_be_checked() -> None:
    found = outcomes(by_poisson(700), scenario="server", rate_per_s=1.0)
    assert found == {
        "scenario": KEPT,
        "minimum duration": KEPT,
        "requests n(t) for p99": KEPT,
        "limits at p99": KEPT,
        "each request answered once": KEPT,
        "greedy": KEPT,
        "tokens of an answer": KEPT,
        "prompts": KEPT,
        "prefix caching": UNDECIDED,
        "whole set": NOT_KEPT,
        "accuracy": UNDECIDED,
        "client": KEPT,
    }


def test_kolmogorov_smirnov_against_known_values() -> None:
    """Three gaps at the quartiles of the law are a quarter away from it at most; p by Kolmogorov's series."""
    gaps = -np.log(1 - np.array([0.25, 0.5, 0.75]))
    distance, probability = mlperf_rules.kolmogorov_smirnov(gaps, 1.0)
    assert distance == pytest.approx(0.25)
    assert probability == pytest.approx(0.96, abs=0.02)
    assert mlperf_rules.kolmogorov_smirnov(np.full(100, 1.0), 1.0)[1] < 1e-6


def test_arrivals_of_another_law_are_not_kept() -> None:
    even = [at(n, n * S) for n in range(700)]
    assert outcomes(even, scenario="server", rate_per_s=1.0)["scenario"] == NOT_KEPT
    rescaled = outcomes(by_poisson(700, rate=1.5), scenario="server", rate_per_s=1.0)
    assert rescaled["scenario"] == NOT_KEPT
    assert outcomes([at(0, 0), at(1, 0)])["scenario"] == KEPT
    assert outcomes([at(0, 0), at(1, S)])["scenario"] == NOT_KEPT
    assert outcomes([at(0, 0), at(1, S)], scenario="single_stream")["scenario"] == KEPT
    assert outcomes([at(0, 0), at(1, 0)], scenario="single_stream")["scenario"] == NOT_KEPT


def test_too_few_too_short_and_too_late() -> None:
    few = outcomes(by_poisson(100), scenario="server", rate_per_s=1.0)
    assert (few["minimum duration"], few["requests n(t) for p99"], few["limits at p99"]) == (
        NOT_KEPT,
        NOT_KEPT,
        UNDECIDED,
    )
    late = [replace(r, first_ns=r.due_ns + 3 * S) if r.number < 20 else r for r in by_poisson(700)]
    found = outcomes(late, scenario="server", rate_per_s=1.0)
    assert (found["requests n(t) for p99"], found["limits at p99"]) == (NOT_KEPT, NOT_KEPT)


def test_looser_limits_of_ones_own_are_not_the_rule() -> None:
    late = [replace(r, first_ns=r.due_ns + 3 * S, last_ns=r.due_ns + 3 * S) for r in by_poisson(700)]
    found = outcomes(late, scenario="server", rate_per_s=1.0, ttft_limit_s=5.0)
    assert found["requests n(t) for p99"] == KEPT
    assert found["limits at p99"] == NOT_KEPT


def test_a_single_stream_needs_64_requests() -> None:
    def kept(count: int) -> str:
        return outcomes([at(n, n * S) for n in range(count)], scenario="single_stream")["requests for p90"]

    assert (kept(63), kept(64)) == (NOT_KEPT, KEPT)


@pytest.mark.parametrize(
    ("settings", "outcome"),
    [
        ([{"prefix_caching": False}, {"prefix_caching": False}], KEPT),
        ([{"prefix_caching": False}, {"prefix_caching": True}], NOT_KEPT),
        ([{"prefix_caching": False}, {}], UNDECIDED),
        ([], UNDECIDED),
    ],
)
def test_prefix_caching_is_what_every_replica_says(settings: list[dict[str, bool]], outcome: str) -> None:
    replicas = tuple(replica(n, settings=each) for n, each in enumerate(settings))
    assert outcomes([at(0, 0)], replicas=replicas)["prefix caching"] == outcome


def test_how_it_was_asked() -> None:
    assert outcomes([at(0, 0)], api="chat")["prompts"] == NOT_KEPT
    assert outcomes([at(0, 0)], form=None)["prompts"] == UNDECIDED
    assert outcomes([at(0, 0)], form="text")["prompts"] == NOT_KEPT
    assert outcomes([at(0, 0, asked_tokens=129)])["tokens of an answer"] == NOT_KEPT
    assert outcomes([at(0, 0, error="reset")])["each request answered once"] == NOT_KEPT


def test_the_whole_set_and_its_accuracy() -> None:
    whole = [at(n, 0) for n in range(13_368)]
    found = outcomes(whole, data="summaries")
    assert (found["whole set"], found["accuracy"]) == (KEPT, UNDECIDED)
    assert outcomes(whole[1:], data="summaries")["whole set"] == NOT_KEPT
    assert outcomes(whole, data="jsonl")["whole set"] == NOT_KEPT
    scored = Rule(name="accuracy", asked="x", seen="y", outcome=KEPT)
    assert outcomes(whole[:1], accuracy=scored)["accuracy"] == KEPT


def test_a_subset_is_smoke(golden: object) -> None:
    (load,) = measurements.gather([record([at(0, 0)], **LONG)])
    seen = {rule.name: rule.seen for rule in mlperf_rules.checklist(load)}
    assert seen["accuracy"] == golden


def test_a_client_that_was_late_breaks_a_rule() -> None:
    late = replace(CLIENT, read_lag_p50_ns=9e6)
    assert outcomes([at(0, 0)], clients=(late,))["client"] == NOT_KEPT


@pytest.mark.parametrize(("verdict", "outcome"), [("passed", KEPT), ("failed", NOT_KEPT), ("smoke", UNDECIDED)])
def test_scores_decide_the_rule_about_them(verdict: str, outcome: str) -> None:
    scored = Accuracy(
        cell="x", axes={}, scored=9, scores=(), targets=(), verdict=verdict, replicas=(), runs=(), note=None
    )
    assert mlperf_rules.accuracy_rules([scored])["x"].outcome == outcome
    assert mlperf_rules.accuracy_rules([replace(scored, verdict=None)]) == {}
