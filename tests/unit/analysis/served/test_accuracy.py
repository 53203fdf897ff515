"""Answers beside speed: what passes, what can do neither, and which replica is fast but wrong."""

from __future__ import annotations

import dataclasses
import sys

import pytest
from answered_records import build_answer, build_record, build_replica, build_spec, one_by_one

from paceline.analysis.findings.served import AGREES, DIFFERS, FAILED, PASSED, SILENT, SMOKE, UNDECIDED, Accuracy
from paceline.analysis.report import build
from paceline.analysis.served import accuracy
from paceline.report.answer import answer
from paceline.report.tables import accuracy as present
from paceline.results.records import RunRecord

pytest.importorskip("rouge_score", reason="pip install 'paceline[accuracy]'")
RIGHT = "The bridge was closed on Monday. Nobody was hurt."
WRONG = "zzz qqq zzz"


def scored(texts: list[str], **more: object) -> RunRecord:
    requests = one_by_one(0.1, len(texts))
    kept = [dataclasses.replace(r, text=text, reference=RIGHT) for r, text in zip(requests, texts, strict=True)]
    return build_record(build_spec(max_tokens=128), kept, **more)


def only(records: list[RunRecord]) -> Accuracy:
    (found,) = accuracy.analyse(records)
    return found


def test_a_part_of_the_set_is_smoke_however_good(golden: object) -> None:
    found = only([scored([RIGHT] * 20)])
    assert (found.verdict, found.scored, found.targets) == (SMOKE, 20, ())
    assert [m.value for m in found.scores] == pytest.approx([100.0] * 4)
    assert found.note == golden


def test_scores_are_means_over_samples_with_an_interval() -> None:
    found = only([scored([RIGHT] * 30 + [WRONG] * 10)])
    first = found.scores[0]
    assert first.value == pytest.approx(75.0)
    assert first.n == 40
    assert first.low is not None
    assert first.high is not None
    # Three quarters of 40: a standard error of 6.8.
    assert first.low == pytest.approx(75 - 1.96 * 6.85, abs=4)
    assert first.high == pytest.approx(75 + 1.96 * 6.85, abs=4)


def test_a_sample_asked_twice_counts_once() -> None:
    """Else the interval of two launches of the same greedy answers would be too narrow by the root of two."""
    once, twice = scored([RIGHT, WRONG] * 10), scored([RIGHT, WRONG] * 10)
    again = dataclasses.replace(twice, spec=dataclasses.replace(twice.spec, repeat=1))
    assert only([once, again]).scores[0].n == 20
    assert only([once, again]).scores[0].low == only([once]).scores[0].low


@pytest.fixture
def small_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole set has 4 samples whose answers have as many characters as these."""
    monkeypatch.setattr(accuracy, "WHOLE_SET", 4)
    monkeypatch.setattr(accuracy, "FULL_CHARACTERS", 4 * len(RIGHT))


LLAMA = (dataclasses.replace(build_replica(0, "a"), model="meta-llama/Llama-3.1-8B-Instruct"),)


@pytest.mark.usefixtures("small_set")
def test_the_whole_set_passes_or_fails() -> None:
    assert only([scored([RIGHT] * 4, replicas=LLAMA)]).verdict == PASSED
    short = only([scored([RIGHT[:20]] * 4, replicas=LLAMA)])
    assert short.verdict == FAILED
    missed = {target.metric: target for target in short.targets if not target.ok}
    assert missed["answer_characters"].low == pytest.approx(0.9 * 4 * len(RIGHT))
    low = {target.metric: target.low for target in short.targets}
    assert low["rouge1_score"] == pytest.approx(0.99 * 38.7792)
    assert low["rouge_lsum_score"] == pytest.approx(0.99 * 35.793)


@pytest.mark.usefixtures("small_set")
def test_targets_are_of_one_model_and_of_every_answer(golden: object) -> None:
    other = only([scored([RIGHT] * 4)])
    assert other.verdict == SMOKE
    assert other.note == golden
    assert "Llama-3" in other.note
    record = scored([RIGHT] * 4, replicas=LLAMA)
    lost = dataclasses.replace(record.requests[0], error="reset", text=None)
    assert only([dataclasses.replace(record, requests=(lost, *record.requests[1:]))]).verdict == SMOKE


def asked(*texts: list[str]) -> RunRecord:
    """One line of answers for each replica."""
    answers = [build_answer(r, sample, text) for r, line in enumerate(texts) for sample, text in enumerate(line)]
    replicas = tuple(build_replica(r, f"node-{r}") for r in range(len(texts)))
    requests = [dataclasses.replace(q, replica=q.number % len(texts)) for q in one_by_one(0.1, 12)]
    return build_record(build_spec(), requests, answers=tuple(answers), replicas=replicas)


def test_a_replica_that_differs_from_most_is_flagged_beside_its_speed() -> None:
    found = only([asked(["a", "b"], ["a", "x"], ["a", "b"])])
    assert [r.agreement for r in found.replicas] == [AGREES, DIFFERS, AGREES]
    assert found.flags == {1: "answered 1 of 2 questions differently from most replicas"}
    # 4 of the 12 requests, 5 tokens each, in 1.2 s.
    assert found.replicas[1].tokens_per_s == pytest.approx(20 / 1.2)
    assert found.verdict is None


def test_two_that_differ_have_no_majority_and_a_silent_one_is_reported() -> None:
    two = only([asked(["a", "b"], ["a", "x"])])
    assert [r.agreement for r in two.replicas] == [UNDECIDED, UNDECIDED]
    told = "has no majority with the other replicas on 1 of 2 questions"
    assert set(two.flags.values()) == {told}
    silent = only([asked(["a"], ["a"], [""])])
    assert silent.replicas[2].agreement == SILENT


def test_answers_that_part_late_are_flagged_with_that(golden: object) -> None:
    long = "the same words at the beginning"
    found = only([asked([f"{long} a"], [f"{long} b"], [f"{long} a"])])
    assert found.flags[1] == golden


def test_an_odd_answer_of_an_earlier_launch_is_not_forgotten() -> None:
    first, second = asked(["a"], ["x"], ["a"]), asked(["a"], ["a"], ["a"])
    again = dataclasses.replace(second, spec=dataclasses.replace(second.spec, repeat=1))
    assert only([first, again]).flags == {1: "answered 1 of 2 questions differently from most replicas"}


def test_one_replica_alone_agrees_with_nobody() -> None:
    assert accuracy.analyse([asked(["a"])]) == ()


def test_a_replica_whose_scores_lie_below_the_others_is_flagged() -> None:
    record = scored([RIGHT, WRONG] * 30)
    split = [dataclasses.replace(q, replica=q.number % 2) for q in record.requests]
    found = only([dataclasses.replace(record, requests=tuple(split))])
    assert found.flags == {1: "scores 0.0 in rouge1_score, the other replicas 100.0"}


def test_without_the_package_the_report_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rouge_score", None)
    accuracy.rouge._tokeniser.cache_clear()
    accuracy._rouge.cache_clear()
    found = only([scored([RIGHT])])
    accuracy.rouge._tokeniser.cache_clear()
    assert found.scores == ()
    assert found.verdict is None
    assert "pip install 'paceline[accuracy]'" in (found.note or "")


def test_the_answer_names_a_suspect(golden: object) -> None:
    report = build([asked(["a", "b"], ["a", "x"], ["a", "b"])], "test")
    assert answer(report) == golden
    assert any("node-1" in text for text in answer(report))
    (table,) = present.tables(report)
    assert [row[0].text for row in table.rows] == ["0", "1", "2"]
    assert table.rows[1][-1].text == golden
