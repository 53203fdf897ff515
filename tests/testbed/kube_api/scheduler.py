"""The scheduler: which node a pod fits on, and in its usual words why it fits nowhere."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from testbed.kube_api.jobs import is_finished, set_condition
from testbed.kube_api.resources import CLAIMS, NODES, PODS, PRIORITIES, Object
from testbed.kube_api.selectors import expression_holds, selects
from testbed.kube_api.state import State

SOURCE = "default-scheduler"
_UNITS = {
    "": 1.0,
    "m": 1e-3,
    "k": 1e3,
    "M": 1e6,
    "G": 1e9,
    "T": 1e12,
    "Ki": 2**10,
    "Mi": 2**20,
    "Gi": 2**30,
    "Ti": 2**40,
}


def quantity(text: Any) -> float:
    """`500m`, `32Gi`, `8` as a number."""
    found = re.fullmatch(r"([0-9.]+(?:e[0-9]+)?)([A-Za-z]*)", str(text))
    if found is None or found[2] not in _UNITS:
        raise ValueError(f"{text!r} is no quantity")
    return float(found[1]) * _UNITS[found[2]]


def requests_of(pod: Object) -> Counter[str]:
    """What a pod takes of a node. A limit without a request is a request."""
    total: Counter[str] = Counter()
    for container in pod["spec"]["containers"]:
        resources = container.get("resources") or {}
        for name, value in {**(resources.get("limits") or {}), **(resources.get("requests") or {})}.items():
            total[name] += quantity(value)  # type: ignore[assignment]
    return total


class Scheduler:
    def __init__(self, state: State) -> None:
        self._state = state
        self._said: set[tuple[str, str]] = set()

    def sync(self) -> None:
        for pod in self._state.list(PODS):
            waiting = not pod["spec"].get("nodeName") and not is_finished(pod)
            if waiting and not pod["metadata"].get("deletionTimestamp"):
                self._place(pod)

    def _place(self, pod: Object) -> None:
        bound = Counter(p["spec"].get("nodeName") for p in self._state.list(PODS) if not is_finished(p))
        # The emptiest first, as the real one scores them.
        nodes, reasons = sorted(self._state.list(NODES), key=lambda n: bound[n["metadata"]["name"]]), Counter[str]()
        missing = self._missing_claim(pod)
        for node in nodes if missing is None else []:
            reason = self._obstacle(pod, node)
            if reason is None:
                self._bind(pod, node)
                return
            reasons[reason] += 1
        self._refuse(pod, len(nodes), missing, reasons)

    def _bind(self, pod: Object, node: Object) -> None:
        name = node["metadata"]["name"]

        def bind(each: Object) -> None:
            each["spec"]["nodeName"] = name
            set_condition(each, "PodScheduled", "", "")

        self._state.modify(PODS, pod, bind)
        place = f"{pod['metadata']['namespace']}/{pod['metadata']['name']}"
        self._state.event(pod, "Normal", "Scheduled", f"Successfully assigned {place} to {name}", SOURCE)

    def _refuse(self, pod: Object, nodes: int, missing: str | None, reasons: Counter[str]) -> None:
        none = f"0/{nodes} nodes are available"
        each = missing or ", ".join(f"{count} {reason}" for reason, count in sorted(reasons.items()))
        if nodes == 0:
            message = "no nodes available to schedule pods"
        elif missing:
            message = f"{none}: {missing}. not found"
        else:
            message = f"{none}: {each}. preemption: {none}: {nodes} Preemption is not helpful for scheduling."
        self._state.modify(
            PODS, pod, lambda p: set_condition(p, "PodScheduled", "Unschedulable", message, status="False")
        )
        # The real one repeats itself every few minutes.
        if (pod["metadata"]["uid"], message) not in self._said:
            self._said.add((pod["metadata"]["uid"], message))
            self._state.event(pod, "Warning", "FailedScheduling", message, SOURCE)

    def _missing_claim(self, pod: Object) -> str | None:
        for volume in pod["spec"].get("volumes") or []:
            name = (volume.get("persistentVolumeClaim") or {}).get("claimName")
            if name and self._state.find(CLAIMS, pod["metadata"]["namespace"], name) is None:
                return f'persistentvolumeclaim "{name}" not found'
        return None

    def _obstacle(self, pod: Object, node: Object) -> str | None:
        """The first filter that does not let the pod onto the node."""
        spec = pod["spec"]
        if node["spec"].get("unschedulable"):
            return "node(s) were unschedulable"
        for taint in node["spec"].get("taints") or []:
            if taint["effect"] != "PreferNoSchedule" and not _tolerated(spec, taint):
                value = f": {taint['value']}" if taint.get("value") else ": "
                return f"node(s) had untolerated taint {{{taint['key']}{value}}}"
        labels = node["metadata"].get("labels") or {}
        if not _node_matches(spec, labels):
            return "node(s) didn't match Pod's node affinity/selector"
        others = [p for p in self._state.list(PODS) if p["spec"].get("nodeName") and not is_finished(p)]
        if self._is_repelled(pod, labels, others):
            return "node(s) didn't match pod anti-affinity rules"
        taken: Counter[str] = Counter()
        for other in others:
            if other["spec"]["nodeName"] == node["metadata"]["name"]:
                taken.update(requests_of(other))
        room = {name: quantity(value) for name, value in node["status"]["allocatable"].items()}
        lacking = [n for n, wanted in sorted(requests_of(pod).items()) if wanted > room.get(n, 0.0) - taken[n]]
        return f"Insufficient {lacking[0]}" if lacking else None

    def _is_repelled(self, pod: Object, labels: dict[str, str], others: list[Object]) -> bool:
        anti = ((pod["spec"].get("affinity") or {}).get("podAntiAffinity") or {}).get(
            "requiredDuringSchedulingIgnoredDuringExecution"
        ) or []
        nodes = {n["metadata"]["name"]: n["metadata"].get("labels") or {} for n in self._state.list(NODES)}
        for term in anti:
            key = term["topologyKey"]
            for other in others:
                same = nodes.get(other["spec"]["nodeName"], {}).get(key) == labels.get(key)
                same = same and other["metadata"]["namespace"] == pod["metadata"]["namespace"]
                if same and selects(term.get("labelSelector"), other["metadata"].get("labels") or {}):
                    return True
        return False


def _tolerated(spec: Object, taint: Object) -> bool:
    for each in spec.get("tolerations") or []:
        exists = each.get("operator", "Equal") == "Exists"
        key = each.get("key") in (None, "", taint["key"]) if exists else each.get("key") == taint["key"]
        value = exists or each.get("value", "") == taint.get("value", "")
        if key and value and each.get("effect") in (None, "", taint["effect"]):
            return True
    return False


def _node_matches(spec: Object, labels: dict[str, str]) -> bool:
    if any(labels.get(k) != v for k, v in (spec.get("nodeSelector") or {}).items()):
        return False
    required = ((spec.get("affinity") or {}).get("nodeAffinity") or {}).get(
        "requiredDuringSchedulingIgnoredDuringExecution"
    )
    if not required:
        return True
    terms = required["nodeSelectorTerms"]
    return any(all(expression_holds(e, labels) for e in term.get("matchExpressions") or []) for term in terms)


def priority_exists(state: State, name: str) -> bool:
    return name.startswith("system-") or state.find(PRIORITIES, "", name) is not None
