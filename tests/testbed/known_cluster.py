"""A cluster whose answers a test writes down itself, in the place of the Kubernetes client."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from paceline.errors import LaunchError
from paceline.launchers.kubernetes.client import AlreadyExists, Cluster, NotFound
from paceline.launchers.kubernetes.manifests import RUN_LABEL, Resource
from paceline.launchers.node import log_transport

RUNNING = {"running": {}}
DONE = {"terminated": {"exitCode": 0, "reason": "Completed"}}


class KnownCluster(Cluster):
    """Objects in a dictionary, pods in a list, a log for each."""

    def __init__(self) -> None:
        super().__init__(context=None, namespace="bench", patience_s=1.0)
        self.objects: dict[tuple[str, str], dict[str, Any]] = {}
        self.running: list[dict[str, Any]] = []
        self.logs: dict[str, list[list[bytes]]] = {}
        self.deleted: list[tuple[str, str]] = []
        self.told: list[dict[str, Any]] = []
        self.refusal: LaunchError | None = None
        self.is_being_deleted = False

    def create(self, resource: Resource, manifest: Mapping[str, Any]) -> dict[str, Any]:
        key = (resource.plural, manifest["metadata"]["name"])
        if key in self.objects:
            raise AlreadyExists("there already")
        kept = json.loads(json.dumps(manifest))
        kept["metadata"]["uid"] = f"uid-{len(self.objects)}"
        self.objects[key] = kept
        return kept

    def read(self, resource: Resource, name: str) -> dict[str, Any] | None:
        return self.objects.get((resource.plural, name))

    def has_namespace(self, resource: Resource, name: str) -> bool:
        return not self.is_being_deleted

    def delete(self, resource: Resource, name: str) -> None:
        if self.refusal:
            raise self.refusal
        self.deleted.append((resource.plural, name))
        self.objects.pop((resource.plural, name), None)
        self.running = [pod for pod in self.running if pod["metadata"]["labels"][RUN_LABEL] != name]

    def pods(self, selector: str) -> list[dict[str, Any]]:
        label, _, wanted = selector.partition("=")
        return [pod for pod in self.running if pod["metadata"]["labels"].get(label) == wanted]

    def pod(self, name: str) -> dict[str, Any] | None:
        return next((pod for pod in self.running if pod["metadata"]["name"] == name), None)

    def events(self, uid: str) -> list[dict[str, Any]]:
        return self.told

    def log(self, pod: str, container: str, follow: bool) -> Iterator[bytes]:
        """Each reading in its turn; the last one again and again."""
        readings = self.logs.get(pod)
        if not readings:
            raise NotFound("no such pod")
        yield from readings.pop(0) if len(readings) > 1 else readings[0]

    def start(self, job: str, state: Mapping[str, Any], nodes: int = 2, **status: Any) -> None:
        known = self.objects["jobs", job]["metadata"]
        same = {"labels": {**known["labels"], RUN_LABEL: job}, "ownerReferences": [{"uid": known["uid"]}]}
        for index in range(nodes):
            about = {"name": f"{job}-{index}-x", "uid": f"p{index}", **same}
            containers = [{"name": "node", "state": state}]
            self.running.append({"metadata": about, "status": {"containerStatuses": containers, **status}})

    def say(self, job: str, kind: str, **more: str) -> None:
        self.objects["jobs", job]["status"] = {"conditions": [{"type": kind, "status": "True", **more}]}


def parcel_of(folder: Path, node: int, stack: bytes = b"") -> bytes:
    """The log of a node whose rank has ended well."""
    folder.mkdir()
    (folder / f"stack-{node}.txt").write_bytes(stack)
    (folder / f"outcome-{node}.json").write_text("{}")
    (folder / f"samples-{node}.jsonl").write_text("{}\n" * 100)
    sender = log_transport.Sender(folder, node)
    lines = [sender.hello({"host": f"n{node}"}), "a line of its own", *sender.changes(), *sender.farewell(0)]
    return "".join(f"{line}\n" for line in lines).encode()
