"""A Kubernetes whose API server, controllers and scheduler are the real programs; only the kubelets are ours.

The programs are not part of the repository. `PACELINE_KUBERNETES` names a directory with them:

    etcd, kube-apiserver, kube-controller-manager, kube-scheduler     of a Kubernetes release
    jobset-manager, trainer-manager, kueue-manager                    the managers of JobSet, Trainer and Kueue
    jobset/*.yaml, trainer/*.yaml, kueue/*.yaml                       their manifests, as their releases publish them

Everything listens on loopback and ends with the block; pods are processes of this host, as those of the double.
"""

from __future__ import annotations

import os
from pathlib import Path

from testbed.kube_real.cluster import RealCluster

VARIABLE = "PACELINE_KUBERNETES"
KUBERNETES = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler")

__all__ = ["KUBERNETES", "VARIABLE", "RealCluster", "directory", "missing"]


def directory() -> Path:
    return Path(os.environ.get(VARIABLE) or "/nonexistent")


def missing(*managers: str) -> str | None:
    """Why the real programs cannot be started here; None if all of them, and these managers, are there."""
    if VARIABLE not in os.environ:
        return f"{VARIABLE} names no directory with the programs of Kubernetes (see tests/testbed/kube_real)"
    programs = (*KUBERNETES, *(f"{name}-manager" for name in managers))
    absent = [name for name in programs if not os.access(directory() / name, os.X_OK)]
    absent += [f"{name}/*.yaml" for name in managers if not list((directory() / name).glob("*.yaml"))]
    return f"{VARIABLE}={directory()} lacks {', '.join(absent)}" if absent else None
