"""The cluster's DNS as /etc/hosts of each pod: names of pods behind headless services."""

from __future__ import annotations

from testbed.kube_api.jobs import is_finished
from testbed.kube_api.resources import PODS, SERVICES, Object
from testbed.kube_api.state import State

DOMAIN = "cluster.local"


def records(state: State) -> list[tuple[str, str, str]]:
    """Namespace, name below it, address: of every pod that a headless service publishes."""
    found = []
    pods = [p for p in state.list(PODS) if p["status"].get("podIP") and not is_finished(p)]
    for service in state.list(SERVICES):
        spec, meta = service["spec"], service["metadata"]
        selector = spec.get("selector") or {}
        if spec.get("clusterIP") != "None" or not selector:
            continue
        for pod in pods:
            labels = pod["metadata"].get("labels") or {}
            chosen = pod["metadata"]["namespace"] == meta["namespace"] and selector.items() <= labels.items()
            ready = pod["status"].get("phase") == "Running" or spec.get("publishNotReadyAddresses")
            if chosen and ready:
                found.append((meta["namespace"], meta["name"], pod["status"]["podIP"]))
                if pod["spec"].get("subdomain") == meta["name"] and pod["spec"].get("hostname"):
                    name = f"{pod['spec']['hostname']}.{meta['name']}"
                    found.append((meta["namespace"], name, pod["status"]["podIP"]))
    return found


def hosts_text(pod: Object, known: list[tuple[str, str, str]]) -> str:
    """What the pod can resolve: itself, and by the search list of its resolver all others."""
    own = pod["metadata"]["namespace"]
    lines = ["127.0.0.1 localhost", f"{pod['status']['podIP']} {hostname(pod)}"]
    for namespace, name, address in known:
        forms = [f"{name}.{namespace}", f"{name}.{namespace}.svc", f"{name}.{namespace}.svc.{DOMAIN}"]
        forms = [name, *forms] if namespace == own else forms
        lines.append(f"{address} {' '.join(forms)}")
    return "\n".join(lines) + "\n"


def hostname(pod: Object) -> str:
    """A name longer than a host name may be is cut, as the kubelet does."""
    return str(pod["spec"].get("hostname") or pod["metadata"]["name"])[:63].rstrip("-.")
