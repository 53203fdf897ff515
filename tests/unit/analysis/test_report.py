from __future__ import annotations

import dataclasses
import json
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from paceline.analysis.report import build, judge
from paceline.experiment.choices import Choice
from paceline.models import arithmetic
from paceline.models.shape import Shape
from paceline.report.exporters.json import text
from paceline.results.records import Outcome, RunRecord, Status

Builder = Callable[..., Any]


@pytest.fixture
def campaign(make_cell: Builder, make_reference: Builder) -> list[RunRecord]:
    """ddp and fsdp2 on two processes, three repeats each, and their reference."""
    ddp, fsdp2 = make_cell(1.0, strategy="ddp"), make_cell(1.2, strategy="fsdp2")
    return [make_reference(ddp[0].spec), *ddp, *fsdp2]


def test_every_part_is_there(campaign: list[RunRecord]) -> None:
    report = build(campaign, "quick", skipped=["half: spec.json is missing"])
    assert [r.status for r in report.runs] == ["ok"] * 7
    assert all(c.valid for c in report.certificates)
    assert len(report.certificates) == 6
    assert {m.axes["strategy"] for m in report.measurements} == {"ddp", "fsdp2"}
    assert {c.metric for c in report.comparisons} == {"tokens_per_s", "step_time_s", "peak_memory_bytes"}
    assert [r.category for r in report.recommendations] == ["highest throughput", "shortest step", "lowest memory"]
    assert report.recommendations[0].choose == ("ddp",)
    assert report.created_at == max(r.ended_at for r in campaign)
    assert report.skipped == ("half: spec.json is missing",)
    assert len(report.machines) == 1
    assert report.notes == ()


def test_reference_is_listed_but_neither_measured_nor_ranked(campaign: list[RunRecord]) -> None:
    report = build(campaign, "quick")
    (reference,) = (r for r in report.runs if r.is_reference)
    assert reference.warmup is None
    assert reference.run not in {run for m in report.measurements for run in m.runs}
    assert reference.cell not in report.distributions


def test_fast_but_wrong_is_invalid_and_never_ranked(
    campaign: list[RunRecord], make_cell: Builder, golden: object
) -> None:
    """Error 1: twice as fast with four updates per step."""
    wrong = [
        dataclasses.replace(r, steps=tuple(dataclasses.replace(s, updates=4) for s in r.steps))
        for r in make_cell(0.5, strategy="zero:stage=1")
    ]
    report = build([*campaign, *wrong], "quick")
    cheats = [r for r in report.runs if r.axes["strategy"] == "zero:stage=1"]
    assert {r.status for r in cheats} == {"invalid"}
    assert cheats[0].reason == golden
    assert "30" in cheats[0].reason
    assert cheats[0].cell not in {m.cell for m in report.measurements}
    assert report.recommendations[0].choose == ("ddp",)
    assert "not ranked: zero:stage=1 (invalid)" in report.recommendations[0].caveats
    assert report.notes == golden


def test_an_invalid_repeat_leaves_the_others(campaign: list[RunRecord]) -> None:
    records = [*campaign[:-1], dataclasses.replace(campaign[-1], wire=())]
    report = build(records, "quick")
    found = next(m for m in report.measurements if m.metric == "tokens_per_s" and m.axes["strategy"] == "fsdp2")
    assert found.launches == 2
    assert records[-1].spec.run_id not in found.runs


def test_failures_are_results(campaign: list[RunRecord], make_spec: Builder) -> None:
    burst = RunRecord(
        spec=make_spec("zero:stage=3"),
        status=Status.OOM,
        error="out of memory on rank 1",
        started_at=1.0,
        ended_at=2.0,
        path="",
    )
    report = build([*campaign, burst], "quick")
    found = report.runs[0]
    assert (found.status, found.reason, found.warmup) == ("oom", "out of memory on rank 1", None)
    assert (found.loss_first, found.loss_last) == (None, None)


def test_without_a_reference_nothing_is_measured(campaign: list[RunRecord], golden: object) -> None:
    report = build(campaign[1:], "quick")
    assert {r.status for r in report.runs} == {"invalid"}
    assert report.measurements == report.comparisons == report.recommendations == ()
    assert report.notes[0] == golden


def test_same_records_give_the_same_report(campaign: list[RunRecord]) -> None:
    """Test (10) of method.md: in any order of reading, to the byte, and as strict JSON."""
    texts = [
        json.dumps(dataclasses.asdict(build(records, "quick")), allow_nan=False)
        for records in (campaign, list(reversed(campaign)))
    ]
    assert texts[0] == texts[1]


def test_nan_of_a_run_stays_out_of_the_report(campaign: list[RunRecord]) -> None:
    steps = tuple(dataclasses.replace(s, loss=math.nan) for s in campaign[-1].steps)
    broken = dataclasses.replace(campaign[-1], steps=steps, status=Status.INVALID, error="the loss is nan at step 0")
    report = build([*campaign[:-1], broken], "quick")
    json.dumps(dataclasses.asdict(report), allow_nan=False)
    found = next(r for r in report.runs if r.run == broken.spec.run_id)
    assert (found.status, found.reason, found.loss_first) == ("invalid", "the loss is nan at step 0", None)


