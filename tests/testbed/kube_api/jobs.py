"""The Job controller: pods of Indexed and plain Jobs, their counting, their limits, their end."""

from __future__ import annotations

import copy
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from testbed.kube_api.refusals import Refusal
from testbed.kube_api.resources import JOBS, PODS, Object
from testbed.kube_api.state import State, now, owner_reference, owners, suffix

INDEX = "batch.kubernetes.io/job-completion-index"
TRACKED = "batch.kubernetes.io/job-tracking"
SOURCE = "job-controller"


class JobController:
    """After a pod has failed its index waits `backoff_s` (ten seconds in a real cluster)."""

    def __init__(self, state: State, backoff_s: float = 0.3) -> None:
        self._state, self._backoff_s = state, backoff_s
        self._started: dict[str, float] = {}
        self._ended: dict[str, float] = {}
        self._failed_at: dict[tuple[str, int], float] = {}
        # The real one writes them into an annotation of the pod that is next.
        self._failures: Counter[tuple[str, int]] = Counter()
        self._refused: set[str] = set()

    def sync(self) -> None:
        for job in self._state.list(JOBS):
            pods = [p for p in self._state.list(PODS, job["metadata"]["namespace"]) if _owned(p, job)]
            if condition(job, "Complete") or condition(job, "Failed"):
                self._release(pods)
                self._expire(job)
            elif job["metadata"].get("deletionTimestamp"):
                self._release(pods)
            else:
                self._advance(job, pods)
        self._release_orphans()

    def _advance(self, job: Object, pods: list[Object]) -> None:
        if job["spec"].get("suspend"):
            self._hold(job, pods)
            return
        uid = job["metadata"]["uid"]
        self._started.setdefault(uid, time.monotonic())
        counted = self._count(job, pods)
        failure = self._failure(counted, pods)
        if failure is not None:
            self._fail(counted, pods, failure)
            return
        done = indexes_done(counted)
        if len(done) >= counted["spec"]["completions"]:
            self._complete(counted)
            return
        self._create_missing(counted, pods, done | indexes_failed(counted))
        self._update_counts(counted, pods)

    def _count(self, job: Object, pods: list[Object]) -> Object:
        """Count pods that have ended, each once; the finalizer that held them for this is taken away."""
        tracked = [p for p in pods if TRACKED in p["metadata"].get("finalizers", [])]
        ended = [p for p in tracked if is_finished(p) or _has_failed(job, p)]
        succeeded = [p for p in ended if p["status"]["phase"] == "Succeeded"]
        failed = [p for p in ended if _has_failed(job, p) and not _is_ignored(job, p)]
        for pod in failed:
            self._failed_at[job["metadata"]["uid"], index_of(pod)] = time.monotonic()
            self._failures[job["metadata"]["uid"], index_of(pod)] += 1

        def add(each: Object) -> None:
            status = each["status"]
            status.setdefault("startTime", now())
            done = indexes_done(each) | {index_of(p) for p in succeeded}
            status["completedIndexes"] = intervals(done)
            status["succeeded"] = len(done)
            status["failed"] = status.get("failed", 0) + len(failed)
            if "backoffLimitPerIndex" in each["spec"]:
                spent = {i for p in failed if self._spends(each, p) for i in (index_of(p),)}
                status["failedIndexes"] = intervals(indexes_failed(each) | spent)
            status["uncountedTerminatedPods"] = {}
            status["conditions"] = [c for c in status.get("conditions", []) if c["type"] != "Suspended"]

        counted = self._state.modify(JOBS, job, add) or job
        self._release(ended)
        return counted

    def _spends(self, job: Object, pod: Object) -> bool:
        """Whether its index is not tried again: its limit is passed, or a rule says so."""
        rule = _matching_rule(job, pod)
        told = rule is not None and rule[1]["action"] == "FailIndex"
        return told or self._failures[job["metadata"]["uid"], index_of(pod)] > job["spec"]["backoffLimitPerIndex"]

    def _release(self, pods: list[Object]) -> None:
        for pod in pods:
            if is_finished(pod) or pod["metadata"].get("deletionTimestamp"):
                self._state.modify(PODS, pod, _untrack)

    def _release_orphans(self) -> None:
        """Pods of a Job that was deleted are held by nobody."""
        living = {job["metadata"]["uid"] for job in self._state.list(JOBS)}
        for pod in self._state.list(PODS):
            if TRACKED in pod["metadata"].get("finalizers", []) and not {o["uid"] for o in owners(pod)} & living:
                self._state.modify(PODS, pod, _untrack)

    def _failure(self, job: Object, pods: list[Object]) -> tuple[str, str] | None:
        target = condition(job, "FailureTarget")
        if target:
            return target["reason"], target["message"]
        for pod in pods:
            rule = _matching_rule(job, pod) if pod["status"].get("phase") == "Failed" else None
            if rule is not None and rule[1]["action"] == "FailJob":
                return "PodFailurePolicy", _policy_message(pod, *rule)
        if job["status"].get("failed", 0) > job["spec"]["backoffLimit"]:
            return "BackoffLimitExceeded", "Job has reached the specified backoff limit"
        # Of the others, one that has failed takes none along.
        failed, most = len(indexes_failed(job)), job["spec"].get("maxFailedIndexes")
        if most is not None and failed > most:
            return "MaxFailedIndexesExceeded", "Job has exceeded the specified maximal number of failed indexes"
        if failed and failed + len(indexes_done(job)) >= job["spec"]["completions"]:
            return "FailedIndexes", "Job has failed indexes"
        limit = job["spec"].get("activeDeadlineSeconds")
        if limit is not None and time.monotonic() - self._started[job["metadata"]["uid"]] > limit:
            return "DeadlineExceeded", "Job was active longer than specified deadline"
        return None

    def _fail(self, job: Object, pods: list[Object], why: tuple[str, str]) -> None:
        """Active pods are deleted, and their logs with them; the Job has failed when the last is gone."""
        active = [p for p in pods if not is_finished(p)]
        self._state.modify(JOBS, job, lambda j: set_condition(j, "FailureTarget", *why))
        for pod in active:
            if not pod["metadata"].get("deletionTimestamp"):
                self._delete(pod)
        if active:
            return

        def end(each: Object) -> None:
            set_condition(each, "Failed", *why)
            each["status"] |= {"active": 0, "ready": 0, "terminating": 0}

        self._end(job, end)
        self._state.event(job, "Warning", why[0], why[1], SOURCE)

    def _complete(self, job: Object) -> None:
        why = ("CompletionsReached", "Reached expected number of succeeded pods")

        def end(each: Object) -> None:
            set_condition(each, "SuccessCriteriaMet", *why)
            set_condition(each, "Complete", *why)
            each["status"] |= {"active": 0, "ready": 0, "terminating": 0, "completionTime": now()}

        self._end(job, end)
        self._state.event(job, "Normal", "Completed", "Job completed", SOURCE)

    def _end(self, job: Object, change: Callable[[Object], None]) -> None:
        self._ended[job["metadata"]["uid"]] = time.monotonic()
        self._state.modify(JOBS, job, change)

    def _expire(self, job: Object) -> None:
        limit = job["spec"].get("ttlSecondsAfterFinished")
        ended = self._ended.get(job["metadata"]["uid"])
        if limit is not None and ended is not None and time.monotonic() - ended >= limit:
            meta = job["metadata"]
            self._state.delete(JOBS, meta["namespace"], meta["name"], "Background")

    def _hold(self, job: Object, pods: list[Object]) -> None:
        """A suspended Job has no pods; its time starts anew."""
        for pod in pods:
            if not is_finished(pod) and not pod["metadata"].get("deletionTimestamp"):
                self._delete(pod)
        self._release(pods)
        self._started.pop(job["metadata"]["uid"], None)

        def note(each: Object) -> None:
            set_condition(each, "Suspended", "JobSuspended", "Job suspended")
            each["status"] |= {"active": 0}
            each["status"].pop("startTime", None)

        self._state.modify(JOBS, job, note)

    def _delete(self, pod: Object) -> None:
        self._state.delete(PODS, pod["metadata"]["namespace"], pod["metadata"]["name"])

    def _create_missing(self, job: Object, pods: list[Object], done: set[int]) -> None:
        waits_for_end = job["spec"]["podReplacementPolicy"] == "Failed"
        taken = {
            index_of(p)
            for p in pods
            if not is_finished(p) and (waits_for_end or not p["metadata"].get("deletionTimestamp"))
        }
        free = job["spec"]["parallelism"] - len(taken)
        for index in range(job["spec"]["completions"]):
            failed_at = self._failed_at.get((job["metadata"]["uid"], index), float("-inf"))
            rested = time.monotonic() - failed_at > self._backoff_s
            if free > 0 and index not in taken | done and rested and self._create(job, index):
                free -= 1

    def _create(self, job: Object, index: int) -> bool:
        from testbed.kube_api.admission import admit

        namespace = job["metadata"]["namespace"]
        try:
            created = self._state.create(PODS, namespace, admit(self._state, PODS, namespace, pod_of(job, index)))
        except Refusal as refusal:
            if job["metadata"]["uid"] not in self._refused:
                self._state.event(job, "Warning", "FailedCreate", f"Error creating: {refusal}", SOURCE)
            self._refused.add(job["metadata"]["uid"])
            return False
        name = created["metadata"]["name"]
        self._state.event(job, "Normal", "SuccessfulCreate", f"Created pod: {name}", SOURCE)
        return True

    def _update_counts(self, job: Object, pods: list[Object]) -> None:
        active = [p for p in pods if not is_finished(p) and not p["metadata"].get("deletionTimestamp")]
        ready = [p for p in active if p["status"].get("phase") == "Running"]
        ending = [p for p in pods if not is_finished(p) and p["metadata"].get("deletionTimestamp")]
        counts = {"active": len(active), "ready": len(ready), "terminating": len(ending)}
        self._state.modify(JOBS, job, lambda j: j["status"].update(counts))


