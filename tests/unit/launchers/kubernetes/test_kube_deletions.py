"""Pods that somebody deletes: named as the cause, and told apart from those that an ending Job deletes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.contract import JobState
from paceline.launchers.kubernetes import states
from paceline.launchers.kubernetes.states import Losses, Snapshot
from paceline.results import store
from paceline.results.records import Status

NAME = "paceline-ddp-2x"
# The kubelet gives it 30 s from 12:00:05 on.
DELETED = {"deletionTimestamp": "2026-11-17T12:00:35Z", "deletionGracePeriodSeconds": 30}
RUNNING: dict[str, Any] = {"phase": "Running", "containerStatuses": [{"name": "node", "state": {"running": {}}}]}
CRASHED: dict[str, Any] = {
    "phase": "Failed",
    "containerStatuses": [{"name": "node", "state": {"terminated": {"exitCode": 1, "reason": "Error"}}}],
}


def pod(index: int, status: dict[str, Any] = RUNNING, **metadata: Any) -> dict[str, Any]:
    about = {"name": f"{NAME}-{index}-x", "annotations": {states.INDEX: str(index)}, **metadata}
    return {"metadata": about, "spec": {"nodeName": f"host-{index}"}, "status": status}


def job(failed_at: str = "", **spec: Any) -> dict[str, Any]:
    end = {"type": "FailureTarget", "status": "True", "reason": "BackoffLimitExceeded", "lastTransitionTime": failed_at}
    return {"metadata": {}, "spec": spec, "status": {"conditions": [end] if failed_at else []}}


def sight(main: dict[str, Any] | None, *pods: dict[str, Any]) -> Snapshot:
    return Snapshot(main=main, job=main, pods=pods, nodes=2, name=NAME)


def last(run_dir: Path, *sights: Snapshot, expendable: tuple[int, ...] = ()) -> JobState:
    losses = Losses(run_dir, 2, 1, expendable, lambda *_: None)
    return [losses.state_of(each) for each in sights][-1]


FAILED = "2026-11-17T12:00:08Z"
BOTH = sight(job(), pod(0), pod(1))
GOING = sight(job(), pod(0), pod(1, **DELETED))


@pytest.mark.parametrize(
    "sights",
    {
        "seen while it ended": [BOTH, GOING, sight(job(FAILED), pod(0, CRASHED))],
        "gone between two polls": [BOTH, sight(job(), pod(0)), sight(job(FAILED), pod(0, CRASHED))],
        "seen only after its Job failed": [BOTH, sight(job(FAILED), pod(0, CRASHED), pod(1, **DELETED))],
        "and its own exit code": [BOTH, GOING, sight(job(FAILED), pod(0), pod(1, CRASHED, **DELETED))],
    }.items(),
    ids=lambda case: case[0],
)
def test_a_deleted_pod_is_the_cause_and_named_with_its_node(tmp_path: Path, sights: tuple[str, list[Snapshot]]) -> None:
    """The rank on host-0 reported a lost connection."""
    state = last(tmp_path, *sights[1])
    assert (state.running, state.status) == (False, Status.PREEMPTED)
    assert state.reason == f"pod {NAME}-1-x on host-1 was deleted while the job was running"


@pytest.mark.parametrize("failed_at", ["2026-11-17T12:00:05Z", "2026-11-17T12:00:02Z", "soon"])
def test_pods_that_a_failed_job_deletes_are_not_the_cause(tmp_path: Path, failed_at: str) -> None:
    state = last(tmp_path, BOTH, sight(job(failed_at), pod(0, CRASHED), pod(1, **DELETED)))
    assert (state.running, state.exit_code, state.status) == (False, 1, None), "the ranks' word counts"
    vanished = last(tmp_path, BOTH, sight(job(failed_at), pod(0, CRASHED)))
    assert (vanished.running, vanished.status) == (False, None)


def test_a_pod_that_goes_beside_a_failed_one_is_judged_when_the_job_says_when_it_failed(tmp_path: Path) -> None:
    """The Job was read before it failed, the pods after it had begun to delete the others."""
    pods = (pod(0, CRASHED), pod(1, **DELETED))
    killed = last(tmp_path, BOTH, sight(job(), *pods), sight(job("2026-11-17T12:00:05Z"), pods[0]))
    assert (killed.running, killed.exit_code, killed.status) == (False, 1, None), "the ranks' word counts"
    robbed = last(tmp_path, BOTH, sight(job(), *pods), sight(job(FAILED), pods[0]))
    assert (robbed.status, robbed.reason) == (
        Status.PREEMPTED,
        f"pod {NAME}-1-x on host-1 was deleted while the job was running",
    )
    vanished = last(tmp_path, BOTH, sight(job(), pods[0]), sight(job(FAILED), pods[0]))
    assert (vanished.running, vanished.exit_code, vanished.status) == (False, 1, None)


def test_a_deleted_or_suspended_job_deletes_its_own_pods(tmp_path: Path) -> None:
    gone = last(tmp_path, BOTH, sight(None, pod(0, **DELETED), pod(1, **DELETED)))
    reason = f"the job {NAME} is gone: somebody else deleted it; repeat the run with --resume"
    assert (gone.status, gone.reason) == (Status.FAILED, reason)
    held = sight(job(suspend=True), pod(0, **DELETED), pod(1, **DELETED))
    assert last(tmp_path, BOTH, held, sight(job(FAILED), pod(0, CRASHED))).status is None


def test_a_pod_that_ended_well_before_its_grace_did_no_harm(tmp_path: Path) -> None:
    done = {**job(), "status": {"conditions": [{"type": "Complete", "status": "True"}]}}
    state = last(tmp_path, BOTH, GOING, sight(done))
    assert (state.running, state.exit_code, state.status) == (False, 0, None)


def test_a_deleted_replica_is_lost_and_not_blamed_for_what_comes_later(tmp_path: Path) -> None:
    store.ProgressFile(tmp_path, 0).mark(0, "timing")
    lost = {**job(backoffLimitPerIndex=0), "status": {"failedIndexes": "1"}}
    both = {**lost, "status": {"failedIndexes": "0,1"}}
    sights = [sight(job(backoffLimitPerIndex=0), pod(0), pod(1)), sight(lost, pod(0), pod(1, **DELETED))]
    state = last(tmp_path, *sights, expendable=(1,))
    assert (state.running, state.lost) == (True, (1,))
    state = last(tmp_path, *sights, sight(both, pod(0, CRASHED)), expendable=(1,))
    assert (state.running, state.exit_code, state.status, state.lost) == (False, 1, None, (1,))
    state = last(tmp_path, *sights, sight(both, pod(0, **DELETED)), expendable=(1,))
    assert (state.status, state.lost) == (Status.PREEMPTED, (1,))
    assert state.reason == f"pod {NAME}-0-x on host-0 was deleted while the job was running"
