"""Agents of one job: whose end ends the others, and without whom a job of served replicas goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.campaign.run.supervision import End, judge
from paceline.contract import may_be_lost
from paceline.experiment.choices import Choice
from paceline.experiment.serving import Serving
from paceline.experiment.spec import RunSpec
from paceline.launchers.node import agent as node_agent
from paceline.launchers.ssh import sessions
from paceline.launchers.ssh.sessions import Sessions
from paceline.results import store
from paceline.results.records import Status

Make = Callable[..., RunSpec]


class Agent:
    """A connection whose far side does what it is told."""

    pid = 1

    def __init__(self) -> None:
        self.code: int | None = None
        self.complaints: list[str] = []
        self.sent: list[bytes] = []

    def listen(self) -> tuple[list[str], list[str]]:
        return [], []

    def send(self, data: bytes) -> None:
        self.sent.append(data)
        if data == node_agent.END + b"\n":
            self.code = 143

    def hang_up(self) -> None:
        pass

    def end(self, patience_s: float) -> int:
        return self.code or 0


@pytest.fixture
def served(make_spec: Make) -> RunSpec:
    """Three nodes of two ranks each."""
    engine = Choice("vllm")
    return make_spec(None, processes=2, nodes=3, workload="inference", serving=Serving(), engine=engine)


@pytest.fixture
def run_dir(tmp_path: Path, served: RunSpec) -> Path:
    return store.create(tmp_path, served)


Start = Callable[[RunSpec], tuple[Sessions, list[Agent]]]


@pytest.fixture
def start(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    monkeypatch.setattr(sessions, "NOTICE_S", -1.0)
    opened: list[Sessions] = []

    def make(spec: RunSpec) -> tuple[Sessions, list[Agent]]:
        agents = [Agent() for _ in range(3)]
        told: dict[str, Any] = {"expendable": may_be_lost(spec), "ranks": 2, "relay": False}
        opened.append(Sessions(run_dir, agents, ["a", "b", "c"], ["try a", "try b", "try c"], **told))  # type: ignore[arg-type]
        return opened[-1], agents

    yield make
    for group in opened:
        group.close()


def at(run_dir: Path, phase: str) -> None:
    store.ProgressFile(run_dir, 0).mark(0, phase)


def spoke(run_dir: Path, make_outcome: Any, *ranks: int, status: Status = Status.OK) -> None:
    for rank in ranks:
        store.write_outcome(run_dir, make_outcome(rank, status))


def test_a_job_of_replicas_goes_on_without_a_node(
    start: Start, served: RunSpec, run_dir: Path, make_outcome: Any
) -> None:
    group, agents = start(served)
    at(run_dir, "timing: 3 of 459 needed")
    agents[1].code = 255
    group.listen()
    assert group.state().running
    assert "paceline: b is gone" in (run_dir / "log.txt").read_text()
    # Two of the four ranks that are left have ended: the others are not cut off.
    spoke(run_dir, make_outcome, 0, 4)
    group.listen()
    assert not any(node_agent.END + b"\n" in agent.sent for agent in agents)
    spoke(run_dir, make_outcome, 1, 5)
    group.listen()
    assert [agent.code for agent in agents] == [143, 255, 143]
    group.listen()
    state = group.state()
    assert (state.running, state.status, state.lost) == (False, None, (1,))
    assert judge(served, run_dir, End(state)) == (Status.OK, None)


def test_before_rank_0_asks_nobody_is_expendable(start: Start, served: RunSpec, run_dir: Path, golden: object) -> None:
    """It waits for the replicas of all, and would wait without end."""
    group, agents = start(served)
    at(run_dir, "setup")
    agents[2].code = 255
    group.listen()
    group.listen()
    state = group.state()
    assert (state.running, state.status, state.lost) == (False, Status.FAILED, ())
    assert state.reason == golden


def test_a_node_that_failed_just_before_rank_0_asked_is_expendable_after(
    start: Start, served: RunSpec, run_dir: Path, make_outcome: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    group, agents = start(served)
    monkeypatch.setattr(sessions, "NOTICE_S", 3600.0)
    at(run_dir, "setup")
    agents[1].code = 255
    group.listen()
    at(run_dir, "timing")
    group.listen()
    # What the others were given to notice the loss themselves is over.
    monkeypatch.setattr(sessions, "NOTICE_S", -1.0)
    group.listen()
    assert not any(node_agent.END + b"\n" in agent.sent for agent in agents)
    spoke(run_dir, make_outcome, 0, 1, 4, 5)
    group.listen()
    assert (group.state().status, group.state().lost) == (None, (1,))


def test_a_rank_that_says_what_went_wrong_ends_the_job(
    start: Start, served: RunSpec, run_dir: Path, make_outcome: Any
) -> None:
    """Its word fails the run, so nobody shall wait for the end of the load."""
    group, agents = start(served)
    at(run_dir, "timing")
    spoke(run_dir, make_outcome, 3, status=Status.OOM)
    agents[1].code = 1
    group.listen()
    group.listen()
    state = group.state()
    assert (state.running, state.lost) == (False, ())
    assert judge(served, run_dir, End(state))[0] is Status.OOM


def test_the_node_of_the_client_is_never_expendable(
    start: Start, served: RunSpec, run_dir: Path, make_outcome: Any, golden: object
) -> None:
    group, agents = start(served)
    at(run_dir, "timing")
    agents[1].code = agents[0].code = 137
    group.listen()
    group.listen()
    state = group.state()
    assert (state.lost, state.status) == ((1,), Status.FAILED)
    assert str(state.reason) == golden
    assert judge(served, run_dir, End(state))[0] is Status.FAILED


def test_ranks_that_train_need_each_other(start: Start, make_spec: Make, run_dir: Path) -> None:
    spec = make_spec("ddp", processes=2, nodes=3)
    group, agents = start(spec)
    at(run_dir, "forward")
    agents[1].code = 255
    group.listen()
    group.listen()
    assert (group.state().lost, group.state().status) == ((), Status.FAILED)


def test_what_a_rank_of_a_lost_node_said_before_still_counts(
    start: Start, served: RunSpec, run_dir: Path, make_outcome: Any, golden: object
) -> None:
    group, agents = start(served)
    at(run_dir, "timing")
    spoke(run_dir, make_outcome, 3, status=Status.FAILED)
    agents[1].code = 1
    spoke(run_dir, make_outcome, 0, 1, 4, 5)
    group.listen()
    group.listen()
    status, error = judge(served, run_dir, End(group.state()))
    assert status is Status.FAILED
    assert str(error) == golden


def test_a_rank_that_is_left_must_speak(start: Start, served: RunSpec, run_dir: Path, make_outcome: Any) -> None:
    group, agents = start(served)
    at(run_dir, "timing")
    agents[1].code = 255
    spoke(run_dir, make_outcome, 0, 1, 4)
    group.listen()
    agents[0].code = agents[2].code = 0
    group.listen()
    assert judge(served, run_dir, End(group.state()))[0] is Status.FAILED
