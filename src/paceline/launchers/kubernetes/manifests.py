"""The Kubernetes objects of one run, as plain data.

An Indexed Job with its Service, a JobSet, or a TrainJob with its runtime. Each has one pod per node. The pod runs the
node agent and satisfies Pod Security "restricted".
"""

from __future__ import annotations

import copy
import hashlib
import math
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.contract import may_be_lost
from paceline.experiment.spec import RunSpec
from paceline.launchers._job import agent_arguments, rank_environment, spec_text
from paceline.launchers.kubernetes.options import Options
from paceline.launchers.node import placement

OWNER = "paceline.dev/owner"
ATTEMPT = "paceline.dev/attempt"
# For people who find the job: where it was submitted. A controller that resumes the run may be elsewhere.
CONTROLLER = "paceline.dev/controller"
RUN_FOLDER = "paceline.dev/run-folder"
RUN_LABEL = "paceline.dev/run"
# Every launch has its own name. This label is the same for all launches of a run in one directory.
DIRECTORY_LABEL = "paceline.dev/directory"
# Name of the one job in a JobSet. The TrainJob controller expects this name.
GROUP = "node"
CONTAINER = "node"
RESULTS = "/results"
GRACE_S = 30
SMALL = "1Gi"
_TTL = "ttlSecondsAfterFinished"
_QUEUE = "kueue.x-k8s.io/queue-name"
# The uid of the Job that created the pod identifies the attempt.
_JOB_UID = "metadata.labels['batch.kubernetes.io/controller-uid']"
_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
# The root file system is read-only, and the user id has no entry in the image's password file.
_HOME = {
    "HOME": "/tmp",
    "TMPDIR": "/tmp",
    "XDG_CACHE_HOME": "/tmp/cache",
    "TRITON_CACHE_DIR": "/tmp/cache/triton",
    "TORCHINDUCTOR_CACHE_DIR": "/tmp/cache/inductor",
    "USER": "paceline",
    "LOGNAME": "paceline",
}

Manifest = dict[str, Any]


@dataclass(frozen=True)
class Resource:
    """A kind of objects of the API server. done: condition of success. child: name of the Job that owns the pods. kind:
    only of objects that a run is submitted as."""

    api: str
    plural: str
    done: str
    child: str = "{name}"
    kind: str = ""

    @property
    def group_and_version(self) -> tuple[str, str]:
        group, _, version = self.api.partition("/")
        return group, version


RESOURCES = {
    "job": Resource("batch/v1", "jobs", "Complete", kind="Job"),
    "jobset": Resource("jobset.x-k8s.io/v1alpha2", "jobsets", "Completed", f"{{name}}-{GROUP}-0", "JobSet"),
    "trainjob": Resource("trainer.kubeflow.org/v1alpha1", "trainjobs", "Complete", f"{{name}}-{GROUP}-0", "TrainJob"),
}
RUNTIME = Resource("trainer.kubeflow.org/v1alpha1", "trainingruntimes", "")


# --- objects of a run ---


def job_manifests(spec: RunSpec, chosen: Options, name: str, run_dir: Path, attempt: str) -> list[Manifest]:
    """Return the objects of a run in the order in which they are created."""
    metadata = {
        "name": name,
        **({"namespace": chosen.namespace} if chosen.namespace else {}),
        "labels": {**labels(chosen, name), DIRECTORY_LABEL: directory_id(run_dir)},
        # Identify the owner and the attempt: jobs of other owners are left alone, earlier attempts are not adopted.
        "annotations": {
            OWNER: name,
            ATTEMPT: attempt,
            CONTROLLER: socket.gethostname(),
            RUN_FOLDER: str(run_dir.absolute()),
        },
    }
    objects = [
        {key: each[key] for key in ("apiVersion", "kind")} | {"metadata": copy.deepcopy(metadata)} | each
        for each in _objects(spec, chosen, name, run_dir)
    ]
    if chosen.queue:
        # Kueue starts a job by resetting `suspend`.
        main = carrier(objects)
        main["metadata"]["labels"][_QUEUE] = chosen.queue
        main["spec"]["suspend"] = True
    return objects


def carrier(made: list[Manifest]) -> Manifest:
    """Return the object that owns the pods; the run ends when it ends."""
    return next(manifest for manifest in made if manifest["kind"] in ("Job", "JobSet", "TrainJob"))


def reader_manifest(chosen: Options, name: str) -> Manifest:
    """A short job that prints the files on the results claim."""
    pod = reader(chosen, name)
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": f"{name}-read", "labels": pod["metadata"]["labels"]},
        "spec": {"backoffLimit": 0, "activeDeadlineSeconds": 600, _TTL: 60, "template": pod},
    }


