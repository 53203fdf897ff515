"""From the API objects of a run to its JobState.

The first part is pure functions of one snapshot. The rest spans several snapshots: `Deletions` are pods that somebody
deleted, `Losses` nodes without which a run of served replicas continues (`contract.may_be_lost`).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from paceline.contract import JobState
from paceline.errors import StoreError
from paceline.launchers._job import awaited_ranks, have_ended, is_past_setup, ranks_of
from paceline.launchers.kubernetes.manifests import CONTAINER
from paceline.results import store
from paceline.results.records import Status
from paceline.results.safe_text import text as safe_text

Object = Mapping[str, Any]

# Kubernetes reasons for an end that no rank could report. First those of a DisruptionTarget condition, then of a pod,
# of its container, of a Job. For any other reason, the outcomes of the ranks decide.
STATUS_OF_REASON: dict[str, Status] = {
    **dict.fromkeys(("PreemptionByScheduler", "DeletionByTaintManager", "EvictionByEvictionAPI"), Status.PREEMPTED),
    **dict.fromkeys(("DeletionByPodGC", "TerminationByKubelet", "Evicted", "Preempting"), Status.PREEMPTED),
    **dict.fromkeys(("NodeLost", "NodeShutdown", "Shutdown", "Terminated"), Status.PREEMPTED),
    "UnexpectedAdmissionError": Status.FAILED,
    "NodeAffinity": Status.FAILED,
    "OOMKilled": Status.OOM,
    "ContainerCannotRun": Status.FAILED,
    "StartError": Status.FAILED,
    "DeadlineExceeded": Status.TIMEOUT,
}
_DESCRIPTIONS = {
    Status.PREEMPTED: "was evicted",
    Status.OOM: "exceeded its memory limit",
    Status.TIMEOUT: "exceeded its time limit",
    Status.FAILED: "could not run",
}
DISRUPTED = "DisruptionTarget"
INDEX = "batch.kubernetes.io/job-completion-index"
# The kubelet retries, but these do not resolve themselves.
STUCK = (
    *("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull"),
    *("CreateContainerConfigError", "CreateContainerError"),
)
# After a node failed while rank 0 seemed to be in setup: how long rank 0's progress may still be on its way.
NOTICE_S = 5.0
# After the client has ended: how long the replicas of the other nodes may take to end. The cluster itself gives up a
# silent node after more than five minutes.
OVERDUE_S = 30.0
_NO_INDEX_LIMIT = (
    "the cluster dropped backoffLimitPerIndex from the Job (Kubernetes before 1.29, or the feature is off): "
    "the loss of any node ends this run"
)
# Part of the names of Kueue's controllers.
_QUEUE = "kueue"
_AGAIN = "repeat the run with --resume"


# --- one snapshot ---


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The objects of a run at one moment. main: what was submitted. job: the Job that owns the pods (main itself for
    kind job). events: warnings about what is waiting. None means that the object does not exist."""

    main: Object | None
    job: Object | None
    pods: Sequence[Object]
    events: Sequence[Object] = field(default_factory=tuple)
    done: str = "Complete"
    nodes: int = 1
    name: str = ""


def state_of(snapshot: Snapshot) -> JobState:
    """Return whether the run is waiting, running or ended, and how it ended."""
    if is_deleted(snapshot):
        gone = "is gone" if snapshot.main is None else "is being deleted"
        return _ended(snapshot, Status.FAILED, f"the job {snapshot.name} {gone}: somebody else deleted it; {_AGAIN}")
    if condition(snapshot.main, snapshot.done):
        return JobState(running=False, exit_code=0)
    failed = condition(snapshot.main, "Failed") or next(_failures(snapshot.job), None)
    # A pod on an unreachable node never ends, and its Job waits for it.
    failed = failed or next(filter(None, (condition(pod, DISRUPTED) for pod in snapshot.pods)), None)
    return failure(snapshot, failed) if failed else JobState(running=True, waiting=why_waiting(snapshot))


def is_deleted(snapshot: Snapshot) -> bool:
    """Whether the submitted object was deleted, or is being deleted."""
    return snapshot.main is None or bool(snapshot.main.get("metadata", {}).get("deletionTimestamp"))


