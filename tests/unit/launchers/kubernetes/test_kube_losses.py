"""Nodes of served replicas that go away on a cluster: which losses a run survives, and when what is left has ended."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from testbed.known_cluster import DONE, RUNNING, KnownCluster

from paceline.campaign.run.supervision import End, judge
from paceline.contract import JobState, may_be_lost
from paceline.experiment.choices import Choice
from paceline.experiment.serving import Serving
from paceline.experiment.spec import RunSpec
from paceline.launchers import kubernetes
from paceline.launchers.kubernetes import run, states
from paceline.launchers.kubernetes.client import Cluster, Unavailable
from paceline.launchers.kubernetes.states import Losses, Snapshot
from paceline.launchers.node import log_transport
from paceline.results import store
from paceline.results.records import Status

Make = Callable[..., RunSpec]
NAME = "paceline-served-3x"
TAKEN = {"type": "DisruptionTarget", "status": "True", "reason": "DeletionByTaintManager", "message": "no heartbeat"}
CRASHED = {"phase": "Failed", "state": {"terminated": {"exitCode": 1, "reason": "Error"}}}
PER_INDEX = {"backoffLimitPerIndex": 0, "backoffLimit": 2}


@pytest.fixture
def served(make_spec: Make) -> RunSpec:
    """Three nodes of two ranks each."""
    more: dict[str, Any] = {"workload": "inference", "serving": Serving(), "engine": Choice("vllm")}
    spec = make_spec(None, processes=2, nodes=3, **more)
    return dataclasses.replace(spec, launcher=Choice("kubernetes", {"image": "paceline:1"}))


@pytest.fixture
def run_dir(tmp_path: Path, served: RunSpec) -> Path:
    return store.create(tmp_path, served)


@dataclasses.dataclass
class Watched:
    """The losses of a run, and what was said of them. No time to notice anything."""

    losses: Losses
    notes: list[tuple[str, list[str]]]

    def state(self, *pods: Mapping[str, Any], **job: Any) -> JobState:
        return self.losses.state_of(sight_of(*pods, **job))


@pytest.fixture
def watched(served: RunSpec, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Watched:
    monkeypatch.setattr(states, "NOTICE_S", -1.0)
    notes: list[tuple[str, list[str]]] = []
    return Watched(Losses(run_dir, 3, 2, may_be_lost(served), lambda *told: notes.append(told)), notes)


def pod(index: int, state: Mapping[str, Any] = RUNNING, **status: Any) -> dict[str, Any]:
    about = {"name": f"{NAME}-{index}-x", "annotations": {states.INDEX: str(index)}}
    containers = [{"name": "node", "state": state}]
    told = {"phase": "Running", "containerStatuses": containers, **status}
    return {"metadata": about, "spec": {"nodeName": f"host-{index}"}, "status": told}


def sight_of(*pods: Mapping[str, Any], spec: Mapping[str, Any] = PER_INDEX, failed: str = "", **end: str) -> Snapshot:
    conditions = [{"type": "Failed", "status": "True", **end}] if end else []
    job = {"metadata": {}, "spec": dict(spec), "status": {"conditions": conditions, "failedIndexes": failed}}
    return Snapshot(main=job, job=job, pods=pods, nodes=3, name=NAME)


def at(run_dir: Path, phase: str) -> None:
    store.ProgressFile(run_dir, 0).mark(0, phase)


def spoke(run_dir: Path, make_outcome: Any, *ranks: int) -> None:
    for rank in ranks:
        store.write_outcome(run_dir, make_outcome(rank, Status.OK))


GONE: dict[str, tuple[list[dict[str, Any]], str]] = {
    "a pod that failed": ([pod(1, **CRASHED)], "1"),
    "a pod on a silent node, which no Job counts yet": ([pod(1, conditions=[TAKEN])], ""),
    "a pod that is listed no more": ([], "1"),
}


@pytest.mark.parametrize("gone", GONE)
def test_a_run_of_replicas_goes_on_without_a_node(
    gone: str, watched: Watched, served: RunSpec, run_dir: Path, make_outcome: Any
) -> None:
    pods, failed = GONE[gone]
    at(run_dir, "timing: 3 of 459 needed")
    assert watched.state(pod(0), pod(1), pod(2)).running
    state = watched.state(pod(0), *pods, pod(2), failed=failed)
    assert (state.running, state.waiting, state.lost) == (True, None, (1,))
    told = "node 1 (host-1) is gone; rank 0 continues with the other replicas"
    assert watched.notes == [(told, [each["metadata"]["name"] for each in pods])]
    # Two of the four ranks that are left have ended: the others are not cut off.
    spoke(run_dir, make_outcome, 0, 4)
    assert watched.state(pod(0), *pods, pod(2), failed=failed).running
    spoke(run_dir, make_outcome, 1, 5)
    state = watched.state(pod(0), *pods, pod(2), failed=failed)
    assert (state.running, state.status, state.lost) == (False, None, (1,)), "starters would wait for the lost one"
    assert judge(served, run_dir, End(state)) == (Status.OK, None)
    assert len(watched.notes) == 1


def test_after_the_load_nobody_waits_for_a_silent_node_that_the_cluster_has_not_given_up(
    watched: Watched, served: RunSpec, run_dir: Path, make_outcome: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    at(run_dir, "timing")
    everybody = (pod(0), pod(1), pod(2))
    assert watched.state(*everybody).running
    spoke(run_dir, make_outcome, 0, 1, 4, 5)
    state = watched.state(*everybody)
    assert (state.running, state.lost) == (True, ()), "it may only be slower than the client"
    monkeypatch.setattr(states, "OVERDUE_S", 0.0)
    state = watched.state(*everybody)
    assert (state.running, state.status, state.lost) == (False, None, (1,))
    assert judge(served, run_dir, End(state)) == (Status.OK, None)
    assert watched.notes == [
        ("node 1 (host-1) is silent: it has not ended 0 s after the client", [f"{NAME}-1-x"]),
    ]


def test_a_job_that_ended_with_failed_indexes_has_ended_well_without_them(watched: Watched, run_dir: Path) -> None:
    at(run_dir, "timing")
    state = watched.state(pod(0, DONE, phase="Succeeded"), failed="1,2", reason="FailedIndexes")
    assert (state.running, state.exit_code, state.status, state.lost) == (False, 0, None, (1, 2))


def test_before_rank_0_asks_nobody_is_expendable(watched: Watched, run_dir: Path, golden: object) -> None:
    """It waits for the replicas of all, and would wait without end."""
    at(run_dir, "setup")
    state = watched.state(pod(0), pod(1), pod(2, conditions=[TAKEN]), failed="2")
    assert (state.running, state.status, state.lost) == (False, Status.PREEMPTED, ())
    assert str(state.reason) == golden
    assert "host-2" in str(state.reason)
    state = watched.state(pod(0), pod(1), pod(2, **CRASHED), failed="2")
    assert (state.running, state.exit_code, state.status, state.lost) == (False, 1, None, ()), "the ranks' word counts"


def test_a_node_that_fell_just_before_rank_0_was_heard_is_expendable_after(
    watched: Watched, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(states, "NOTICE_S", 3600.0)
    assert watched.state(pod(0), pod(2), failed="1").lost == ()
    assert watched.state(pod(0), pod(2), failed="1", reason="FailedIndexes").running, "its log is still to be read"
    at(run_dir, "timing")
    assert watched.state(pod(0), pod(2), failed="1").lost == (1,)


def test_the_node_of_the_client_is_never_expendable(watched: Watched, run_dir: Path, golden: object) -> None:
    at(run_dir, "timing")
    assert watched.state(pod(0), pod(2), failed="1").lost == (1,)
    state = watched.state(pod(0, conditions=[TAKEN]), pod(2), failed="1")
    assert (state.running, state.status) == (False, Status.PREEMPTED)
    assert str(state.reason) == golden
    assert "host-0" in str(state.reason)
    assert "DeletionByTaintManager" in str(state.reason)
    state = watched.state(pod(2), failed="0,1")
    assert state.status == Status.PREEMPTED
    assert state.reason == golden
    assert f"{NAME}" in state.reason


@pytest.mark.parametrize("reason", ["DeadlineExceeded", "BackoffLimitExceeded"])
def test_a_job_that_ends_all_of_its_pods_loses_none(watched: Watched, run_dir: Path, reason: str) -> None:
    at(run_dir, "timing")
    state = watched.state(pod(1, **CRASHED), failed="0-2", reason=reason)
    assert (state.running, state.lost) == (False, ())
    assert state.status is (Status.TIMEOUT if reason == "DeadlineExceeded" else None)


def test_a_cluster_that_drops_the_limit_of_each_index_is_reported_and_loses_no_run(
    watched: Watched, run_dir: Path, golden: object
) -> None:
    """Its Job would start the pod again, which would find nobody."""
    at(run_dir, "timing")
    old = {"spec": {"backoffLimit": 2}}
    for _ in range(2):
        assert watched.state(pod(0), pod(1), pod(2), **old).running
    ((told, _),) = watched.notes
    assert told == golden
    state = watched.state(pod(0), pod(1, **CRASHED), pod(2), **old)
    assert (state.running, state.lost) == (False, ())


def test_ranks_that_train_need_each_other(make_spec: Make, run_dir: Path) -> None:
    """Their Job ends itself; until it does nothing is decided here."""
    at(run_dir, "forward")
    spec = make_spec("ddp", processes=2, nodes=3)
    losses = Losses(run_dir, 3, 2, may_be_lost(spec), lambda *_: pytest.fail("nothing was lost"))
    crashed = sight_of(pod(0), pod(1, **CRASHED), pod(2), spec={"backoffLimit": 0})
    assert losses.state_of(crashed) == states.state_of(crashed) == JobState(running=True)
    ended = sight_of(pod(0), pod(1, **CRASHED), reason="BackoffLimitExceeded")
    assert losses.state_of(ended) == states.state_of(ended)
    assert not losses.state_of(ended).running


def test_failed_indexes_are_read_as_the_job_writes_them() -> None:
    job = {"status": {"failedIndexes": "1,3-5,7"}}
    assert states.failed_indexes(job) == {1, 3, 4, 5, 7}
    assert states.failed_indexes({"status": {}}) == states.failed_indexes(None) == set()


def test_a_controller_that_comes_late_does_not_wait_for_pods_that_are_gone(golden: object) -> None:
    assert states.why_waiting(sight_of(pod(0), pod(2), failed="1")) is None
    assert str(states.why_waiting(sight_of(pod(0), pod(2)))) == golden


def test_a_word_that_is_being_written_is_read_at_the_next_look(
    watched: Watched, run_dir: Path, make_outcome: Any
) -> None:
    at(run_dir, "timing")
    spoke(run_dir, make_outcome, 0, 1, 4)
    (run_dir / "outcome-5.json").write_text('{"rank": ')
    assert watched.state(pod(0), pod(2), failed="1").running
    spoke(run_dir, make_outcome, 5)
    assert not watched.state(pod(0), pod(2), failed="1").running


def farewell(folder: Path, node: int, make_outcome: Any) -> bytes:
    """The log of a node whose two ranks have ended well."""
    folder.mkdir()
    spoke(folder, make_outcome, 2 * node, 2 * node + 1)
    sender = log_transport.Sender(folder, node)
    return "".join(f"{line}\n" for line in [sender.hello({"host": "n"}), *sender.farewell(0)]).encode()


def test_nobody_waits_for_the_files_and_the_log_of_a_lost_node(
    served: RunSpec, run_dir: Path, tmp_path: Path, make_outcome: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its kubelet answers no more, and whoever asks it for a log never hears the end."""
    cluster = KnownCluster()
    monkeypatch.setattr(Cluster, "reach", lambda *_: cluster)
    monkeypatch.setattr(run, "Cluster", lambda *_: cluster)
    monkeypatch.setattr(run, "POLL_S", 0.0)
    monkeypatch.setattr(run, "DRAIN_S", 600.0)
    handle = kubernetes.submit(kubernetes.prepare(served, run_dir))
    name = handle["name"]
    log = cluster.log

    def silent(node: str, container: str, follow: bool) -> Any:
        if node == f"{name}-1-x":
            raise Unavailable("dial tcp: i/o timeout")
        return log(node, container, follow)

    cluster.log = silent  # type: ignore[method-assign]
    cluster.start(name, RUNNING, nodes=3)
    for index, each in enumerate(cluster.running):
        each |= {"spec": {"nodeName": f"host-{index}"}}
        each["metadata"]["annotations"] = {states.INDEX: str(index)}
        cluster.logs[each["metadata"]["name"]] = [[farewell(tmp_path / f"n{index}", index, make_outcome)]]
    cluster.running[1]["status"]["conditions"] = [TAKEN]
    for kept in (0, 2):
        cluster.running[kept]["status"]["containerStatuses"][0]["state"] = DONE
    at(run_dir, "timing")
    assert kubernetes.poll(handle).lost == (1,)
    kubernetes._runs[handle["namespace"], name].logs.drain(600.0)
    state = kubernetes.poll(handle)
    assert (state.running, state.lost) == (False, (1,))
    assert kubernetes.collect(handle, run_dir) is None
    kubernetes.cancel(handle)
    assert "paceline: node 1 (host-1) is gone" in (run_dir / "log.txt").read_text()