def _objects(spec: RunSpec, chosen: Options, name: str, run_dir: Path) -> list[Manifest]:
    """Return the objects of a run without their metadata, in the order in which they are created."""
    kept = {_TTL: chosen.keep_s}
    if chosen.kind == "job":
        pod = template(spec, chosen, name, f"{name}-0.{name}", run_dir)
        pod["spec"]["subdomain"] = name
        service = {
            "clusterIP": "None",
            # The rendezvous happens before any pod is ready.
            "publishNotReadyAddresses": True,
            "selector": {"batch.kubernetes.io/job-name": name},
            "ports": [{"name": "rendezvous", "port": chosen.port, "protocol": "TCP"}],
        }
        job = {"apiVersion": "batch/v1", "kind": "Job", "spec": _job_spec(spec, chosen, pod) | kept}
        return [job, {"apiVersion": "v1", "kind": "Service", "spec": service}]
    pod = template(spec, chosen, name, f"{name}-{GROUP}-0-0.{name}", run_dir)
    group: Manifest = {"name": GROUP, "replicas": 1, "template": {"spec": _job_spec(spec, chosen, pod)}}
    jobs = {
        # The JobSet controller creates the Service. A restart would be another run, so none is allowed.
        "network": {"enableDNSHostnames": True, "subdomain": name, "publishNotReadyAddresses": True},
        "failurePolicy": {"maxRestarts": 0},
        "replicatedJobs": [group],
    }
    if chosen.kind == "jobset":
        return [{"apiVersion": RESOURCES["jobset"].api, "kind": "JobSet", "spec": jobs | kept}]
    # The runtime has no framework: the agent starts torchrun itself, and the framework's variables would conflict.
    group["template"]["metadata"] = {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}}
    count = {"numNodes": spec.topology.nodes}
    runtime = {"mlPolicy": dict(count), "template": {"spec": jobs}}
    reference = {"apiGroup": RUNTIME.group_and_version[0], "kind": "TrainingRuntime", "name": name}
    job = {"runtimeRef": reference, "trainer": dict(count)}
    return [
        {"apiVersion": RUNTIME.api, "kind": "TrainingRuntime", "spec": runtime},
        {"apiVersion": RESOURCES["trainjob"].api, "kind": "TrainJob", "spec": job},
    ]