def is_ending_all_pods(snapshot: Snapshot) -> bool:
    """Whether all pods end: the job was deleted or suspended, or failed as a whole (for example by its deadline)."""
    own = any(end.get("reason") != "FailedIndexes" for end in _failures(snapshot.job))
    return is_deleted(snapshot) or is_suspended(snapshot) or own


def failed_nodes(snapshot: Snapshot) -> set[int]:
    """Return the nodes whose pod failed or was evicted, from the pods and from the status of the Job."""
    nodes = failed_indexes(snapshot.job)
    for pod in snapshot.pods:
        phase, index = pod.get("status", {}).get("phase"), index_of(pod)
        if index is not None and (phase == "Failed" or (phase != "Succeeded" and condition(pod, DISRUPTED))):
            nodes.add(index)
    return nodes


def index_of(pod: Object) -> int | None:
    """Return the node rank of a pod, or None if no Indexed Job created it."""
    index = (pod["metadata"].get("annotations") or {}).get(INDEX)
    return None if index is None else int(index)


def failed_indexes(job: Object | None) -> set[int]:
    """Return the failed indexes of a Job, which it writes as `1,3-5`.

    >>> sorted(failed_indexes({"status": {"failedIndexes": "1,3-5"}}))
    [1, 3, 4, 5]
    """
    indexes: set[int] = set()
    for part in filter(None, ((job or {}).get("status", {}).get("failedIndexes") or "").split(",")):
        first, _, last = part.partition("-")
        indexes |= set(range(int(first), int(last or first) + 1))
    return indexes


def is_over(snapshot: Snapshot) -> bool:
    """Whether the cluster has ended the job, so that its pods end soon."""
    return snapshot.main is None or has_ended(snapshot.main, snapshot.done) or any(_failures(snapshot.job))


def has_ended(obj: Object, done: str) -> bool:
    return bool(condition(obj, done) or condition(obj, "Failed"))


def is_suspended(snapshot: Snapshot) -> bool:
    return bool(snapshot.main and snapshot.main.get("spec", {}).get("suspend"))


def is_stuck(snapshot: Snapshot) -> bool:
    """Whether a pod waits for something that will not come by itself, such as a missing image."""
    return any(_waiting_state(pod).get("reason") in STUCK for pod in snapshot.pods)


def has_started(pod: Object) -> bool:
    """Whether the agent of a pod was ever started."""
    state = _container_status(pod).get("state") or {}
    return "running" in state or "terminated" in state


def condition(obj: Object | None, kind: str) -> Object | None:
    """Return the condition of this type if it is true."""
    for entry in (obj or {}).get("status", {}).get("conditions") or ():
        if entry.get("type") == kind and entry.get("status") == "True":
            return dict(entry)
    return None


def why_waiting(snapshot: Snapshot) -> str | None:
    """Return None once every pod has started, otherwise the most specific reason that the cluster gives."""
    if is_suspended(snapshot):
        # Others only say that the job is suspended.
        queue = [
            event for event in snapshot.events if _QUEUE in f"{event.get('reportingComponent')}{event.get('source')}"
        ]
        return _line(f"suspended until its queue admits it{_newest(queue or snapshot.events, warnings=False)}")
    # An evicted pod may no longer be listed.
    gone = failed_indexes(snapshot.job) - {index_of(pod) for pod in snapshot.pods}
    started = sum(map(has_started, snapshot.pods)) + len(gone)
    if started >= snapshot.nodes:
        return None
    reasons = []
    for pod in snapshot.pods:
        conditions: Sequence[Object] = pod.get("status", {}).get("conditions") or ()
        scheduled: Object = next((c for c in conditions if c.get("type") == "PodScheduled"), {})
        waiting = scheduled if scheduled.get("status") == "False" else _waiting_state(pod)
        if not has_started(pod) and (waiting is scheduled or waiting.get("reason") in STUCK):
            reason, message = waiting.get("reason", "Unschedulable"), waiting.get("message", "no reason given")
            reasons.append(f"{reason}: {message}")
    why = f": {reasons[0]}" if reasons else _newest(snapshot.events)
    return _line(f"{started} of {snapshot.nodes} pods have started{why}")


