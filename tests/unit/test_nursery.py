"""The process that forks the ranks of test runs: one for all, and another when it has died."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import pytest
from testbed import nursery

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


def test_one_that_cannot_begin_is_told_at_once(path: Path, started: Children, golden: object) -> None:
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
