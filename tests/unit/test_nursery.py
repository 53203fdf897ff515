"""The process that forks the ranks of test runs: one for all, and another when it has died."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import psutil
import pytest
from testbed import nursery
from testbed.waiting import until

# Serves as a nursery does, but imports nothing and forks nobody.
STAND_IN = """
import socket, sys
listening = socket.socket(socket.AF_UNIX)
listening.bind(sys.argv[1])
listening.listen()
while True:
    listening.accept()
"""
Children = list["subprocess.Popen[bytes]"]


@pytest.fixture
def path() -> Iterator[Path]:
    """Names of sockets must be short."""
    with tempfile.TemporaryDirectory(prefix="nursery-") as folder:
        yield Path(folder) / "x.sock"


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[Children]:
    found: Children = []

    def begun(path: Path, kind: str, env: Mapping[str, str], log: IO[bytes]) -> subprocess.Popen[bytes]:
        code = "raise SystemExit(3)" if kind == "broken" else STAND_IN
        found.append(subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=log, stderr=log))
        return found[-1]

    monkeypatch.setattr(nursery, "_begun", begun)
    yield found
    for child in found:
        child.kill()
        child.wait()


def test_runs_share_one_until_it_dies(path: Path, started: Children) -> None:
    for _ in range(2):
        nursery._connected(path, "kind", {}).close()
    assert len(started) == 1
    started[0].kill()
    started[0].wait()
    assert path.exists(), "what it leaves refuses every connection"
    nursery._connected(path, "kind", {}).close()
    assert len(started) == 2


def test_a_process_that_cannot_start_is_reported_at_once(path: Path, started: Children, golden: object) -> None:
    with pytest.raises(ChildProcessError) as caught:
        nursery._connected(path, "broken", {})
    assert str(caught.value) == golden
    assert len(started) == 1


def test_only_what_is_read_while_importing_makes_another_nursery() -> None:
    before = nursery._mark("kind", {})
    assert nursery._mark("kind", {"XDG_STATE_HOME": "/elsewhere"}) == before
    assert nursery._mark("kind", {"OMP_NUM_THREADS": "7"}) != before


def test_a_command_is_a_process_of_its_own(paceline: Any, tmp_path: Path) -> None:
    (tmp_path / "wrong.yaml").write_text("name: wrong\nbase: 3\n")
    done = paceline("plan", "wrong.yaml", cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith("paceline: wrong.yaml")
    assert paceline("list", "models").stdout.startswith("tiny ")


PROGRAM = """
import os, sys, time
os.write(int(sys.argv[1]), b"%d" % os.getpid())
if sys.argv[2] == "killed":
    os.kill(os.getpid(), 9)
if sys.argv[2] == "wait":
    time.sleep(3600)
print(sys.stdin.readline(), "as", __name__)
sys.exit(7)
"""


def test_a_program_has_the_files_and_the_end_of_whoever_asks(paceline: Any, environment: Any, tmp_path: Path) -> None:
    """The nursery runs it as __main__ in another process, which ends as the one that asks does, and with it."""
    (tmp_path / "told.py").write_text(PROGRAM)
    reader, writer = os.pipe()

    def ask(what: str) -> tuple[subprocess.Popen[str], int]:
        words = ("start", "-u", "-m", "told", str(writer), what)
        asking = subprocess.Popen(
            [sys.executable, "-m", "testbed.nursery", *words],
            env=environment(PYTHONPATH=str(tmp_path)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=[writer],
        )
        program = int(os.read(reader, 99))
        assert program != asking.pid
        return asking, program

    try:
        answered, _ = ask("answer")
        assert (answered.communicate("asked")[0], answered.returncode) == ("asked as __main__\n", 7)
        killed, _ = ask("killed")
        assert killed.wait() == -signal.SIGKILL
        left, program = ask("wait")
        waiting = psutil.Process(program)
        left.kill()
        left.communicate()
        waiting.wait(60)
    finally:
        os.close(reader)
        os.close(writer)


def test_whoever_asks_for_a_run_ends_after_its_ranks(environment: Any, tmp_path: Path) -> None:
    """Its end is waited for before a run is sealed: a rank that still writes would damage the record."""
    sleep = "import os, pathlib, time\n\ndef sleep(rank):\n    pathlib.Path(f'{os.getpid()}.rank').touch()\n"
    (tmp_path / "sleeper.py").write_text(f"{sleep}    time.sleep(3600)\n")
    (tmp_path / "run.call").write_text("sleeper sleep 2")
    command = [sys.executable, "-m", "testbed.nursery", "run", "1", str(tmp_path / "run.call")]
    asking = subprocess.Popen(command, cwd=tmp_path, env=environment(PYTHONPATH=str(tmp_path)))
    until(lambda: len(list(tmp_path.glob("*.rank"))) == 2, "the start of both ranks")
    asking.terminate()
    assert asking.wait() == 1
    assert not any(psutil.pid_exists(int(path.stem)) for path in tmp_path.glob("*.rank"))
