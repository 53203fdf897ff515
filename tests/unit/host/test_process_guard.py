"""Whatever a guarded command leaves behind ends with it, and nothing is started for a parent that is gone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from paceline.host import process_guard, processes

# Leaves a process that is in a session of its own, has lost its parent and does not listen.
ORPHANS = """
import os, signal, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        open(sys.argv[1] + ".new", "w").write(str(os.getpid()))
        os.rename(sys.argv[1] + ".new", sys.argv[1])
        time.sleep(600)
    os._exit(0)
os.wait()
if sys.argv[2] == "stays":
    time.sleep(600)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
"""


def orphan_of(file: Path) -> int:
    end = time.monotonic() + 60
    while not file.exists():
        assert time.monotonic() < end, "the command did not start"
        time.sleep(0.02)
    return int(file.read_text())


def test_an_orphan_of_a_command_that_ended_is_ended(tmp_path: Path) -> None:
    file = tmp_path / "orphan"
    done = subprocess.run(
        process_guard.command([sys.executable, "-c", ORPHANS, str(file), "ends"]), timeout=120, check=False
    )
    assert done.returncode == 0
    assert not psutil.pid_exists(orphan_of(file))


def test_a_polite_end_takes_everything_along(tmp_path: Path) -> None:
    file = tmp_path / "orphan"
    with subprocess.Popen(process_guard.command([sys.executable, "-c", ORPHANS, str(file), "stays"])) as guarded:
        orphan = orphan_of(file)
        guarded.send_signal(signal.SIGTERM)
        assert guarded.wait(120) == 0
    assert not psutil.pid_exists(orphan)


def test_nothing_is_started_for_a_parent_that_is_gone(tmp_path: Path) -> None:
    file = tmp_path / "started"
    argv = process_guard.command([sys.executable, "-c", f"open({str(file)!r}, 'w')"])
    argv[argv.index(str(os.getpid()))] = str(2**22 + 1)
    assert subprocess.run(argv, timeout=120, check=False).returncode == 0
    assert not file.exists()


def test_a_child_whose_end_cannot_be_seen_is_not_waited_for_without_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal that interrupts Popen.poll at the wrong moment leaves its lock taken; then no wait sees the end."""
    monkeypatch.setattr(processes, "GRACE_S", 0.2)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    child._waitpid_lock.acquire()  # type: ignore[attr-defined]
    try:
        assert not processes.end_all(child)
    finally:
        child._waitpid_lock.release()  # type: ignore[attr-defined]
    assert processes.end_all(child)
    assert child.returncode == -signal.SIGTERM
