"""A CronJob of Kubernetes: its pod runs the schedule in the image, with the results on a volume that outlives it."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.campaign.schedule.agenda import DEFINITION, EXPERIMENT, LAUNCHER, Schedule, folder_of
from paceline.errors import RequestError, require
from paceline.results.store import read_json

# How late the cluster may start a pod, and how long that pod may take to come up.
DEADLINE_S, COMING_UP_S = 3600, 1800
RESULTS, ASKED = "/results", "/schedule"
USER = 1000
_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_REFERENCE = re.compile(r"[A-Za-z0-9][\w./:@-]{0,254}", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class PodSettings:
    """Where the pod runs. image holds Paceline; claim is the PersistentVolumeClaim of the results; account needs what
    the launcher asks of the cluster; secret holds the variables that notifications need."""

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
            require(bool(_LABEL.fullmatch(value)), f"--{option}", value, "a name of Kubernetes, such as paceline-1")


def install(out: Path, schedule: Schedule) -> str:
    place = PodSettings(**schedule.place)
    if not place.apply:
        return (
            "nothing was applied: hand the manifest that follows to `kubectl apply -f -`, or add it again with --apply"
        )
    for document in documents(out, schedule):
        _put(document)
    return f"the CronJob {name_of(schedule)} of the namespace {place.namespace} starts it"


def remove(out: Path, schedule: Schedule) -> str | None:
    place = PodSettings(**schedule.place)
    if not place.apply:
        return (
            "nothing was deleted on the cluster, as its manifest was only printed; if it was applied, this ends it:\n"
            f"kubectl delete cronjob,configmap {name_of(schedule)} -n {place.namespace}"
        )
    for kind in ("CronJob", "ConfigMap"):
        _delete(kind, name_of(schedule), place.namespace)
    return None


def name_of(schedule: Schedule) -> str:
    return f"paceline-{schedule.name}"


def documents(out: Path, schedule: Schedule) -> list[dict[str, Any]]:
    """The ConfigMap with what was asked, and the CronJob that runs it."""
    place = PodSettings(**schedule.place)
    about = {"name": name_of(schedule), "namespace": place.namespace, "labels": _labels(schedule)}
    config = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": about, "data": _asked(out, schedule)}
    spec = {
        "schedule": schedule.cron.numbers,
        "timeZone": schedule.cron.timezone,
        "concurrencyPolicy": "Forbid",
        "startingDeadlineSeconds": DEADLINE_S,
        "successfulJobsHistoryLimit": 3,
        "failedJobsHistoryLimit": 3,
        # A failed benchmark is a result; to repeat it at once would hide that.
        "jobTemplate": {"spec": {"backoffLimit": 0, "template": _pod(schedule, place)}},
    }
    return [config, {"apiVersion": "batch/v1", "kind": "CronJob", "metadata": about, "spec": spec}]


def _labels(schedule: Schedule) -> dict[str, str]:
    return {"app.kubernetes.io/name": "paceline", "paceline.dev/schedule": schedule.name}


def _asked(out: Path, schedule: Schedule) -> dict[str, str]:
    import json

    folder = folder_of(out, schedule.name)
    files = {name: (folder / name).read_text() for name in (EXPERIMENT, LAUNCHER) if (folder / name).is_file()}
    # In the pod there is neither this host's folder nor its file of variables: those come from the Secret.
    asked = dataclasses.replace(schedule, directory=RESULTS, env_file=None).to_dict()
    return {DEFINITION: json.dumps(asked, indent=1), **files}


def _pod(schedule: Schedule, place: PodSettings) -> dict[str, Any]:
    within = str(DEADLINE_S + COMING_UP_S)
    run = ["python", "-m", "paceline.cli", "schedule", "run", schedule.name, "--out", RESULTS]
    container: dict[str, Any] = {
        "name": "paceline",
        "image": place.image,
        "command": [*run, "--definition", ASKED, "--due-within", within],
        "env": [{"name": "HOME", "value": RESULTS}],
        "volumeMounts": [
            {"name": "results", "mountPath": RESULTS},
            {"name": "asked", "mountPath": ASKED, "readOnly": True},
            {"name": "tmp", "mountPath": "/tmp"},
        ],
        # The controller only: devices belong to the jobs that its launcher starts.
        "resources": {"requests": {"cpu": "1", "memory": "2Gi"}, "limits": {"memory": "4Gi"}},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
    }
    if place.secret:
        container["envFrom"] = [{"secretRef": {"name": place.secret}}]
    spec = {
        "restartPolicy": "Never",
        "serviceAccountName": place.account,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "fsGroup": USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
        "volumes": [
            {"name": "results", "persistentVolumeClaim": {"claimName": place.claim}},
            {"name": "asked", "configMap": {"name": name_of(schedule)}},
            {"name": "tmp", "emptyDir": {}},
        ],
    }
    return {"metadata": {"labels": _labels(schedule)}, "spec": spec}


def manifest(out: Path, schedule: Schedule) -> str:
    """What `kubectl apply -f -` takes."""
    import yaml

    return str(yaml.safe_dump_all(documents(out, schedule), sort_keys=False, default_flow_style=False))


def definition_in(folder: Path) -> Schedule:
    """What the pod was given, from its ConfigMap."""
    return Schedule.from_dict(read_json(folder / DEFINITION))


# --- the cluster ---


def _put(document: dict[str, Any]) -> None:
    """Create the object, or replace the one of an earlier schedule of that name."""
    create, replace, _ = _calls(document["kind"])
    kind, name, namespace = document["kind"], document["metadata"]["name"], document["metadata"]["namespace"]
    if not _done(lambda: create(namespace, document), "create", kind, namespace, unless=409):
        _done(lambda: replace(name, namespace, document), "update", kind, namespace)


def _delete(kind: str, name: str, namespace: str) -> None:
    delete = _calls(kind)[2]
    _done(lambda: delete(name, namespace), "delete", kind, namespace, unless=404)


def _done(call: Callable[[], Any], verb: str, kind: str, namespace: str, unless: int | None = None) -> bool:
    """Whether the cluster did it; False where it answered with the status that is expected instead."""
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
        raise RequestError("--apply: the cluster cannot be reached; try: kubectl cluster-info") from None
    return True


def _calls(kind: str) -> tuple[Any, Any, Any]:
    """create, replace and delete of a kind, by the cluster that kubectl would ask."""
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
        # The client takes a sound file for granted. Its error may quote lines of the file, where tokens stand.
        place, why = os.environ.get("KUBECONFIG") or "~/.kube/config", type(error).__name__
        raise RequestError(f"--apply: {place} is not a usable kubeconfig ({why}); try: kubectl config view") from None
    api = client.BatchV1Api() if kind == "CronJob" else client.CoreV1Api()
    word = "cron_job" if kind == "CronJob" else "config_map"
    create, replace, delete = (getattr(api, f"{verb}_namespaced_{word}") for verb in ("create", "replace", "delete"))
    return create, replace, delete
