"""Two short pods that say what a run would find: the image, each other's names, shared memory, GPUs."""

from __future__ import annotations

import contextlib
import json
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from paceline.errors import LaunchError
from paceline.launchers.kubernetes import watch
from paceline.launchers.kubernetes.client import Cluster
from paceline.launchers.kubernetes.manifests import RESOURCES
from paceline.launchers.kubernetes.options import Options, quantity
from paceline.launchers.kubernetes.pod import CONTAINER, RUN_LABEL, SMALL, reader

PODS = 2
LOOK_S = 0.5
MARK = "@paceline-probe "
_JOB = RESOURCES["job"]
# Runs in the image, whatever version it holds: only what every version has is imported. A name that is new may be
# unknown to the resolver for a moment, so it is asked for again.
_SCRIPT = """
import json, os, socket, sys, time
found = {"index": os.environ["JOB_COMPLETION_INDEX"], "node": os.environ.get("PACELINE_NODE")}
try:
    import paceline
    found["version"] = paceline.__version__
except ImportError as error:
    found["import_error"] = str(error)
room = os.statvfs("/dev/shm")
found["shm_bytes"], found["user"] = room.f_frsize * room.f_blocks, os.getuid()
job, end = os.environ["JOB"], time.monotonic() + 30
name = f"{job}-{1 - int(found['index'])}.{job}"
while "peer" not in found and time.monotonic() < end:
    try:
        found["peer"] = socket.getaddrinfo(name, 1)[0][4][0]
    except OSError as error:
        found["name_error"] = str(error)
        time.sleep(0.2)
if os.environ.get("GPUS"):
    from paceline.host import machine
    found["gpus"] = machine.device_count()
print("@paceline-probe " + json.dumps(found), flush=True)
# The other one may still be asking for this pod's name, which goes with it.
time.sleep(float(os.environ["LINGER_S"]))
"""
LINGER_S = 3.0


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What the pods said, by index; trouble is why there is less than that of all of them."""

    said: dict[int, dict[str, Any]] = field(default_factory=dict)
    trouble: str | None = None


def probe(cluster: Cluster, chosen: Options, limit_s: float) -> Finding:
    """Start both pods, hear them, remove everything; what could not be done is in `trouble`."""
    name = f"paceline-probe-{secrets.token_hex(4)}"
    try:
        job = cluster.create(_JOB, _job(chosen, name, limit_s))
        cluster.create_service(_service(name, job["metadata"]["uid"]))
        trouble = _await_end(cluster, name, limit_s)
        return Finding(said=dict(_heard(cluster, name)), trouble=trouble)
    except LaunchError as refusal:
        return Finding(trouble=str(refusal))
    finally:
        with contextlib.suppress(LaunchError):
            cluster.delete(_JOB, name)
            cluster.delete_service(name)


def _job(chosen: Options, name: str, limit_s: float) -> dict[str, Any]:
    pod = reader(chosen, name)
    labels = {**pod["metadata"]["labels"], RUN_LABEL: name}
    container = pod["spec"]["containers"][0]
    container["command"] = [chosen.python, "-c", _SCRIPT.replace("$", "$$")]
    container["env"] += [
        {"name": "PACELINE_NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
        {"name": "JOB", "value": name},
        {"name": "LINGER_S", "value": f"{LINGER_S:g}"},
    ]
    # A disk of memory is no larger than the pod's limit: with a small one it would not be that of a run.
    container["resources"]["limits"]["memory"] = chosen.memory_limit
    container["resources"]["requests"]["memory"] = min(SMALL, chosen.memory_request, key=quantity)
    if chosen.gpus:
        container["env"].append({"name": "GPUS", "value": "1"})
        container["resources"]["limits"] |= {chosen.gpu_resource: "1"}
    pod["spec"] |= {"subdomain": name, "terminationGracePeriodSeconds": 1}
    spec = {
        "completionMode": "Indexed",
        "completions": PODS,
        "parallelism": PODS,
        "backoffLimit": 0,
        "activeDeadlineSeconds": int(limit_s) + 60,
        "ttlSecondsAfterFinished": 60,
        "template": {"metadata": {"labels": labels}, "spec": pod["spec"]},
    }
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name, "labels": labels}, "spec": spec}


def _service(name: str, owner: str) -> dict[str, Any]:
    reference = {"apiVersion": "batch/v1", "kind": "Job", "name": name, "uid": owner}
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, "ownerReferences": [reference]},
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {"batch.kubernetes.io/job-name": name},
        },
    }


def _await_end(cluster: Cluster, name: str, limit_s: float) -> str | None:
    """None when all pods have ended; else why they have not, in the cluster's words."""
    deadline, waiting = time.monotonic() + limit_s, None
    while time.monotonic() < deadline:
        job, pods = cluster.read(_JOB, name), cluster.pods(f"{RUN_LABEL}={name}")
        sight = watch.Sight(main=job, job=job, pods=pods, nodes=PODS, name=name)
        state = watch.state_of(sight)
        if not state.running:
            return state.reason or (None if state.exit_code == 0 else f"it ended with exit code {state.exit_code}")
        waiting = state.waiting
        if watch.is_stuck(sight):
            break
        time.sleep(LOOK_S)
    return waiting or f"the probe did not end within {limit_s:g} s"


def _heard(cluster: Cluster, name: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """What each pod printed. One that never started has no log."""
    for pod in cluster.pods(f"{RUN_LABEL}={name}"):
        if not watch.is_begun(pod):
            continue
        text = b"".join(cluster.log(pod["metadata"]["name"], CONTAINER, follow=False)).decode(errors="replace")
        for line in text.splitlines():
            if line.startswith(MARK):
                said = json.loads(line.removeprefix(MARK))
                yield int(said["index"]), said
