"""Manifests into a cluster: created, or made equal to what is asked for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from paceline.launchers.kubernetes.client import Cluster, Taken

# kind -> class of the official client, the word in its methods' names, the plural of the API.
_METHODS = {
    "Namespace": ("CoreV1Api", "namespace", "namespaces"),
    "ServiceAccount": ("CoreV1Api", "namespaced_service_account", "serviceaccounts"),
    "ResourceQuota": ("CoreV1Api", "namespaced_resource_quota", "resourcequotas"),
    "Role": ("RbacAuthorizationV1Api", "namespaced_role", "roles"),
    "RoleBinding": ("RbacAuthorizationV1Api", "namespaced_role_binding", "rolebindings"),
    "NetworkPolicy": ("NetworkingV1Api", "namespaced_network_policy", "networkpolicies"),
}


def apply(cluster: Cluster, manifests: Iterable[dict[str, Any]]) -> list[str]:
    """`created Role NAME`, one line per object; raises LaunchError at the first that is refused."""
    said = []
    for manifest in manifests:
        api, word, plural = _METHODS[manifest["kind"]]
        name = manifest["metadata"]["name"]
        place = [manifest["metadata"]["namespace"]] if "namespaced" in word else []
        try:
            cluster.call("create", plural, api, f"create_{word}", *place, manifest)
            said.append(f"created {manifest['kind']} {name}")
        except Taken:
            cluster.call("patch", plural, api, f"patch_{word}", name, *place, manifest)
            said.append(f"updated {manifest['kind']} {name}")
    return said
