"""What keeps every run of a campaign from beginning on a cluster, asked before the first one: nothing is created.

The questions are those of `paceline cluster check` whose answer is certain. One that may not be asked with these rights
is left to the runs.
"""

from __future__ import annotations

import contextlib

from paceline.errors import LaunchError
from paceline.launchers.kubernetes.client import Cluster, Forbidden, Gone
from paceline.launchers.kubernetes.manifests import RESOURCES, RUNTIME
from paceline.launchers.kubernetes.options import Options
from paceline.launchers.kubernetes.survey import missing_rights, named_things, namespace


def refuse(chosen: Options) -> None:
    """LaunchError with the first thing that is wrong: no kubeconfig or context, a server that does not answer or does
    not know these credentials, a right, the namespace, the kind of job, or what the options name."""
    cluster = Cluster.reach(chosen.context, chosen.namespace, chosen.patience_s)
    with contextlib.suppress(Forbidden):
        cluster.call("get", "version", "VersionApi", "get_code")
    _refuse_rights(cluster, chosen)
    _refuse_kind(cluster, chosen)
    for found in (namespace(cluster, chosen), *named_things(cluster, chosen)):
        if found.ok is False:
            raise LaunchError(f"{found.name} {found.text}: {found.fix}")


def essential(kind: str) -> dict[tuple[str, str], tuple[str, ...]]:
    """(API group, resource) -> verbs without which no run can be begun and followed. To remove what is left, or to hear
    why something waits, needs more; a run that may not is a run all the same."""
    main = RESOURCES[kind]
    found: dict[tuple[str, str], tuple[str, ...]] = {(main.group_and_version[0], main.plural): ("create", "get")}
    found |= {("batch", "jobs"): ("get",)} if kind != "job" else {("", "services"): ("create",)}
    found |= {(RUNTIME.group_and_version[0], RUNTIME.plural): ("create",)} if kind == "trainjob" else {}
    return {**found, ("", "pods"): ("get", "list"), ("", "pods/log"): ("get",)}


def _refuse_rights(cluster: Cluster, chosen: Options) -> None:
    """Whoever has rights in some namespaces only is told of one that is not there as of one that is not theirs."""
    with contextlib.suppress(Forbidden):
        if missing := missing_rights(cluster, essential(chosen.kind)):
            where = f"in namespace {cluster.namespace}, if there is such a one"
            shown = f"kubectl auth can-i {missing[0]} --namespace {cluster.namespace}"
            raise LaunchError(f"not permitted to {', '.join(missing)} {where}; try: {shown}")


def _refuse_kind(cluster: Cluster, chosen: Options) -> None:
    resource = RESOURCES[chosen.kind]
    group, version = resource.group_and_version
    try:
        with contextlib.suppress(Forbidden):
            cluster.call("get", "resources", "CustomObjectsApi", "get_api_resources", group, version)
    except Gone:
        known = f"kubectl api-resources --api-group={group}"
        given = (
            f"kubernetes.kind: {chosen.kind} was given, and the cluster knows no {resource.plural} of {resource.api}"
        )
        raise LaunchError(f"{given}; install them, or give job; try: {known}") from None
