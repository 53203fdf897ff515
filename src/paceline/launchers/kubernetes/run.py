"""One run on a cluster: create its objects, follow its logs, poll its state, collect its files, remove everything."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from paceline.contract import JobState
from paceline.errors import LaunchError, StoreError
from paceline.host.rank_lines import LineSplitter
from paceline.launchers.kubernetes import states
from paceline.launchers.kubernetes.client import AlreadyExists, Cluster, LogNotReady, NotFound, Object, Unavailable
from paceline.launchers.kubernetes.manifests import (
    ATTEMPT,
    CONTAINER,
    DIRECTORY_LABEL,
    OWNER,
    RESOURCES,
    RUN_FOLDER,
    RUN_LABEL,
    RUNTIME,
    Resource,
    carrier,
)
from paceline.launchers.node.log_transport import Receiver
from paceline.results import store
from paceline.results.records import Status

POLL_S = 1.0
EVENTS_S = 5.0
# A pod that cannot start by itself gets less time than one that waits for a free node.
STUCK_S = 60.0
# Pods have 30 s to terminate; agents need a few.
DRAIN_S = 20.0
REMOVAL_S = 40.0
REMOVAL_PATIENCE_S = 10.0
READER_S = 300.0
LOG_RETRY_S = 0.5
# For log threads that end at once. A thread that waits for a silent node is abandoned; it writes nothing any more.
JOIN_S = 1.0
_JOB = RESOURCES["job"]


# --- logs ---


class Logs:
    """Follows the logs of all pods, one thread each, and writes the files of the ranks into the run directory.

    A broken stream is read again from its beginning. Lines already received are skipped; lines that a rotated log has
    lost show as a gap (see `log_transport`). `trouble` is the first refusal of the API server, if any.
    """

    def __init__(self, cluster: Cluster, run_dir: Path) -> None:
        self._cluster = cluster
        self.receiver = Receiver(run_dir)
        self.trouble: LaunchError | None = None
        self._log = run_dir / "log.txt"
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._threads: dict[str, threading.Thread] = {}
        self._printed: dict[str, int] = {}
        self._abandoned: set[str] = set()

    def follow(self, pods: Iterable[str]) -> None:
        """Start to follow the pods that are not followed yet."""
        for pod in pods:
            if not self._threads:
                # A controller that adopted the job reads everything again.
                self._log.write_text("")
            if pod not in self._threads:
                thread = threading.Thread(target=self._follow, args=(pod,), name=f"log of {pod}", daemon=True)
                self._threads[pod] = thread
                thread.start()

    def drain(self, limit_s: float) -> None:
        """Wait for the last lines of ended pods."""
        deadline = time.monotonic() + limit_s
        for pod, thread in self._threads.items():
            if pod not in self._abandoned:
                thread.join(max(0.0, deadline - time.monotonic()))

    def stop(self) -> None:
        """Write nothing from now on: the directory may be sealed, or belong to the next attempt."""
        with self._lock:
            self._stop.set()
        self.drain(JOIN_S)

    def note(self, sentence: str, lost: Iterable[str] = ()) -> None:
        """Write a line. lost: pods that are not waited for any more, because their node may never answer."""
        self._abandoned |= set(lost)
        with self._lock, self._log.open("a", encoding="utf-8") as log:
            log.write(f"paceline: {sentence}\n")

    def _follow(self, pod: str) -> None:
        try:
            while not self._stop.is_set() and not self._read_once(pod) and pod not in self._abandoned:
                self._stop.wait(LOG_RETRY_S)
        except LaunchError as refusal:
            if pod not in self._abandoned:
                self.trouble = self.trouble or refusal

    def _read_once(self, pod: str) -> bool:
        """Read a log as far as it goes. Returns True when nothing more will come."""
        known = self._cluster.pod(pod)
        ended = known is None or states.exit_code(known) is not None
        try:
            with contextlib.suppress(NotFound):
                self.read(pod, follow=not ended)
        except (Unavailable, LogNotReady):
            return False
        # Only a log that was read after the end of the pod is known to be complete.
        return ended

    def read(self, pod: str, follow: bool) -> None:
        splitter, count = LineSplitter(), 0
        for chunk in self._cluster.log(pod, CONTAINER, follow):
            count = self._write(pod, splitter.add(chunk), count)
            if self._stop.is_set():
                return
        # The rest of a followed stream may be half a line; that of an ended pod is its last line.
        if not follow:
            self._write(pod, splitter.last(), count)

    def _write(self, pod: str, lines: list[bytes], count: int) -> int:
        """Write the new lines of a chunk. count: lines that this reading has seen before it. Returns the new count."""
        with self._lock:
            if self._stop.is_set():
                return count
            with self._log.open("ab") as log:
                for line in lines:
                    if self.receiver.feed(line.decode(errors="replace")) is None:
                        continue
                    count += 1
                    if count > self._printed.get(pod, 0):
                        self._printed[pod] = count
                        log.write(line + b"\n")
        return count


# --- a submitted run ---


@dataclass
class Run:
    """A submitted job, by its handle, with what this process has seen of it."""

    handle: Mapping[str, Any]
    cluster: Cluster
    logs: Logs
    state: JobState = field(default_factory=lambda: JobState(running=True, waiting="submitted"))
    polled_at: float = float("-inf")
    waiting_since: float = field(default_factory=time.monotonic)
    has_begun: bool = False
    has_ended: bool = False
    is_over: bool = False
    _events: tuple[float, list[Object]] = (float("-inf"), [])
    losses: states.Losses = field(init=False)

    def __post_init__(self) -> None:
        # The handle of an older version has neither key.
        expendable, ranks = self.handle.get("may_be_lost", ()), int(self.handle.get("ranks", 1))
        run_dir, nodes = Path(self.handle["run_dir"]), int(self.handle["nodes"])
        self.losses = states.Losses(run_dir, nodes, ranks, expendable, self.logs.note)

    @property
    def name(self) -> str:
        return str(self.handle["name"])

    @property
    def resource(self) -> Resource:
        return RESOURCES[self.handle["kind"]]

    def poll(self) -> JobState:
        """Job state, polled at most once per second; terminal states are final."""
        if self.logs.trouble is not None:
            raise self.logs.trouble
        if self.state.running and time.monotonic() - self.polled_at >= POLL_S:
            snapshot = self._snapshot()
            self.logs.follow(pod["metadata"]["name"] for pod in snapshot.pods if states.has_started(pod))
            self.state, self.is_over = self._explain(self._judge(snapshot)), states.is_over(snapshot)
            self.has_ended = snapshot.main is not None and states.has_ended(snapshot.main, snapshot.done)
            self.polled_at = time.monotonic()
        return self.state

    def _snapshot(self) -> states.Snapshot:
        main = self.cluster.read(self.resource, self.name)
        child = self.resource.child.format(name=self.name)
        job = main if self.resource is _JOB else self.cluster.read(_JOB, child)
        pods = self.cluster.pods(f"{RUN_LABEL}={self.name}")
        if job is not None:
            # Pods of a job of the same name that was just removed may still be terminating.
            pods = [pod for pod in pods if _owner(pod) in (None, job["metadata"]["uid"])]
        snapshot = states.Snapshot(
            main=main, job=job, pods=pods, done=self.resource.done, nodes=int(self.handle["nodes"]), name=self.name
        )
        if states.why_waiting(snapshot) is None:
            return snapshot
        if time.monotonic() - self._events[0] >= EVENTS_S:
            events: list[Object] = []
            waiting = [main, job, *(pod for pod in pods if not states.has_started(pod))]
            # A missing permission to read events does not end the run.
            with contextlib.suppress(LaunchError):
                for uid in dict.fromkeys(obj["metadata"]["uid"] for obj in waiting if obj is not None):
                    events += self.cluster.events(uid)
            self._events = (time.monotonic(), events)
        return replace(snapshot, events=self._events[1])

    def _judge(self, snapshot: states.Snapshot) -> JobState:
        """Return the state of the run, given the snapshot and how long it has been waiting."""
        state, waiting = self.losses.state_of(snapshot), states.why_waiting(snapshot)
        self.has_begun = self.has_begun or waiting is None
        if not state.running:
            # If some pods never started, the others only report that they waited in vain.
            obstacle = self.state.waiting or ""
            is_explained = self.has_begun or state.status is not None or state.exit_code == 0 or ": " not in obstacle
            if is_explained:
                return state
            return replace(state, status=Status.FAILED, reason=f"it ended while {obstacle}", recurs=True)
        if states.is_suspended(snapshot):
            self.waiting_since = time.monotonic()
            if self.has_begun:
                reason = f"the queue has suspended the job {self.name} again: {state.waiting}"
                return JobState(running=False, status=Status.PREEMPTED, reason=reason)
            return state
        if self.has_begun:
            # Pods that disappear after all have started mean the end of the job; its condition will say how.
            return replace(state, waiting=None)
        limit = float(self.handle["pending_s"])
        limit = min(limit, STUCK_S) if states.is_stuck(snapshot) else limit
        if time.monotonic() - self.waiting_since > limit:
            reason = f"after {limit:g} s {state.waiting}"
            return JobState(running=False, status=Status.FAILED, reason=reason, recurs=True)
        return state

    def _explain(self, state: JobState) -> JobState:
        """Return the state with a deleted namespace as its cause. The cluster deletes the pods of such a namespace
        first and the job after the last of them, so that its end looks like that of pods that somebody deleted."""
        may_be = state.status in (None, Status.PREEMPTED, Status.FAILED) and state.exit_code != 0
        if state.running or not may_be or self.cluster.has_namespace(self.resource, self.name):
            return state
        namespace = self.cluster.namespace
        what = f"the job {self.name} is being deleted: somebody deleted its namespace {namespace}"
        reason = f"{what}; try: paceline cluster init --namespace {namespace} --apply"
        return replace(state, status=Status.FAILED, reason=reason, recurs=True)

    def collect(self, run_dir: Path) -> str | None:
        """Fetch missing files. Returns a sentence about those that could not be fetched."""
        if not self.is_over:
            # The controller gave up. Agents that are asked to end send their files and the stacks of their ranks.
            with contextlib.suppress(LaunchError):
                self.cluster.delete(self.resource, self.name)
        self.logs.drain(DRAIN_S)
        missing = self.logs.receiver.missing(int(self.handle["nodes"]), but=self.losses.lost)
        # If a job ended while nobody polled it, its pods may be gone, but it may still have written files.
        may_have_files = self.has_begun or self.has_ended
        if missing is None or self.handle.get("reader") is None or not may_have_files:
            return missing
        # Logs and claim must not write the same files.
        self.logs.stop()
        return self._read_claim(run_dir, missing)

    def _read_claim(self, run_dir: Path, missing: str) -> str | None:
        """Start a pod that prints the files on the claim, and receive them from its log."""
        manifest = self.handle["reader"]
        name = manifest["metadata"]["name"]
        receiver = Receiver(run_dir)
        try:
            with contextlib.suppress(AlreadyExists):
                self.cluster.create(_JOB, manifest)
            deadline = time.monotonic() + READER_S
            while time.monotonic() < deadline:
                job = self.cluster.read(_JOB, name)
                if states.condition(job, "Complete") or states.condition(job, "Failed"):
                    break
                time.sleep(POLL_S)
            for pod in self.cluster.pods(f"{RUN_LABEL}={name}"):
                for line in self._whole_log(pod["metadata"]["name"], deadline).decode(errors="replace").splitlines():
                    receiver.feed(line)
        except LaunchError as refusal:
            return f"{missing}; and the claim could not be read: {refusal}"
        finally:
            with contextlib.suppress(LaunchError):
                self.cluster.delete(_JOB, name)
        return None if receiver.missing(1) is None else f"{missing}; and the files on the claim are incomplete"

    def _whole_log(self, pod: str, deadline: float) -> bytes:
        while True:
            try:
                return b"".join(self.cluster.log(pod, CONTAINER, follow=False))
            except Unavailable:
                if time.monotonic() > deadline:
                    raise
            time.sleep(POLL_S)

    def remove(self) -> bool:
        """Delete everything that was created. Returns True once the pods are gone, so that their GPUs are free.

        If the API server cannot be reached, the job's deadline and time to live still apply, and the log says so.
        """
        cluster = _impatient(self.cluster)
        command = f"kubectl delete {self.resource.plural} {self.name} --namespace {cluster.namespace}"
        deadline = time.monotonic() + REMOVAL_S
        try:
            _delete(cluster, self.resource, self.name)
            while not _is_empty(cluster, self.name):
                if time.monotonic() > deadline:
                    self.logs.note(f"its pods did not end within {REMOVAL_S:g} s; the job may still exist: {command}")
                    return False
                time.sleep(POLL_S / 4)
            return True
        except LaunchError as refusal:
            self.logs.note(f"{refusal}; the job may still exist: {command}")
        finally:
            self.logs.stop()
        return False


def _delete(cluster: Cluster, resource: Resource, name: str) -> None:
    """Delete a job and its companions. The Job would delete its Service too late: the next attempt needs its name."""
    cluster.delete(resource, name)
    if resource is _JOB:
        cluster.delete_service(name)
    if resource is RESOURCES["trainjob"]:
        cluster.delete(RUNTIME, name)


def _is_empty(cluster: Cluster, name: str) -> bool:
    """Whether no pod of the job can do anything. An evicted pod may stay listed if its node never answers."""
    return all(states.condition(pod, states.DISRUPTED) for pod in cluster.pods(f"{RUN_LABEL}={name}"))


def _impatient(cluster: Cluster) -> Cluster:
    """The same cluster with a short patience, for cleaning up."""
    return Cluster(cluster.context, cluster.namespace, REMOVAL_PATIENCE_S, cluster.client, cluster.rights)


# --- submission ---


def submit(cluster: Cluster, manifests: list[Object], name: str, kind: str) -> None:
    """Create all objects, or adopt those of the same attempt. If interrupted, remove what was created."""
    resource, main = RESOURCES[kind], carrier(manifests)
    # Finds the job of another owner before there is anything to remove.
    _make_room(cluster, main, resource)

    def undo(kind: type[BaseException] | None, stop: BaseException | None, _: object) -> None:
        if stop is None:
            return
        quick = _impatient(cluster)
        try:
            known = quick.read(resource, name)
            if known is None or is_ours(known, name):
                _delete(quick, resource, name)
        except LaunchError as refusal:
            if isinstance(stop, LaunchError):
                command = f"kubectl delete {resource.plural} {name} --namespace {cluster.namespace}"
                text = f"{stop}; {refusal}; the job may still exist: {command}"
                raise LaunchError(text, recurs=stop.recurs) from None

    with contextlib.ExitStack() as stack:
        stack.push(undo)
        owner: Object | None = None
        for manifest in manifests:
            if manifest is main:
                while owner is None:
                    owner = _make_room(cluster, manifest, resource)
                    # A request that was repeated because its answer got lost finds the object it created.
                    with contextlib.suppress(AlreadyExists):
                        owner = owner or cluster.create(resource, manifest)
            elif manifest["kind"] == "Service":
                assert owner is not None, "a Service comes after the Job that owns it"
                create_service(cluster, manifest, owner)
            else:
                with contextlib.suppress(AlreadyExists):
                    cluster.create(RUNTIME, manifest)


def remove_earlier(cluster: Cluster, settings: Mapping[str, Any]) -> None:
    """Remove jobs of earlier launches in the same run directory, and wait until their pods are gone.

    A controller that lost the cluster could not remove its job, which would compete with the new one for the nodes.
    Jobs are found by the label of the directory, which pods have too, and by the handles that are stored in it: it may
    be mounted on another host now.
    """
    found = _stored_jobs(cluster, Path(settings["run_dir"]))
    for pod in cluster.pods(f"{DIRECTORY_LABEL}={settings['directory']}"):
        found.setdefault(pod["metadata"]["labels"][RUN_LABEL], RESOURCES[settings["kind"]])
    found.pop(settings["name"], None)
    for name, resource in found.items():
        known = cluster.read(resource, name)
        if known is not None and is_ours(known, name):
            _delete(cluster, resource, name)
    deadline = time.monotonic() + REMOVAL_S
    for name, resource in found.items():
        while not _is_empty(cluster, name):
            if time.monotonic() > deadline:
                command = f"kubectl delete {resource.plural} {name} --namespace {cluster.namespace}"
                raise LaunchError(
                    f"{resource.plural} {name} of an earlier launch of this run did not end within {REMOVAL_S:g} s"
                    f"; try: {command}"
                )
            time.sleep(POLL_S / 4)


def _stored_jobs(cluster: Cluster, run_dir: Path) -> dict[str, Resource]:
    """Return the jobs of earlier launches in this namespace, from job.json of the launches that were set aside."""
    found = {}
    for path in sorted(run_dir.glob(f"{store.EARLIER}/*/{store.JOB}")):
        with contextlib.suppress(StoreError):
            handle = store.read_json(path).get("handle") or {}
            is_here = (handle.get("context"), handle.get("namespace")) == (cluster.context, cluster.namespace)
            if is_here and handle.get("kind") in RESOURCES and isinstance(handle.get("name"), str):
                found[handle["name"]] = RESOURCES[handle["kind"]]
    return found


def create_service(cluster: Cluster, manifest: Object, owner: Object) -> None:
    """Create the Service as a dependent of the Job, so that both are removed together."""
    reference = {"apiVersion": "batch/v1", "kind": "Job", "name": owner["metadata"]["name"]}
    reference["uid"] = owner["metadata"]["uid"]
    cluster.create_service({**manifest, "metadata": {**manifest["metadata"], "ownerReferences": [reference]}})


def _make_room(cluster: Cluster, manifest: Object, resource: Resource) -> Object | None:
    """Return the job of this attempt if it is active. Otherwise remove earlier attempts, wait until their pods are
    gone, and return None: two attempts must not write into one directory.

    The Job of a deleted JobSet or TrainJob is removed a little later, and its failure must not pass for that of the
    next attempt, whose Job has the same name.
    """
    name, deadline = manifest["metadata"]["name"], time.monotonic() + REMOVAL_S
    child = resource.child.format(name=name)
    while True:
        known = cluster.read(resource, name)
        is_left = resource is not _JOB and cluster.read(_JOB, child) is not None
        if known is None and not is_left and _is_empty(cluster, name):
            return None
        if known is not None:
            if not is_ours(known, name):
                owner = _annotations(known).get(RUN_FOLDER, "another program")
                raise LaunchError(
                    f"{resource.plural} {name} already exists in namespace {cluster.namespace} and belongs to {owner}"
                )
            is_deleted = bool(known["metadata"].get("deletionTimestamp"))
            is_active = not is_deleted and not states.has_ended(known, resource.done)
            if is_active and is_of_attempt(known, manifest["metadata"]["annotations"][ATTEMPT]):
                return known
            if not is_deleted:
                _delete(cluster, resource, name)
        if time.monotonic() > deadline:
            raise LaunchError(f"{resource.plural} {name} of an earlier attempt did not end within {REMOVAL_S:g} s")
        time.sleep(POLL_S)


def is_ours(known: Object, name: str) -> bool:
    """Whether Paceline created the object for this launch, whose id is part of the name."""
    return _annotations(known).get(OWNER) == name


def is_of_attempt(known: Object, attempt: str) -> bool:
    return _annotations(known).get(ATTEMPT) == attempt


def _annotations(known: Object) -> Mapping[str, str]:
    return known["metadata"].get("annotations") or {}


def _owner(pod: Object) -> str | None:
    owners = pod["metadata"].get("ownerReferences") or ()
    return owners[0].get("uid") if owners else None
