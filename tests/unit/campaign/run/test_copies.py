"""A run that is refused narrowly is judged again with more copies of its reference; any other run is not."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from testbed.instant import Instant, Watcher
from training_records import build_evidence, build_record, build_spec, build_steps

from paceline.analysis.report import build
from paceline.campaign.run import controller, copies, reference_cache, references
from paceline.campaign.run.replay import replayed
from paceline.campaign.run.stopping import Stopping
from paceline.experiment.spec import RunSpec
from paceline.results import store
from paceline.results.records import Outcome, RunRecord, Status

# By number of a copy, its relative deviation from the reference: 1e-3 is the largest of three, 2e-3 of eight.
COPIES = (0.0, 5e-4, -1e-3, 2e-4, 1e-4, -2e-3, 3e-4, 1e-3, 5e-4)
HONEST, SLIGHT, WRONG = 2.2e-3, 5e-3, 8e-3


class Ranks:
    """Leaves what ranks would: a reference with COPIES, and runs that deviate by `off` from it."""

    def __init__(self, off: float) -> None:
        self.off, self.started = off, list[RunSpec]()
        self.left: dict[str, Outcome] = {}
        self.fails = False

    def __call__(self, run_dir: Path) -> None:
        spec = store.read_spec(run_dir)
        self.started.append(spec)
        if spec.workload.name == "reference":
            options = spec.workload.options
            numbers = range(options.get("first", 0), options["variants"])
            short = replace(spec, steps=10)
            steps = [s for number in numbers for s in build_steps(short, 1.0, number, COPIES[number])]
            record = build_record(spec, steps=tuple(steps))
        else:
            record = build_record(spec, steps=build_steps(spec, 1.0, off=self.off))
        for rank, outcome in enumerate(record.outcomes):
            own = [s for s in (*record.steps, *record.memory, *record.wire, *record.traces) if s.rank == rank]
            (run_dir / f"samples-{rank}.jsonl").write_text("".join(map(store.sample_line, own)))
            if self.fails and "first" in spec.workload.options:
                outcome = replace(outcome, status=Status.OOM, error="full", evidence=None)
            store.write_outcome(run_dir, outcome)

    @property
    def supplements(self) -> list[RunSpec]:
        return [spec for spec in self.started if "first" in spec.workload.options]


@pytest.fixture
def spec() -> RunSpec:
    return build_spec("ddp", 2, precision="bf16", steps=10)


Launch = Callable[[Callable[[Path], None]], Instant]


def run(specs: list[RunSpec], out: Path, **more: Any) -> tuple[list[Status], list[str]]:
    messages: list[str] = []
    return controller.campaign(specs, out, Watcher(), notify=messages.append, **more), messages


def records(out: Path) -> dict[str, RunRecord]:
    found, skipped = store.read_runs(out)
    assert not skipped
    return {record.spec.run_id: record for record in found}


def test_a_narrow_refusal_is_judged_again_with_more_copies(tmp_path: Path, spec: RunSpec, launcher: Launch) -> None:
    ranks = Ranks(HONEST)
    launcher(ranks)
    statuses, messages = run([spec], tmp_path)
    assert statuses == [Status.OK] * 3
    (supplement,) = ranks.supplements
    options = supplement.workload.options
    assert (options["first"], options["variants"], options["least"]) == (4, 9, 10)
    assert supplement.work == spec.work
    found = records(tmp_path)
    assert (found[spec.run_id].status, found[spec.run_id].error) == (Status.OK, None)
    assert found[supplement.run_id].is_supplement
    assert messages[-2:] == [
        f"{spec.run_id}: loss trajectory 1.1 times and gradient norm 1.1 times the limit that 3 re-seeded references "
        "give. Computing 5 more to tell rounding from a mistake.",
        f"{spec.run_id}: valid with the limit of 8 re-seeded references.",
    ]
    plan = json.loads((tmp_path / "test" / "campaign.json").read_text())
    assert [each["run"] for each in plan["runs"]] == [s.run_id for s in (ranks.started[0], spec, supplement)]
    # Every report judges with all copies, too.
    (certificate,) = build(list(found.values()), title="").certificates
    assert certificate.valid
    assert "of 8 re-seeded references" in next(c.expected for c in certificate.checks if c.name == "loss trajectory")
    assert certificate.reference == ranks.started[0].run_id


def test_further_runs_of_the_work_use_all_copies(tmp_path: Path, spec: RunSpec, launcher: Launch) -> None:
    ranks = Ranks(HONEST)
    launcher(ranks)
    statuses, messages = run([spec, replace(spec, repeat=1)], tmp_path)
    assert statuses == [Status.OK] * 4
    assert len(ranks.supplements) == 1
    assert sum("Computing" in message for message in messages) == 1


def test_a_mistake_stays_invalid_with_the_new_limit(tmp_path: Path, spec: RunSpec, launcher: Launch) -> None:
    ranks = Ranks(SLIGHT)
    launcher(ranks)
    statuses, messages = run([spec], tmp_path)
    assert statuses == [Status.OK, Status.OK, Status.INVALID]
    assert messages[-1] == f"{spec.run_id}: still invalid with the limit of 8 re-seeded references."
    record = records(tmp_path)[spec.run_id]
    assert record.status is Status.INVALID
    assert "within 0.004 of the reference" in str(record.error)
    assert "of 8 re-seeded references" in str(record.error)
    # The same command again says nothing new and computes nothing.
    before = len(ranks.started)
    statuses, messages = run([spec], tmp_path)
    assert statuses == [Status.OK, Status.OK, Status.INVALID]
    assert not any(spec.run_id in message for message in messages)
    assert len(ranks.started) == before


@pytest.mark.parametrize("off", [0.0, WRONG])
def test_what_is_certified_or_far_off_needs_no_more(
    tmp_path: Path, spec: RunSpec, launcher: Launch, off: float
) -> None:
    ranks = Ranks(off)
    launcher(ranks)
    statuses, _ = run([spec], tmp_path)
    assert statuses == [Status.OK, Status.INVALID if off else Status.OK]
    assert ranks.supplements == []


def test_a_rank_that_refused_itself_stays_invalid(
    tmp_path: Path, spec: RunSpec, launcher: Launch, make_outcome: Callable[..., Outcome]
) -> None:
    ranks = Ranks(HONEST)

    def leave(run_dir: Path) -> None:
        ranks(run_dir)
        if run_dir.name == spec.run_id:
            refusal = make_outcome(1, Status.INVALID, "env.X", evidence=build_evidence(spec))
            store.write_outcome(run_dir, refusal)

    launcher(leave)
    statuses, _ = run([spec], tmp_path)
    assert statuses == [Status.OK, Status.INVALID]
    assert ranks.supplements == []


def test_fp32_has_a_fixed_limit(tmp_path: Path, launcher: Launch) -> None:
    ranks = Ranks(1.1e-4)
    launcher(ranks)
    statuses, _ = run([build_spec("ddp", 2, steps=10)], tmp_path)
    assert statuses == [Status.OK, Status.INVALID]
    assert ranks.supplements == []


def test_a_run_that_was_sealed_invalid_is_judged_again_on_resume(
    tmp_path: Path, spec: RunSpec, launcher: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By an earlier version, or because the command was interrupted while it computed the copies."""
    ranks = Ranks(HONEST)
    launcher(ranks)
    with monkeypatch.context() as before:
        before.setattr(copies, "narrow_refusal", lambda record, known: None)
        assert run([spec], tmp_path)[0] == [Status.OK, Status.INVALID]
    count = len(ranks.started)
    assert run([spec], tmp_path)[0] == [Status.OK] * 3
    assert ranks.started[count:] == ranks.supplements
    # From now on the plan has the supplement before the runs.
    assert run([spec], tmp_path)[0] == [Status.OK] * 3
    assert len(ranks.started) == count + 1
    assert records(tmp_path)[spec.run_id].status is Status.OK