def pod_of(job: Object, index: int) -> Object:
    """The pod of one index: its name, host name, annotation, label, and the variable at the end of its environment."""
    template, name = copy.deepcopy(job["spec"]["template"]), job["metadata"]["name"]
    meta, spec = template.setdefault("metadata", {}), template["spec"]
    meta |= {"ownerReferences": [owner_reference(job)], "finalizers": [TRACKED]}
    meta["name"] = f"{name}-{suffix()}"
    if job["spec"]["completionMode"] == "Indexed":
        meta["name"] = f"{name}-{index}-{suffix()}"
        for key in ("labels", "annotations"):
            meta.setdefault(key, {})[INDEX] = str(index)
        spec.setdefault("hostname", f"{name}-{index}")
        source = {"fieldRef": {"fieldPath": f"metadata.labels['{INDEX}']"}}
        for container in spec["containers"]:
            container.setdefault("env", []).append({"name": "JOB_COMPLETION_INDEX", "valueFrom": source})
    return {"metadata": meta, "spec": spec}


def index_of(pod: Object) -> int:
    return int((pod["metadata"].get("annotations") or {}).get(INDEX, 0))


def indexes_done(job: Object) -> set[int]:
    return _numbers(job["status"].get("completedIndexes", ""))


def indexes_failed(job: Object) -> set[int]:
    return _numbers(job["status"].get("failedIndexes", ""))


