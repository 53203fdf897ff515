"""Nodes that a job on Slurm has lost, by what srun says in its log: without whom served replicas go on, and who ends
them when they cannot."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.campaign.run.supervision import End, judge
from paceline.contract import JobState
from paceline.experiment.choices import Choice
from paceline.experiment.serving import Serving
from paceline.experiment.spec import RunSpec
from paceline.launchers import slurm
from paceline.launchers.slurm import script, states
from paceline.launchers.slurm.states import BEGIN, Losses
from paceline.results import store
from paceline.results.records import Status

Make = Callable[..., RunSpec]
KILLED = "srun: error: n10: task 1: Exited with exit code 1"
GONE = "srun: error: n11: task 2: Killed\nsrun: error: Node failure on n11"


class Slurm:
    """Its commands. The job runs until it is asked to end."""

    def __init__(self) -> None:
        self.state, self.cancelled = "RUNNING", list[tuple[str, ...]]()

    def __call__(self, *argv: str, **_: Any) -> subprocess.CompletedProcess[str]:
        out = ""
        if argv[0] == "squeue":
            values = ("7", self.state, "256", "0", "None", "n[9-11]")
            out = "".join(f"{v:<{w}}" for v, w in zip(values, states._WIDTHS.values(), strict=True)) + "\n"
        elif argv[0] == "scontrol":
            out = "n9\nn10\nn11\n"
        elif argv[0] == "scancel":
            self.cancelled.append(argv[1:])
        return subprocess.CompletedProcess(argv, 0, out, "")


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Slurm:
    slurm._watches.clear()
    found = Slurm()
    monkeypatch.setattr(states, "call", found)
    return found


@pytest.fixture
def served(make_spec: Make) -> RunSpec:
    """Three nodes of two ranks each."""
    fields = {"workload": "inference", "serving": Serving(), "engine": Choice("vllm")}
    return make_spec(None, processes=2, nodes=3, launcher="slurm:poll_s=0.000001", **fields)


@pytest.fixture
def run_dir(tmp_path: Path, served: RunSpec) -> Path:
    return store.create(tmp_path, served)


@pytest.fixture
def handle(served: RunSpec, run_dir: Path, engine: Slurm) -> dict[str, Any]:
    return slurm._handle(slurm.prepare(served, run_dir), "7")


def say(run_dir: Path, *lines: str) -> None:
    with (run_dir / "log.txt").open("a") as log:
        log.writelines(f"{line}\n" for line in lines)


def at(run_dir: Path, phase: str) -> None:
    store.ProgressFile(run_dir, 0).mark(0, phase)


def spoke(run_dir: Path, make_outcome: Any, *ranks: int, status: Status = Status.OK) -> None:
    for rank in ranks:
        store.write_outcome(run_dir, make_outcome(rank, status))


def losses(handle: dict[str, Any]) -> Losses:
    return states.read_losses(handle, states.hosts)


def test_a_job_of_replicas_goes_on_without_a_node_and_ends_when_the_others_have_spoken(
    engine: Slurm, handle: dict[str, Any], served: RunSpec, run_dir: Path, make_outcome: Any
) -> None:
    say(run_dir, f"{BEGIN}n[9-11]", f"a bar without an end {KILLED}")
    at(run_dir, "warmup")
    assert slurm.poll(handle) == JobState(running=True)
    spoke(run_dir, make_outcome, 0, 1, 4)
    slurm.poll(handle)
    assert not engine.cancelled, "rank 5 is still to speak"
    spoke(run_dir, make_outcome, 5)
    slurm.poll(handle)
    slurm.poll(handle)
    assert engine.cancelled == [("--signal=TERM", "7")], "once, and politely"
    # By that the other agents end badly too.
    say(run_dir, "srun: error: n9,n11: tasks 0,2: Exited with exit code 143")
    engine.state = "FAILED"
    state = slurm.poll(handle)
    assert (state.running, state.status, state.lost) == (False, None, (1,))
    assert judge(served, run_dir, End(state)) == (Status.OK, None)


def test_agents_that_do_not_end_are_ended_by_slurm(
    engine: Slurm, handle: dict[str, Any], run_dir: Path, make_outcome: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm, "FAREWELL_S", -1.0)
    say(run_dir, f"{BEGIN}n[9-11]", GONE)
    at(run_dir, "done")
    spoke(run_dir, make_outcome, 0, 1, 2, 3)
    slurm.poll(handle)
    slurm.poll(handle)
    assert engine.cancelled == [("--signal=TERM", "7"), ("7",)]


def test_before_rank_0_asks_nobody_is_expendable(
    engine: Slurm, handle: dict[str, Any], run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for the replicas of all, and would wait without end."""
    say(run_dir, f"{BEGIN}n[9-11]", GONE)
    at(run_dir, "setup")
    assert losses(handle) == Losses(fatal=(2,), vanished=(2,))
    slurm.poll(handle)
    assert not engine.cancelled, "the others may notice it themselves"
    monkeypatch.setattr(script, "WAIT_S", -1)
    slurm.poll(handle)
    assert engine.cancelled == [("--signal=TERM", "7")]
    engine.state = "FAILED"
    state = slurm.poll(handle)
    told = "Slurm job 7 lost a node; `sinfo -R` shows which and why"
    assert (state.status, state.reason, state.lost) == (Status.PREEMPTED, told, ())


