"""Ranks forked from a warm process do the same work as new interpreters, and the record says which they were."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from testbed import EXHAUSTIVE

from paceline.launchers import local
from paceline.launchers._warm import Kind
from paceline.results import store
from paceline.results.records import RunRecord

pytestmark = pytest.mark.slow

FORKED, TORCHRUN = "local", "local:warm=false"
STRATEGIES = ("ddp", "zero:stage=3")
# Starting torchrun takes longest. The campaign over SSH certifies DDP that it started.
COMPARED = "zero:stage=3"


@pytest.fixture(scope="module")
def both(campaign: Callable[..., Any]) -> Any:
    matrix = [{"strategy": list(STRATEGIES), "launcher": [FORKED]}, {"strategy": [COMPARED], "launcher": [TORCHRUN]}]
    return campaign("both", matrix, global_batch=4)


def losses(record: RunRecord) -> dict[tuple[int, int], tuple[float, float | None, int]]:
    return {(s.rank, s.step): (s.loss, s.grad_norm, s.data_digest) for s in record.steps}


@pytest.mark.exhaustive
def test_both_ways_of_starting_give_the_same_trajectory_and_certificate(both: Any) -> None:
    assert both.code == 0, both.stdout + both.stderr
    forked, started = (both.record(COMPARED, launcher=launcher) for launcher in (FORKED, TORCHRUN))
    assert losses(forked) == losses(started), "to the last bit"
    assert len(losses(forked)) == 2 * forked.spec.steps
    certificates = {c["run"]: c for c in both.report["certificates"]}
    assert all(certificates[record.spec.run_id]["valid"] for record in (forked, started))
    assert forked.spec.work == started.spec.work
    assert forked.spec.cell != started.spec.cell


@pytest.mark.exhaustive
def test_the_record_says_how_ranks_were_started(both: Any) -> None:
    runs = [*((strategy, FORKED, "forked") for strategy in STRATEGIES), (COMPARED, TORCHRUN, "torchrun")]
    for strategy, launcher, ranks in runs:
        record = both.record(strategy, launcher=launcher)
        assert store.read_json(Path(record.path) / store.JOB)["handle"]["ranks"] == ranks
        for outcome in record.outcomes:
            assert outcome.evidence is not None
            assert outcome.evidence.settings.get("started") == ("forked" if ranks == "forked" else None)


@pytest.mark.exhaustive
def test_nothing_is_left_of_a_campaign(both: Any, living: Callable[[Path], list[str]]) -> None:
    assert living(both.out) == []


def test_a_warm_process_serves_many_runs_and_another_follows_one_that_died(
    make_spec: Callable[..., Any], tmp_path: Path, eventually: Callable[..., Any]
) -> None:
    def finished(number: int, **env: str) -> tuple[int, int | None]:
        spec = make_spec("ddp", 1, experiment=f"e{number}", env=env)
        handle = local.submit(local.prepare(spec, store.create(tmp_path, spec)))
        eventually(lambda: not local.poll(handle).running, "the end of the run")
        local.cancel(handle)
        return handle["pid"], local.poll(handle).exit_code

    try:
        first, second = finished(1), finished(2)
        assert first == second, "the same process"
        assert first[1] == 0
        if EXHAUSTIVE:
            other = finished(4, NCCL_ALGO="Ring")
            assert other[0] != first[0], "imports may have read the variable, so its ranks are of another process"
            (machine,) = store.read_machines(next((tmp_path / "e4").iterdir()))
            assert machine["environment"]["NCCL_ALGO"] == "Ring"
            assert other[1] == 0
            first = finished(5)
            (machine,) = store.read_machines(next((tmp_path / "e5").iterdir()))
            assert "NCCL_ALGO" not in machine["environment"]
        (imported,) = psutil.Process(first[0]).children()
        os.kill(first[0], signal.SIGKILL)
        assert psutil.wait_procs([imported], 60)[1] == [], "what has made the imports ends with it"
        third = finished(3)
        assert third[0] != first[0]
        assert third[1] == 0
        (imported,) = psutil.Process(third[0]).children()
        imported.kill()
        eventually(lambda: local._warm._warm[Kind()].process.poll() is not None, "the end of both")
        assert local._warm._warm[Kind()].process.poll() == -signal.SIGKILL
    finally:
        local.close()
    assert not psutil.pid_exists(third[0])


# Starts a thread in every interpreter that imports the worker.
HASTY = """
import sys, threading
class Hasty:
    def find_spec(self, name, *_):
        if name == "paceline.workloads.worker":
            threading.Thread(target=threading.Event().wait, daemon=True).start()
