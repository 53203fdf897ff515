"""A reference is reused only if everything that its numbers depend on is equal, and the report says so."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.analysis.report import build
from paceline.campaign.run import reference_cache
from paceline.campaign.run.references import reference_of
from paceline.experiment.spec import RunSpec
from paceline.results import sealing, store
from paceline.results.records import Status

FACTS = {"versions": {"torch": "2.13.0"}, "environment": {"OMP_NUM_THREADS": "1"}, "machine": ["arm", "N1", [], "", ""]}


@pytest.fixture(autouse=True)
def known_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(reference_cache, "_machine_class", lambda: copy.deepcopy(FACTS))
    monkeypatch.setattr(reference_cache, "_source", lambda: "a")


@pytest.fixture
def kept(make_spec: Callable[..., RunSpec], make_run: Callable[..., Path], tmp_path: Path) -> RunSpec:
    """A reference that a campaign has kept."""
    spec = reference_of(make_spec("ddp"))
    reference_cache.keep(spec, make_run(tmp_path / "first", spec))
    return spec


def test_an_equal_request_reuses_the_files_in_an_experiment_of_another_name(kept: RunSpec, tmp_path: Path) -> None:
    spec = replace(kept, experiment="other", timeout_s=7.0)
    found = reference_cache.reuse(spec, tmp_path / "second")
    assert found is not None
    record = store.read_run(tmp_path / "second" / "other" / spec.run_id)
    assert record.reused
    assert (record.spec.experiment, record.spec.timeout_s) == ("other", 7.0)
    assert list(record.steps) == list(found.steps) != []
    (note,) = [note for note in build([record], title="").notes if "reused" in note]
    assert "1 reference was reused, computed on 1970-01-01" in note


def changed_request(spec: RunSpec, name: str) -> RunSpec:
    training = spec.training
    changes: dict[str, dict[str, Any]] = {
        "model": {"model": replace(spec.model, options={"layers": 1})},
        "seed": {"seed": spec.seed + 1},
        "steps": {"steps": spec.steps + 1},
        "data": {"training": replace(training, data=replace(training.data, options={"zipf": 2.0}))},
        "contents of files": {"contents": {"data": "0f"}},
        "precision": {"training": replace(training, precision=replace(training.precision, compute="bf16"))},
        "sequence length": {"training": replace(training, sequence_length=64)},
        "micro batch": {"training": replace(training, micro_batch=2)},
        "device": {"topology": replace(spec.topology, device="cuda")},
        "threads": {"launcher": replace(spec.launcher, options={"threads": 2})},
        "variants": {"workload": replace(spec.workload, options={**spec.workload.options, "variants": 4})},
    }
    return replace(spec, **changes[name])


REQUESTS = ("model", "seed", "steps", "data", "contents of files", "precision", "sequence length", "micro batch")


@pytest.mark.parametrize("name", [*REQUESTS, "device", "threads", "variants"])
def test_every_part_of_the_request_counts(kept: RunSpec, name: str) -> None:
    assert reference_cache.find(kept) is not None
    assert reference_cache.find(changed_request(kept, name)) is None


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("versions", {"torch": "2.13.1"}),
        ("environment", {"OMP_NUM_THREADS": "2"}),
        ("machine", ["arm", "N2", [], "", ""]),
        ("machine", ["arm", "N1", ["H200 9.0"], "", ""]),
        ("machine", ["arm", "N1", [], "580.1", ""]),
    ],
)
def test_software_variables_and_the_class_of_machine_count(
    kept: RunSpec, monkeypatch: pytest.MonkeyPatch, part: str, value: Any
) -> None:
    monkeypatch.setattr(reference_cache, "_machine_class", lambda: {**FACTS, part: value})
    assert reference_cache.find(kept) is None


def test_the_code_of_paceline_counts(kept: RunSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference_cache, "_source", lambda: "b")
    assert reference_cache.find(kept) is None


def test_a_damaged_one_is_computed_again(kept: RunSpec, tmp_path: Path) -> None:
    (samples,) = reference_cache.directory().rglob("samples-0.jsonl")
    samples.write_text(samples.read_text().replace("5.5", "5.6"))
    assert reference_cache.find(kept) is None
    assert reference_cache.reuse(kept, tmp_path / "second") is None
    assert not (tmp_path / "second").exists()


def test_only_references_that_ended_ok_on_this_host_are_kept(
    make_spec: Callable[..., RunSpec], make_run: Callable[..., Path], tmp_path: Path
) -> None:
    run, failed = make_spec("ddp"), reference_of(make_spec("ddp"))
    elsewhere = reference_of(make_spec("ddp", launcher="slurm"))
    reference_cache.keep(run, make_run(tmp_path, run))
    reference_cache.keep(failed, make_run(tmp_path, failed, Status.FAILED, "it failed"))
    reference_cache.keep(elsewhere, make_run(tmp_path, elsewhere))
    assert not reference_cache.directory().exists()


def test_the_oldest_are_removed(
    kept: RunSpec, make_run: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference_cache, "MOST_KEPT", 1)
    newer = replace(kept, seed=kept.seed + 1)
    reference_cache.keep(newer, make_run(tmp_path / "first", newer))
    assert reference_cache.find(kept) is None
    assert reference_cache.find(newer) is not None


def test_a_state_directory_that_cannot_be_written_costs_only_time(
    make_spec: Callable[..., RunSpec], make_run: Callable[..., Path], tmp_path: Path
) -> None:
    (tmp_path / "state").write_text("a file")
    spec = reference_of(make_spec("ddp"))
    reference_cache.keep(spec, make_run(tmp_path / "first", spec))
    assert reference_cache.find(spec) is None


def test_the_seal_of_a_reused_reference_covers_its_files(kept: RunSpec, tmp_path: Path) -> None:
    reference_cache.reuse(kept, tmp_path)
    files = sealing.read(tmp_path / kept.experiment / kept.run_id)["files"]
    assert {"spec.json", "samples-0.jsonl", "outcome-0.json"} <= files.keys()
