"""Failures are results: each way a run can end badly is a sealed record with a sentence; nothing keeps running."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.results import store

pytestmark = pytest.mark.slow

# how -> status, words of the sentence
TROUBLES = {
    "oom": ("oom", ("rank 1", "CUDA out of memory. Tried to allocate 20.00 GiB")),
    "raise": ("failed", ("rank 1", "ValueError: made up by a test")),
    # Rank 1's loss is no number at step 2; through the gradients every rank's is at step 3, and any may say so first.
    "nan": ("invalid", ("the loss is nan at step",)),
    "kill": ("failed", ("rank 1", "killed by signal 9")),
    "exit": ("failed", ("rank 1", "exit code 7")),
}
# A rank that leaves no outcome is reported by torchrun or by the supervisor of forked ranks.
DEADLY = ("kill", "exit")
TORCHRUN, FORKED = "local:warm=false", "local"


SHARED = "testbed.forked"
CASES = [(how, launcher) for how in TROUBLES for launcher in ((TORCHRUN, FORKED) if how in DEADLY else (SHARED,))]


@pytest.fixture(scope="module")
def troubled(campaign: Callable[..., Any]) -> Any:
    told = [f"faulty.trouble:how={how}" for how in TROUBLES if how not in DEADLY]
    dead = [f"faulty.trouble:how={how}" for how in DEADLY]
    matrix = [{"strategy": told}, {"strategy": dead, "launcher": [TORCHRUN, FORKED]}]
    return campaign("troubles", matrix, global_batch=4)


@pytest.mark.parametrize(("how", "launcher"), CASES)
def test_a_failure_is_a_sealed_record_with_a_sentence(troubled: Any, how: str, launcher: str) -> None:
    status, words = TROUBLES[how]
    record = troubled.record(f"faulty.trouble:how={how}", launcher=launcher)
    assert record.status == status, record.error
    assert all(word in record.error for word in words), record.error
    assert "\n" not in record.error
    assert {s.step for s in record.steps} >= {0}, "the steps before the trouble are kept"


def test_failures_stand_in_the_report_and_in_the_exit_code(troubled: Any) -> None:
    assert troubled.code == 1
    assert "Traceback" not in troubled.stdout + troubled.stderr
    text = (troubled.directory / "report.md").read_text()
    for how, launcher in CASES:
        status, words = TROUBLES[how]
        finding = troubled.finding(troubled.record(f"faulty.trouble:how={how}", launcher=launcher))
        assert finding["status"] == status
        assert words[-1] in finding["reason"]
        assert words[-1] in text.replace("\\", "")
    assert troubled.report["measurements"] == []


def test_no_process_outlives_a_failed_run(troubled: Any, living: Callable[[Path], list[str]]) -> None:
    assert living(troubled.out) == []


def test_a_second_run_repeats_nothing_and_resume_repeats_what_failed(troubled: Any, paceline: Any) -> None:
    file = troubled.out / "troubles.yaml"
    command = ("run", str(file), "--out", str(troubled.out), "--format", "json")
    again = paceline(*command)
    assert again.returncode == 1
    assert again.stdout.count("already measured") == len(CASES) + 1
    # The reference runs on the launcher of one of the cells; with another launcher it would be another run.
    reference = troubled.record(None)
    victim = next(r for r in troubled.records if not r.is_reference and r.spec.launcher == reference.spec.launcher)
    settings = ("--set", f"strategy={victim.spec.strategy}", "--set", f"launcher={victim.spec.launcher}")
    retried = paceline(*command, "--resume", *settings)
    assert retried.stdout.count("already measured") == 1, "the reference, which was ok"
    record = troubled.record(str(victim.spec.strategy), launcher=str(victim.spec.launcher))
    assert record.status == victim.status
    assert (Path(record.path) / "attempts" / "1" / "status.json").is_file()


@pytest.fixture(scope="module")
def limited(campaign: Callable[..., Any]) -> Any:
    """One rank sleeps for ever; once only the time-out is noticed (forked ranks), once the stall is (torchrun)."""
    strategy = ["faulty.trouble:how=sleep"]
    matrix = [
        {"strategy": strategy, "timeout_s": [45.0], "launcher": [FORKED]},
        {"strategy": strategy, "stall_s": [40.0], "launcher": [TORCHRUN]},
    ]
    return campaign("limits", matrix, global_batch=4)


def test_a_hang_names_the_rank_that_stopped(limited: Any) -> None:
    record = limited.record("faulty.trouble:how=sleep", launcher=TORCHRUN)
    assert record.status == "hang"
    assert "no progress for 40 s: rank 1 stopped at step 2 in forward" in record.error
    stack = (Path(record.path) / "stack-1.txt").read_text()
    assert "_sleep" in stack, "the stack of the rank that hangs says where"
    assert limited.finding(record)["status"] == "hang"


def test_a_time_out_says_where_the_ranks_were(limited: Any) -> None:
    record = limited.record("faulty.trouble:how=sleep", launcher=FORKED)
    assert record.status == "timeout"
    assert record.error.startswith("did not end within 45 s; ")
    assert "rank 1 was at step 2 in forward" in record.error
    assert limited.code == 1


def test_limits_leave_no_process(limited: Any, living: Callable[[Path], list[str]]) -> None:
    assert living(limited.out) == []


def test_a_suspended_rank_is_named(
    tmp_path: Path,
    experiment_file: Callable[..., Path],
    environment: Callable[..., dict[str, str]],
    eventually: Callable[..., Any],
    living: Callable[[Path], list[str]],
) -> None:
    """Forked ranks have to be ended, though a suspended rank does not act on any other signal than SIGKILL."""
    matrix = {"strategy": ["faulty.trouble:how=slow"], "launcher": [FORKED]}
    small = {"launcher": "testbed.forked", "stall_s": 25.0, "global_batch": 2, "steps": 200}
    file = experiment_file(tmp_path, "suspended", matrix, **small)
    command = [sys.executable, "-m", "paceline.cli", "run", str(file), "--out", str(tmp_path), "--format", "json"]
    with subprocess.Popen(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as child:

        def rank_1_at_work() -> store.Progress | None:
            runs = [path for path in store.run_dirs(tmp_path) if path.name.startswith("faulty")]
            ranks = [p for run in runs for p in store.read_progress(run) if p.rank == 1 and p.step >= 5]
            return ranks[0] if ranks else None

        os.kill(eventually(rank_1_at_work, "rank 1 at step 5").pid, signal.SIGSTOP)
        text, _ = child.communicate(timeout=240)
    assert child.returncode == 1, text
    record = next(r for r in store.read_runs(tmp_path)[0] if not r.is_reference)
    assert record.status == "hang"
    assert "rank 1 stopped at step" in record.error
    assert "is suspended" in record.error
    assert [s for s in record.steps if s.rank == 0], "samples up to the suspension are kept"
    assert living(tmp_path) == []


BLOCKER = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "deepspeed":
            raise ModuleNotFoundError("No module named 'deepspeed'", name="deepspeed")

sys.meta_path.insert(0, Absent())
"""


def test_a_missing_package_is_unsupported_with_the_install_command(
    campaign: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(BLOCKER)
    done = campaign(
        "missing", {"strategy": ["zero:stage=2"]}, {"PYTHONPATH": str(tmp_path)}, processes=1, launcher="local"
    )
    record = done.record("zero:stage=2")
    assert record.status == "unsupported"
    assert record.error == (
        "the strategy zero needs the package deepspeed, which is not installed: run `pip install 'paceline[zero]'`"
    )
    assert done.code == 1, "nothing was measured"
    assert "pip install 'paceline[zero]'" in done.stdout.replace("\n", " ")