def test_scaling_is_part_of_the_measurements(
    campaign: list[RunRecord], make_cell: Builder, make_reference: Builder
) -> None:
    one = make_cell(0.9, strategy="ddp", world_size=1)
    report = build([*campaign, *one, make_reference(one[0].spec)], "quick")
    values = {p.world_size: p.efficiency for p in report.scaling}
    assert values[1].value == 1.0
    assert values[2].value == pytest.approx(0.9, rel=0.01)
    assert values[2] in report.measurements


def test_distribution_keeps_at_most_500_steps(make_cell: Builder, make_reference: Builder) -> None:
    runs = make_cell(1.0, steps=301)
    report = build([make_reference(runs[0].spec), *runs], "quick")
    (found,) = report.distributions.values()
    assert len(found) == 500
    assert found[0] == runs[0].steps[2].duration_s
    assert found[-1] == runs[-1].steps[-2].duration_s


def test_health_names_what_a_reader_should_know(campaign: list[RunRecord], make_cell: Builder, golden: object) -> None:
    facts = {"settings": {"shared_gpu": True}, "switches": {"NCCL_DEBUG": "INFO"}, "neighbours": 2}
    (run,) = make_cell(1.0, 1, device="cuda", record={"evidence": facts})
    health = build([run], "quick").runs[0].health
    assert health == golden
    assert "debug switches: NCCL_DEBUG=INFO" in health


def test_empty() -> None:
    report = build([], "nothing")
    assert (report.runs, report.created_at) == ((), 0.0)


def test_a_sequence_beyond_the_context_is_noted(campaign: list[RunRecord], monkeypatch: pytest.MonkeyPatch) -> None:
    spec, load = campaign[1].spec, arithmetic.load
    length = spec.training.sequence_length

    def shorter(choice: Choice) -> Shape:
        return dataclasses.replace(load(choice), context=length - 1, positions="rope")

    monkeypatch.setattr(arithmetic, "load", shorter)
    told = f"the sequence length {length} exceeds the {length - 1} positions of {spec.model}"
    assert build(campaign, "quick").notes == (told,)


def test_a_host_that_changed_between_repeats_is_noted(make_spec: Builder, make_record: Builder, golden: object) -> None:
    """Repeats before and after an upgrade are one cell: the reader must know."""
    old, new = (make_record(make_spec(repeat=k)) for k in (0, 1))
    machines = tuple({"host": "h", "versions": {"torch": v}} for v in ("2.12", "2.13"))
    before, after = (dataclasses.replace(r, machines=(m,)) for r, m in zip((old, new), machines, strict=True))
    assert build([before, after], title="t").notes == golden
    assert any("versions.torch" in note for note in build([before, after], title="t").notes)
    assert any("2.12" in note for note in build([before, after], title="t").notes)
    assert any("2.13" in note for note in build([before, after], title="t").notes)
    assert not any("changed" in note for note in build([before], title="t").notes)


def test_a_report_does_not_depend_on_who_judged_its_runs(
    campaign: list[RunRecord], make_cell: Builder, make_reference: Builder
) -> None:
    """Several processes each judge the runs of some works; the rest is judged with the report."""
    others = [run for seed in (1, 2) for run in make_cell(1.1, strategy="ddp", seed=seed)]
    references = {run.spec.work: make_reference(run.spec) for run in others}
    records = [*others, *campaign, *references.values()]
    parts = [judge([r for r in records if r.spec.seed == seed]) for seed in (2, 1)]
    _ = [cell.measurements for cell in parts[0].cells]
    whole = build(records, "quick")
    assert {len({r.spec.work for r in records}), len(whole.certificates) // 4} == {3}
    received = pickle.loads(pickle.dumps(parts))  # noqa: S301 - our own
    assert text(build(records, "quick", judged=received)) == text(whole)


def test_launches_that_were_started_in_two_ways_are_noted(campaign: list[RunRecord]) -> None:
    """Records of an older version on a GPU are new interpreters, those of this one are forked."""

    def started(record: RunRecord, **settings: str) -> RunRecord:
        def own(outcome: Outcome) -> Outcome:
            evidence = outcome.evidence
            assert evidence is not None
            return dataclasses.replace(
                outcome, evidence=dataclasses.replace(evidence, settings={**evidence.settings, **settings})
            )

        return dataclasses.replace(record, outcomes=tuple(map(own, record.outcomes)))

    reference, first, *others = campaign
    assert build([reference, *(started(r, started="forked") for r in campaign[1:])], "quick").notes == ()
    assert build([reference, started(first, started="forked"), *others], "quick").notes == (
        "some launches of ddp have forked ranks and others new interpreters: their spread includes both",
    )
    assert build([reference, *(started(r, not_forked="2 threads run") for r in campaign[1:])], "quick").notes == (
        "ranks were started as new interpreters instead of forked, because 2 threads run",
    )
