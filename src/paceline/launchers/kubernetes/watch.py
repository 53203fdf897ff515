"""What the objects of a run say about it, in our words: pure functions from API objects to a JobState."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.contract import JobState
from paceline.launchers.kubernetes.pod import CONTAINER
from paceline.results.records import Status
from paceline.results.safe_text import text as neutral

Object = Mapping[str, Any]

# Foreign words for an end that no rank could tell of -> ours. Reasons of a DisruptionTarget condition first, then of a
# pod, of its container, of a Job. What is not here is left to what the ranks said.
ENDS: dict[str, Status] = {
    "PreemptionByScheduler": Status.PREEMPTED,
    "DeletionByTaintManager": Status.PREEMPTED,
    "EvictionByEvictionAPI": Status.PREEMPTED,
    "DeletionByPodGC": Status.PREEMPTED,
    "TerminationByKubelet": Status.PREEMPTED,
    "Evicted": Status.PREEMPTED,
    "Preempting": Status.PREEMPTED,
    "NodeLost": Status.PREEMPTED,
    "NodeShutdown": Status.PREEMPTED,
    "Shutdown": Status.PREEMPTED,
    "Terminated": Status.PREEMPTED,
    "UnexpectedAdmissionError": Status.FAILED,
    "NodeAffinity": Status.FAILED,
    "OOMKilled": Status.OOM,
    "ContainerCannotRun": Status.FAILED,
    "StartError": Status.FAILED,
    "DeadlineExceeded": Status.TIMEOUT,
}
_SAID = {
    Status.PREEMPTED: "was taken away",
    Status.OOM: "ran out of its memory limit",
    Status.TIMEOUT: "ran out of its time",
    Status.FAILED: "could not run",
}
DISRUPTED = "DisruptionTarget"
INDEX = "batch.kubernetes.io/job-completion-index"
# The kubelet tries again, but what it would need is not going to come by itself.
STUCK = (
    "ErrImagePull",
    "ImagePullBackOff",
    "InvalidImageName",
    "ErrImageNeverPull",
    "CreateContainerConfigError",
    "CreateContainerError",
)


@dataclass(frozen=True, kw_only=True)
class Sight:
    """One look at a run: the object that was submitted, the Job that holds its pods (the same one for kind job), its
    pods, and warnings about what waits. None is what is not there."""

    main: Object | None
    job: Object | None
    pods: Sequence[Object]
    events: Sequence[Object] = field(default_factory=tuple)
    done: str = "Complete"
    nodes: int = 1
    name: str = ""


def state_of(sight: Sight) -> JobState:
    """Running, waiting or ended, and how."""
    if is_going(sight):
        gone = "is gone" if sight.main is None else "is being deleted"
        return _ended(sight, Status.FAILED, f"the job {sight.name} {gone}: somebody else deleted it")
    if condition(sight.main, sight.done):
        return JobState(running=False, exit_code=0)
    failed = condition(sight.main, "Failed") or next(_failures(sight.job), None)
    # A pod on a node that does not answer is never seen to end, and its Job waits for that.
    failed = failed or next(filter(None, (condition(pod, DISRUPTED) for pod in sight.pods)), None)
    return failure(sight, failed) if failed else JobState(running=True, waiting=why_waiting(sight))


def is_going(sight: Sight) -> bool:
    """Whether somebody has deleted what was submitted."""
    return sight.main is None or bool(sight.main.get("metadata", {}).get("deletionTimestamp"))


def is_ending_as_a_whole(sight: Sight) -> bool:
    """Whether somebody takes all pods away: who deleted or suspended it, or the Job itself, out of its time for one."""
    own = any(end.get("reason") != "FailedIndexes" for end in _failures(sight.job))
    return is_going(sight) or is_suspended(sight) or own


def fallen(sight: Sight) -> set[int]:
    """Nodes whose pod has failed or was taken away, by the pods and by what the Job keeps of those that are gone."""
    found = {index_of(pod) for pod in sight.pods if _has_fallen(pod)}
    return failed_indexes(sight.job) | {index for index in found if index is not None}


def _has_fallen(pod: Object) -> bool:
    phase = pod.get("status", {}).get("phase")
    return phase == "Failed" or (phase != "Succeeded" and condition(pod, DISRUPTED) is not None)


def index_of(pod: Object) -> int | None:
    """The number of a pod's node; None of a pod that no Indexed Job has made."""
    given = (pod["metadata"].get("annotations") or {}).get(INDEX)
    return None if given is None else int(given)


def failed_indexes(job: Object | None) -> set[int]:
    """Of a Job with a limit for each index; it writes them as `1,3-5`."""
    found: set[int] = set()
    for word in filter(None, ((job or {}).get("status", {}).get("failedIndexes") or "").split(",")):
        first, _, last = word.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found


def has_failed_by_indexes(sight: Sight) -> bool:
    """Whether the Job calls itself failed only for indexes that have, once every pod had ended."""
    return any(end.get("reason") == "FailedIndexes" for end in _failures(sight.job))


def is_over(sight: Sight) -> bool:
    """Whether the cluster itself has ended the job, so that nothing of it is left running for long."""
    return sight.main is None or has_ended(sight.main, sight.done) or any(_failures(sight.job))


def has_ended(obj: Object, done: str) -> bool:
    return bool(condition(obj, done) or condition(obj, "Failed"))


def is_suspended(sight: Sight) -> bool:
    return bool(sight.main and sight.main.get("spec", {}).get("suspend"))


def is_stuck(sight: Sight) -> bool:
    """Whether a pod waits for something that nobody will bring."""
    return any(_waiting_of(pod).get("reason") in STUCK for pod in sight.pods)


