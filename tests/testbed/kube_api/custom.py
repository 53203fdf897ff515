"""The fields of JobSet, TrainJob, TrainingRuntime and LocalQueue, as their API servers know them.

Names and types by the CRDs of JobSet v0.12.0, Kubeflow Trainer v2.3.0 and Kueue v0.19.2, as far as this double needs
them; a field that is not listed is refused. What these kinds embed (Jobs and pods) is checked by the official schema.
`tests/unit/launchers/kubernetes/test_kube_crds.py` compares with the CRDs themselves, where somebody provides them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

Object = dict[str, Any]
# A dict: an object of these fields. A list: items of this kind. "any": an object that this double does not look into.
_JOB, _ANY = "job", "any"
_METADATA: Object = {"annotations": _ANY, "finalizers": [str], "labels": _ANY, "name": str, "namespace": str}
_JOB_SET: Object = {
    "coordinator": _ANY,
    "failurePolicy": {"maxRestarts": int, "restartStrategy": str, "rules": [_ANY]},
    "managedBy": str,
    "network": {"enableDNSHostnames": bool, "publishNotReadyAddresses": bool, "subdomain": str},
    "replicatedJobs": [
        {
            "dependsOn": [_ANY],
            "groupName": str,
            "name": str,
            "replicas": int,
            "template": {"metadata": _METADATA, "spec": _JOB},
        }
    ],
    "startupPolicy": _ANY,
    "successPolicy": _ANY,
    "suspend": bool,
    "ttlSecondsAfterFinished": int,
    "volumeClaimPolicies": [_ANY],
}
_TRAINER: Object = {
    "args": [str],
    "command": [str],
    "env": [_ANY],
    "image": str,
    "numNodes": int,
    "numProcPerNode": int,
    "resourcesPerNode": _ANY,
}
FIELDS: dict[str, Object] = {
    "JobSet": _JOB_SET,
    "TrainJob": {
        "activeDeadlineSeconds": int,
        "initializer": _ANY,
        "managedBy": str,
        "runtimePatches": [_ANY],
        "runtimeRef": {"apiGroup": str, "kind": str, "name": str},
        "suspend": bool,
        "trainer": _TRAINER,
    },
    "TrainingRuntime": {
        "mlPolicy": {"numNodes": int, **dict.fromkeys(("flux", "jax", "mpi", "torch", "xgboost"), _ANY)},
        "podGroupPolicy": _ANY,
        "template": {"metadata": _METADATA, "spec": _JOB_SET},
    },
    "LocalQueue": {"clusterQueue": str, "fairSharing": _ANY, "stopPolicy": str},
}


def problems(kind: str, spec: Any, check_job: Callable[[Object], None]) -> Iterator[str]:
    """What the CRD of this kind says against a spec. check_job raises for an embedded Job that is not valid."""
    yield from _problems("spec", FIELDS[kind], spec, check_job)


def _problems(where: str, wanted: Any, value: Any, check_job: Callable[[Object], None]) -> Iterator[str]:
    if isinstance(wanted, list):
        if not isinstance(value, list):
            yield f"{where}: Invalid value: must be of type array"
            return
        for number, item in enumerate(value):
            yield from _problems(f"{where}[{number}]", wanted[0], item, check_job)
    elif isinstance(wanted, type):
        if type(value) is not wanted:
            yield f"{where}: Invalid value: must be of type {wanted.__name__}"
    elif not isinstance(value, dict):
        yield f"{where}: Invalid value: must be of type object"
    elif wanted == _JOB:
        check_job(value)
    elif wanted != _ANY:
        for name, inner in value.items():
            if name not in wanted:
                yield f'unknown field "{where}.{name}"'
            else:
                yield from _problems(f"{where}.{name}", wanted[name], inner, check_job)
