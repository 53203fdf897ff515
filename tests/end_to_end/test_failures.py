"""Failures are results: each way a run can end badly is a sealed record with a sentence; nothing keeps running."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from testbed import EXHAUSTIVE

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
TORCHRUN, FORKED, SHARED = "local:warm=false", "local", "testbed.forked"
# Torchrun and the warm process of `local` have torch from the nursery, else each imports it.
FORKED_PROGRAMS = {} if EXHAUSTIVE else {"FORKED_PROGRAMS": "1"}
# A rank that leaves no outcome is reported by torchrun or by the supervisor of forked ranks. Exit codes in torchrun's
# report are tested with the controller.
CASES = [(how, SHARED) for how in ("oom", "raise", "nan")]
CASES += [("kill", TORCHRUN), ("kill", FORKED), *([("exit", FORKED)] if EXHAUSTIVE else [])]
# One rank sleeps for ever or is suspended; the first is noticed by the time limit, the others by their standing still.
LIMITED = [("sleep", SHARED, {"timeout_s": 45.0}), ("sleep", FORKED, {"stall_s": 25.0})]
LIMITED += [("suspend", FORKED, {"stall_s": 25.0})]


@pytest.fixture(scope="module")
def troubled(campaign: Callable[..., Any]) -> Any:
    """One campaign for all: it has one process that forks the ranks of the launcher local, and one reference."""
    cells = [*((how, launcher, {}) for how, launcher in CASES), *LIMITED]
    matrix = [
        {"strategy": [f"faulty.trouble:how={how}"], "launcher": [launcher], **{key: [s] for key, s in limits.items()}}
        for how, launcher, limits in cells
    ]
    return campaign("troubles", matrix, FORKED_PROGRAMS, profiled=False, global_batch=4, micro_batch=2)


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


def test_the_log_names_the_rank_of_a_traceback(troubled: Any, paceline: Any) -> None:
    run = troubled.record("faulty.trouble:how=raise", launcher=SHARED)
    done = paceline("logs", run.path, "--rank", "1")
    assert done.returncode == 0
    assert "[rank 1] Traceback (most recent call last):" in done.stdout
    assert all(line.startswith("[rank 1] ") for line in done.stdout.splitlines())


def test_no_process_outlives_a_failed_run(troubled: Any, living: Callable[[Path], list[str]]) -> None:
    assert living(troubled.out) == []


def test_a_second_run_repeats_nothing_and_resume_repeats_what_failed(troubled: Any, paceline: Any) -> None:
    file = troubled.out / "troubles.yaml"
    command = ("run", str(file), "--out", str(troubled.out), "--format", "json")
    again = paceline(*command)
    assert again.returncode == 1
    assert again.stdout.count("already measured") == len(CASES) + len(LIMITED) + 1
    # The reference runs on the launcher of one of the cells; with another launcher it would be another run.
    reference = troubled.record(None)
    victim = next(r for r in troubled.records if not r.is_reference and r.spec.launcher == reference.spec.launcher)
    settings = ("--set", f"strategy={victim.spec.strategy}", "--set", f"launcher={victim.spec.launcher}")
    retried = paceline(*command, "--resume", *settings, env=FORKED_PROGRAMS)
    assert retried.stdout.count("already measured") == 1, "the reference, which was ok"
    record = troubled.record(str(victim.spec.strategy), launcher=str(victim.spec.launcher))
    assert record.status == victim.status
    assert (Path(record.path) / "attempts" / "1" / "status.json").is_file()


def test_a_hang_names_the_rank_that_stopped(troubled: Any) -> None:
    record = troubled.record("faulty.trouble:how=sleep", launcher=FORKED)
    assert record.status == "hang"
    assert "no progress for 25 s: rank 1 stopped at step 2 in forward" in record.error
    stack = (Path(record.path) / "stack-1.txt").read_text()
    assert "_sleep" in stack, "the stack of the rank that hangs says where"
    assert troubled.finding(record)["status"] == "hang"


def test_a_time_out_says_where_the_ranks_were(troubled: Any) -> None:
    record = troubled.record("faulty.trouble:how=sleep", launcher=SHARED)
    assert record.status == "timeout"
    assert record.error.startswith("did not end within 45 s; ")
    assert "rank 1 was at step 2 in forward" in record.error


def test_a_suspended_rank_is_named(troubled: Any) -> None:
    """Forked ranks have to be ended, though a suspended rank does not act on any other signal than SIGKILL."""
    record = troubled.record("faulty.trouble:how=suspend", launcher=FORKED)
    assert record.status == "hang"
    assert "rank 1 stopped at step 2" in record.error
    assert "is suspended" in record.error
    assert [s for s in record.steps if s.rank == 0], "samples up to the suspension are kept"


BLOCKER = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "deepspeed":
            raise ModuleNotFoundError("No module named 'deepspeed'", name="deepspeed")

sys.meta_path.insert(0, Absent())
"""


@pytest.mark.exhaustive
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
