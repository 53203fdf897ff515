"""Engines are compared at equal work only; folders and days of served runs by the same rule."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from answered_records import build_answer, build_record, build_replica, build_request, build_spec, in_stages, one_by_one

from paceline.analysis.compare import folders, history
from paceline.analysis.findings import BETTER, EQUAL, INCONCLUSIVE, WORSE, Between, Change
from paceline.analysis.findings.served import ServedPair
from paceline.analysis.report import build
from paceline.analysis.served import equal_work, estimates
from paceline.analysis.statistics.verdict import ONE_LAUNCH
from paceline.errors import RequestError
from paceline.report import gate
from paceline.report.tables import comparison as told
from paceline.report.tables import history as over_time
from paceline.report.tables import served_work as present
from paceline.results.records import RunRecord

COUNT = 460


def wobbling(seconds: float, phase: int = 0) -> Callable[[int, float], float]:
    """Answers that take 10 % more or less, in a pattern that every launch begins elsewhere."""
    return lambda number, at: seconds * (1 + 0.1 * (((number + phase) * 7) % 11 - 5) / 5)


def run(
    engine: str = "transformers", seconds: float = 0.1, phase: int = 0, repeat: int = 0, **request: Any
) -> RunRecord:
    """Another phase is another launch, made later."""
    requests = one_by_one(wobbling(seconds, phase), COUNT, **request)
    return build_record(build_spec(engine, repeat), requests, started_at=1e6 + phase)


def thrice(engine: str = "transformers", seconds: float = 0.1, phase: int = 0, **request: Any) -> list[RunRecord]:
    """Three launches, 0.2 % apart."""
    return [run(engine, seconds * (1 + 0.002 * n), phase + n, n, **request) for n in range(3)]


def only(*records: RunRecord) -> ServedPair:
    (found,) = equal_work.analyse(records)
    return found


def test_equal_work_is_compared() -> None:
    """Every eleventh answer takes longest, so that 460 of them tell the 99th percentile too."""
    found = only(*thrice("vllm", 0.1), *thrice("transformers", 0.2, phase=3))
    assert found.equal
    assert {c.metric: c.verdict for c in found.comparisons} == dict.fromkeys(estimates.COMPARED, BETTER)
    assert found.undecided == ()
    assert (found.label, found.other_label) == ("vllm", "transformers")
    same = only(*thrice("vllm"), *thrice("transformers", phase=3))
    assert {c.verdict for c in same.comparisons} == {EQUAL}
    assert {"for all 5 comparisons together" in c.reason for c in same.comparisons} == {True}


def test_one_launch_of_each_engine_has_ratios_and_no_verdict() -> None:
    found = only(run("vllm", 0.1), *thrice("transformers", 0.2, phase=3))
    assert found.equal
    assert {(c.verdict, c.reason) for c in found.comparisons} == {(INCONCLUSIVE, ONE_LAUNCH)}


@pytest.mark.parametrize(
    "change",
    [
        {"tokens": 4},
        {"prompt_tokens": 16},
        {"text": "something else entirely"},
    ],
)
def test_different_work_is_not_ranked(change: dict[str, Any], golden: object) -> None:
    found = only(run("vllm", text="what was asked for"), run(seconds=0.01, **{"text": "what was asked for"} | change))
    assert found.reasons == golden
    assert found.comparisons == ()
    report = build([run("vllm", text="what was asked for"), run(seconds=0.01, **{"text": "a"} | change)], "test")
    (table,) = present.tables(report)
    assert table.rows[0][4].text == golden


def test_texts_that_part_late_are_the_same_work() -> None:
    found = only(run("vllm", text="a long beginning, then this"), run(text="a long beginning, then that"))
    assert found.equal


def test_half_of_the_samples_is_other_work(golden: object) -> None:
    half = run("vllm")
    found = only(dataclasses.replace(half, requests=half.requests[: COUNT // 2]), run())
    assert found.reasons == golden


def test_a_dtype_that_engines_tell_must_agree(golden: object) -> None:
    def with_dtype(record: RunRecord, dtype: str) -> RunRecord:
        return dataclasses.replace(record, replicas=(build_replica(0, "a", settings={"dtype": dtype}),))

    assert only(with_dtype(run("vllm"), "torch.float32"), with_dtype(run(), "float32")).equal
    found = only(with_dtype(run("vllm"), "bfloat16"), with_dtype(run(), "float32"))
    assert found.reasons == golden


def test_a_flag_goes_with_the_verdict(golden: object) -> None:
    answers = [build_answer(r, n, "x" if r == 0 else "right") for r in range(3) for n in range(2)]
    wrong = [dataclasses.replace(record, answers=tuple(answers)) for record in thrice("vllm", 0.05)]
    report = build([*wrong, *thrice(phase=3)], "test")
    (pair,) = report.served_pairs
    assert pair.flags == golden
    (table,) = present.tables(report)
    assert table.rows[0][4].text == golden


# --- two folders ---


def compared(a: list[RunRecord], b: list[RunRecord]) -> Between:
    return folders.compare_experiments(a, b)


def by_metric(found: Between) -> dict[str, Change]:
    return {c.metric: c for c in found.changes}


def test_a_slower_server_is_a_regression(golden: object) -> None:
    found = compared(thrice(), thrice(seconds=0.13, phase=3))
    changes = by_metric(found)
    assert changes["output_tokens_per_s"].verdict == WORSE
    assert changes["output_tokens_per_s"].ratio == pytest.approx(1 / 1.3, rel=0.01)
    assert changes["ttft_p50_s"].verdict == WORSE
    assert {r.text.partition(":")[0] for r in gate.regressions(found, 10)} == {changes["ttft_p50_s"].label}
    text = told.sentence(found)
    assert text == golden
    assert "23" in text
    assert "TTFT" in text
    assert "p50" in text
    assert "30" in text
    same = compared(thrice(), thrice(phase=3))
    assert by_metric(same)["output_tokens_per_s"].verdict == EQUAL
    assert gate.regressions(same, 0) == ()


def test_another_engine_meets_and_is_named() -> None:
    found = compared(thrice("openai:url=http://a:1"), thrice("openai:url=http://b:2", phase=3))
    assert by_metric(found)["output_tokens_per_s"].verdict == EQUAL
    assert any(d.path == "engine" for d in found.shared)


def test_other_answers_are_not_compared_and_other_questions_do_not_meet(golden: object) -> None:
    found = compared([run()], [run(seconds=0.05, tokens=2, phase=3)])
    assert {c.verdict for c in found.changes} == {None}
    assert found.changes[0].reason == golden
    assert "2,300" in found.changes[0].reason
    assert "920" in found.changes[0].reason
    longer = build_record(build_spec(max_tokens=64), one_by_one(0.1, COUNT))
    with pytest.raises(RequestError) as caught:
        compared([run("openai:url=http://x")], [longer])
    assert str(caught.value) == golden
    assert "serving.max_tokens" in str(caught.value)
    assert "128" in str(caught.value)
    assert "64" in str(caught.value)


def test_an_unreliable_run_is_not_ranked(golden: object) -> None:
    """It answered its first request as often as there are requests, so it counts for nothing."""
    broken = run(seconds=0.01, phase=3)
    twice = tuple(dataclasses.replace(q, number=0) for q in broken.requests)
    with pytest.raises(RequestError) as caught:
        compared([run()], [dataclasses.replace(broken, requests=twice)])
    assert str(caught.value) == golden
    repeated = dataclasses.replace(broken, spec=dataclasses.replace(broken.spec, repeat=3), requests=twice)
    found = compared(thrice(), [*thrice(phase=3), repeated])
    assert by_metric(found)["output_tokens_per_s"].verdict == EQUAL
    assert [lost.reason for lost in found.lost] == golden


def test_loads_of_a_sweep_meet_by_their_load() -> None:
    def sweep(*seconds: float, phase: int = 0) -> list[RunRecord]:
        found = []
        for repeat in range(3):
            at, parts = 0.0, []
            for each in seconds:
                parts.append(one_by_one(wobbling(each * (1 + 0.002 * repeat), phase + repeat), COUNT, at))
                at = (parts[-1][-1].ended_ns or 0) / 1e9
            made = in_stages(build_spec("vllm", repeat, scenario="sweep"), parts, concurrency=[1, 2])
            found.append(dataclasses.replace(made, started_at=1e6 + phase + repeat))
        return found

    found = compared(sweep(0.1, 0.1), sweep(0.1, 0.2, phase=3))
    rates = {c.row: c.verdict for c in found.changes if c.metric == "output_tokens_per_s"}
    assert rates == {"concurrency 1": EQUAL, "concurrency 2": WORSE}
    shorter = compared(sweep(0.1, 0.1), sweep(0.1, phase=3))
    assert [c.row for c in shorter.changes if c.metric == "output_tokens_per_s"] == ["concurrency 1"]
    assert any(
        note.startswith("not compared: concurrency 2 of ") and "valid only in A" in note for note in shorter.notes
    )


def test_a_tail_of_too_few_requests_is_not_compared_and_said_so() -> None:
    few = [build_record(build_spec(), one_by_one(0.1, 458), started_at=1e6 + n) for n in range(2)]
    found = compared([few[0]], [few[1]])
    assert "ttft_p99_s" not in by_metric(found)
    assert "ttft_p50_s" in by_metric(found)
    (note,) = [note for note in found.notes if "ttft_p99_s" in note]
    assert note.startswith("not compared: ttft_p99_s of ")
    assert note.endswith("which needs 459 requests on each side")
    assert not any("ttft_p99_s" in note for note in compared([run()], [run(phase=3)]).notes)


# --- over time ---


def test_a_cell_over_days_shows_where_its_level_changed() -> None:
    days = []
    for day in range(12):
        record = run(seconds=0.1 if day < 6 else 0.13, phase=day)
        days.append(dataclasses.replace(record, started_at=1e6 + 86400 * day, path=f"day-{day}/{record.spec.run_id}"))
    found = {s.metric: s for s in build(days[-1:], "test", earlier=days[:-1]).histories}
    assert set(found) == {"output_tokens_per_s", "ttft_p50_s", "ttft_p99_s", "tpot_p50_s", "tpot_p99_s"}
    (change,) = found["output_tokens_per_s"].changes
    assert (change.index, change.verdict) == (6, WORSE)
    judged = history.judge(days)
    assert judged.count == 12
    assert "change" in over_time.sentence(history.analyse(judged.windows, 1, judged.asked))


def test_a_request_of_nothing_is_no_load() -> None:
    lost = build_request(0, 0.0, 0.1, error="reset", first_ns=None, last_ns=None, tokens=None, pieces=0)
    assert equal_work.analyse([build_record(build_spec("vllm"), [lost]), run()]) == ()