sys.meta_path.insert(0, Hasty())
"""


@pytest.fixture
def ended(
    make_spec: Callable[..., Any], tmp_path: Path, eventually: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., tuple[int | None, dict[str, Any], str]]]:
    """Submits a run; its exit code, the settings of its evidence and its log. settings: those of its job to replace."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, sys.path)]))

    def run(strategy: str = "ddp", processes: int = 1, **settings: Any) -> tuple[int | None, dict[str, Any], str]:
        spec = make_spec(strategy, processes)
        run_dir = store.create(tmp_path / "out", spec)
        job = local.prepare(spec, run_dir)
        handle = local.submit(replace(job, settings={**job.settings, **settings}))
        eventually(lambda: not local.poll(handle).running, "the end of the run")
        seen = [o.evidence.settings for o in store.read_outcomes(run_dir) if o.evidence is not None]
        return local.poll(handle).exit_code, dict(seen[0]) if seen else {}, (run_dir / "log.txt").read_text()

    yield run
    local.close()


def test_ranks_are_new_interpreters_if_they_cannot_be_forked(ended: Callable[..., Any], tmp_path: Path) -> None:
    """The run takes place, and its record says why it was started so."""
    (tmp_path / "sitecustomize.py").write_text(HASTY)
    why = "2 threads run after the imports, and only one survives a fork"
    code, settings, log = ended(processes=2)
    assert code == 0, log
    assert "started" not in settings
    assert settings["not_forked"] == why
    assert f"paceline: ranks are new interpreters, not forked: {why}" in log


def test_imports_that_make_a_process_unfit_are_left_to_the_ranks(ended: Callable[..., Any]) -> None:
    code, settings, log = ended("testbed.hasty")
    assert code == 0, log
    assert settings["started"] == "forked"
    assert "paceline: not imported before the ranks start: 2 threads run after the imports" in log


def test_the_compiler_of_torch_can_be_imported_before_ranks_of_a_gpu_are_forked(ended: Callable[..., Any]) -> None:
    """The warm process of a GPU, whose ranks train on the CPU here."""
    code, settings, log = ended(device="cuda", modules=local.COMPILER)
    assert code == 0, log
    assert settings["started"] == "forked"
    assert "not imported" not in log


def test_new_interpreters_in_place_of_forked_ranks_can_be_cancelled(
    make_spec: Callable[..., Any], tmp_path: Path, eventually: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With all of their processes, also those that ignore SIGTERM."""
    (tmp_path / "sitecustomize.py").write_text(HASTY)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, sys.path)]))
    spec = make_spec("ddp", 1)
    run_dir = store.create(tmp_path / "out", spec)
    waits = "import os, signal, time; signal.signal(15, signal.SIG_IGN); print(os.getpid()); time.sleep(600)"
    job = replace(local.prepare(spec, run_dir), argv=(sys.executable, "-uc", waits))
    try:
        handle = local.submit(job)
        log = run_dir / "log.txt"
        pid = int(
            eventually(lambda: [line for line in log.read_text().split("\n") if line.isdecimal()], "its start")[0]
        )
        assert local.poll(handle).running
        assert local.cancel(handle)
        assert not psutil.pid_exists(pid)
        assert not local.poll(handle).running
    finally:
        local.close()
