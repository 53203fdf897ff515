"""Memory runs of real processes: what was predicted from the shape is what was held; the frontier is proved."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from testbed import EXHAUSTIVE
from testbed.nursery import command

from paceline.analysis.findings import Report
from paceline.analysis.report import build
from paceline.results import store

pytestmark = pytest.mark.slow

BASE = {
    "device": "cpu",
    "precision": "fp32",
    "model": "small",
    "steps": 3,
    "timeout_s": 300.0,
    "stall_s": 200.0,
    "launcher": "testbed.forked",
}
# Two layers are enough: every operator is counted on real tensors and once more on fake ones, which takes its time.
SMALL = "small:layers=2"
MEMORY = {"workload": "memory", "model": SMALL, "processes": 2, "sequence_length": 64, "micro_batch": 2}
ZERO = ("zero:stage=2", "zero:stage=3") if EXHAUSTIVE else ("zero:stage=2",)
# tests/unit/workloads/memory/test_rehearsal.py has what tp splits.
LAYOUTS = ["tp", "pp", "cp", "cp:attention=ulysses"] if EXHAUSTIVE else ["pp"]
FRONTIER = {"workload": "frontier:limit_gib=0.2,most=32", "strategy": "single", "processes": 1}


Ask = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def ask(environment: Callable[..., dict[str, str]]) -> Ask:
    def paceline(
        verb: str, folder: Path, name: str, base: dict[str, Any], matrix: Any, *more: str, **env: str
    ) -> subprocess.CompletedProcess[str]:
        file = folder / f"{name}.yaml"
        file.write_text(yaml.safe_dump({"name": name, "base": {**BASE, **base}, "matrix": matrix}))
        formats = ("--format", "markdown") if verb == "run" else ()
        return command((verb, str(file), "--out", str(folder), *more, *formats), environment(**env), None, 1500)

    return paceline


def concluded(folder: Path, name: str) -> Report:
    records, skipped = store.read_runs(folder / name)
    assert not skipped
    return build(records, name)


@pytest.fixture(scope="module")
def components(tmp_path_factory: pytest.TempPathFactory, ask: Ask) -> Report:
    folder = tmp_path_factory.mktemp("components")
    matrix = [
        {"strategy": ["ddp", "fsdp2"], "accumulation": [2]},
        {"strategy": list(ZERO), "accumulation": [2], "bucket_mb": [4.0]},
        {"strategy": LAYOUTS, "model": ["tiny-llama"], "accumulation": [2], "sequence_length": [32]},
        # 16-bit arithmetic is emulated on most CPUs: fewer and shorter sequences.
        {
            "strategy": ["fsdp2"],
            "model": ["tiny-llama"],
            "precision": ["bf16"],
            "checkpointing": ["full"],
            "sequence_length": [16],
            "micro_batch": [1],
        },
    ]
    # The search below has its predictions in processes of their own, as users have them.
    done = ask("run", folder, "components", MEMORY, matrix, FORKED_REHEARSALS="1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Memory by component" in done.stdout
    return concluded(folder, "components")


def test_every_peak_was_predicted(components: Report) -> None:
    assert len(components.memory) == 3 + len(ZERO) + len(LAYOUTS)
    for row in components.memory:
        assert row.error_ratio is not None, row.note
        assert abs(row.error_ratio) < 0.02, (row.axes["strategy"], row.error_ratio)


COMPONENTS = ("parameters", "optimizer", "gradients", "activations")


def differing(report: Report) -> list[tuple[Any, str]]:
    """Components of which prediction and measurement are 2 % apart or more."""
    found = []
    for row in report.memory:
        for name in COMPONENTS:
            told, seen = row.predicted[name], row.measured[name]
            assert told is not None
            assert seen, name
            if abs(told / seen - 1) >= 0.02:
                found.append((row.axes["strategy"], name))
    return found


def test_every_component_was_predicted(components: Report) -> None:
    assert not differing(components)


def test_state_is_sharded_as_the_strategy_says(components: Report) -> None:
    rows = {row.axes["strategy"]: row.measured for row in components.memory if row.axes["model"] == SMALL}
    whole = rows["ddp"]["parameters"]
    assert whole is not None
    assert rows["fsdp2"]["parameters"] == whole / 2
    assert rows["zero:stage=2"]["parameters"] == whole
    assert (rows["zero:stage=2"]["optimizer"] or 0) < (rows["ddp"]["optimizer"] or 0)


@pytest.fixture(scope="module")
def search(tmp_path_factory: pytest.TempPathFactory, ask: Ask) -> tuple[Path, subprocess.CompletedProcess[str]]:
    folder = tmp_path_factory.mktemp("search")
    settings = {**FRONTIER, "sequence_length": 512, "micro_batch": 1}
    return folder, ask("run", folder, "search", settings, {})


@pytest.mark.exhaustive
def test_the_limit_lies_between_two_real_probes(search: tuple[Path, Any]) -> None:
    folder, done = search
    (point,) = concluded(folder, "search").frontier
    ended = {probe.micro_batch: probe.status for probe in point.probes}
    assert point.settled
    assert point.largest_fitting is not None
    assert 1 <= point.largest_fitting < 32
    assert ended[point.largest_fitting] == "ok"
    assert ended[point.largest_fitting + 1] == "oom"
    assert point.predicted is not None
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Not ranked" not in done.stdout


@pytest.mark.exhaustive
def test_a_probe_without_room_is_a_sealed_record_with_its_reason(search: tuple[Path, Any]) -> None:
    records, _ = store.read_runs(search[0] / "search")
    without_room = [r for r in records if r.status == "oom"]
    assert without_room
    assert all("memory" in (r.error or "") or "alloc" in (r.error or "") for r in without_room)
    assert all(any(c.source == "predicted" for c in r.components) for r in without_room)


@pytest.mark.exhaustive
def test_a_settled_search_is_not_repeated(
    search: tuple[Path, Any], ask: Ask, living: Callable[[Path], list[str]]
) -> None:
    folder, _ = search
    settings = {**FRONTIER, "sequence_length": 512, "micro_batch": 1}
    before = {path.parent.name: path.stat().st_mtime for path in folder.rglob("status.json")}
    again = ask("run", folder, "search", settings, {})
    assert again.returncode == 0
    assert " ".join(again.stdout.split()).count("already measured") == len(before)  # lines are wrapped
    assert {path.parent.name: path.stat().st_mtime for path in folder.rglob("status.json")} == before
    assert not living(folder)


def test_plan_says_that_more_follows(tmp_path: Path, ask: Ask) -> None:
    done = ask("plan", tmp_path, "planned", {**FRONTIER, "sequence_length": 64}, {})
    assert "to run; more runs may follow" in " ".join(done.stdout.split())


@pytest.mark.exhaustive
def test_what_is_advised_after_out_of_memory_fits_when_it_is_run(tmp_path: Path, ask: Ask) -> None:
    """The limit is real: an allocation beyond it fails as on a full host."""
    limited = {
        "workload": "pretrain:limit_gib=0.35",
        "strategy": "single",
        "processes": 1,
        "sequence_length": 256,
        "micro_batch": 16,
        "steps": 2,
        "warmup": {"minimum": 1, "maximum": 2, "window": 2},
    }
    done = ask("run", tmp_path, "limited", limited, {})
    assert done.returncode == 1, done.stdout + done.stderr
    (advice,) = concluded(tmp_path, "limited").memory_advice
    assert advice.room_bytes == int(0.35 * 2**30)
    assert {each.change for each in advice.alternatives} >= {"checkpointing selective", "checkpointing full"}
    first = advice.fitting[0]
    assert first.change.startswith("micro batch")
    assert first.change in (tmp_path / "limited" / "report.md").read_text()
    settings = [word for setting in first.settings.split() for word in ("--set", setting)]
    ask("run", tmp_path, "limited", limited, {}, *settings)
    records, _ = store.read_runs(tmp_path / "limited")
    ended = {r.spec.training.micro_batch: r.status for r in records if not r.is_reference}
    assert sorted(ended.values()) == ["ok", "oom"], [r.error for r in records]
