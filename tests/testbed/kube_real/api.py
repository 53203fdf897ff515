"""A client of the real API server with the methods by which kubelets and accidents of the double know their state."""

from __future__ import annotations

import contextlib
import copy
import http.client
import itertools
import json
import ssl
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

from testbed.kube_api.resources import EVENTS, NODES, PODS, Object, Resource
from testbed.kube_api.state import now

# Lists of the whole cluster are read so often at most.
FRESH_S = 0.2


class Refused(Exception):
    """The API server refused a request, or does not answer (status 0)."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status


class Api:
    """Requests of an administrator."""

    def __init__(self, url: str, token: str) -> None:
        self._url, self._token = url, token
        self._trust = ssl._create_unverified_context()
        self._lists: dict[Resource, tuple[float, list[Object], str]] = {}
        self._lock = threading.Lock()
        self._events = itertools.count()

    def call(self, method: str, path: str, body: Any = None, kind: str = "application/json") -> Object:
        request = urllib.request.Request(
            self._url + path,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Authorization": f"Bearer {self._token}", "Content-Type": kind, "Accept": "application/json"},
            method=method,
        )
        try:
            with urllib.request.urlopen(request, timeout=60, context=self._trust) as answer:
                found: Object = json.loads(answer.read() or b"{}")
                return found
        except urllib.error.HTTPError as error:
            raise Refused(error.code, error.read().decode(errors="replace")[:500]) from None
        except (OSError, http.client.HTTPException) as error:
            raise Refused(0, str(error)) from None

    def list(self, resource: Resource, namespace: str | None = None) -> list[Object]:
        if namespace:
            return self._read(path(resource, namespace), resource)[0]
        with self._lock:
            at, items, _ = self._lists.get(resource, (float("-inf"), [], ""))
            if time.monotonic() - at > FRESH_S:
                items, version = self._read(path(resource), resource)
                self._lists[resource] = time.monotonic(), items, version
            return copy.deepcopy(items)

    def _read(self, where: str, resource: Resource) -> tuple[list[Object], str]:
        answer = self.call("GET", where)
        about = {"apiVersion": resource.api_version, "kind": resource.kind}
        return [about | item for item in answer.get("items") or []], answer["metadata"]["resourceVersion"]

    @property
    def version(self) -> str:
        """Changes whenever a pod may have changed."""
        return self._lists.get(PODS, (0.0, [], ""))[2]

    def find(self, resource: Resource, namespace: str, name: str) -> Object | None:
        try:
            return self.call("GET", path(resource, namespace, name))
        except Refused as refusal:
            if refusal.status == 404:
                return None
            raise

    def get(self, resource: Resource, namespace: str, name: str) -> Object:
        return self.call("GET", path(resource, namespace, name))

    def create(self, resource: Resource, namespace: str, given: Object) -> Object:
        about = {"apiVersion": resource.api_version, "kind": resource.kind}
        return self.call("POST", path(resource, namespace), about | given)

    def modify(self, resource: Resource, obj: Object, change: Callable[[Object], None]) -> Object | None:
        """Apply a change to what is there now; of pods and nodes it is one of their status."""
        namespace, name = obj["metadata"].get("namespace", ""), obj["metadata"]["name"]
        where = path(resource, namespace, name) + ("/status" if resource in (PODS, NODES) else "")
        while True:
            old = self.find(resource, namespace, name)
            if old is None or old["metadata"]["uid"] != obj["metadata"]["uid"]:
                return None
            new = copy.deepcopy(old)
            change(new)
            if new == old:
                return old
            try:
                return self.call("PUT", where, new)
            except Refused as refusal:
                if refusal.status == 404:
                    return None
                if refusal.status != 409:
                    raise

    def delete(self, resource: Resource, namespace: str, name: str, policy: str = "", grace: int | None = None) -> None:
        body = ({"propagationPolicy": policy} if policy else {}) | (
            {"gracePeriodSeconds": grace} if grace is not None else {}
        )
        with absent():
            self.call("DELETE", path(resource, namespace, name), body)

    def remove(self, resource: Resource, obj: Object) -> None:
        """As the kubelet does when a pod has ended: without grace, and only this very object."""
        meta = obj["metadata"]
        body = {"gracePeriodSeconds": 0, "preconditions": {"uid": meta["uid"]}}
        with absent():
            self.call("DELETE", path(resource, meta.get("namespace", ""), meta["name"]), body)

    def event(self, about: Object, kind: str, reason: str, message: str, source: str) -> None:
        meta = about["metadata"]
        whom = {"kind": "Pod", "apiVersion": "v1", "namespace": meta["namespace"], "name": meta["name"]}
        entry = {
            "metadata": {"name": f"{meta['name']}.{time.time_ns():x}{next(self._events):x}"},
            "involvedObject": whom | {"uid": meta["uid"]},
            "reason": reason,
            "message": message,
            "type": kind,
            "source": {"component": source},
            "count": 1,
            "firstTimestamp": now(),
            "lastTimestamp": now(),
        }
        with contextlib.suppress(Refused):  # its namespace may be going
            self.create(EVENTS, meta["namespace"], entry)


@contextlib.contextmanager
def absent() -> Any:
    """What is gone, or was replaced, need not be deleted."""
    try:
        yield
    except Refused as refusal:
        if refusal.status not in (404, 409):
            raise


def path(resource: Resource, namespace: str = "", name: str = "") -> str:
    """
    >>> from testbed.kube_api.resources import JOBS
    >>> path(JOBS, "team", "x"), path(PODS)
    ('/apis/batch/v1/namespaces/team/jobs/x', '/api/v1/pods')
    """
    root = f"/apis/{resource.group}/{resource.version}" if resource.group else f"/api/{resource.version}"
    space = f"/namespaces/{namespace}" if namespace and resource.namespaced else ""
    return f"{root}{space}/{resource.plural}" + (f"/{name}" if name else "")