def _numbers(text: str) -> set[int]:
    spans = [word.partition("-") for word in text.split(",") if word]
    return {number for first, _, last in spans for number in range(int(first), int(last or first) + 1)}


def intervals(numbers: Iterable[int]) -> str:
    """`0,1` and `0-2`: from three in a row on only the first and the last."""
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and spans[-1][-1] == number - 1:
            spans[-1].append(number)
        else:
            spans.append([number])
    return ",".join(f"{s[0]}-{s[-1]}" if len(s) > 2 else ",".join(map(str, s)) for s in spans)


def is_finished(pod: Object) -> bool:
    return pod["status"].get("phase") in ("Succeeded", "Failed")


def _has_failed(job: Object, pod: Object) -> bool:
    """A pod that is being deleted has, unless its Job waits for the end of those."""
    if job["spec"]["podReplacementPolicy"] == "Failed" or is_finished(pod):
        return bool(pod["status"].get("phase") == "Failed")
    return "deletionTimestamp" in pod["metadata"]


def condition(obj: Object, kind: str) -> Object | None:
    found = (c for c in obj.get("status", {}).get("conditions", []) if c["type"] == kind and c["status"] == "True")
    return next(found, None)


def set_condition(obj: Object, kind: str, reason: str, message: str, status: str = "True") -> None:
    conditions, wanted = obj["status"].setdefault("conditions", []), [status, reason, message]
    for known in conditions:
        # A real API server leaves out what is empty.
        if known["type"] == kind and [known.get(key, "") for key in ("status", "reason", "message")] == wanted:
            return
    conditions[:] = [c for c in conditions if c["type"] != kind]
    stamp = {"lastTransitionTime": now(), "lastProbeTime": None}
    conditions.append({"type": kind, "status": status, "reason": reason, "message": message, **stamp})


def _owned(pod: Object, job: Object) -> bool:
    return job["metadata"]["uid"] in {o["uid"] for o in owners(pod)}


def _untrack(pod: Object) -> None:
    left = [f for f in pod["metadata"].get("finalizers", []) if f != TRACKED]
    pod["metadata"]["finalizers"] = left


def _is_ignored(job: Object, pod: Object) -> bool:
    rule = _matching_rule(job, pod)
    return rule is not None and rule[1]["action"] == "Ignore"


def _matching_rule(job: Object, pod: Object) -> tuple[int, dict[str, Any]] | None:
    for number, rule in enumerate((job["spec"].get("podFailurePolicy") or {}).get("rules", [])):
        wanted = rule.get("onPodConditions") or []
        if any(condition(pod, each["type"]) for each in wanted):
            return number, rule
        if "onExitCodes" in rule and _exit_code_matches(rule["onExitCodes"], pod):
            return number, rule
    return None


def _exit_code_matches(wanted: Object, pod: Object) -> bool:
    for status in pod["status"].get("containerStatuses", []):
        ended = status.get("state", {}).get("terminated")
        if ended and ended["exitCode"] != 0 and wanted.get("containerName") in (None, status["name"]):
            return bool((ended["exitCode"] in wanted["values"]) == (wanted["operator"] == "In"))
    return False


def _policy_message(pod: Object, number: int, rule: Object) -> str:
    place = f"{pod['metadata']['namespace']}/{pod['metadata']['name']}"
    tail = f"matching FailJob rule at index {number}"
    if rule.get("onPodConditions"):
        return f"Pod {place} has condition {rule['onPodConditions'][0]['type']} {tail}"
    ended = next(s for s in pod["status"]["containerStatuses"] if s["state"].get("terminated", {}).get("exitCode"))
    code = ended["state"]["terminated"]["exitCode"]
    return f"Container {ended['name']} for pod {place} failed with exit code {code} {tail}"
