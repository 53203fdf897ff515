"""`pytest -n N` itself: every test is run once and reported as without it, whatever happens to a worker."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

FIRST = """
import os, warnings, pytest

@pytest.fixture(scope="module")
def once():
    return []

def test_passes(once): once.append(1)
def test_shares_what_its_module_has(once): assert once == [1]
def test_fails(): print("what it said"); assert {"a": 1} == {"a": 2}
def test_warns(): warnings.warn("careful")
def test_kills_its_worker(): os.kill(os.getpid(), 9)
def test_follows_in_another_worker(tmp_path): assert tmp_path.is_dir()
@pytest.mark.skip(reason="not today")
def test_is_skipped(): pass
"""
SECOND = "def test_elsewhere(tmp_path): assert tmp_path.is_dir()\n"


def test_every_test_is_reported_once(tmp_path: Path, environment: Callable[..., dict[str, str]]) -> None:
    (tmp_path / "test_first.py").write_text(FIRST)
    (tmp_path / "test_second.py").write_text(SECOND)
    words = (sys.executable, "-m", "pytest", "-p", "conftest", "-n", "2", "-ra", "-p", "no:xdist", str(tmp_path))
    done = subprocess.run(words, cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "2 failed, 5 passed, 1 skipped, 1 warning in" in done.stdout
    assert "what it said" in done.stdout
    assert "test_first.py::test_kills_its_worker - worker w0 ended with exit code -9" in done.stdout.replace("w1", "w0")
    assert "not today" in done.stdout
    assert "UserWarning: careful" in done.stdout
