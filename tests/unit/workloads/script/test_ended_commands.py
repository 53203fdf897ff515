"""A command ends with the process that started it, however that ends: real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.host.processes import is_running

# A launcher whose rank has a session of its own, as torchrun's have, and which passes SIGTERM on to it.
LAUNCHER = """
import os, signal, subprocess, sys
rank = subprocess.Popen([sys.executable, "-c", sys.argv[1]], start_new_session=True)
signal.signal(signal.SIGTERM, lambda *_: (rank.terminate(), sys.exit(1)))
with open("pids.part", "w") as file:
    file.write(f"{os.getpid()} {rank.pid}")
os.rename("pids.part", "pids")
rank.wait()
"""
RANK = "import time; time.sleep(600)"
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
WORKER = """
import os, sys
from paceline.workloads.script import process

class Reader:
    def read(self):
        pass

process.run_command([sys.executable, *sys.argv[1:]], dict(os.environ), Reader())
"""


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize(("how", "rank"), [(signal.SIGTERM, RANK), (signal.SIGTERM, STUBBORN), (signal.SIGKILL, RANK)])
def test_ranks_of_a_command_end_with_its_worker(how: signal.Signals, rank: str, tmp_path: Path) -> None:
    (tmp_path / "launcher.py").write_text(LAUNCHER)
    worker = subprocess.Popen([sys.executable, "-c", WORKER, "launcher.py", rank], cwd=tmp_path)
    pids: list[int] = []
    try:
        until((tmp_path / "pids").exists)
        pids = [int(word) for word in (tmp_path / "pids").read_text().split()]
        until(lambda: rank is not STUBBORN or ignores_sigterm(pids[1]))
        worker.send_signal(how)
        assert worker.wait(60) == (-how if how is signal.SIGKILL else 128 + how)
        until(lambda: not any(is_alive(pid) for pid in pids))
    finally:
        for pid in (worker.pid, *pids):
            if is_running(pid):
                os.kill(pid, signal.SIGKILL)
        worker.wait()


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and that nobody waits for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def ignores_sigterm(pid: int) -> bool:
    ignored = Path(f"/proc/{pid}/status").read_text().split("SigIgn:")[1].split()[0]
    return bool(int(ignored, 16) >> (signal.SIGTERM - 1) & 1)