def test_copies_that_fail_leave_the_run_invalid(tmp_path: Path, spec: RunSpec, launcher: Launch) -> None:
    ranks = Ranks(HONEST)
    ranks.fails = True
    launcher(ranks)
    statuses, messages = run([spec, replace(spec, repeat=1)], tmp_path)
    assert statuses == [Status.OK, Status.OOM, Status.INVALID, Status.INVALID]
    assert len(ranks.supplements) == 1
    assert messages[-1].endswith("still invalid, because no more re-seeded references could be computed.")
    ranks.fails = False
    assert run([spec], tmp_path, retry=True)[0] == [Status.OK, Status.OK, Status.OK]


def test_with_a_stopping_rule_every_run_that_ends_was_announced(
    tmp_path: Path, spec: RunSpec, launcher: Launch
) -> None:
    ranks = Ranks(HONEST)
    launcher(ranks)
    known: set[str] = set()

    class Announced(Watcher):
        def begin(self, specs: Any) -> None:  # type: ignore[override]
            known.update(each.run_id for each in specs)

        def ended(self, spec: RunSpec, *more: Any) -> None:  # type: ignore[override]
            assert spec.run_id in known

    statuses = controller.campaign([spec], tmp_path, Announced(), stopping=Stopping(until=0.5))
    assert statuses == [Status.OK] * 5
    plan = json.loads((tmp_path / "test" / "campaign.json").read_text())
    assert {each["run"] for each in plan["runs"]} == {each.run_id for each in ranks.started}


def test_copies_are_kept_for_the_next_campaign(
    tmp_path: Path, spec: RunSpec, launcher: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(reference_cache, "is_kept_here", lambda spec: spec.workload.name == "reference")
    monkeypatch.setattr(reference_cache, "_machine_class", dict[str, Any])
    ranks = Ranks(HONEST)
    launcher(ranks)
    run([spec], tmp_path / "first", cache=True)
    count = len(ranks.started)
    assert run([spec], tmp_path / "second", cache=True)[0] == [Status.OK] * 3
    assert [each.run_id for each in ranks.started[count:]] == [spec.run_id]


def test_a_replay_is_compared_with_all_copies(tmp_path: Path, spec: RunSpec, launcher: Launch) -> None:
    ranks = Ranks(HONEST)
    launcher(ranks)
    run([spec], tmp_path)
    reference = references.references_of([spec])[spec.work]
    found = {record.spec.run_id for record in replayed([spec], [reference], tmp_path)}
    assert found == {each.run_id for each in ranks.started}
    assert len(found) == 3


def test_a_supplement_has_the_time_of_its_copies(tmp_path: Path, spec: RunSpec, launcher: Launch) -> None:
    ranks = Ranks(HONEST)
    launcher(ranks)
    run([spec], tmp_path)
    assert ranks.supplements[0].timeout_s == pytest.approx(ranks.started[0].timeout_s * 5 / 4)
