"""Accidents: each changes the cluster as the real one is changed by it."""

from __future__ import annotations

from testbed.kube_api.access import Access
from testbed.kube_api.jobs import set_condition
from testbed.kube_api.kubelet import Kubelet
from testbed.kube_api.resources import BY_PLURAL, JOBS, NAMESPACES, NODES, PODS, Object
from testbed.kube_api.server import Listener
from testbed.kube_api.state import State


class Accidents:
    """What befalls pods, nodes and the API server. Pods are given as read; `pods` reads them."""

    state: State
    kubelet: Kubelet
    listener: Listener
    access: Access

    def pods(self, namespace: str) -> list[Object]:
        return self.state.list(PODS, namespace)

    def evict(self, pod: Object) -> None:
        """The kubelet of a node under pressure ends the pod and leaves it as Failed."""
        message = "The node was low on resource: memory. Threshold quantity: 100Mi, available: 64Mi. "

        def mark(each: Object) -> None:
            said = ("TerminationByKubelet", message)
            set_condition(each, "DisruptionTarget", *said)
            each["status"] |= {"phase": "Failed", "reason": "Evicted", "message": message}

        self.state.modify(PODS, pod, mark)
        self.state.event(pod, "Warning", "Evicted", message, "kubelet")
        self.kubelet.kill(pod["metadata"]["uid"])

    def preempt(self, pod: Object) -> None:
        """The scheduler takes the pod's place for one of a higher priority."""
        said = ("PreemptionByScheduler", "default-scheduler: preempting to accommodate a higher priority pod")
        self.state.modify(PODS, pod, lambda p: set_condition(p, "DisruptionTarget", *said))
        node = pod["spec"].get("nodeName", "")
        text = f"Preempted by pod 5f2b0f0e-0000-4000-8000-000000000000 on node {node}"
        self.state.event(pod, "Normal", "Preempted", text, "default-scheduler")
        self.state.delete(PODS, pod["metadata"]["namespace"], pod["metadata"]["name"])

    def lose_node(self, name: str) -> None:
        """The machine is gone and its Node is deleted, as a cloud controller does: its pods are collected."""
        self.kubelet.silence(name)
        for pod in self.state.list(PODS):
            if pod["spec"].get("nodeName") == name:
                self.kubelet.kill(pod["metadata"]["uid"])
        self.state.delete(NODES, "", name)

    def silence_node(self, name: str) -> None:
        """The machine answers no more; its pods are marked for deletion, which nobody confirms."""
        self.kubelet.silence(name)
        node = self.state.get(NODES, "", name)

        def mark_node(each: Object) -> None:
            set_condition(each, "Ready", "NodeStatusUnknown", "Kubelet stopped posting node status.", status="Unknown")
            taint = {"key": "node.kubernetes.io/unreachable", "effect": "NoExecute"}
            each["spec"]["taints"] = [*(each["spec"].get("taints") or []), taint]

        self.state.modify(NODES, node, mark_node)
        said = ("DeletionByTaintManager", "Taint manager: deleting due to NoExecute taint")
        for pod in self.state.list(PODS):
            if pod["spec"].get("nodeName") == name:
                self.kubelet.kill(pod["metadata"]["uid"])
                self.state.modify(PODS, pod, lambda p: set_condition(p, "DisruptionTarget", *said))
                self.state.delete(PODS, pod["metadata"]["namespace"], pod["metadata"]["name"])

    def mute_node(self, name: str) -> None:
        """The machine answers no more, and the cluster has not noticed: for it everything there runs."""
        self.kubelet.silence(name)
        for pod in self.state.list(PODS):
            if pod["spec"].get("nodeName") == name:
                self.kubelet.kill(pod["metadata"]["uid"])

    def run_out_of_memory(self, pod: Object) -> None:
        self.kubelet.kill(pod["metadata"]["uid"], oom=True)

    def rotate_logs(self, namespace: str) -> None:
        """The kubelet begins new files; whoever follows is cut off, as by a proxy that closes idle connections, and
        gets only what is in the new file."""
        for pod in self.pods(namespace):
            for each in self.kubelet.containers.get(pod["metadata"]["uid"], {}).values():
                each.log.rotate(cut=True)

    def delete_pod(self, pod: Object) -> None:
        """Somebody does `kubectl delete pod`: no condition of the pod says why it ends."""
        self.state.delete(PODS, pod["metadata"]["namespace"], pod["metadata"]["name"])

    def delete_namespace(self, name: str) -> None:
        """Somebody does `kubectl delete namespace`: its pods go first, then all the rest, also the roles."""
        self.state.delete(NAMESPACES, "", name)

    def delete_job(self, namespace: str, name: str) -> None:
        """Somebody else does `kubectl delete job`."""
        self.state.delete(JOBS, namespace, name, "Background")

    def forbid(self, namespace: str, role: str, resource: str, verb: str) -> None:
        """Take one verb on one resource (`jobs`, `pods/log`) out of a Role."""
        found = self.state.get(BY_PLURAL["roles"], namespace, role)

        def narrow(each: Object) -> None:
            rules = []
            for rule in each["rules"]:
                for name in rule["resources"]:
                    verbs = [v for v in rule["verbs"] if (name, v) != (resource, verb)]
                    rules += [{"apiGroups": rule["apiGroups"], "resources": [name], "verbs": verbs}] if verbs else []
            each["rules"] = rules

        self.state.modify(BY_PLURAL["roles"], found, narrow)

    def stop_api_server(self) -> None:
        self.listener.stop()

    def start_api_server(self, cold_s: float = 2.0) -> None:
        """On the same port, with everything that was stored. Seen on a real one: for about 2 s, while its caches of
        roles fill, it answers 403 to everybody but administrators."""
        self.access.forget_roles(cold_s)
        self.listener.start()
