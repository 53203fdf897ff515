"""The pod of one node: an agent that satisfies Pod Security "restricted", whatever object carries it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.experiment.spec import RunSpec
from paceline.launchers._start import agent_arguments, rank_environment, spec_text
from paceline.launchers.kubernetes.options import Options
from paceline.launchers.node.placement import ATTEMPT

CONTAINER = "node"
RUN_LABEL = "paceline.dev/run"
RESULTS = "/results"
GRACE_S = 30
SMALL = "1Gi"
# Of the Job that made the pod, so of one attempt.
_JOB_UID = "metadata.labels['batch.kubernetes.io/controller-uid']"
_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
# Caches go where something may be written; a user without a name in the image has none to look up.
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


def literal(text: str) -> str:
    """The text as Kubernetes leaves it alone: it replaces $(NAME), and $$ by $, in commands and variables."""
    return text.replace("$", "$$")


def run_folder(name: str) -> str:
    return f"{RESULTS}/{name}"


def template(spec: RunSpec, chosen: Options, name: str, master: str) -> Manifest:
    """Labels and pod of one node; `master` is the name by which node 0 is found."""
    # A node that is there waits for the others as long as they may wait for a place.
    arguments = [*agent_arguments(port=chosen.port), f"--patience={chosen.pending_s:g}"]
    if chosen.results_claim:
        arguments.append(f"--run-dir={run_folder(name)}")
    container = {
        **_container(chosen, arguments),
        "env": _environment(spec, chosen, master),
        "ports": [{"name": "rendezvous", "containerPort": chosen.port}],
        "resources": _resources(chosen),
    }
    pod = {"metadata": {"labels": labels(chosen, name)}, "spec": {**_pod(chosen, name), "containers": [container]}}
    patched: Manifest = merged(pod, chosen.pod_patch or {})
    return patched


def reader(chosen: Options, name: str) -> Manifest:
    """A pod that prints what a run left on the claim, wherever the log of its own pods was cut."""
    arguments = ["-m", "paceline.launchers.node.agent", "--handover", f"--run-dir={run_folder(name)}"]
    small = {"cpu": "1", "memory": SMALL}
    container = {
        **_container(chosen, arguments),
        "env": [_variable(key, value) for key, value in _HOME.items()],
        "resources": {"requests": small, "limits": dict(small)},
    }
    # The label of the run would count it among the run's own pods.
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
    pod: Manifest = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        # One variable for every service of the namespace would reach the ranks' environment.
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": GRACE_S,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": chosen.user,
            "runAsGroup": chosen.group,
            "fsGroup": chosen.group,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "volumes": _volumes(chosen),
    }
    if chosen.host_network:
        # With the node's own resolver no other pod would be found by its name.
        pod |= {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
    optional = {
        "serviceAccountName": chosen.service_account,
        "priorityClassName": chosen.priority_class,
        "imagePullSecrets": [{"name": secret} for secret in chosen.image_pull_secrets or ()],
        "nodeSelector": dict(chosen.node_selector or {}),
        "tolerations": _tolerations(chosen),
        "affinity": _affinity(chosen, name),
    }
    return pod | {key: value for key, value in optional.items() if value}


def _volumes(chosen: Options) -> list[Manifest]:
    volumes: list[Manifest] = [
        {"name": "tmp", "emptyDir": {}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": chosen.shm}},
    ]
    if chosen.results_claim:
        volumes.append({"name": "results", "persistentVolumeClaim": {"claimName": chosen.results_claim}})
    return volumes


def _tolerations(chosen: Options) -> list[Any]:
    """GPU nodes are commonly tainted with the name of their resource, to keep others away."""
    gpu = {"key": chosen.gpu_resource, "operator": "Exists", "effect": "NoSchedule"}
    return [*([gpu] if chosen.gpus else []), *map(dict, chosen.tolerations or ())]


def _affinity(chosen: Options, name: str) -> Manifest:
    given: Manifest = merged({}, chosen.affinity or {})
    if not chosen.spread:
        return given
    apart = {"labelSelector": {"matchLabels": {RUN_LABEL: name}}, "topologyKey": "kubernetes.io/hostname"}
    others = given.setdefault("podAntiAffinity", {})
    required = "requiredDuringSchedulingIgnoredDuringExecution"
    others[required] = [apart, *others.get(required, ())]
    return given


def _resources(chosen: Options) -> Manifest:
    gpus = {chosen.gpu_resource: str(chosen.gpus)} if chosen.gpus else {}
    return {
        "requests": {"cpu": _cores(chosen.cpu_request), "memory": chosen.memory_request, **gpus},
        "limits": {"cpu": _cores(chosen.cpu_limit), "memory": chosen.memory_limit, **gpus},
    }


def _cores(number: float) -> str:
    return str(int(number)) if number == int(number) else f"{round(number * 1000)}m"


def _environment(spec: RunSpec, chosen: Options, master: str) -> list[Manifest]:
    plain = {
        **_HOME,
        **rank_environment(chosen.threads),
        **chosen.variables(),
        "PACELINE_NODES": str(spec.topology.nodes),
        "PACELINE_MASTER": master,
        "PACELINE_SPEC": spec_text(spec),
    }
    fields = {"PACELINE_NODE_RANK": _INDEX, "PACELINE_NODE": "spec.nodeName", ATTEMPT: _JOB_UID}
    return [
        *(_variable(name, value) for name, value in plain.items()),
        *({"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in fields.items()),
        *(
            {"name": name, "valueFrom": {"secretKeyRef": {"name": source["secret"], "key": source["key"]}}}
            for name, source in (chosen.secret_env or {}).items()
        ),
    ]


def _variable(name: str, value: str) -> Manifest:
    return {"name": name, "value": literal(value)}


def merged(target: Any, patch: Any) -> Any:
    """The target under a JSON merge patch (RFC 7386), but lists of named things are merged by their names, as kubectl
    does: a variable or a volume is added without writing all others again."""
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
    if isinstance(patch, list | tuple):
        return _merged_lists(target, patch)
    return patch


def _merged_lists(target: Any, patch: Any) -> list[Any]:
    named = isinstance(target, list) and all(isinstance(e, Mapping) and "name" in e for e in (*target, *patch))
    if not named:
        return [merged(None, entry) for entry in patch]
    result = {entry["name"]: entry for entry in target}
    for entry in patch:
        result[entry["name"]] = merged(result.get(entry["name"], {}), entry)
    return list(result.values())
