"""LoadGen's word beside ours: its figures from its own keys, and no trust where requests failed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from paceline.analysis.report import build
from paceline.analysis.served import mlperf_verdict
from paceline.experiment.choices import Choice
from paceline.experiment.serving import Serving
from paceline.experiment.spec import RunSpec, Topology, Training
from paceline.report.tables.loadgen import tables
from paceline.results.records import RunRecord, Status
from paceline.results.served_samples import LoadgenSample, RequestSample

MS = 1_000_000
NUMBERS = {
    "completed_tokens_per_second": 40.0,
    "token_throughput": 1.6e-07,
    "first_token_99.00_percentile_latency_ns": 110.0 * MS,
    "time_per_output_token_99.00_percentile_ns": 11.0 * MS,
    "99.00_percentile_latency_ns": 150.0 * MS,
}


def sample(**more: Any) -> LoadgenSample:
    values = {"version": "6.0.17", "scenario": "Server", "verdict": "VALID", "reasons": (), "asked": 500, "errors": {}}
    return LoadgenSample(rank=0, **{**values, "settings": {}, "numbers": NUMBERS, **more})


def request(number: int) -> RequestSample:
    values = {"sample": number, "replica": 0, "due_ns": 0, "sent_ns": MS, "first_byte_ns": 90 * MS, "coalesced": 0}
    values |= {"first_ns": 100 * MS, "last_ns": 130 * MS, "ended_ns": 140 * MS, "pieces": 4, "tokens": 4}
    return RequestSample(rank=0, number=number, prompt_tokens=9, asked_tokens=4, stamped=True, **values)


def record(*told: LoadgenSample, count: int = 500, **serving: Any) -> RunRecord:
    spec = RunSpec(
        experiment="test",
        workload=Choice("inference"),
        model=Choice("tiny"),
        topology=Topology(device="cpu"),
        training=Training(sequence_length=1, micro_batch=1),
        steps=1,
        engine=Choice("openai", {"url": "http://x"}),
        serving=Serving(scenario="server", rate_per_s=5.0, loadgen="mlcommons", **serving),
    )
    requests = tuple(map(request, range(count)))
    made = RunRecord(spec=spec, status=Status.OK, error=None, started_at=0.0, ended_at=1.0, path="x", requests=requests)
    return replace(made, loadgens=told)


def test_both_sides_from_their_own_numbers() -> None:
    (found,) = mlperf_verdict.verdicts([record(sample())])
    assert found.agrees
    assert found.theirs.output_tokens_per_s == 40.0
    assert (found.theirs.ttft_p99_s, found.theirs.tpot_p99_s, found.theirs.latency_p99_s) == (0.11, 0.011, 0.15)
    assert found.ours.output_tokens_per_s == pytest.approx(500 * 4 / 0.14)
    assert (found.ours.ttft_p99_s, found.ours.latency_p99_s) == pytest.approx((0.1, 0.14))
    assert found.ours.tpot_p99_s == pytest.approx(0.01)


def test_a_verdict_over_failed_requests_does_not_count(golden: object) -> None:
    (found,) = mlperf_verdict.verdicts([record(sample(errors={"reset": 2, "http_500": 1}))])
    assert (found.theirs.verdict, found.theirs.failed, found.theirs.ttft_p99_s) == ("INVALID", 3, None)
    assert found.text == golden
    assert "500" in found.text
    assert "http_500" in found.text
    assert "LoadGen" in found.text
    assert not found.agrees


def test_a_client_at_its_limit_is_reported_although_loadgen_does_not_check(golden: object) -> None:
    (found,) = mlperf_verdict.verdicts([record(sample(cpu_ratio=0.97))])
    assert found.theirs.verdict == "INVALID(client)"
    assert found.text == golden
    assert "97" in found.text
    assert "80" in found.text
    assert "VALID" in found.text
    assert found.theirs.output_tokens_per_s == 40.0
    (found,) = mlperf_verdict.verdicts([record(sample(cpu_ratio=0.5))])
    assert found.theirs.verdict == "VALID"


def test_times_that_cannot_be_are_missing() -> None:
    """Answers of one token: LoadGen divides by their further tokens."""
    numbers = {**NUMBERS, "time_per_output_token_99.00_percentile_ns": -50396.0, "completed_tokens_per_second": 0.0}
    (found,) = mlperf_verdict.verdicts([record(sample(numbers=numbers))])
    assert found.theirs.tpot_p99_s is None
    assert found.theirs.output_tokens_per_s is None


def test_too_few_requests_are_invalid_on_both_sides(golden: object) -> None:
    few = sample(verdict="INVALID", reasons=("early stopping: Would need 435 more queries",), asked=24)
    (found,) = mlperf_verdict.verdicts([record(few, count=24)])
    assert found.agrees
    assert found.text == golden
    assert "INVALID" in found.text
    assert found.ours.reasons == golden
    assert any("459" in reason for reason in found.ours.reasons)


def test_our_word_is_that_of_the_verdict(golden: object) -> None:
    """A load that ended early, and a client that had no files left, as everywhere else."""
    (found,) = mlperf_verdict.verdicts([record(sample(), least_s=600.0)])
    assert found.ours.reasons == golden
    whole = record(sample())
    lacking = replace(whole, requests=(*whole.requests, replace(request(500), error="client")))
    (found,) = mlperf_verdict.verdicts([lacking])
    assert found.ours.verdict == "INVALID(client)"


def test_the_table_has_both_rows_and_says_what_it_is_not(golden: object) -> None:
    (table,) = tables(build([record(sample())], title="t"))
    assert [row[1].text for row in table.rows] == ["LoadGen 6.0.17", "Paceline"]
    assert [row[2].text for row in table.rows] == ["VALID", "VALID"]
    assert table.rows[0][3].text == "40.0"
    assert not any("MLPerf" in note for note in table.notes)
    (table,) = tables(build([record(sample(), least_s=600.0)], title="t"))
    assert table.notes[0] == golden
    assert table.notes[0].startswith("LoadGen-rule")
    assert "MLPerf" in table.notes[0]
    assert tables(build([record()], title="t")) == ()