def _newest(events: Sequence[Object], warnings: bool = True) -> str:
    """Return the newest warning: a full quota, a volume that cannot be mounted, a pod that a policy rejects."""

    def time_of(event: Object) -> str:
        # Times of the API server sort as text.
        series = event.get("series") or {}
        return str(series.get("lastObservedTime") or event.get("lastTimestamp") or event.get("eventTime") or "")

    relevant = [event for event in events if event.get("type") == "Warning" or not warnings]
    if not relevant:
        return ""
    last = max(relevant, key=time_of)
    return f": {last.get('reason', 'no reason')}: {last.get('message', '')}"


def failure(snapshot: Snapshot, failed: Object) -> JobState:
    """Return the state of a failed run: the cause is a pod that was evicted or killed, else the Job, else the ranks."""
    for cause, subject in _causes(snapshot.pods):
        status = STATUS_OF_REASON[cause["reason"]]
        # The pod's own fault: it used more disk than its limit.
        exceeded = cause["reason"] in ("Evicted", "TerminationByKubelet") and "exceed" in cause.get("message", "")
        if exceeded and "The node was low" not in cause.get("message", ""):
            status = Status.FAILED
        return _ended(snapshot, status, f"{subject} {_DESCRIPTIONS[status]}: {_describe(cause)}")
    ends = (failed, *_failures(snapshot.job))
    own = next((end for end in ends if end.get("reason") in STATUS_OF_REASON), None)
    if own is not None:
        status = STATUS_OF_REASON[own["reason"]]
        return _ended(snapshot, status, f"the job {snapshot.name} {_DESCRIPTIONS[status]}: {_describe(own)}")
    evicted = next((end for end in ends if DISRUPTED in end.get("message", "")), None)
    if evicted is not None:
        return _ended(snapshot, Status.PREEMPTED, f"a pod of {snapshot.name} was evicted: {_describe(evicted)}")
    return _ended(snapshot, None, None)


def _failures(job: Object | None) -> Iterator[Object]:
    """Yield FailureTarget first, because Failed is only set after the last pod has ended."""
    for kind in ("FailureTarget", "Failed"):
        if end := condition(job, kind):
            yield end


def _causes(pods: Sequence[Object]) -> Iterator[tuple[Object, str]]:
    """Yield known causes with the pod they concern: evicted pods first, then killed ones, then failed ones."""
    causes = []
    for pod in pods:
        status = pod.get("status", {})
        terminated = (_container_status(pod).get("state") or {}).get("terminated") or {}
        for priority, cause in enumerate((condition(pod, DISRUPTED), status, terminated)):
            if cause and cause.get("reason") in STATUS_OF_REASON:
                # The kubelet's message is not always repeated in the container status.
                message = cause.get("message") or status.get("message") or ""
                causes.append((priority, {"reason": cause["reason"], "message": message}, name_and_node(pod)))
    return ((cause, subject) for _, cause, subject in sorted(causes, key=lambda entry: entry[0]))


def name_and_node(pod: Object) -> str:
    node = pod.get("spec", {}).get("nodeName")
    return f"pod {pod['metadata']['name']}" + (f" on {node}" if node else "")


def _ended(snapshot: Snapshot, status: Status | None, reason: str | None) -> JobState:
    codes = [code for pod in snapshot.pods if (code := exit_code(pod)) is not None]
    return JobState(
        running=False, exit_code=max(codes, default=None), status=status, reason=_line(reason) if reason else None
    )


def exit_code(pod: Object) -> int | None:
    terminated = (_container_status(pod).get("state") or {}).get("terminated")
    return None if terminated is None else terminated.get("exitCode")


def _container_status(pod: Object) -> Object:
    statuses = pod.get("status", {}).get("containerStatuses") or ()
    return next((status for status in statuses if status.get("name") == CONTAINER), {})


def _waiting_state(pod: Object) -> Object:
    return (_container_status(pod).get("state") or {}).get("waiting") or {}


def _describe(cause: Object) -> str:
    message = cause.get("message") or ""
    return f"{cause.get('reason', 'no reason given')}{f' ({message})' if message else ''}"


def _line(sentence: str) -> str:
    """Make the cluster's text one line of safe characters, short enough for a table."""
    return " ".join(safe_text(sentence).split())[:500]


# --- pods that somebody deletes ---


