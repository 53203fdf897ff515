"""What a namespace needs before runs can be started in it, as plain data: rights, limits, walls.

The controller may do what the launcher does and nothing else; pods may do nothing. No rule has a wildcard.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.launchers.kubernetes.options import KINDS, Options
from paceline.launchers.kubernetes.pod import reader

Manifest = dict[str, Any]

CONTROLLER_ACCOUNT = "paceline-controller"
POD_ACCOUNT = "paceline-pods"
_RBAC = "rbac.authorization.k8s.io"
_OURS = {"app.kubernetes.io/managed-by": "paceline"}
# (group, resource) -> verbs: what the launcher asks of the API server, no more.
_RIGHTS: dict[tuple[str, str], tuple[str, ...]] = {
    ("batch", "jobs"): ("create", "get", "delete"),
    ("", "pods"): ("get", "list"),
    ("", "pods/log"): ("get",),
    ("", "services"): ("create", "delete"),
    ("", "events"): ("list",),
}
_MORE_RIGHTS: dict[str, dict[tuple[str, str], tuple[str, ...]]] = {
    "job": {},
    "jobset": {("jobset.x-k8s.io", "jobsets"): ("create", "get", "delete")},
    "trainjob": {
        ("trainer.kubeflow.org", "trainjobs"): ("create", "get", "delete"),
        ("trainer.kubeflow.org", "trainingruntimes"): ("create", "delete"),
    },
}


def rights(kind: str) -> dict[tuple[str, str], tuple[str, ...]]:
    """(API group, resource) -> verbs that a controller of this kind of job needs in its namespace."""
    return {**_RIGHTS, **_MORE_RIGHTS[kind]}


def cluster_manifests(
    namespace: str, kinds: Sequence[str] = KINDS[:1], quota: Mapping[str, str] | None = None
) -> dict[str, list[Manifest]]:
    """File name -> objects, in the order in which they must be applied."""
    found = {
        "00-namespace.yaml": [_namespace(namespace)],
        "10-access.yaml": _access(namespace, kinds),
        "20-network.yaml": [_network(namespace)],
    }
    if quota:
        spec = {"hard": {key: str(value) for key, value in quota.items()}}
        found["30-quota.yaml"] = [_object("v1", "ResourceQuota", "paceline", namespace) | {"spec": spec}]
    return found


def smoke_job(chosen: Options, namespace: str) -> Manifest:
    """A job of one small pod that starts Paceline from the image: `kubectl apply`, then `kubectl logs`."""
    name = "paceline-smoke"
    pod = reader(chosen, name)
    pod["spec"]["containers"][0]["command"] = [chosen.python, "-m", "paceline.cli", "--version"]
    spec = {"backoffLimit": 0, "activeDeadlineSeconds": 600, "ttlSecondsAfterFinished": 3600, "template": pod}
    return _object("batch/v1", "Job", name, namespace) | {"spec": spec}


def _object(api: str, kind: str, name: str, namespace: str | None) -> Manifest:
    place = {"namespace": namespace} if namespace else {}
    return {"apiVersion": api, "kind": kind, "metadata": {"name": name, **place, "labels": dict(_OURS)}}


def _namespace(name: str) -> Manifest:
    """Pods that may become root, or see their node, are refused at the door."""
    found = _object("v1", "Namespace", name, None)
    for mode in ("enforce", "audit", "warn"):
        found["metadata"]["labels"][f"pod-security.kubernetes.io/{mode}"] = "restricted"
    return found


def _access(namespace: str, kinds: Sequence[str]) -> list[Manifest]:
    allowed = {key: verbs for kind in kinds for key, verbs in rights(kind).items()}
    rules = [
        {"apiGroups": [group], "resources": [resource], "verbs": list(verbs)}
        for (group, resource), verbs in allowed.items()
    ]
    role = _object(f"{_RBAC}/v1", "Role", CONTROLLER_ACCOUNT, namespace) | {"rules": rules}
    subject = {"kind": "ServiceAccount", "name": CONTROLLER_ACCOUNT, "namespace": namespace}
    binding = _object(f"{_RBAC}/v1", "RoleBinding", CONTROLLER_ACCOUNT, namespace) | {
        "subjects": [subject],
        "roleRef": {"apiGroup": _RBAC, "kind": "Role", "name": CONTROLLER_ACCOUNT},
    }
    # A pod never speaks to the API server: its account has no rights, and it is not given a token.
    pods = _object("v1", "ServiceAccount", POD_ACCOUNT, namespace) | {"automountServiceAccountToken": False}
    return [_object("v1", "ServiceAccount", CONTROLLER_ACCOUNT, namespace), role, binding, pods]


def _network(namespace: str) -> Manifest:
    """Pods of Paceline talk to each other and ask for names; nobody else comes in, nothing else goes out.

    A policy cannot say "of the same job" for jobs to come, so the wall is around all runs of the namespace. Names are
    asked for at any address: a cache for them often stands on the node itself, which no selector can name.
    """
    peers = [{"podSelector": {"matchLabels": dict(_OURS)}}]
    names = {"ports": [{"protocol": protocol, "port": 53} for protocol in ("UDP", "TCP")]}
    return _object("networking.k8s.io/v1", "NetworkPolicy", "paceline", namespace) | {
        "spec": {
            "podSelector": {"matchLabels": dict(_OURS)},
            "policyTypes": ["Ingress", "Egress"],
            "ingress": [{"from": peers}],
            "egress": [{"to": peers}, names],
        }
    }