def _job_spec(spec: RunSpec, chosen: Options, pod: Manifest) -> dict[str, Any]:
    """No pod is restarted: a rank cannot rejoin alone. The controller restarts the whole job instead."""
    nodes = spec.topology.nodes
    if may_be_lost(spec):
        # The other nodes continue after a failure. Each node can fail once, so only the last failure reaches the total
        # limit, whose default differs between servers.
        limits: Manifest = {"backoffLimitPerIndex": 0, "backoffLimit": nodes - 1}
    else:
        # With this policy the Job itself records that a pod was evicted. The pod may be deleted before we read it.
        evicted = {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
        limits = {"backoffLimit": 0, "podFailurePolicy": {"rules": [evicted]}}
    return {
        "completionMode": "Indexed",
        "completions": nodes,
        "parallelism": nodes,
        **limits,
        # For a job without a controller; a living controller ends it earlier.
        "activeDeadlineSeconds": math.ceil(spec.timeout_s + chosen.pending_s + chosen.patience_s) + GRACE_S,
        "template": pod,
    }


# --- pods ---


def template(spec: RunSpec, chosen: Options, name: str, master: str, run_dir: Path) -> Manifest:
    """Labels and pod of one node. master: DNS name of node 0."""
    # A started node waits for the others as long as they may wait to be scheduled.
    arguments = [*agent_arguments(port=chosen.port), f"--patience={chosen.pending_s:g}"]
    if chosen.results_claim:
        arguments.append(f"--run-dir={RESULTS}/{name}")
    gpus = {chosen.gpu_resource: str(chosen.gpus)} if chosen.gpus else {}
    plain = {
        **_HOME,
        **rank_environment(spec, chosen.threads, chosen.variables()),
        "PACELINE_NODES": str(spec.topology.nodes),
        "PACELINE_MASTER": master,
        "PACELINE_SPEC": spec_text(spec),
    }
    env = [_variable(key, value) for key, value in plain.items()]
    fields = {"PACELINE_NODE_RANK": _INDEX, "PACELINE_NODE": "spec.nodeName", placement.ATTEMPT: _JOB_UID}
    env += [{"name": key, "valueFrom": {"fieldRef": {"fieldPath": path}}} for key, path in fields.items()]
    for key, source in (chosen.secret_env or {}).items():
        secret = {"name": source["secret"], "key": source["key"]}
        env.append({"name": key, "valueFrom": {"secretKeyRef": secret}})
    container = {
        **_container(chosen, arguments),
        "env": env,
        "ports": [{"name": "rendezvous", "containerPort": chosen.port}],
        "resources": {
            "requests": {"cpu": _cores(chosen.cpu_request), "memory": chosen.memory_request, **gpus},
            "limits": {"cpu": _cores(chosen.cpu_limit), "memory": chosen.memory_limit, **gpus},
        },
    }
    tags = {**labels(chosen, name), DIRECTORY_LABEL: directory_id(run_dir)}
    pod = {"metadata": {"labels": tags}, "spec": {**_pod(chosen, name), "containers": [container]}}
    patched: Manifest = merged(pod, chosen.pod_patch or {})
    return patched


def reader(chosen: Options, name: str) -> Manifest:
    """A pod that prints the files of a run from the claim, for logs that were truncated."""
    arguments = ["-m", "paceline.launchers.node.agent", "--handover", f"--run-dir={RESULTS}/{name}"]
    small = {"cpu": "1", "memory": SMALL}
    container = {
        **_container(chosen, arguments),
        "env": [_variable(key, value) for key, value in _HOME.items()],
        "resources": {"requests": small, "limits": dict(small)},
    }
    # With the label of the run, this pod would count as one of its nodes.
    tags = {**labels(chosen, name), RUN_LABEL: f"{name}-read"}
    pod = _pod(chosen, name)
    pod.pop("affinity", None)
    return {"metadata": {"labels": tags}, "spec": {**pod, "hostNetwork": False, "containers": [container]}}


def labels(chosen: Options, name: str) -> dict[str, str]:
    own = {
        "app.kubernetes.io/name": "paceline",
        "app.kubernetes.io/instance": name,
        "app.kubernetes.io/managed-by": "paceline",
        RUN_LABEL: name,
    }
    return {**(chosen.labels or {}), **own}


def directory_id(run_dir: Path) -> str:
    """Return a short id of a run directory on this host."""
    return hashlib.sha256(f"{socket.gethostname()}:{run_dir.absolute()}".encode()).hexdigest()[:16]


def _container(chosen: Options, arguments: list[str]) -> Manifest:
    mounts = [{"name": "tmp", "mountPath": "/tmp"}, {"name": "shm", "mountPath": "/dev/shm"}]
    if chosen.results_claim:
        mounts.append({"name": "results", "mountPath": RESULTS})
    return {
        "name": CONTAINER,
        "image": chosen.image,
        "imagePullPolicy": chosen.image_pull_policy,
        "command": [literal(word) for word in (chosen.python, *arguments)],
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": mounts,
    }


def _pod(chosen: Options, name: str) -> Manifest:
    volumes: list[Manifest] = [
        {"name": "tmp", "emptyDir": {}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": chosen.shm}},
    ]
    if chosen.results_claim:
        volumes.append({"name": "results", "persistentVolumeClaim": {"claimName": chosen.results_claim}})
    pod: Manifest = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        # Otherwise each service of the namespace adds variables to the environment of the ranks.
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": GRACE_S,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": chosen.user,
            "runAsGroup": chosen.group,
            "fsGroup": chosen.group,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "volumes": volumes,
    }
    if chosen.host_network:
        # The node's own resolver does not know the names of pods.
        pod |= {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
    # GPU nodes are often tainted with the name of their resource.
    gpu_taint = {"key": chosen.gpu_resource, "operator": "Exists", "effect": "NoSchedule"}
    affinity: Manifest = merged({}, chosen.affinity or {})
    if chosen.spread:
        apart = {"labelSelector": {"matchLabels": {RUN_LABEL: name}}, "topologyKey": "kubernetes.io/hostname"}
        rules = affinity.setdefault("podAntiAffinity", {})
        required = "requiredDuringSchedulingIgnoredDuringExecution"
        rules[required] = [apart, *rules.get(required, ())]
    optional = {
        "serviceAccountName": chosen.service_account,
        "priorityClassName": chosen.priority_class,
        "imagePullSecrets": [{"name": secret} for secret in chosen.image_pull_secrets or ()],
        "nodeSelector": dict(chosen.node_selector or {}),
        "tolerations": [*([gpu_taint] if chosen.gpus else []), *map(dict, chosen.tolerations or ())],
        "affinity": affinity,
    }
    return pod | {key: value for key, value in optional.items() if value}


def _cores(number: float) -> str:
    return str(int(number)) if number == int(number) else f"{round(number * 1000)}m"


def _variable(name: str, value: str) -> Manifest:
    return {"name": name, "value": literal(value)}


def literal(text: str) -> str:
    """Escape text that Kubernetes would expand: it replaces $(NAME), and $$ by $, in commands and variables."""
    return text.replace("$", "$$")


def merged(target: Any, patch: Any) -> Any:
    """Apply a JSON merge patch (RFC 7386), but merge lists of named items by name, as kubectl does.

    >>> merged([{"name": "a", "x": 1}], [{"name": "a", "y": 2}, {"name": "b"}])
    [{'name': 'a', 'x': 1, 'y': 2}, {'name': 'b'}]
    """
    if isinstance(target, Mapping) and isinstance(patch, Mapping):
        result = dict(target)
        for key, value in patch.items():
            if value is None:
                result.pop(key, None)
            else:
                result[key] = merged(result.get(key), value)
        return result
    if isinstance(patch, Mapping):
        return merged({}, patch)
    if not isinstance(patch, list | tuple):
        return patch
    if not isinstance(target, list) or not all(isinstance(e, Mapping) and "name" in e for e in (*target, *patch)):
        return [merged(None, entry) for entry in patch]
    by_name = {entry["name"]: entry for entry in target}
    for entry in patch:
        by_name[entry["name"]] = merged(by_name.get(entry["name"], {}), entry)
    return list(by_name.values())
