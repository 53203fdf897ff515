"""The ranks of one node, with programs that need no torch: variables, order, failures, and what is left afterwards."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from paceline.campaign.run import supervision
from paceline.launchers.node import ranks, torchrun

# What torchrun sets in every rank.
OF_TORCHRUN = {
    *("RANK", "LOCAL_RANK", "ROLE_RANK", "GROUP_RANK", "ROLE_NAME"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_USE_AGENT_STORE"),
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
}
# The store is ready only when all ranks have begun: a runner that prepares it first waits for ever.
RUNNER = """
import sys, time
from pathlib import Path
from paceline.launchers.node import ranks, torchrun
folder, count, command = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
def serve(listener):
    while len(list(folder.glob("began-*"))) < count:
        time.sleep(0.01)
ranks.GRACE_S = 1.0
sys.exit(ranks.run(command, count, torchrun.listen(), serve))
"""
BEGIN = """
import json, os, signal, sys, time
from pathlib import Path
folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
(folder / f"{rank}.json").write_text(json.dumps(dict(os.environ)))
(folder / f"{rank}.pid").write_text(str(os.getpid()))
"""
BEGAN = "(folder / f'began-{rank}').touch()\n"


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts ranks that run this code; whatever is left is killed after the test."""
    begun: list[subprocess.Popen[str]] = []

    def begin(code: str, count: int = 2, before: str = "") -> subprocess.Popen[str]:
        script = tmp_path / "rank.py"
        script.write_text(BEGIN + before + BEGAN + code)
        words = [sys.executable, "-c", RUNNER, str(tmp_path), str(count), str(script), str(tmp_path)]
        env = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        begun.append(subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=env))
        return begun[-1]

    yield begin
    for child in begun:
        child.kill()
        child.communicate()
    for pid in pids(tmp_path):
        if psutil.pid_exists(pid):
            os.kill(pid, signal.SIGKILL)


def pids(folder: Path) -> list[int]:
    return [int(path.read_text()) for path in folder.glob("*.pid") if path.read_text()]


def began(folder: Path, count: int) -> None:
    deadline = time.monotonic() + 60
    while len(list(folder.glob("began-*"))) < count and time.monotonic() < deadline:
        time.sleep(0.02)


def are_gone(folder: Path) -> bool:
    """Whether the ranks end within a minute."""
    left = [psutil.Process(pid) for pid in pids(folder) if psutil.pid_exists(pid)]
    alive = psutil.wait_procs(left, timeout=60)[1]
    return all(process.status() == psutil.STATUS_ZOMBIE for process in alive)


def test_ranks_begin_before_the_store_with_the_variables_of_torchrun(start: Any, tmp_path: Path) -> None:
    assert start("").wait(60) == 0
    seen = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    for rank, environment in enumerate(seen):
        assert set(environment) >= OF_TORCHRUN
        assert {environment[name] for name in ("RANK", "LOCAL_RANK", "ROLE_RANK")} == {str(rank)}
        assert environment["WORLD_SIZE"] == environment["LOCAL_WORLD_SIZE"] == "2"
        assert environment["MASTER_ADDR"] == torchrun.LOOPBACK
        assert environment["OMP_NUM_THREADS"] == "1", "as torchrun, for several ranks"
    assert len({environment["MASTER_PORT"] for environment in seen}) == 1


def test_one_rank_keeps_its_number_of_threads(start: Any, tmp_path: Path) -> None:
    assert start("", count=1).wait(60) == 0
    assert "OMP_NUM_THREADS" not in json.loads((tmp_path / "0.json").read_text())


def test_a_failed_rank_is_reported_and_ends_the_others(start: Any, tmp_path: Path) -> None:
    runner = start("time.sleep(600) if rank else sys.exit(7)\n", count=3)
    _, report = runner.communicate(timeout=60)
    assert runner.returncode == 1
    assert supervision._deaths(SimpleNamespace(outcomes=[], log=report)) == {0: 7}  # type: ignore[arg-type]
    assert are_gone(tmp_path)


@pytest.mark.parametrize("deaf", [False, True])
def test_asked_to_end_it_ends_its_ranks(start: Any, tmp_path: Path, deaf: bool) -> None:
    ignore = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" if deaf else ""
    runner = start("time.sleep(600)\n", before=ignore)
    began(tmp_path, 2)
    runner.terminate()
    assert runner.wait(60) == 128 + signal.SIGTERM
    assert are_gone(tmp_path)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child that its parent died")
def test_ranks_do_not_outlive_a_runner_that_is_killed(start: Any, tmp_path: Path) -> None:
    runner = start("time.sleep(600)\n")
    began(tmp_path, 2)
    runner.kill()
    runner.wait(60)
    assert are_gone(tmp_path)


def test_what_a_rank_started_ends_with_it(start: Any, tmp_path: Path) -> None:
    child = "import subprocess\nown = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
    child += "(folder / f'child-{rank}.pid').write_text(str(own.pid))\n"
    runner = start("time.sleep(600)\n", before=child)
    began(tmp_path, 2)
    runner.terminate()
    runner.wait(60)
    assert len(pids(tmp_path)) == 4
    assert are_gone(tmp_path)


def test_several_nodes_are_left_to_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its agents wait for each other at the end."""
    from torch.distributed import run

    called: list[list[str]] = []
    monkeypatch.setattr(run, "main", called.append)
    monkeypatch.setattr(ranks, "run", lambda *_: pytest.fail("the ranks of one node"))
    torchrun.main(["torchrun", "--nnodes=2", "--node-rank=1", "--nproc-per-node=4", "-m", "module"])
    assert called[0][-4:] == ["--nnodes=2", "--nproc-per-node=4", "-m", "module"]
