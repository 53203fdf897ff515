"""One run on a cluster, from its submission to the removal of everything it left there."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from paceline.contract import JobState
from paceline.errors import LaunchError
from paceline.launchers.kubernetes import watch
from paceline.launchers.kubernetes.client import Away, Cluster, Object, Taken
from paceline.launchers.kubernetes.logs import Logs
from paceline.launchers.kubernetes.losses import Losses
from paceline.launchers.kubernetes.manifests import ATTEMPT, OWNER, RESOURCES, RUN_FOLDER, RUNTIME, Resource, carrier
from paceline.launchers.kubernetes.pod import CONTAINER, RUN_LABEL
from paceline.launchers.node.log_transport import Receiver
from paceline.results.records import Status

LOOK_S = 1.0
EVENTS_S = 5.0
# What cannot come by itself is not waited for as long as a free node is.
STUCK_S = 60.0
# Pods that are told to end have 30 s for it; agents need a few.
DRAIN_S = 20.0
REMOVAL_S = 40.0
REMOVAL_PATIENCE_S = 10.0
READER_S = 300.0
_JOB = RESOURCES["job"]


@dataclass
class Run:
    """What a handle stands for, with what this process has seen of it so far."""

    handle: Mapping[str, Any]
    cluster: Cluster
    logs: Logs
    state: JobState = field(default_factory=lambda: JobState(running=True, waiting="submitted"))
    looked_at: float = float("-inf")
    waiting_since: float = field(default_factory=time.monotonic)
    has_begun: bool = False
    has_ended: bool = False
    is_over: bool = False
    _events: tuple[float, list[Object]] = (float("-inf"), [])
    losses: Losses = field(init=False)

    def __post_init__(self) -> None:
        # A job that an older version has submitted names neither of the two.
        expendable, ranks = self.handle.get("may_be_lost", ()), int(self.handle.get("ranks", 1))
        run_dir, nodes = Path(self.handle["run_dir"]), int(self.handle["nodes"])
        self.losses = Losses(run_dir, nodes, ranks, expendable, note=self._note_loss)

    def _note_loss(self, sentence: str, pods: list[str]) -> None:
        self.logs.note(sentence)
        self.logs.give_up(pods)

    @property
    def name(self) -> str:
        return str(self.handle["name"])

    @property
    def resource(self) -> Any:
        return RESOURCES[self.handle["kind"]]

    def poll(self) -> JobState:
        """How it stands, by a look at most once a second; the last word stays the last."""
        if self.logs.trouble is not None:
            raise self.logs.trouble
        if self.state.running and time.monotonic() - self.looked_at >= LOOK_S:
            sight = self._look()
            self.logs.follow(pod["metadata"]["name"] for pod in sight.pods if watch.is_begun(pod))
            self.state, self.is_over = self._judged(sight), watch.is_over(sight)
            self.has_ended = sight.main is not None and watch.has_ended(sight.main, sight.done)
            self.looked_at = time.monotonic()
        return self.state

    def _look(self) -> watch.Sight:
        main = self.cluster.read(self.resource, self.name)
        child = self.resource.child.format(name=self.name)
        job = main if self.resource is _JOB else self.cluster.read(_JOB, child)
        pods = self.cluster.pods(f"{RUN_LABEL}={self.name}")
        if job is not None:
            # A job of the same name may have been removed a moment ago, whose pods are still ending.
            pods = [pod for pod in pods if _owner(pod) in (None, job["metadata"]["uid"])]
        sight = watch.Sight(
            main=main, job=job, pods=pods, done=self.resource.done, nodes=int(self.handle["nodes"]), name=self.name
        )
        if watch.why_waiting(sight) is None:
            return sight
        return replace(sight, events=self._warnings(sight))

    def _warnings(self, sight: watch.Sight) -> list[Object]:
        """What the cluster says about a run that waits. Not being allowed to read it is no reason to end."""
        asked_at, known = self._events
        if time.monotonic() - asked_at < EVENTS_S:
            return known
        found: list[Object] = []
        about = [sight.main, sight.job, *(pod for pod in sight.pods if not watch.is_begun(pod))]
        with contextlib.suppress(LaunchError):
            for uid in dict.fromkeys(obj["metadata"]["uid"] for obj in about if obj is not None):
                found += self.cluster.events(uid)
        self._events = (time.monotonic(), found)
        return found

    def _judged(self, sight: watch.Sight) -> JobState:
        """What is seen, and how long it has been so."""
        state, waiting = self.losses.state_of(sight), watch.why_waiting(sight)
        self.has_begun = self.has_begun or waiting is None
        if not state.running:
            return state if self.has_begun else self._explained(state)
        if watch.is_suspended(sight):
            self.waiting_since = time.monotonic()
            if self.has_begun:
                reason = f"the queue has taken the job {self.name} back: {state.waiting}"
                return JobState(running=False, status=Status.PREEMPTED, reason=reason)
            return state
        if self.has_begun:
            # Pods that go once all have begun are the end of a job, which its own condition will tell.
            return replace(state, waiting=None)
        limit = float(self.handle["pending_s"])
        limit = min(limit, STUCK_S) if watch.is_stuck(sight) else limit
        if time.monotonic() - self.waiting_since > limit:
            return JobState(running=False, status=Status.FAILED, reason=f"after {limit:g} s {state.waiting}")
        return state

    def _explained(self, state: JobState) -> JobState:
        """Of a job that ended because some of its pods never came, the others only know that they waited in vain."""
        obstacle = self.state.waiting or ""
        if state.status is not None or state.exit_code == 0 or ": " not in obstacle:
            return state
        return replace(state, status=Status.FAILED, reason=f"it ended while {obstacle}")

    def collect(self, run_dir: Path) -> str | None:
        """Bring home what is missing; says what could not be."""
        if not self.is_over:
            # It was given up: agents that are told to end send what there is, and where their ranks stood.
            with contextlib.suppress(LaunchError):
                self.cluster.delete(self.resource, self.name)
        self.logs.drain(DRAIN_S)
        missing = self.logs.receiver.missing(int(self.handle["nodes"]), but=self.losses.lost)
        # Of a job that ended while nobody looked, the pods may be gone: it may have begun all the same.
        may_have_left = self.has_begun or self.has_ended
        if missing is None or self.handle.get("reader") is None or not may_have_left:
            return missing
        # What a log still says would be written over by what the claim holds, or the other way round.
        self.logs.stop()
        return self._read_claim(run_dir, missing)

    def _read_claim(self, run_dir: Path, missing: str) -> str | None:
        """Have a pod print what is on the claim; it is asked only when the logs did not do."""
        manifest = self.handle["reader"]
        name = manifest["metadata"]["name"]
        receiver = Receiver(run_dir)
        try:
            with contextlib.suppress(Taken):
                self.cluster.create(_JOB, manifest)
            deadline = time.monotonic() + READER_S
            while time.monotonic() < deadline:
                job = self.cluster.read(_JOB, name)
                if watch.condition(job, "Complete") or watch.condition(job, "Failed"):
                    break
                time.sleep(LOOK_S)
            for pod in self.cluster.pods(f"{RUN_LABEL}={name}"):
                for line in self._printed(pod["metadata"]["name"], deadline).decode(errors="replace").splitlines():
                    receiver.feed(line)
        except LaunchError as refusal:
            return f"{missing}; and the claim could not be read: {refusal}"
        finally:
            with contextlib.suppress(LaunchError):
                self.cluster.delete(_JOB, name)
        return None if receiver.missing(1) is None else f"{missing}; and the claim did not hold it whole"

    def _printed(self, pod: str, deadline: float) -> bytes:
        """The whole log of a pod that has ended; one that breaks off is asked for again."""
        while True:
            try:
                return b"".join(self.cluster.log(pod, CONTAINER, follow=False))
            except Away:
                if time.monotonic() > deadline:
                    raise
            time.sleep(LOOK_S)

    def remove(self) -> bool:
        """Everything that was created, and its pods; whether they are gone. An engine that cannot be asked now keeps
        its own limits: the job's deadline and its time to live; the log says so."""
        cluster = _briefly(self.cluster)
        command = f"kubectl delete {self.resource.plural} {self.name} --namespace {cluster.namespace}"
        try:
            _delete(cluster, self.resource, self.name)
            if self._await_pods(cluster):
                return True
            self.logs.note(f"its pods did not go within {REMOVAL_S:g} s; the job may be there still: {command}")
        except LaunchError as refusal:
            self.logs.note(f"{refusal}; the job may be there still: {command}")
        finally:
            self.logs.stop()
        return False

    def _await_pods(self, cluster: Cluster) -> bool:
        """Their GPUs are free for the next run when they are gone."""
        deadline = time.monotonic() + REMOVAL_S
        while not _is_empty(cluster, self.name):
            if time.monotonic() > deadline:
                return False
            time.sleep(LOOK_S / 4)
        return True


