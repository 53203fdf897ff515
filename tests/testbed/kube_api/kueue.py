"""Kueue, as far as one job at a time needs it: it starts suspended jobs of its queues and takes them back."""

from __future__ import annotations

from testbed.kube_api.resources import BY_PLURAL, JOB_SETS, JOBS, TRAIN_JOBS, Object, Resource
from testbed.kube_api.state import State

QUEUE = "kueue.x-k8s.io/queue-name"
LOCAL_QUEUES = BY_PLURAL["localqueues"]
SOURCE = "batch/job-kueue-controller"
PREEMPTED = "Preempted to accommodate a workload (UID: 0f7c, JobUID: 31ab) due to prioritization in the ClusterQueue"


class Kueue:
    """A queue that holds admits nothing: its cluster queue has no quota left (`stopPolicy: Hold` here)."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._created: set[str] = set()

    def sync(self) -> None:
        for resource in (JOBS, JOB_SETS, TRAIN_JOBS):
            for job in self._state.list(resource):
                name = (job["metadata"].get("labels") or {}).get(QUEUE)
                if name and job["spec"].get("suspend") and not job["metadata"].get("deletionTimestamp"):
                    self._consider(resource, job, name)

    def _consider(self, resource: Resource, job: Object, name: str) -> None:
        meta = job["metadata"]
        if meta["uid"] not in self._created:
            self._created.add(meta["uid"])
            about = f"Created Workload: {meta['namespace']}/{resource.kind.lower()}-{meta['name']}-1b2c3"
            self._state.event(job, "Normal", "CreatedWorkload", about, SOURCE, new_api=True)
        queue = self._state.find(LOCAL_QUEUES, meta["namespace"], name)
        if queue is None or queue["spec"].get("stopPolicy") == "Hold":
            return
        self._state.modify(resource, job, lambda each: each["spec"].update(suspend=False))
        said = f"Admitted by clusterQueue {queue['spec']['clusterQueue']}"
        self._state.event(job, "Normal", "Started", said, SOURCE, new_api=True)


def hold(state: State, namespace: str, queue: str, policy: str = "Hold") -> None:
    """Admit nothing from here on; with policy None, admit again."""
    found = state.get(LOCAL_QUEUES, namespace, queue)
    state.modify(LOCAL_QUEUES, found, lambda each: each["spec"].update(stopPolicy=policy))


def take_back(state: State, resource: Resource, job: Object) -> None:
    """The place is needed for a more important workload: the job is suspended, which deletes its pods."""
    state.modify(resource, job, lambda each: each["spec"].update(suspend=True))
    state.event(job, "Normal", "Stopped", PREEMPTED, SOURCE, new_api=True)