def is_begun(pod: Object) -> bool:
    """Whether the agent of a pod was ever started."""
    state = _container_of(pod).get("state") or {}
    return "running" in state or "terminated" in state


def condition(obj: Object | None, kind: str) -> Object | None:
    """The condition of this type when it holds."""
    for found in (obj or {}).get("status", {}).get("conditions") or ():
        if found.get("type") == kind and found.get("status") == "True":
            return dict(found)
    return None


def why_waiting(sight: Sight) -> str | None:
    """None once every pod has started; else the first reason that somebody gives, most telling first."""
    if is_suspended(sight):
        return _line(f"suspended until its queue admits it{_newest(sight.events, warnings=False)}")
    # A pod that was taken away may be listed no more.
    gone = failed_indexes(sight.job) - {index_of(pod) for pod in sight.pods}
    begun = sum(map(is_begun, sight.pods)) + len(gone)
    if begun >= sight.nodes:
        return None
    reasons = [reason for pod in sight.pods if not is_begun(pod) and (reason := _pod_waits(pod))]
    why = f": {reasons[0]}" if reasons else _newest(sight.events)
    return _line(f"{begun} of {sight.nodes} pods have started{why}")


def _pod_waits(pod: Object) -> str | None:
    conditions: Sequence[Object] = pod.get("status", {}).get("conditions") or ()
    scheduled: Object = next((c for c in conditions if c.get("type") == "PodScheduled"), {})
    if scheduled.get("status") == "False":
        return f"{scheduled.get('reason', 'Unschedulable')}: {scheduled.get('message', 'no reason given')}"
    waiting = _waiting_of(pod)
    if waiting.get("reason") in STUCK:
        return f"{waiting['reason']}: {waiting.get('message', 'no reason given')}"
    return None


def _newest(events: Sequence[Object], warnings: bool = True) -> str:
    """The last warning: a quota that is full, a volume that cannot be mounted, a pod that a policy refuses."""
    told = [event for event in events if event.get("type") == "Warning" or not warnings]
    if not told:
        return ""
    last = max(told, key=_told_at)
    return f": {last.get('reason', 'no reason')}: {last.get('message', '')}"


def _told_at(event: Object) -> str:
    """Times of the API server are texts that sort by themselves."""
    series = event.get("series") or {}
    return str(series.get("lastObservedTime") or event.get("lastTimestamp") or event.get("eventTime") or "")


def failure(sight: Sight, failed: Object) -> JobState:
    """The first pod that was taken away or killed says how; else the Job does; else it is the ranks' word."""
    for cause, subject in _causes(sight.pods):
        status = ENDS[cause["reason"]]
        # Its own fault: it had used more of the disk than it may.
        overdrawn = cause["reason"] in ("Evicted", "TerminationByKubelet") and "exceed" in cause.get("message", "")
        if overdrawn and "The node was low" not in cause.get("message", ""):
            status = Status.FAILED
        return _ended(sight, status, f"{subject} {_SAID[status]}: {_words(cause)}")
    own = next((c for c in (failed, *_failures(sight.job)) if c.get("reason") in ENDS), None)
    if own is not None:
        status = ENDS[own["reason"]]
        return _ended(sight, status, f"the job {sight.name} {_SAID[status]}: {_words(own)}")
    taken = next((c for c in (failed, *_failures(sight.job)) if DISRUPTED in c.get("message", "")), None)
    if taken is not None:
        return _ended(sight, Status.PREEMPTED, f"a pod of {sight.name} was taken away: {_words(taken)}")
    return _ended(sight, None, None)


def _failures(job: Object | None) -> Iterator[Object]:
    """FailureTarget comes first: the other waits for the last pod."""
    for kind in ("FailureTarget", "Failed"):
        if found := condition(job, kind):
            yield found


def _causes(pods: Sequence[Object]) -> Iterator[tuple[Object, str]]:
    """What is known of each pod's end that our table has a word for; a pod that was taken away comes before one that
    was killed, and that before one that only failed."""
    found = []
    for pod in pods:
        status = pod.get("status", {})
        node = pod.get("spec", {}).get("nodeName")
        subject = f"pod {pod['metadata']['name']}" + (f" on {node}" if node else "")
        terminated = (_container_of(pod).get("state") or {}).get("terminated") or {}
        for rank, cause in enumerate((condition(pod, DISRUPTED), status, terminated)):
            if cause and cause.get("reason") in ENDS:
                # A container's own end carries the kubelet's message only sometimes.
                message = cause.get("message") or status.get("message") or ""
                found.append((rank, {"reason": cause["reason"], "message": message}, subject))
    return ((cause, subject) for _, cause, subject in sorted(found, key=lambda entry: entry[0]))


def _ended(sight: Sight, status: Status | None, reason: str | None) -> JobState:
    codes = [code for pod in sight.pods if (code := exit_code(pod)) is not None]
    return JobState(
        running=False, exit_code=max(codes, default=None), status=status, reason=_line(reason) if reason else None
    )


def exit_code(pod: Object) -> int | None:
    terminated = (_container_of(pod).get("state") or {}).get("terminated")
    return None if terminated is None else terminated.get("exitCode")


def _container_of(pod: Object) -> Object:
    statuses = pod.get("status", {}).get("containerStatuses") or ()
    return next((status for status in statuses if status.get("name") == CONTAINER), {})


def _waiting_of(pod: Object) -> Object:
    return (_container_of(pod).get("state") or {}).get("waiting") or {}


def _words(cause: Object) -> str:
    message = cause.get("message") or ""
    return f"{cause.get('reason', 'no reason given')}{f' ({message})' if message else ''}"


def _line(sentence: str) -> str:
    """One line, whatever the cluster said, and no longer than a table can hold."""
    return " ".join(neutral(sentence).split())[:500]