def _delete(cluster: Cluster, resource: Resource, name: str) -> None:
    """A job and what was created along with it. The Job would take its Service along, but perhaps not before the next
    attempt needs its name."""
    cluster.delete(resource, name)
    if resource is _JOB:
        cluster.delete_service(name)
    if resource is RESOURCES["trainjob"]:
        cluster.delete(RUNTIME, name)


def _is_empty(cluster: Cluster, name: str) -> bool:
    """Whether no pod of that job can do anything any more. One that was taken away may be on a node that will never
    say so."""
    return all(watch.condition(pod, watch.DISRUPTED) for pod in cluster.pods(f"{RUN_LABEL}={name}"))


def _briefly(cluster: Cluster) -> Cluster:
    """The same one, for what is not worth waiting for long."""
    return Cluster(cluster.context, cluster.namespace, REMOVAL_PATIENCE_S, cluster.client)


def submit(cluster: Cluster, manifests: list[Object], name: str, kind: str) -> None:
    """Create everything, or take over what was created for the same attempt before. Whatever ends this halfway removes
    what is there by then: nobody would follow it."""
    resource, main = RESOURCES[kind], carrier(manifests)
    # Somebody else's job is met here, before there is anything to remove.
    _make_room(cluster, main, resource)

    def undo(kind: type[BaseException] | None, stop: BaseException | None, _: object) -> None:
        left = None if stop is None else _withdrawn(_briefly(cluster), name, resource)
        if left and isinstance(stop, LaunchError):
            raise LaunchError(f"{stop}; {left}") from None

    with contextlib.ExitStack() as stack:
        stack.push(undo)
        _create(cluster, manifests, main, resource)