@dataclass
class Deletions:
    """Pods that were deleted while their Job went on (`kubectl delete pod`, a descheduler).

    Their ranks are asked to end and report nothing, and the others report a lost connection, so that only the cluster
    knows the cause. No condition says it afterwards, and the pod disappears. A Job that fails deletes its pods too, and
    the snapshot may have read the Job before it said so: beside a pod that failed by itself, a deleted pod is only
    suspected until the Job tells when it failed.
    """

    by_name: dict[str, Object] = field(default_factory=dict)
    _suspected: dict[str, Object] = field(default_factory=dict)
    _seen: dict[str, Object] = field(default_factory=dict)

    def watch(self, snapshot: Snapshot) -> None:
        """Take the next snapshot of the run into account."""
        listed = {str(pod["metadata"]["name"]): pod for pod in snapshot.pods}
        if is_deleted(snapshot) or is_suspended(snapshot):
            return
        ending = next(_failures(snapshot.job), None)
        going = {name: pod for name, pod in listed.items() if pod["metadata"].get("deletionTimestamp")}
        if ending is not None:
            suspected = {**self._suspected, **going}
            deleted = {name: pod for name, pod in suspected.items() if _was_deleted(pod, before=ending)}
        else:
            vanished = {name: pod for name, pod in self._seen.items() if name not in listed}
            deleted = {name: pod for name, pod in {**going, **vanished}.items() if not _is_explained(pod)}
            if _may_be_failing(snapshot):
                self._suspected |= deleted
                deleted = {}
        # What was found first stays first.
        self.by_name = {**self.by_name, **deleted}
        self._seen |= listed

    def explain(self, state: JobState, lost: Collection[int] = ()) -> JobState:
        """Return the state with the first deleted pod as its cause, if it has none. lost: nodes that do not matter."""
        pod = next((pod for pod in self.by_name.values() if index_of(pod) not in lost), None)
        if pod is None or state.running or state.status is not None or state.exit_code == 0:
            return state
        reason = _line(f"{name_and_node(pod)} was deleted while the job was running")
        return replace(state, status=Status.PREEMPTED, reason=reason)


def _is_explained(pod: Object) -> bool:
    """Whether a pod that goes away has ended by itself, or was evicted."""
    is_finished = pod.get("status", {}).get("phase") in ("Succeeded", "Failed")
    return is_finished or condition(pod, DISRUPTED) is not None


def _may_be_failing(snapshot: Snapshot) -> bool:
    """Whether a pod failed by itself, so that its Job may be deleting the others though it did not say so yet. The pods
    were listed at one moment: no Job deletes a pod before a failed one is listed, except at its deadline."""
    job: Object = snapshot.job or {}
    failed = (pod for pod in snapshot.pods if pod.get("status", {}).get("phase") == "Failed")
    is_per_index = job.get("spec", {}).get("backoffLimitPerIndex") is not None
    return not is_per_index and any(not pod["metadata"].get("deletionTimestamp") for pod in failed)


def _was_deleted(pod: Object, before: Object) -> bool:
    """Whether the deletion of a pod was requested earlier than its Job failed. The server's clock wrote both times;
    within the same second the Job counts as the cause."""
    metadata = pod["metadata"]
    if not metadata.get("deletionTimestamp") or condition(pod, DISRUPTED):
        return False
    with contextlib.suppress(KeyError, TypeError, ValueError):
        # The time of a deletion is when the grace period ends.
        grace = timedelta(seconds=metadata.get("deletionGracePeriodSeconds") or 0)
        requested = datetime.fromisoformat(metadata["deletionTimestamp"]) - grace
        return requested < datetime.fromisoformat(before["lastTransitionTime"])
    return False


# --- nodes that a run can lose ---


