"""What API objects say about a run: each fault as the API server shows it, and the word it gets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from paceline.launchers.kubernetes import states
from paceline.launchers.kubernetes.states import Snapshot, state_of
from paceline.results.records import Status

NAME = "paceline-ddp-2x"


def job(*conditions: Mapping[str, Any], **spec: Any) -> dict[str, Any]:
    held = [{"status": "True", **each} for each in conditions]
    return {"metadata": {"name": NAME, "uid": "u1"}, "spec": spec, "status": {"conditions": held}}


def pod(index: int = 0, state: Mapping[str, Any] | None = None, **status: Any) -> dict[str, Any]:
    containers = [] if state is None else [{"name": "node", "state": state}]
    return {
        "metadata": {"name": f"{NAME}-{index}-abcde", "uid": f"p{index}"},
        "spec": {"nodeName": f"node-{index}"},
        "status": {"phase": "Running", "containerStatuses": containers, **status},
    }


def sight(main: dict[str, Any] | None, *pods: dict[str, Any], **more: Any) -> Snapshot:
    return Snapshot(main=main, job=main, pods=pods, **{"nodes": 2, "name": NAME, **more})


RUNNING = {"running": {"startedAt": "2026-01-01T00:00:00Z"}}
FAILED = {"type": "Failed", "reason": "BackoffLimitExceeded", "message": "Job has reached the specified backoff limit"}
DONE = {"terminated": {"exitCode": 0, "reason": "Completed"}}


def disrupted(reason: str, message: str) -> list[dict[str, str]]:
    return [{"type": "DisruptionTarget", "status": "True", "reason": reason, "message": message}]


EVICTION = "The node was low on resource: memory. Threshold quantity: 100Mi, available: 64Mi."
OVERDRAWN = 'Usage of EmptyDir volume "tmp" exceeds the limit "1Gi".'
EVICTED: dict[str, Any] = {"phase": "Failed", "reason": "Evicted", "message": EVICTION}
POLICY = {
    "type": "FailureTarget",
    "reason": "PodFailurePolicy",
    "message": "Pod bench/x-1 has condition DisruptionTarget matching FailJob rule at index 0",
}
ENDS: dict[str, tuple[Snapshot, Status | None, str | None]] = {
    "a rank that failed: the ranks' own word counts": (
        sight(job(FAILED), pod(0, {"terminated": {"exitCode": 1, "reason": "Error"}}), pod(1, DONE)),
        None,
        None,
    ),
    "evicted": (
        sight(
            job(FAILED),
            pod(0, DONE),
            pod(1, **EVICTED, conditions=disrupted("TerminationByKubelet", EVICTION)),
        ),
        Status.PREEMPTED,
        f"pod {NAME}-1-abcde on node-1 was evicted: TerminationByKubelet ({EVICTION})",
    ),
    "evicted, before there was a condition for it": (
        sight(job(FAILED), pod(0, DONE), pod(1, **EVICTED)),
        Status.PREEMPTED,
        f"pod {NAME}-1-abcde on node-1 was evicted: Evicted ({EVICTION})",
    ),
    "evicted by its own fault: a full disk": (
        sight(job(FAILED), pod(1, phase="Failed", reason="Evicted", message=OVERDRAWN)),
        Status.FAILED,
        f"pod {NAME}-1-abcde on node-1 could not run: Evicted ({OVERDRAWN})",
    ),
    "pre-empted, the pod gone already": (
        sight(job(POLICY), pod(0, RUNNING)),
        Status.PREEMPTED,
        f"a pod of {NAME} was evicted: PodFailurePolicy ({POLICY['message']})",
    ),
    "pre-empted, its Job not told yet": (
        sight(job(), pod(0, RUNNING), pod(1, RUNNING, conditions=disrupted("PreemptionByScheduler", "for another"))),
        Status.PREEMPTED,
        f"pod {NAME}-1-abcde on node-1 was evicted: PreemptionByScheduler (for another)",
    ),
    "its node does not answer, so it never ends": (
        sight(job(), pod(0, RUNNING), pod(1, RUNNING, conditions=disrupted("DeletionByTaintManager", "NoExecute"))),
        Status.PREEMPTED,
        f"pod {NAME}-1-abcde on node-1 was evicted: DeletionByTaintManager (NoExecute)",
    ),
    "out of its memory limit": (
        sight(job(FAILED), pod(0, DONE), pod(1, {"terminated": {"exitCode": 137, "reason": "OOMKilled"}})),
        Status.OOM,
        f"pod {NAME}-1-abcde on node-1 exceeded its memory limit: OOMKilled",
    ),
    "out of its time": (
        sight(job({"type": "Failed", "reason": "DeadlineExceeded", "message": "Job was active longer"})),
        Status.TIMEOUT,
        f"the job {NAME} exceeded its time limit: DeadlineExceeded (Job was active longer)",
    ),
    "refused by the kubelet": (
        sight(job(FAILED), pod(1, phase="Failed", reason="UnexpectedAdmissionError", message="no GPU left")),
        Status.FAILED,
        f"pod {NAME}-1-abcde on node-1 could not run: UnexpectedAdmissionError (no GPU left)",
    ),
    "deleted by somebody": (
        sight(None),
        Status.FAILED,
        f"the job {NAME} is gone: somebody else deleted it; repeat the run with --resume",
    ),
    "being deleted by somebody": (
        sight({**job(), "metadata": {"name": NAME, "deletionTimestamp": "2026-01-01T00:00:00Z"}}, pod(0, RUNNING)),
        Status.FAILED,
        f"the job {NAME} is being deleted: somebody else deleted it; repeat the run with --resume",
    ),
}


@pytest.mark.parametrize("case", ENDS)
def test_an_end_gets_our_word_and_a_sentence(case: str) -> None:
    seen, status, reason = ENDS[case]
    state = state_of(seen)
    assert not state.running
    assert (state.status, state.reason) == (status, reason)


def test_a_pod_that_was_taken_away_comes_before_one_that_was_killed_by_it() -> None:
    killed = pod(0, {"terminated": {"exitCode": 137, "reason": "OOMKilled"}})
    taken = pod(1, conditions=disrupted("EvictionByEvictionAPI", "drained"))
    assert state_of(sight(job(FAILED), killed, taken)).status is Status.PREEMPTED


def test_exit_codes_come_from_the_pods() -> None:
    failed = pod(0, {"terminated": {"exitCode": 3, "reason": "Error"}})
    assert state_of(sight(job(FAILED), failed, pod(1, DONE))).exit_code == 3
    assert state_of(sight(job({"type": "Complete"}), pod(0, DONE), pod(1, DONE))).exit_code == 0
    assert state_of(sight(job(FAILED))).exit_code is None, "nobody knows"


@pytest.mark.parametrize(("kind", "done"), [("job", "Complete"), ("jobset", "Completed"), ("trainjob", "Complete")])
def test_each_kind_has_its_own_word_for_done(kind: str, done: str) -> None:
    from paceline.launchers.kubernetes.manifests import RESOURCES

    assert RESOURCES[kind].done == done
    assert not state_of(sight(job({"type": done}), done=done)).running


def test_a_jobset_fails_by_the_job_within_it() -> None:
    late = job({"type": "Failed", "reason": "DeadlineExceeded", "message": "too long"})
    main = job({"type": "Failed", "reason": "FailedJobs", "message": "jobset failed due to one or more job failures"})
    seen = Snapshot(main=main, job=late, pods=(), done="Completed", nodes=2, name=NAME)
    assert state_of(seen).status is Status.TIMEOUT
    taken = state_of(Snapshot(main=main, job=job(POLICY), pods=(), done="Completed", nodes=2, name=NAME))
    assert taken.status is Status.PREEMPTED
    assert POLICY["message"] in str(taken.reason), "the Job says more than the JobSet"


UNSCHEDULABLE = [
    {
        "type": "PodScheduled",
        "status": "False",
        "reason": "Unschedulable",
        "message": "0/3 nodes are available: 3 Insufficient nvidia.com/gpu.",
    }
]
PULL = {"waiting": {"reason": "ImagePullBackOff", "message": 'Back-off pulling image "x:1": not found'}}
QUOTA = {
    "type": "Warning",
    "reason": "FailedCreate",
    "message": 'Error creating: pods "x" is forbidden: exceeded quota: gpus, requested: 8, used: 0, limited: 4',
    "lastTimestamp": "2026-01-01T00:00:05Z",
}
CREATED = {
    "type": "Normal",
    "reason": "CreatedWorkload",
    "message": "Created",
    "eventTime": "2026-01-01T00:00:05.000001Z",
}
WAITS: dict[str, tuple[Snapshot, str]] = {
    "no pod yet": (sight(job()), "0 of 2 pods have started"),
    "no node fits": (
        sight(job(), pod(0, RUNNING), pod(1, phase="Pending", conditions=UNSCHEDULABLE)),
        "1 of 2 pods have started: Unschedulable: 0/3 nodes are available: 3 Insufficient nvidia.com/gpu.",
    ),
    "no image": (
        sight(job(), pod(0, PULL, phase="Pending"), pod(1, PULL, phase="Pending")),
        '0 of 2 pods have started: ImagePullBackOff: Back-off pulling image "x:1": not found',
    ),
    "a quota is full": (
        sight(job(), events=[{**QUOTA, "message": "old", "lastTimestamp": "2026-01-01T00:00:01Z"}, QUOTA]),
        f"0 of 2 pods have started: FailedCreate: {QUOTA['message']}",
    ),
    "its queue": (
        sight(
            job(suspend=True),
            events=[
                {**CREATED, "reportingComponent": "jobset-kueue-controller"},
                {
                    "type": "Normal",
                    "reason": "Suspended",
                    "message": "Job suspended",
                    "eventTime": "2026-01-01T00:00:09Z",
                },
            ],
        ),
        "suspended until its queue admits it: CreatedWorkload: Created",
    ),
    "another queue": (
        sight(job(suspend=True), events=[CREATED]),
        "suspended until its queue admits it: CreatedWorkload: Created",
    ),
}


@pytest.mark.parametrize("case", WAITS)
def test_waiting_says_for_what(case: str) -> None:
    seen, reason = WAITS[case]
    state = state_of(seen)
    assert state.running
    assert state.waiting == reason


def test_all_pods_started_is_no_waiting() -> None:
    state = state_of(sight(job(), pod(0, RUNNING), pod(1, DONE)))
    assert state.running
    assert state.waiting is None


def test_only_what_nobody_will_bring_is_stuck() -> None:
    assert states.is_stuck(sight(job(), pod(0, PULL)))
    assert not states.is_stuck(sight(job(), pod(0, {"waiting": {"reason": "ContainerCreating"}})))
    assert not states.is_stuck(sight(job(), pod(0, conditions=UNSCHEDULABLE)))


def test_what_a_cluster_says_stays_one_harmless_line() -> None:
    hostile = [{**UNSCHEDULABLE[0], "message": "a\n\x1b[2Jb" + "x" * 9999}]
    said = str(state_of(sight(job(), pod(0, conditions=hostile))).waiting)
    assert "\n" not in said
    assert "\x1b" not in said
    assert len(said) <= 500
