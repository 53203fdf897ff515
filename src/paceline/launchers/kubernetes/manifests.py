"""The objects of one run as plain data: an Indexed Job with its Service, a JobSet, or a TrainJob with its runtime."""

from __future__ import annotations

import copy
import math
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.contract import may_be_lost
from paceline.experiment.spec import RunSpec
from paceline.launchers.kubernetes.options import Options
from paceline.launchers.kubernetes.pod import GRACE_S, Manifest, labels, reader, template

OWNER = "paceline.dev/owner"
ATTEMPT = "paceline.dev/attempt"
# For people who meet the job: where it was submitted. A controller that goes on may be elsewhere.
CONTROLLER = "paceline.dev/controller"
RUN_FOLDER = "paceline.dev/run-folder"
# Of the one job within a JobSet; the TrainJob controller looks for this name.
GROUP = "node"
_TTL = "ttlSecondsAfterFinished"
_QUEUE = "kueue.x-k8s.io/queue-name"


@dataclass(frozen=True)
class Resource:
    """Where the API server keeps objects of a kind; `done` is the condition of one that ended well, `child` what the
    Job with the pods is called."""

    api: str
    plural: str
    done: str
    child: str = "{name}"

    @property
    def group_and_version(self) -> tuple[str, str]:
        group, _, version = self.api.partition("/")
        return group, version


RESOURCES = {
    "job": Resource("batch/v1", "jobs", "Complete"),
    "jobset": Resource("jobset.x-k8s.io/v1alpha2", "jobsets", "Completed", f"{{name}}-{GROUP}-0"),
    "trainjob": Resource("trainer.kubeflow.org/v1alpha1", "trainjobs", "Complete", f"{{name}}-{GROUP}-0"),
}
RUNTIME = Resource("trainer.kubeflow.org/v1alpha1", "trainingruntimes", "")


def job_manifests(spec: RunSpec, chosen: Options, name: str, run_dir: Path, attempt: str) -> list[Manifest]:
    """In the order in which they are created; the one that carries the pods is found by `carrier`."""
    made = {"job": _job_and_service, "jobset": _jobset, "trainjob": _trainjob}[chosen.kind](spec, chosen, name)
    place = {"namespace": chosen.namespace} if chosen.namespace else {}
    about = {"name": name, **place, "labels": labels(chosen, name), "annotations": _notes(name, run_dir, attempt)}
    whole = [
        {key: each[key] for key in ("apiVersion", "kind")} | {"metadata": copy.deepcopy(about)} | each for each in made
    ]
    if chosen.queue:
        # Kueue lets a job start by setting `suspend` back.
        main = carrier(whole)
        main["metadata"]["labels"][_QUEUE] = chosen.queue
        main["spec"]["suspend"] = True
    return whole


def _notes(name: str, run_dir: Path, attempt: str) -> dict[str, str]:
    """Whose it is: a job of this name that somebody else has created is not touched, and one of an earlier attempt is
    not taken for the next one."""
    where = {CONTROLLER: socket.gethostname(), RUN_FOLDER: str(run_dir.absolute())}
    return {OWNER: name, ATTEMPT: attempt, **where}


def carrier(made: list[Manifest]) -> Manifest:
    """The object whose end is the end of the run."""
    return next(manifest for manifest in made if manifest["kind"] in ("Job", "JobSet", "TrainJob"))


def reader_manifest(chosen: Options, name: str) -> Manifest:
    """A job that prints what is on the claim, and is gone soon after."""
    pod = reader(chosen, name)
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": f"{name}-read", "labels": pod["metadata"]["labels"]},
        "spec": {
            "backoffLimit": 0,
            "activeDeadlineSeconds": 600,
            _TTL: 60,
            "template": pod,
        },
    }


def _job_and_service(spec: RunSpec, chosen: Options, name: str) -> list[Manifest]:
    pod = template(spec, chosen, name, f"{name}-0.{name}")
    pod["spec"]["subdomain"] = name
    job = {"apiVersion": "batch/v1", "kind": "Job", "spec": _job_spec(spec, chosen, pod) | {_TTL: chosen.keep_s}}
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "spec": {
            "clusterIP": "None",
            # Ranks meet before any of them could be called ready.
            "publishNotReadyAddresses": True,
            "selector": {"batch.kubernetes.io/job-name": name},
            "ports": [{"name": "rendezvous", "port": chosen.port, "protocol": "TCP"}],
        },
    }
    return [job, service]


def _jobset(spec: RunSpec, chosen: Options, name: str) -> list[Manifest]:
    jobs = _jobset_spec(spec, chosen, name)
    return [{"apiVersion": RESOURCES["jobset"].api, "kind": "JobSet", "spec": jobs | {_TTL: chosen.keep_s}}]


def _trainjob(spec: RunSpec, chosen: Options, name: str) -> list[Manifest]:
    """The runtime has no framework: the agent starts torchrun itself, and its variables would contradict ours."""
    jobs = _jobset_spec(spec, chosen, name)
    ancestor = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    jobs["replicatedJobs"][0]["template"]["metadata"] = {"labels": ancestor}
    nodes = spec.topology.nodes
    runtime = {
        "apiVersion": RUNTIME.api,
        "kind": "TrainingRuntime",
        "spec": {"mlPolicy": {"numNodes": nodes}, "template": {"spec": jobs}},
    }
    reference = {"apiGroup": RUNTIME.group_and_version[0], "kind": "TrainingRuntime", "name": name}
    job = {
        "apiVersion": RESOURCES["trainjob"].api,
        "kind": "TrainJob",
        "spec": {"runtimeRef": reference, "trainer": {"numNodes": nodes}},
    }
    return [runtime, job]


def _jobset_spec(spec: RunSpec, chosen: Options, name: str) -> Manifest:
    pod = template(spec, chosen, name, f"{name}-{GROUP}-0-0.{name}")
    return {
        # Its controller creates the Service; one restart would be another run.
        "network": {"enableDNSHostnames": True, "subdomain": name, "publishNotReadyAddresses": True},
        "failurePolicy": {"maxRestarts": 0},
        "replicatedJobs": [
            {"name": GROUP, "replicas": 1, "template": {"spec": _job_spec(spec, chosen, pod)}},
        ],
    }


def _job_spec(spec: RunSpec, chosen: Options, pod: Manifest) -> dict[str, Any]:
    nodes = spec.topology.nodes
    return {
        "completionMode": "Indexed",
        "completions": nodes,
        "parallelism": nodes,
        **_limits(spec),
        # For a job whose controller is gone; a living one ends it earlier.
        "activeDeadlineSeconds": math.ceil(spec.timeout_s + chosen.pending_s + chosen.patience_s) + GRACE_S,
        "template": pod,
    }


def _limits(spec: RunSpec) -> dict[str, Any]:
    """How many pods may fail. A rank that comes back alone finds nobody: no pod is started again, restarts are of the
    whole job and the controller's affair."""
    if may_be_lost(spec):
        # A node that fails takes no other along. Each can fail once, so that the limit over all of them, whose default
        # differs between servers, is reached by the last one only.
        return {"backoffLimitPerIndex": 0, "backoffLimit": spec.topology.nodes - 1}
    # Makes the Job itself say that a pod was taken away: the pod may be gone before anybody looks.
    taken = {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    return {"backoffLimit": 0, "podFailurePolicy": {"rules": [taken]}}
