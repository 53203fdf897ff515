"""A Kubernetes CronJob: its pod runs the schedule from the image, with results on a persistent volume."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from paceline.campaign.schedule.agenda import DEFINITION, EXPERIMENT, LAUNCHER, Schedule, folder_of
from paceline.errors import RequestError, require
from paceline.results.store import read_json

# How late the cluster may start a pod, and how long the pod may take to come up.
DEADLINE_S, COMING_UP_S = 3600, 1800
RESULTS, MOUNTED = "/results", "/schedule"
USER = 1000
_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_REFERENCE = re.compile(r"[A-Za-z0-9][\w./:@-]{0,254}", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class PodSettings:
    """Settings of the pod. image: contains Paceline. claim: PersistentVolumeClaim for the results. account: service
    account with the permissions of the launcher. secret: Secret with the variables for notifications."""

    image: str
    claim: str
    namespace: str = "default"
    account: str = "default"
    secret: str | None = None
    apply: bool = False

    def __post_init__(self) -> None:
        require(
            bool(_REFERENCE.fullmatch(self.image)), "--image", self.image, "a reference such as registry/paceline:1"
        )
        labels = {"claim": self.claim, "namespace": self.namespace, "service-account": self.account}
        for option, value in labels.items() | ({("secret", self.secret)} if self.secret else set()):
            require(bool(_LABEL.fullmatch(value)), f"--{option}", value, "a Kubernetes name, such as paceline-1")


def install(out: Path, schedule: Schedule) -> str:
    pod = PodSettings(**schedule.place)
    if not pod.apply:
        return "not applied yet: pipe this manifest to `kubectl apply -f -`, or add the schedule again with --apply"
    for document in documents(out, schedule):
        # Create the object, or replace the one of an earlier schedule of that name.
        create, replace, _ = _calls(document["kind"])
        kind, name, namespace = document["kind"], document["metadata"]["name"], document["metadata"]["namespace"]
        if not _done(partial(create, namespace, document), "create", kind, namespace, unless=409):
            _done(partial(replace, name, namespace, document), "update", kind, namespace)
    return f"installed as the CronJob {name_of(schedule)} in the namespace {pod.namespace}"


def remove(out: Path, schedule: Schedule) -> str | None:
    pod = PodSettings(**schedule.place)
    if not pod.apply:
        return (
            "nothing was deleted on the cluster, because the manifest was only printed; if you applied it, run:\n"
            f"kubectl delete cronjob,configmap {name_of(schedule)} -n {pod.namespace}"
        )
    for kind in ("CronJob", "ConfigMap"):
        _done(partial(_calls(kind)[2], name_of(schedule), pod.namespace), "delete", kind, pod.namespace, unless=404)
    return None


def name_of(schedule: Schedule) -> str:
    return f"paceline-{schedule.name}"


def documents(out: Path, schedule: Schedule) -> list[dict[str, Any]]:
    """The ConfigMap with the definition, and the CronJob that runs it."""
    pod = PodSettings(**schedule.place)
    folder = folder_of(out, schedule.name)
    files = {
        name: (folder / name).read_text(encoding="utf-8")
        for name in (EXPERIMENT, LAUNCHER)
        if (folder / name).is_file()
    }
    # The pod has neither this host's directory nor its env file: the variables come from the Secret.
    definition = dataclasses.replace(schedule, directory=RESULTS, env_file=None).to_dict()
    files = {DEFINITION: json.dumps(definition, indent=1), **files}
    about = {"name": name_of(schedule), "namespace": pod.namespace, "labels": _labels(schedule)}
    config = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": about, "data": files}
    spec = {
        "schedule": schedule.cron.numbers,
        "timeZone": schedule.cron.timezone,
        "concurrencyPolicy": "Forbid",
        "startingDeadlineSeconds": DEADLINE_S,
        "successfulJobsHistoryLimit": 3,
        "failedJobsHistoryLimit": 3,
        # A failed benchmark is a result; an immediate retry would hide it.
        "jobTemplate": {"spec": {"backoffLimit": 0, "template": _pod(schedule, pod)}},
    }
    return [config, {"apiVersion": "batch/v1", "kind": "CronJob", "metadata": about, "spec": spec}]


def _labels(schedule: Schedule) -> dict[str, str]:
    return {"app.kubernetes.io/name": "paceline", "paceline.dev/schedule": schedule.name}


def _pod(schedule: Schedule, pod: PodSettings) -> dict[str, Any]:
    within = str(DEADLINE_S + COMING_UP_S)
    run = ["python", "-m", "paceline.cli", "schedule", "run", schedule.name, "--out", RESULTS]
    container: dict[str, Any] = {
        "name": "paceline",
        "image": pod.image,
        "command": [*run, "--definition", MOUNTED, "--due-within", within],
        "env": [{"name": "HOME", "value": RESULTS}],
        "volumeMounts": [
            {"name": "results", "mountPath": RESULTS},
            {"name": "asked", "mountPath": MOUNTED, "readOnly": True},
            {"name": "tmp", "mountPath": "/tmp"},
        ],
        # Only the controller runs here: the devices belong to the jobs of its launcher.
        "resources": {"requests": {"cpu": "1", "memory": "2Gi"}, "limits": {"memory": "4Gi"}},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
    }
    if pod.secret:
        container["envFrom"] = [{"secretRef": {"name": pod.secret}}]
    spec = {
        "restartPolicy": "Never",
        "serviceAccountName": pod.account,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "fsGroup": USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
        "volumes": [
            {"name": "results", "persistentVolumeClaim": {"claimName": pod.claim}},
            {"name": "asked", "configMap": {"name": name_of(schedule)}},
            {"name": "tmp", "emptyDir": {}},
        ],
    }
    return {"metadata": {"labels": _labels(schedule)}, "spec": spec}


def manifest(out: Path, schedule: Schedule) -> str:
    """The documents as YAML for `kubectl apply -f -`."""
    import yaml

    return str(yaml.safe_dump_all(documents(out, schedule), sort_keys=False, default_flow_style=False))


def definition_in(folder: Path) -> Schedule:
    """The schedule from a mounted ConfigMap."""
    return Schedule.from_dict(read_json(folder / DEFINITION))


# --- the cluster ---


def _done(call: Callable[[], Any], verb: str, kind: str, namespace: str, unless: int | None = None) -> bool:
    """Call the API server; False if it answers with the status `unless`, RequestError for any other failure."""
    import urllib3
    from kubernetes.client.exceptions import ApiException

    resource = f"{kind.lower()}s"
    try:
        call()
    except ApiException as error:
        if error.status == unless:
            return False
        hint = f"; try: kubectl auth can-i {verb} {resource} -n {namespace}" if error.status == 403 else ""
        raise RequestError(
            f"--apply: the cluster refused to {verb} {resource} in the namespace {namespace} "
            f"({error.status} {error.reason}){hint}"
        ) from None
    except urllib3.exceptions.HTTPError:
        raise RequestError("--apply: cannot reach the cluster; try: kubectl cluster-info") from None
    return True


def _calls(kind: str) -> tuple[Any, Any, Any]:
    """create, replace and delete for a kind, on the cluster that kubectl uses."""
    import yaml

    try:
        from kubernetes import client, config
    except ImportError:
        raise RequestError("--apply needs the package kubernetes: run `pip install 'paceline[kubernetes]'`") from None
    try:
        if os.environ.get("KUBERNETES_SERVICE_HOST") and "KUBECONFIG" not in os.environ:
            config.load_incluster_config()
        else:
            config.load_kube_config(os.environ.get("KUBECONFIG"))
    except (config.ConfigException, OSError) as error:
        raise RequestError(f"--apply: no cluster is configured here ({error}); try: kubectl config view") from None
    except (yaml.YAMLError, AttributeError, LookupError, TypeError, ValueError) as error:
        # The client assumes a valid file. Its error may quote lines of the file with tokens.
        path, why = os.environ.get("KUBECONFIG") or "~/.kube/config", type(error).__name__
        raise RequestError(f"--apply: {path} is not a usable kubeconfig ({why}); try: kubectl config view") from None
    api = client.BatchV1Api() if kind == "CronJob" else client.CoreV1Api()
    word = "cron_job" if kind == "CronJob" else "config_map"
    create, replace, delete = (getattr(api, f"{verb}_namespaced_{word}") for verb in ("create", "replace", "delete"))
    return create, replace, delete
