"""Which works are proved on less, on how much less, and what follows from a proof that failed."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from testbed.instant import Instant, Watcher
from training_records import build_record, build_spec, build_steps

from paceline.analysis.report import build
from paceline.campaign.run import controller, proofs, reference_cache
from paceline.campaign.run.rehearsed import Rehearsed
from paceline.errors import RequestError
from paceline.experiment import recipe
from paceline.experiment.choices import Choice
from paceline.experiment.proof import Proof, Reduction
from paceline.experiment.reduced import configuration, reduced
from paceline.experiment.spec import RunSpec
from paceline.models import arithmetic, directory
from paceline.report.summary import headline, light
from paceline.results import store
from paceline.results.records import Outcome, RunRecord, Status

Launch = Callable[[Callable[[Path], None]], Instant]
MODEL = "tiny:layers=16"
# Between the state of 16 layers by arithmetic, and a generous estimate of 2.
LIMIT_GIB = 0.04


class Ranks:
    """Leaves what ranks would; `full` are the layers at which a reference runs out of memory, and runs of `wrong`
    strategies deviate at these layers."""

    def __init__(self, full: Collection[int] = (), wrong: dict[str, int] | None = None) -> None:
        self.full, self.wrong = full, wrong or {}
        self.started = list[RunSpec]()

    def __call__(self, run_dir: Path) -> None:
        spec = store.read_spec(run_dir)
        self.started.append(spec)
        layers = int(str(spec.model.options["layers"]))
        if spec.workload.name == "reference":
            if layers in self.full:
                error = "OutOfMemoryError: CUDA out of memory"
                outcome = Outcome(rank=0, status=Status.OOM, error=error, host="a", pid=1, started_at=0.0, ended_at=1.0)
                return store.write_outcome(run_dir, outcome)
            record = build_record(spec, steps=build_steps(spec))
        else:
            off = 0.1 if self.wrong.get(str(spec.strategy)) == layers else 0.0
            record = build_record(spec, steps=build_steps(spec, 1.0, off=off))
        for rank, outcome in enumerate(record.outcomes):
            own = [s for s in (*record.steps, *record.memory, *record.wire, *record.traces) if s.rank == rank]
            (run_dir / f"samples-{rank}.jsonl").write_text("".join(map(store.sample_line, own)))
            store.write_outcome(run_dir, outcome)
        return None

    @property
    def layers(self) -> list[tuple[str, object]]:
        return [(str(s.strategy or s.workload.name), s.model.options["layers"]) for s in self.started]


def spec_of(strategy: str = "ddp", **more: Any) -> RunSpec:
    return build_spec(strategy, 2, **{"model": MODEL, "steps": 10, **more})


def run(specs: list[RunSpec], out: Path, **more: Any) -> tuple[list[Status], list[str]]:
    messages: list[str] = []
    return controller.campaign(specs, out, Watcher(), notify=messages.append, **more), messages


def records(out: Path) -> list[RunRecord]:
    found, skipped = store.read_runs(out)
    assert not skipped
    return found


def whole(out: Path) -> dict[str, RunRecord]:
    return {str(r.spec.strategy): r for r in records(out) if not r.proves_only}


# --- what decides ---


def test_what_fits_gets_a_reference(tmp_path: Path, launcher: Launch) -> None:
    ranks = Ranks()
    launcher(ranks)
    assert run([spec_of()], tmp_path)[0] == [Status.OK] * 2
    assert ranks.layers == [("reference", 16), ("ddp", 16)]


def test_proof_groups_that_differ_in_the_seed_alone_are_one_line() -> None:
    sized = {"proof": Proof(layers=4)}
    specs = [spec_of(name, seed=seed, **sized) for name in ("ddp", "fsdp2") for seed in (1, 2, 3)]
    assert proofs.Proving(specs[::3]).lines() == [
        f"proof: the experiment gives the sizes for {MODEL}. 2 configurations are certified on 4 of 16 layers, "
        "then compared with each other at full size."
    ]
    assert proofs.Proving(specs).lines() == [
        f"proof: the experiment gives the sizes for {MODEL}. 6 configurations are certified on 4 of 16 layers, "
        "then compared with the others of the same work at full size."
    ]


def test_a_report_says_on_what_equal_work_was_proved(tmp_path: Path, launcher: Launch) -> None:
    """In its first line; and proof runs alone are not `0 of 0 runs certified`."""
    launcher(Ranks())
    specs = [spec_of(name, proof=Proof(layers=4), repeat=n) for name in ("ddp", "fsdp2") for n in range(3)]
    run(specs, tmp_path)
    whole_report = build(records(tmp_path), "test")
    assert headline(whole_report).endswith("; equal work: proved on 4 of 16 layers")
    assert light(whole_report).text.startswith("6 of 6 runs proved on 4 of 16 layers")
    alone = build([r for r in records(tmp_path) if r.proves_only], "test")
    assert headline(alone) == "2 of 2 proof runs certified on 4 of 16 layers"
    assert light(alone).text.startswith("2 of 2 proof runs certified on 4 of 16 layers; no run at full size")


def test_arithmetic_decides_before_anything_starts(tmp_path: Path, launcher: Launch) -> None:
    ranks = Ranks()
    launcher(ranks)
    specs = [spec_of(name, proof=Proof(limit_gib=LIMIT_GIB)) for name in ("ddp", "fsdp2")]
    statuses, messages = run(specs, tmp_path)
    assert statuses == [Status.OK] * 5
    assert ranks.layers == [("reference", 2), ("ddp", 2), ("fsdp2", 2), ("ddp", 16), ("fsdp2", 16)]
    assert ranks.started[0].workload.options["limit_gib"] == LIMIT_GIB, "the limit holds where it decided"
    (told,) = [message for message in messages if message.startswith("proof: ")]
    assert told == (
        f"proof: the one-process reference of {MODEL} needs 49.4 MiB (at least, by arithmetic) and may use 41 MiB. "
        "2 configurations are certified on 2 of 16 layers, then compared with each other at full size."
    )


def test_a_rehearsal_decides_where_arithmetic_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    rehearsed: list[RunSpec] = []

    def rehearse(spec: RunSpec, major: int, limit_s: float) -> Rehearsed:
        rehearsed.append(spec)
        return Rehearsed(components={"peak": 2**27 if spec.model.options["layers"] == 16 else 2**20})

    monkeypatch.setattr(proofs.rehearsed, "rehearse_spec", rehearse)
    monkeypatch.setattr(proofs, "_needs", {})
    proving = proofs.Proving([spec_of(sequence_length=256, proof=Proof(limit_gib=0.1))])
    assert [str(spec.strategy) for spec in rehearsed] == ["single"] * len(rehearsed)
    (group,) = proving.groups.values()
    assert group.reduction.text == "2 of 16 layers"
    assert "needs 128 MiB (rehearsed) and may use 102 MiB" in group.why


def test_a_reference_that_runs_out_of_memory_decides_too(tmp_path: Path, launcher: Launch) -> None:
    ranks = Ranks(full=(16, 2))
    launcher(ranks)
    statuses, messages = run([spec_of()], tmp_path)
    assert statuses == [Status.OOM, Status.OOM, Status.OK, Status.OK, Status.OK]
    assert ranks.layers == [("reference", 16), ("reference", 2), ("reference", 1), ("ddp", 1), ("ddp", 16)]
    assert any("ran out of memory; on 2 of 16 layers it ran out of memory. 1 configuration is" in m for m in messages)
    report = build(records(tmp_path), title="")
    (own,) = [c for c in report.certificates if not c.proves_only]
    assert (own.valid, own.level) == (True, "proved on 1 of 16 layers")
    failures = {run.run: run.is_failure for run in report.runs if run.status == "oom"}
    assert sorted(failures.values()) == [False, True], "a proof replaced that of the whole"
    # A later command starts nothing, and knows all of it.
    again = Ranks()
    instant = launcher(again)
    assert run([spec_of()], tmp_path)[0] == statuses
    assert instant.submitted == 0


def test_where_nothing_fits_no_run_of_the_whole_is_started(tmp_path: Path, launcher: Launch) -> None:
    ranks = Ranks(full=(16, 2, 1))
    launcher(ranks)
    statuses, _ = run([spec_of()], tmp_path)
    assert statuses == [Status.OOM] * 3 + [Status.INVALID]
    assert ("ddp", 16) not in ranks.layers
    assert "no reduced form of it fits either" in str(whole(tmp_path)["ddp"].error)


def test_who_wants_no_proof_gets_none(tmp_path: Path, launcher: Launch) -> None:
    ranks = Ranks(full=(16,))
    launcher(ranks)
    statuses, messages = run([spec_of(proof=Proof(mode="never", limit_gib=LIMIT_GIB))], tmp_path)
    assert statuses == [Status.OOM, Status.INVALID]
    assert ranks.layers == [("reference", 16), ("ddp", 16)]
    assert not [message for message in messages if message.startswith("proof")]


def test_a_failed_proof_keeps_the_whole_from_starting(tmp_path: Path, launcher: Launch) -> None:
    ranks = Ranks(wrong={"fsdp2": 4})
    launcher(ranks)
    specs = [spec_of(name, proof=Proof(layers=4)) for name in ("ddp", "fsdp2")]
    statuses, _ = run(specs, tmp_path)
    assert statuses == [Status.OK, Status.OK, Status.INVALID, Status.OK, Status.INVALID]
    assert ("fsdp2", 16) not in ranks.layers
    refused = whole(tmp_path)["fsdp2"]
    assert str(refused.error).startswith("not started: not proved on 4 of 16 layers: proof-fsdp2-tiny-2x-r0-")
    assert "loss trajectory" in str(refused.error)
    # Once it is fixed, --resume repeats the proof and then runs the whole.
    fixed = Ranks()
    launcher(fixed)
    assert run(specs, tmp_path, retry=True)[0] == [Status.OK] * 5
    assert fixed.layers == [("fsdp2", 4), ("fsdp2", 16)]


def test_a_mistake_of_the_whole_is_found_beside_two_others(tmp_path: Path, launcher: Launch) -> None:
    launcher(Ranks(wrong={"fsdp2": 16}))
    specs = [spec_of(name, proof=Proof(layers=4)) for name in ("ddp", "fsdp2", "zero:stage=2")]
    run(specs, tmp_path)
    report = build(records(tmp_path), title="")
    assert {r.axes["strategy"]: r.status for r in report.runs if not r.proves_only} == {
        "ddp": "ok",
        "fsdp2": "invalid",
        "zero:stage=2": "ok",
    }
    assert {c.level for c in report.comparisons} == {"proved on 4 of 16 layers"}


# --- sizes ---


@pytest.mark.parametrize(
    ("strategies", "expected"),
    [
        (("ddp",), ["2 of 16 layers", "1 of 16 layers"]),
        (("ddp", "mesh:pp=2"), ["4 of 16 layers", "2 of 16 layers"]),
        (("mesh:pp=2,schedule=zbv",), ["8 of 16 layers", "4 of 16 layers"]),
    ],
)
def test_every_stage_of_a_pipeline_has_layers(strategies: tuple[str, ...], expected: list[str]) -> None:
    members = [spec_of(name, accumulation=8 if "pp" in name else 4, micro_batch=1) for name in strategies]
    assert [to.text for to in proofs.reductions(members)] == expected


def test_sequences_are_shortened_only_after_layers() -> None:
    (member,) = [spec_of(sequence_length=1024, model="tiny:layers=4")]
    texts = [to.text for to in proofs.reductions([member])]
    assert texts == [
        "2 of 4 layers",
        "1 of 4 layers",
        *(f"1 of 4 layers, sequence {length} of 1,024" for length in (512, 256, 128)),
    ]


def test_a_directory_loses_its_last_layers(tmp_path: Path) -> None:
    shape = arithmetic.load(Choice.parse(MODEL))
    (tmp_path / "config.json").write_text(json.dumps(directory.configuration(shape, "float32")))
    member = replace(spec_of(sequence_length=256), model=Choice(str(tmp_path)))
    first = next(iter(proofs.reductions([member])))
    assert first.text == "2 of 16 layers"
    assert str(reduced(member, first).model) == f"{tmp_path}:layers=2"


def test_a_proof_keeps_everything_but_its_sizes() -> None:
    spec = spec_of("mesh:pp=2,layers=12+4,schedule=gpipe", accumulation=4, steps=50, compile=True, max_restarts=2)
    to = reduction_of(spec, layers=4, of_layers=16)
    proof = reduced(spec, to)
    assert (str(proof.model), str(proof.strategy)) == ("tiny:layers=4", "mesh:pp=2,layers=3+1,schedule=gpipe")
    assert (proof.training, proof.topology, proof.global_batch) == (spec.training, spec.topology, spec.global_batch)
    assert (proof.steps, proof.max_restarts) == (20, 0)
    assert proof.work != spec.work
    assert proof.group_work == spec.work
    assert configuration(replace(proof, steps=7)) == configuration(reduced(replace(spec, repeat=3), to))
    other = replace(spec, training=replace(spec.training, checkpointing="full"))
    assert configuration(proof) != configuration(reduced(other, to))
    assert RunSpec.from_dict(proof.to_dict()) == proof


def reduction_of(spec: RunSpec, **sizes: int) -> Reduction:
    length, batch = spec.training.sequence_length, spec.global_batch
    usual = {"layers": 16, "of_layers": 16, "sequence_length": length, "of_sequence_length": length}
    return Reduction(work=spec.work, **{**usual, "global_batch": batch, "of_global_batch": batch, **sizes})


def test_a_request_is_part_of_its_recipe_and_of_no_identity() -> None:
    asked = spec_of(proof=Proof(layers=4, limit_gib=2.0))
    assert (asked.run_id, asked.cell) == (spec_of().run_id, spec_of().cell)
    assert recipe.fields(asked)["proof"] == {"layers": 4, "limit_gib": 2.0}
    assert recipe.fields(spec_of(proof=Proof(mode="never")))["proof"] == "never"
    assert "proof" not in recipe.fields(spec_of())
    assert RunSpec.from_dict(asked.to_dict()) == asked


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"layers": 17}, "proof.layers: got 17, expected at most 16, that of the experiment."),
        ({"layers": 16}, "proof: got 'layers 16', expected at least one size smaller than that of the experiment."),
        (
            {"layers": 3},
            "proof.layers: got 3, expected a multiple of 2, so that each stage of a pipeline has as many layers.",
        ),
        ({"sequence_length": 100}, "proof.sequence_length: got 100, expected at most 64, that of the experiment."),
        ({"global_batch": 3}, "proof.global_batch: got 3, expected a multiple of 2, which mesh:pp=2 needs."),
        (
            {"global_batch": 2},
            "proof: got 'global_batch 2', expected sizes with which mesh:pp=2 works: the schedule 1f1b",
        ),
    ],
)
def test_sizes_that_cannot_be_are_one_sentence(sizes: dict[str, int], said: str, tmp_path: Path) -> None:
    spec = spec_of("mesh:pp=2", accumulation=4, proof=Proof(**sizes))
    with pytest.raises(RequestError) as caught:
        controller.campaign([spec], tmp_path, Watcher())
    assert str(caught.value).startswith(said)
    assert not list(tmp_path.iterdir())


# --- earlier campaigns ---


def test_a_proof_is_computed_once(tmp_path: Path, launcher: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference_cache, "directory", lambda: tmp_path / "kept")
    launcher(Ranks())
    run([spec_of(proof=Proof(layers=4))], tmp_path / "a", cache=True)
    later = Ranks()
    launcher(later)
    # Another name, more steps and other warm-up do not change what a proof computes.
    other = spec_of(proof=Proof(layers=4), experiment="other", steps=10, timeout_s=7.0)
    statuses, messages = run([other], tmp_path / "b", cache=True)
    assert statuses == [Status.OK] * 3
    assert later.layers == [("ddp", 16)]
    assert sum("reused" in message for message in messages) == 2
    notes = build(records(tmp_path / "b"), title="").notes
    assert sum("was reused" in note for note in notes) == 2


def test_proofs_of_other_packages_are_computed_again() -> None:
    """Their code is not part of the name of what is kept."""
    to = reduction_of(spec_of(), layers=4)
    assert reference_cache.is_kept_here(reduced(spec_of(), to))
    assert not reference_cache.is_kept_here(reduced(spec_of("faulty.other_init"), to))
    assert not reference_cache.is_kept_here(spec_of())
