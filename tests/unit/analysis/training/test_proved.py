"""Runs without a reference of their size: judged by their proof group and by each other."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
from training_records import build_record, build_reference, build_spec, build_steps, sequence_digest

from paceline.analysis.compare.folders import compare_experiments
from paceline.analysis.compare.history import judge
from paceline.analysis.findings import Certificate, Check
from paceline.analysis.report import build
from paceline.analysis.reproduction import reproduce
from paceline.analysis.training.certificate import certify, certify_all
from paceline.experiment.proof import Reduction
from paceline.experiment.reduced import reduced
from paceline.experiment.spec import RunSpec
from paceline.report.replay import reproduction_lines
from paceline.report.tables.table import equal_work_text
from paceline.results.records import RunRecord, Status

LEVEL = "proved on 4 of 16 layers"
STEPS = 12


def spec_of(strategy: str = "ddp", **more: Any) -> RunSpec:
    return build_spec(strategy, 2, **{"model": "tiny:layers=16", "steps": STEPS, **more})


def reduction_of(spec: RunSpec, layers: int = 4) -> Reduction:
    length, batch = spec.training.sequence_length, spec.global_batch
    sizes = {"sequence_length": length, "of_sequence_length": length, "global_batch": batch, "of_global_batch": batch}
    return Reduction(work=spec.work, layers=layers, of_layers=16, **sizes)


def proof_of(spec: RunSpec, off: float = 0.0, layers: int = 4) -> RunRecord:
    small = reduced(spec, reduction_of(spec, layers))
    return build_record(small, steps=build_steps(small, off=off))


def proof_reference(spec: RunSpec, variants: Sequence[float] = (0.0,), layers: int = 4, **more: Any) -> RunRecord:
    small = reduced(spec, reduction_of(spec, layers))
    made = build_reference(small, variants, STEPS, **more)
    seen = [sum(sequence_digest(step, i) for i in range(spec.global_batch)) % 2**64 for step in range(STEPS)]
    return with_evidence(made, whole_digests=seen)


def with_evidence(record: RunRecord, **changes: Any) -> RunRecord:
    outcomes = [
        dataclasses.replace(o, evidence=dataclasses.replace(o.evidence, **changes)) if o.evidence else o
        for o in record.outcomes
    ]
    return dataclasses.replace(record, outcomes=tuple(outcomes))


def run_of(strategy: str, off: float = 0.0, **more: Any) -> RunRecord:
    spec = spec_of(strategy, **more)
    return build_record(spec, steps=build_steps(spec, off=off))


def failed(certificate: Certificate) -> list[str]:
    return [check.name for check in certificate.checks if not check.ok]


def named(certificate: Certificate, name: str) -> Check:
    return next(check for check in certificate.checks if check.name == name)


@pytest.fixture
def group() -> list[RunRecord]:
    """A proof group of two strategies."""
    return [proof_reference(spec_of()), proof_of(spec_of("ddp")), proof_of(spec_of("fsdp2"))]


def test_a_run_is_certified_at_the_level_of_its_proof(group: list[RunRecord]) -> None:
    runs = [run_of("ddp"), run_of("fsdp2")]
    found = certify_all([*group, *runs])
    for run in runs:
        own = found[run.spec.run_id]
        assert own.reasons == ()
        assert (own.level, own.level_text, own.reference) == (LEVEL, LEVEL, group[0].spec.run_id)
        assert (own.steps, own.compared_steps, own.proves_only) == (STEPS, STEPS, False)
    assert [found[r.spec.run_id].proves_only for r in group[1:]] == [True, True]
    assert [found[r.spec.run_id].level for r in group[1:]] == [None, None]


def test_one_run_is_judged_as_the_group_is(group: list[RunRecord]) -> None:
    run, peer = run_of("ddp"), run_of("fsdp2")
    assert certify(run, group[0], [peer], group[1:]) == certify_all([*group, run, peer])[run.spec.run_id]


def test_a_reference_of_the_whole_counts_more_than_a_proof(group: list[RunRecord]) -> None:
    run = run_of("ddp")
    found = certify_all([*group, run, build_reference(run.spec)])[run.spec.run_id]
    assert (found.valid, found.level) == (True, None)


def test_the_largest_proof_decides(group: list[RunRecord]) -> None:
    run = run_of("ddp")
    larger = [proof_reference(run.spec, layers=8), proof_of(run.spec, 0.1, layers=8)]
    found = certify_all([*group, *larger, run])[run.spec.run_id]
    assert (found.level, failed(found)) == ("proved on 8 of 16 layers", ["proof"])
    broken = dataclasses.replace(larger[0], status=Status.OOM, error="full")
    assert certify_all([*group, broken, larger[1], run])[run.spec.run_id].level == LEVEL


def test_a_configuration_that_was_not_proved_is_refused(group: list[RunRecord]) -> None:
    other = run_of("ddp", checkpointing="full")
    found = certify_all([*group, other])[other.spec.run_id]
    assert failed(found) == ["proof"]
    assert named(found, "proof").observed == "no run of the proof group has this configuration"


def test_a_failed_proof_refuses_the_whole(group: list[RunRecord]) -> None:
    wrong = proof_of(spec_of("fsdp2"), off=0.01)
    found = certify_all([*group[:2], wrong, run_of("fsdp2")])[spec_of("fsdp2").run_id]
    assert failed(found) == ["proof"]
    assert named(found, "proof").observed.startswith(f"{wrong.spec.run_id}: loss trajectory: expected within")


def test_a_proof_group_without_reference_proves_nothing(group: list[RunRecord]) -> None:
    found = certify_all([*group[1:], run_of("ddp")])[spec_of("ddp").run_id]
    assert (failed(found), found.level) == (["reference"], None)


class TestAtFullSize:
    def test_other_losses_than_the_other_configurations(self, group: list[RunRecord]) -> None:
        third = proof_of(spec_of("zero:stage=2"))
        runs = [run_of("ddp"), run_of("fsdp2", off=0.01), run_of("zero:stage=2")]
        found = certify_all([*group, third, *runs])
        assert [failed(found[run.spec.run_id]) for run in runs] == [[], ["loss trajectory", "gradient norm"], []]
        assert "of the median of 3 cells" in named(found[runs[1].spec.run_id], "loss trajectory").expected

    def test_two_that_differ_are_both_refused(self, group: list[RunRecord]) -> None:
        found = certify_all([*group, run_of("ddp"), run_of("fsdp2", off=0.01)])
        assert [failed(found[spec_of(name).run_id])[:1] for name in ("ddp", "fsdp2")] == [["loss trajectory"]] * 2

    def test_alone_it_rests_on_its_proof(self, group: list[RunRecord]) -> None:
        found = certify_all([*group, run_of("ddp")])[spec_of("ddp").run_id]
        assert (found.valid, found.compared_steps) == (True, 0)
        assert named(found, "loss trajectory").observed == "no other configuration to compare with"
        report = build([*group, run_of("ddp")], title="")
        (health,) = [run.health for run in report.runs if not run.proves_only]
        assert any(note.startswith("no step could be compared at full size") for note in health)

    def test_the_limit_grows_with_the_root_of_the_depth(self) -> None:
        """Twice the spread of the copies, times the root of 16 over 4 layers."""
        reference = proof_reference(spec_of(precision="bf16"), (0.0, 0.001, -0.001, 0.0005))
        proofs = [proof_of(spec_of(name, precision="bf16")) for name in ("ddp", "fsdp2")]
        for off, expected in ((0.0035, []), (0.0045, ["loss trajectory", "gradient norm"])):
            runs = [run_of("ddp", precision="bf16"), run_of("fsdp2", off, precision="bf16")]
            found = certify_all([reference, *proofs, *runs])[runs[1].spec.run_id]
            assert failed(found) == expected
            text = named(found, "loss trajectory").expected
            assert "4 x the spread so far of 3 re-seeded references in bf16 on 4 of 16 layers" in text

    def test_data_are_those_of_the_seed_though_nobody_else_read_them(self, group: list[RunRecord]) -> None:
        run = run_of("ddp")
        spoiled = tuple(dataclasses.replace(s, data_digest=s.data_digest + (s.step == 3)) for s in run.steps)
        found = certify_all([*group, dataclasses.replace(run, steps=spoiled)])[run.spec.run_id]
        assert failed(found) == ["data"]
        assert named(found, "data").observed == "other token ids than the seed gives at step 3"

    def test_other_initial_weights_than_most(self, group: list[RunRecord]) -> None:
        third = proof_of(spec_of("zero:stage=2"))
        runs = [run_of("ddp"), with_evidence(run_of("fsdp2"), init_digest="beef"), run_of("zero:stage=2")]
        found = certify_all([*group, third, *runs])
        assert [failed(found[run.spec.run_id]) for run in runs] == [[], ["initial weights"], []]

    def test_weights_that_moved_less_than_in_others(self, group: list[RunRecord]) -> None:
        third = proof_of(spec_of("zero:stage=2"))
        moved = [
            with_evidence(run_of(name), movements={"norm": 1.0, "head": change})
            for name, change in (("ddp", 1.0), ("fsdp2", 0.5), ("zero:stage=2", 1.0))
        ]
        found = certify_all([*group, third, *moved])
        assert [failed(found[run.spec.run_id]) for run in moved] == [[], ["weights moved"], []]
        text = named(found[moved[1].spec.run_id], "weights moved").observed
        assert text == "head changed 0.5 times as much as in other configurations"

    @pytest.mark.parametrize(
        ("changes", "check"),
        [
            ({"optimizer": {"implementation": "torch.optim.AdamW", "lr": 0.5, "clip_norm": 1.0}}, "optimizer"),
            ({"parameters": 7}, "parameters"),
            ({"dtypes": {"compute": "bf16"}}, "dtypes"),
        ],
    )
    def test_settings_are_those_of_the_reference_of_the_proof(
        self, group: list[RunRecord], changes: dict[str, Any], check: str
    ) -> None:
        run = with_evidence(run_of("ddp"), **changes)
        assert failed(certify_all([*group, run])[run.spec.run_id]) == [check]


def test_a_report_counts_only_runs_of_the_whole(group: list[RunRecord]) -> None:
    runs = [run_of(name, repeat=repeat) for name in ("ddp", "fsdp2") for repeat in (0, 1)]
    report = build([*group, *runs], title="")
    assert equal_work_text(report) == f"4 of 4 runs {LEVEL}"
    assert {c.level for c in report.comparisons} == {LEVEL}
    assert {m.axes["equal_work"] for m in report.measurements} == {LEVEL}
    assert all(LEVEL in recommendation.group for recommendation in report.recommendations)
    assert any(note.startswith(f"{LEVEL}: the whole has no one-process reference") for note in report.notes)
    assert {recipe.cell for recipe in report.recipes} == {run.spec.cell for run in runs}
    assert {run.run: run.proof for run in report.runs if run.proof} == {
        record.spec.run_id: "4 of 16 layers" for record in group
    }


def test_folders_and_histories_know_the_level(group: list[RunRecord]) -> None:
    first, second = ([run_of("ddp", repeat=r) for r in (0, 1)] for _ in range(2))
    between = compare_experiments([*group, *first], [*group, *second], ("a", "b"))
    assert {change.level for change in between.changes} == {LEVEL}
    assert all(change.label.endswith(LEVEL) for change in between.changes)
    whole = build_reference(first[0].spec)
    assert {c.level for c in compare_experiments([*group, *first], [whole, *second], ("a", "b")).changes} == {
        f"A {LEVEL}, B certified"
    }
    found = judge([*group, *first])
    assert (found.count, found.dropped) == (2, {})


def test_a_replay_is_judged_by_the_stored_proof(group: list[RunRecord]) -> None:
    runs = [run_of("ddp"), run_of("fsdp2")]
    cells = {run.spec.cell: run.spec.cell for run in runs}
    found = reproduce([*group, *runs], [*group, *runs], cells)
    assert [(cell.certificate.valid, cell.certificate.level) for cell in found.cells if cell.certificate] == [
        (True, LEVEL),
        (True, LEVEL),
    ]
    lines = [line for line in reproduction_lines(found) if "checks hold" in line]
    assert len(lines) == 2
    assert all(f"against the stored reference, {LEVEL}; " in line for line in lines)
