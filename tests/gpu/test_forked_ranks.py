"""Ranks on the GPU that were forked from a warm process do the work of new interpreters, which run if a fork fails."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from paceline.campaign.run.controller import campaign
from paceline.experiment import expansion
from paceline.launchers import local
from paceline.results import store
from paceline.results.records import RunRecord, Status

EXPERIMENT = """
name: warm
base: {device: cuda, model: tiny-llama, precision: fp32, sequence_length: 128, micro_batch: 2, accumulation: 2,
       steps: 8, warmup: {minimum: 2, maximum: 4, window: 2}, timeout_s: 240, stall_s: 120, rank: 8,
       data: "instructions:mean=80"}
matrix:
  - {strategy: [ddp], data: [synthetic], processes: [1], compile: [false, true],
     launcher: ["local", "local:warm=false"]}
  - {strategy: [fsdp2], data: [synthetic], processes: [2],
     launcher: ["local:shared_gpu=true", "local:shared_gpu=true,warm=false"]}
  - {strategy: ["zero:stage=1"], data: [synthetic], processes: [1]}
  - {workload: [finetune], method: [lora], strategy: [single], processes: [1]}
"""
WAYS = ("ddp", "ddp compiled", "fsdp2")
# Starts CUDA wherever the worker is imported: with a context, or as `torch.cuda.is_available` does.
STARTS_CUDA = """
import sys
class Hasty:
    def find_spec(self, name, *_):
        if name == "paceline.workloads.worker":
            import torch
            {call}
sys.meta_path.insert(0, Hasty())
"""


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory, remember: Any) -> dict[tuple[str, bool], RunRecord]:
    """By what they train and whether they are forked."""
    folder = tmp_path_factory.mktemp("warm")
    (folder / "warm.yaml").write_text(EXPERIMENT)
    campaign(expansion.load(str(folder / "warm.yaml")), folder, remember)
    runs, skipped = store.read_runs(folder / "warm")
    assert not skipped
    found = {}
    for run in (run for run in runs if not run.proves_only):
        name = run.spec.workload.name if run.spec.tuning else run.spec.strategy.name if run.spec.strategy else ""
        name += " compiled" if run.spec.training.compile else ""
        found[name, bool(run.spec.launcher.options.get("warm", True))] = run
    return found


def settings_of(record: RunRecord) -> dict[str, Any]:
    assert record.evidence is not None
    return dict(record.evidence.settings)


def log_of(record: RunRecord) -> str:
    return (Path(record.path) / "log.txt").read_text()


@pytest.mark.parametrize("name", [*WAYS, "zero", "finetune"])
def test_forked_ranks_are_certified(name: str, records: dict[tuple[str, bool], RunRecord]) -> None:
    record = records[name, True]
    assert (record.status, record.error) == (Status.OK, None), log_of(record)
    assert settings_of(record).get("not_forked") is None
    assert settings_of(record)["started"] == "forked"


def test_what_compiled_runs_import_starts_no_cuda(records: dict[tuple[str, bool], RunRecord]) -> None:
    """Else they are forked from the process that has torch alone, as fine-tuning is where transformers starts a
    thread."""
    assert "not imported before the ranks start" not in log_of(records["ddp compiled", True])


@pytest.mark.parametrize("name", WAYS)
def test_new_interpreters_do_the_same_work(name: str, records: dict[tuple[str, bool], RunRecord]) -> None:
    forked, fresh = records[name, True], records[name, False]
    assert (fresh.status, fresh.error) == (Status.OK, None)
    assert "started" not in settings_of(fresh)
    losses = [{(s.rank, s.step): s.loss for s in record.steps} for record in (forked, fresh)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    peaks = [[m.allocated_bytes for m in record.memory if m.moment == "steps"] for record in (forked, fresh)]
    assert peaks[0] == pytest.approx(peaks[1], rel=0.01)
    # Any rank may have described the machine; each has a NCCL_HOSTID of its own.
    variables = [{**record.machines[0]["environment"], "NCCL_HOSTID": ""} for record in (forked, fresh)]
    assert variables[0] == variables[1]
    assert [o.evidence and o.evidence.neighbours for o in forked.outcomes] == [
        o.evidence and o.evidence.neighbours for o in fresh.outcomes
    ]


@pytest.fixture
def submitted(make_spec: Callable[..., Any], tmp_path: Path) -> Iterator[Callable[..., tuple[Path, Any]]]:
    """Submits a run and returns its directory and handle."""

    def submit(processes: int = 1, **more: Any) -> tuple[Path, Any]:
        shared = "local:shared_gpu=true" if processes > 1 else "local"
        spec = make_spec("ddp", processes, device="cuda", launcher=shared, **more)
        run_dir = store.create(tmp_path / "out", spec)
        return run_dir, local.submit(local.prepare(spec, run_dir))

    yield submit
    local.close()


def wait_until(condition: Callable[[], Any], limit_s: float = 240.0) -> None:
    """The limit is a guard against hanging tests, not a criterion."""
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.1)


@pytest.mark.parametrize("call", ["torch.cuda.init()", "torch._C._cuda_getDeviceCount()"])
def test_ranks_are_new_interpreters_if_the_imports_start_cuda(
    call: str, submitted: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(STARTS_CUDA.format(call=call))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, sys.path)]))
    run_dir, handle = submitted()
    wait_until(lambda: not local.poll(handle).running)
    log = (run_dir / "log.txt").read_text()
    assert local.poll(handle).exit_code == 0, log
    (outcome,) = store.read_outcomes(run_dir)
    assert outcome.evidence is not None
    assert "started" not in outcome.evidence.settings
    assert "CUDA does not survive a fork" in str(outcome.evidence.settings["not_forked"])


def test_a_killed_rank_ends_the_others(submitted: Callable[..., Any]) -> None:
    run_dir, handle = submitted(2, steps=100_000)
    wait_until(lambda: [p.step for p in store.read_progress(run_dir) if p.step > 2][1:])
    pids = [position.pid for position in store.read_progress(run_dir)]
    os.kill(pids[1], signal.SIGKILL)
    wait_until(lambda: not local.poll(handle).running)
    assert local.poll(handle).exit_code == 1
    assert f"exitcode  : -9 (pid: {pids[1]})" in (run_dir / "log.txt").read_text()
    assert not any(psutil.pid_exists(pid) for pid in pids)