def _withdrawn(cluster: Cluster, name: str, resource: Resource) -> str | None:
    """Remove a job that was created in part; what could not be, as a sentence."""
    try:
        known = cluster.read(resource, name)
        if known is not None and not is_ours(known, name):
            return None
        _delete(cluster, resource, name)
    except LaunchError as refusal:
        command = f"kubectl delete {resource.plural} {name} --namespace {cluster.namespace}"
        return f"{refusal}; the job may be there still: {command}"
    return None


def _create(cluster: Cluster, manifests: list[Object], main: Object, resource: Resource) -> None:
    owner = None
    for manifest in manifests:
        if manifest is main:
            owner = _create_main(cluster, manifest, resource)
        elif manifest["kind"] == "Service":
            assert owner is not None, "a Service comes after the Job that owns it"
            create_service(cluster, manifest, owner)
        else:
            with contextlib.suppress(Taken):
                cluster.create(RUNTIME, manifest)


def create_service(cluster: Cluster, manifest: Object, owner: Object) -> None:
    """Owned by the Job: whoever removes that one removes the Service along."""
    reference = {"apiVersion": "batch/v1", "kind": "Job", "name": owner["metadata"]["name"]}
    reference["uid"] = owner["metadata"]["uid"]
    cluster.create_service({**manifest, "metadata": {**manifest["metadata"], "ownerReferences": [reference]}})


def _create_main(cluster: Cluster, manifest: Object, resource: Resource) -> Object:
    while True:
        if known := _make_room(cluster, manifest, resource):
            return known
        # A request that was sent twice, because its answer got lost, finds what it has created.
        with contextlib.suppress(Taken):
            return cluster.create(resource, manifest)


def _make_room(cluster: Cluster, manifest: Object, resource: Resource) -> Object | None:
    """The job of this attempt, where it is under way; else none, once those of earlier attempts and their pods are
    gone: two of them would write into one folder."""
    name, deadline = manifest["metadata"]["name"], time.monotonic() + REMOVAL_S
    while True:
        known = cluster.read(resource, name)
        if known is None and _is_empty(cluster, name):
            return None
        if known is not None:
            _require_ours(known, name, resource, cluster.namespace)
            if _is_under_way(known, manifest, resource):
                return known
            if not known["metadata"].get("deletionTimestamp"):
                # Of an earlier attempt, whose removal was not seen.
                _delete(cluster, resource, name)
        if time.monotonic() > deadline:
            raise LaunchError(f"{resource.plural} {name} of an earlier attempt did not go within {REMOVAL_S:g} s")
        time.sleep(LOOK_S)


def _is_under_way(known: Object, manifest: Object, resource: Resource) -> bool:
    is_going = known["metadata"].get("deletionTimestamp") or watch.has_ended(known, resource.done)
    return not is_going and is_of_attempt(known, manifest["metadata"]["annotations"][ATTEMPT])


def _require_ours(known: Object, name: str, resource: Resource, namespace: str) -> None:
    if not is_ours(known, name):
        folder = _notes(known).get(RUN_FOLDER, "another program")
        raise LaunchError(
            f"{resource.plural} {name} is there already, in namespace {namespace}, and belongs to {folder}"
        )


def is_ours(known: Object, name: str) -> bool:
    """Created under this name by us. The name holds the mark of the run's launch, which is the same wherever its
    controller runs."""
    return _notes(known).get(OWNER) == name


def is_of_attempt(known: Object, attempt: str) -> bool:
    return _notes(known).get(ATTEMPT) == attempt


def _notes(known: Object) -> Mapping[str, str]:
    return known["metadata"].get("annotations") or {}


def _owner(pod: Object) -> str | None:
    owners = pod["metadata"].get("ownerReferences") or ()
    return owners[0].get("uid") if owners else None
