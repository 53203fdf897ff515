"""Whose error a failed script has, and which exit code `paceline measure` returns for it."""

from __future__ import annotations

import collections
import json
from pathlib import Path

import pytest

from paceline.cli import scripts
from paceline.errors import ScriptError
from paceline.workloads.script import process


def test_the_earliest_error_is_the_cause(tmp_path: Path) -> None:
    """Rank 0 lost its connection because rank 1 had failed; rank 2 was ended without a word."""
    crashes = {0: (12.5, "RuntimeError: Connection closed by peer"), 1: (12.0, "ValueError: a bad batch")}
    for rank, (at_s, error) in crashes.items():
        facts = {"crash": {"at_s": at_s, "error": error, "lines": []}}
        (tmp_path / f"rank-{rank}.facts.json").write_text(json.dumps(facts))
    (tmp_path / "rank-2.facts.json").write_text("{}")
    output = process.Output(1, collections.deque(["the last line"]))
    for rank, words in ((0, "rank 1: ValueError: a bad batch"), (1, "ValueError: a bad batch")):
        with pytest.raises(ScriptError, match=f"^the script ended with exit code 1: {words}$"):
            process.require_success(output, tmp_path, rank)


def test_a_rank_that_calls_exit_is_the_cause_of_the_errors_of_others(tmp_path: Path) -> None:
    left = {"at_s": 12.0, "error": "SystemExit: 23", "lines": [], "by": "sys.exit"}
    lost = {"at_s": 12.5, "error": "RuntimeError: Connection closed by peer", "lines": []}
    output = process.Output(1, collections.deque(["train.py: error: argument --lr: invalid float value: 'x'"]))
    (tmp_path / "rank-1.facts.json").write_text(json.dumps({"crash": left}))
    with pytest.raises(ScriptError, match=r"exit code 1: train\.py: error: argument --lr"):
        process.require_success(output, tmp_path, 1)
    (tmp_path / "rank-0.facts.json").write_text(json.dumps({"crash": lost}))
    with pytest.raises(ScriptError, match=r"exit code 1: rank 1: SystemExit: 23$"):
        process.require_success(output, tmp_path, 0)


# The end of what torchrun printed when its rank 1 was killed.
TORCHRUN = """\
Failures:
[1]:
  rank      : 0 (local_rank: 0)
  exitcode  : -15 (pid: 19026)  (SIGTERM)
  traceback : Signal 15 (SIGTERM) received by PID 19026
-------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-19_01:30:17
  rank      : 1 (local_rank: 1)
  exitcode  : -9 (pid: 19027)  (SIGKILL)
  error_file: <N/A>
=======================================================
"""


@pytest.mark.parametrize(
    ("code", "lines", "error"),
    [
        (1, TORCHRUN, "ended with exit code 1: rank 1 was ended by signal 9 (SIGKILL)"),
        (1, TORCHRUN.replace("-9", "1"), "ended with exit code 1: RuntimeError: Connection reset by peer"),
        (-9, "last words", "was ended by signal 9 (SIGKILL): last words"),
        (-15, "last words", "was ended by signal 15 (SIGTERM): RuntimeError: Connection reset by peer"),
    ],
)
def test_a_killed_rank_is_the_cause_of_the_errors_of_others(code: int, lines: str, error: str, tmp_path: Path) -> None:
    crash = {"at_s": 1.0, "error": "RuntimeError: Connection reset by peer", "lines": []}
    (tmp_path / "rank-0.facts.json").write_text(json.dumps({"crash": crash}))
    with pytest.raises(ScriptError) as failed:
        process.require_success(process.Output(code, collections.deque(lines.splitlines())), tmp_path, 0)
    assert str(failed.value) == f"the script {error}"


@pytest.mark.parametrize(("code", "expected"), [(7, 7), (-9, 137), (-1000, 1128)])
def test_the_exit_code_is_that_of_a_shell(
    code: int, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ScriptError) as failed:
        process.require_success(process.Output(code, collections.deque()), tmp_path, 0)
    record = type("Record", (), {"error": str(failed.value)})
    monkeypatch.setattr("paceline.results.launches.read_experiment", lambda directory: ([record], []))
    assert scripts.script_exit_code(tmp_path) == expected