def test_the_node_of_the_client_is_never_expendable(handle: dict[str, Any], run_dir: Path) -> None:
    say(run_dir, f"{BEGIN}n[9-11]", "srun: error: n[9-10]: tasks 0-1: Exited with exit code 1")
    at(run_dir, "warmup")
    assert losses(handle) == Losses(fatal=(0,)), "and nobody went on without the other"


def test_a_rank_that_says_what_went_wrong_fails_the_run(
    handle: dict[str, Any], run_dir: Path, make_outcome: Any
) -> None:
    say(run_dir, f"{BEGIN}n[9-11]", KILLED)
    at(run_dir, "warmup")
    spoke(run_dir, make_outcome, 3, status=Status.OOM)
    assert losses(handle) == Losses(fatal=(1,))


def test_steps_of_the_user_and_earlier_attempts_are_no_loss(handle: dict[str, Any], run_dir: Path) -> None:
    at(run_dir, "warmup")
    say(run_dir, KILLED)
    assert losses(handle) == Losses()
    say(run_dir, f"{BEGIN}n[9-11]", GONE, f"{BEGIN}n[9-11]")
    assert losses(handle) == Losses()


def test_a_training_run_is_left_to_slurm(engine: Slurm, make_spec: Make, tmp_path: Path) -> None:
    spec = make_spec("ddp", processes=2, nodes=3, launcher="slurm:poll_s=0.000001")
    run_dir = store.create(tmp_path, spec)
    handle = slurm._handle(slurm.prepare(spec, run_dir), "7")
    say(run_dir, f"{BEGIN}n[9-11]", GONE)
    at(run_dir, "forward")
    slurm.poll(handle)
    engine.state = "NODE_FAIL"
    state = slurm.poll(handle)
    assert (state.status, state.lost, engine.cancelled) == (Status.PREEMPTED, (), [])


@pytest.mark.parametrize("tasks", ["0-9999999", "1-99999999999999", "-", "1--2", "1-2-9999999", "9" * 5000, "²"])
def test_a_line_that_a_rank_made_up_names_no_nodes_that_are_not_there(
    handle: dict[str, Any], run_dir: Path, tasks: str
) -> None:
    at(run_dir, "warmup")
    say(run_dir, f"{BEGIN}n[9-11]", f"srun: error: n9: tasks {tasks}: Exited with exit code 1")
    found = losses(handle)
    assert {*found.spared, *found.fatal} <= {0, 1, 2}


def test_what_squeue_prints_beside_its_answer_is_ignored(
    monkeypatch: pytest.MonkeyPatch, served: RunSpec, run_dir: Path
) -> None:
    values = ("7", "RUNNING", "garbage", "²", "None", "n[9-11]")
    line = "".join(f"{v:<{w}}" for v, w in zip(values, states._WIDTHS.values(), strict=True))
    banner = "Welcome to the cluster\n\n8 jobs of yours\n"
    monkeypatch.setattr(
        states, "call", lambda *argv, **_: subprocess.CompletedProcess(argv, 0, f"{banner}{line}\n", "")
    )
    seen = states.look_up("7")
    assert seen is not None
    assert (seen.state, seen.exit_code, seen.restarts, seen.nodes) == ("RUNNING", 0, 0, "n[9-11]")
    listed = f"{banner}12  \n 7\n{'9' * 5000}\n"
    monkeypatch.setattr(states, "call", lambda *argv, **_: subprocess.CompletedProcess(argv, 0, listed, ""))
    assert states.named("x") == ["12", "7"]


def test_an_exit_file_that_no_script_wrote_is_none(run_dir: Path) -> None:
    for words in ("7 ²", f"7 {'9' * 5000}", "7", "7 -1"):
        (run_dir / script.EXIT).write_text(words)
        assert slurm._exit_words(str(run_dir)) is None
    (run_dir / script.EXIT).write_text("7 143")
    assert slurm._exit_words(str(run_dir)) == ["7", "143"]