@dataclass
class Losses:
    """The lost nodes of one run. Its Job keeps the other indexes when one fails, so the end is decided here.

    expendable: nodes that may be lost once rank 0 is past setup. ranks: per node. note: called once per loss, with the
    names of the node's pods that are still listed.
    """

    run_dir: Path
    nodes: int
    ranks: int
    expendable: Collection[int]
    note: Callable[[str, list[str]], None]
    lost: list[int] = field(default_factory=list)
    deletions: Deletions = field(default_factory=Deletions)
    _failed_at: float | None = None
    _client_ended_at: float | None = None
    _is_warned: bool = False
    # By node: the pod of a lost node may no longer be listed.
    _hosts: dict[int | None, str] = field(default_factory=dict)

    def state_of(self, snapshot: Snapshot) -> JobState:
        """Return the state of the run, judged by the nodes that are left."""
        self.deletions.watch(snapshot)
        if not self.expendable or is_ending_all_pods(snapshot):
            return self.deletions.explain(state_of(self._without_lost(snapshot)), self.lost)
        self._hosts |= {index_of(pod): host for pod in snapshot.pods if (host := pod["spec"].get("nodeName"))}
        failed, expendable = failed_nodes(snapshot), self._expendable(snapshot)
        if is_past_setup(self.run_dir):
            overdue = self._overdue()
            for node in sorted(((failed | overdue) & expendable) - set(self.lost)):
                self.lost.append(node)
                host = self._hosts.get(node, "never scheduled")
                names = [str(pod["metadata"]["name"]) for pod in snapshot.pods if index_of(pod) == node]
                how = "is gone; rank 0 continues with the other replicas"
                silent = f"is silent: it has not ended {OVERDUE_S:g} s after the client"
                self.note(f"node {node} ({host}) {how if node in failed else silent}", names)
        fatal = failed - set(self.lost)
        if fatal and fatal <= expendable:
            self._failed_at = time.monotonic() if self._failed_at is None else self._failed_at
            if time.monotonic() - self._failed_at < NOTICE_S:
                return JobState(running=True, waiting=why_waiting(snapshot))
        left = self._without_lost(snapshot)
        if not fatal:
            return replace(self._state_of_rest(left), lost=tuple(self.lost))
        # The run cannot continue without this node, though its Job would.
        state, node = self.deletions.explain(failure(left, {}), self.lost), min(fatal)
        if state.status is None and not any(index_of(pod) == node for pod in left.pods):
            # A pod that failed by itself would still be listed: somebody deleted it before this controller looked.
            host = f" ({self._hosts[node]})" if node in self._hosts else ""
            reason = f"the pod of node {node}{host} of {left.name} was evicted or deleted"
            state = replace(state, status=Status.PREEMPTED, reason=reason)
        return replace(state, lost=tuple(self.lost))

    def _overdue(self) -> set[int]:
        """Return the nodes whose ranks have not reported their end OVERDUE_S after those of the client's node."""
        ended = {outcome.rank for outcome in store.sound_outcomes(self.run_dir)}
        if not set(ranks_of(0, self.ranks)) <= ended:
            return set()
        self._client_ended_at = time.monotonic() if self._client_ended_at is None else self._client_ended_at
        if time.monotonic() - self._client_ended_at < OVERDUE_S:
            return set()
        return {node for node in range(self.nodes) if not set(ranks_of(node, self.ranks)) <= ended}

    def _without_lost(self, snapshot: Snapshot) -> Snapshot:
        kept = [pod for pod in snapshot.pods if index_of(pod) not in self.lost]
        return replace(snapshot, pods=kept, nodes=snapshot.nodes - len(self.lost))

    def _expendable(self, snapshot: Snapshot) -> set[int]:
        """Return no nodes if the cluster dropped the limit per index: its Job would then restart them."""
        if snapshot.job is None or snapshot.job["spec"].get("backoffLimitPerIndex") is not None:
            return set(self.expendable)
        if not self._is_warned and why_waiting(snapshot) is None:
            self._is_warned = True
            self.note(_NO_INDEX_LIMIT, [])
        return set()

    def _state_of_rest(self, snapshot: Snapshot) -> JobState:
        """End the run once all remaining ranks have ended: their torchrun would wait minutes for the lost ones."""
        self._failed_at = None
        # The log reader may be in the middle of a file; it is complete at the next poll.
        with contextlib.suppress(StoreError):
            by_index = any(end.get("reason") == "FailedIndexes" for end in _failures(snapshot.job))
            awaited = awaited_ranks(self.nodes, self.lost, self.ranks)
            if self.lost and (by_index or have_ended(self.run_dir, awaited)):
                return JobState(running=False, exit_code=0)
        return state_of(snapshot)
