"""A whole cluster for a test: API server, controllers, nodes, and the accidents that befall them."""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import yaml

from testbed.kube_api.access import ADMIN_TOKEN, Access
from testbed.kube_api.admission import admit
from testbed.kube_api.faults import Accidents
from testbed.kube_api.garbage import Garbage
from testbed.kube_api.jobs import JobController
from testbed.kube_api.jobsets import JobSetController, TrainJobController
from testbed.kube_api.kubelet import Image, Kubelet
from testbed.kube_api.kueue import Kueue
from testbed.kube_api.logs import ROTATED_AT
from testbed.kube_api.requests import Api
from testbed.kube_api.resources import BY_KIND, NAMESPACES, NODES, Object
from testbed.kube_api.scheduler import Scheduler
from testbed.kube_api.server import Listener
from testbed.kube_api.state import State, now

TICK_S = 0.05
LIMITS_S = 0.3
TESTS = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A machine as the cluster sees it; none of its numbers needs to be true."""

    name: str
    cpu: int = 64
    memory: str = "256Gi"
    gpus: int = 0
    labels: dict[str, str] = field(default_factory=dict)
    taints: tuple[dict[str, str], ...] = ()

    def manifest(self) -> Object:
        room = {"cpu": str(self.cpu), "memory": self.memory, "pods": "110"}
        room |= {"nvidia.com/gpu": str(self.gpus)} if self.gpus else {}
        labels = {"kubernetes.io/hostname": self.name, "kubernetes.io/os": "linux", **self.labels}
        ready = {
            "type": "Ready",
            "status": "True",
            "reason": "KubeletReady",
            "message": "kubelet is posting ready status",
        }
        info = {"kubeletVersion": "v1.33.0", "osImage": "Debian GNU/Linux 12 (bookworm)", "architecture": "amd64"}
        info |= {"containerRuntimeVersion": "containerd://2.0.0", "kernelVersion": "6.1.0", "operatingSystem": "linux"}
        info |= dict.fromkeys(("bootID", "machineID", "systemUUID", "kubeProxyVersion"), "")
        return {
            "metadata": {"name": self.name, "labels": labels},
            "spec": {"taints": list(self.taints)} if self.taints else {},
            "status": {
                "capacity": room,
                "allocatable": dict(room),
                "conditions": [{**ready, "lastTransitionTime": now(), "lastHeartbeatTime": now()}],
                "nodeInfo": info,
            },
        }


TWO_NODES = (Node(name="node-a"), Node(name="node-b"))


class Cluster(Accidents):
    """Runs from `with` to its end; nothing of it stays behind."""

    def __init__(self, folder: Path, nodes: Sequence[Node] = TWO_NODES, rotated_at: int = ROTATED_AT) -> None:
        self.folder = folder
        self.state = State()
        self.access = Access(self.state)
        self.kubelet = Kubelet(self.state, folder, _image(), rotated_at)
        self.listener = Listener(Api(self.state, self.access, self.kubelet))
        parts = (Kueue, JobController, JobSetController, TrainJobController, Scheduler, Garbage)
        self._parts: list[Any] = [part(self.state) for part in parts]
        self._ending = threading.Event()
        self._loop = threading.Thread(target=self._run, daemon=True)
        for name in ("default", "kube-system"):
            self.add_namespace(name)
        for node in nodes:
            self.add_node(node)

    def __enter__(self) -> Cluster:
        self.listener.start()
        self._loop.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ending.set()
        self._loop.join()
        self.listener.stop()
        self.kubelet.stop()

    def _run(self) -> None:
        """The controllers, one after the other, until the end: a mistake in one is printed and does not stop them."""
        seen, looked_at = 0, 0.0
        while not self._ending.is_set():
            # Kubelets look at processes; the others have work when something changed, or when time has passed.
            due = self.state.version != seen or time.monotonic() - looked_at > LIMITS_S
            seen, looked_at = (self.state.version, time.monotonic()) if due else (seen, looked_at)
            for part in [*(self._parts if due else ()), self.kubelet]:
                try:
                    part.sync()
                except Exception:
                    traceback.print_exc()
            self._ending.wait(TICK_S)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.listener.port}"

    def add_namespace(self, name: str, **labels: str) -> None:
        about = {"name": name, "labels": {"kubernetes.io/metadata.name": name, **labels}}
        self.state.create(NAMESPACES, "", {"metadata": about, "status": {"phase": "Active"}})

    def add_node(self, node: Node) -> None:
        self.state.create(NODES, "", node.manifest())

    def kubeconfig(self, path: Path, *, token: str = ADMIN_TOKEN, namespace: str | None = None) -> Path:
        """As a user has it."""
        return self.contexts(path, {"double": (token, namespace)})

    def contexts(self, path: Path, users: Mapping[str, tuple[str, str | None]]) -> Path:
        """A kubeconfig with a context for each name, of a token and a namespace; the first is the current one. Plain
        HTTP, so that no certificate is needed."""
        places = [
            {"name": n, "context": {"cluster": "double", "user": n} | ({"namespace": space} if space else {})}
            for n, (_, space) in users.items()
        ]
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "double", "cluster": {"server": self.url}}],
            "users": [{"name": n, "user": {"token": token}} for n, (token, _) in users.items()],
            "contexts": places,
            "current-context": next(iter(users)),
        }
        # Somebody may be reading the one before.
        fresh = path.with_suffix(".new")
        fresh.write_text(yaml.safe_dump(config))
        return fresh.rename(path)

    def apply(self, manifests: Iterable[Object]) -> None:
        """As `kubectl apply` of an administrator, for what is not there yet."""
        for manifest in manifests:
            resource = BY_KIND[manifest["kind"]]
            namespace = manifest["metadata"].get("namespace", "")
            self.state.create(resource, namespace, admit(self.state, resource, namespace, dict(manifest)))

    def leftovers(self, namespace: str) -> list[str]:
        """Names of everything in a namespace that some run has made; events are told for an hour by the real one."""
        made = ("Job", "Pod", "Service", "ConfigMap", "JobSet", "TrainJob", "TrainingRuntime", "Secret")
        found = [f"{kind}/{name}" for kind, name in self.state.names(namespace) if kind in made]
        return sorted([*found, *self.kubelet.traces(namespace)])


def _image() -> Image:
    """Paceline's image: this interpreter, and the sources under test where a real image has them installed."""
    python = Path(sys.executable)
    roots = [Path(word) for word in os.environ.get("PYTHONPATH", "").split(os.pathsep) if word]
    paths = [Path(__file__).parent / "image", TESTS, *roots]
    kept = {Path(sys.prefix), Path(sys.base_prefix), TESTS.parent, *roots}
    env = {
        "PATH": f"{python.parent}:/usr/local/bin:/usr/bin:/bin",
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
    }
    programs = dict.fromkeys(("python", "python3", "/usr/bin/python3", "/opt/venv/bin/python"), str(python))
    return Image(env=env, programs=programs, kept=tuple(sorted(kept)))
