"""The garbage collector: what owners leave, what namespaces hold, what lost nodes had."""

from __future__ import annotations

from contextlib import suppress

from testbed.kube_api.jobs import is_finished, set_condition
from testbed.kube_api.refusals import Refusal
from testbed.kube_api.resources import NAMESPACES, NODES, PODS, Object, Resource
from testbed.kube_api.state import FOREGROUND, State, owners


class Garbage:
    def __init__(self, state: State) -> None:
        self._state = state

    def sync(self) -> None:
        everything = list(self._state.everything())
        living = {obj["metadata"]["uid"]: obj for _, obj in everything}
        for resource, obj in everything:
            self._collect(resource, obj, living)
        self._empty_namespaces()
        self._collect_pods_of_lost_nodes()

    def _collect(self, resource: Resource, obj: Object, living: dict[str, Object]) -> None:
        """An object goes when all its owners are gone, or when one waits for it in the foreground."""
        meta, named = obj["metadata"], owners(obj)
        present = [living[o["uid"]] for o in named if o["uid"] in living]
        waited_for = any(FOREGROUND in p["metadata"].get("finalizers", []) for p in present)
        if named and (not present or waited_for) and not meta.get("deletionTimestamp"):
            with suppress(Refusal):
                self._state.delete(resource, meta.get("namespace", ""), meta["name"], "Background")
        if meta.get("deletionTimestamp") and FOREGROUND in meta.get("finalizers", []) and not self._state.owned(obj):
            rest = [f for f in meta["finalizers"] if f != FOREGROUND]
            self._state.modify(resource, obj, lambda o: o["metadata"].update(finalizers=rest))

    def _empty_namespaces(self) -> None:
        """Pods go first, and everything else after the last of them, also roles (`OrderedNamespaceDeletion`)."""
        for namespace in self._state.list(NAMESPACES):
            if not namespace["metadata"].get("deletionTimestamp"):
                continue
            name = namespace["metadata"]["name"]
            inside = [(r, o) for r, o in self._state.everything() if o["metadata"].get("namespace") == name]
            pods = [(resource, obj) for resource, obj in inside if resource == PODS]
            for resource, obj in pods or inside:
                if not obj["metadata"].get("deletionTimestamp"):
                    with suppress(Refusal):
                        self._state.delete(resource, name, obj["metadata"]["name"], "Background")
            if not inside:
                self._state.remove(NAMESPACES, namespace)

    def _collect_pods_of_lost_nodes(self) -> None:
        """Pods whose node is no longer there are marked as failed and taken away without grace."""
        nodes = {n["metadata"]["name"] for n in self._state.list(NODES)}
        for pod in self._state.list(PODS):
            node = pod["spec"].get("nodeName")
            if not node or node in nodes:
                continue
            if not is_finished(pod):
                said = ("DeletionByPodGC", "PodGC: node no longer exists")

                def mark(each: Object, said: tuple[str, str] = said) -> None:
                    set_condition(each, "DisruptionTarget", *said)
                    each["status"]["phase"] = "Failed"

                pod = self._state.modify(PODS, pod, mark) or pod
            self._state.remove(PODS, pod)
