"""The objects of the cluster and their history: what etcd and the generic part of the API server guarantee.

Every write gets the next resourceVersion; watches read the history, which forgets its beginning. Objects handed out are
copies. Whoever waits for a change waits on `changed`.
"""

from __future__ import annotations

import itertools
import secrets
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from testbed.kube_api import refusals
from testbed.kube_api.refusals import Refusal
from testbed.kube_api.resources import EVENTS, JOBS, NAMESPACES, PODS, Object, Resource

Key = tuple[Resource, str, str]
_LETTERS = "bcdfghjklmnpqrstvwxz2456789"
FOREGROUND = "foregroundDeletion"
# Kinds whose DELETE answers with the object instead of a Status.
_RETURNED = ("pods", "services", "persistentvolumeclaims", "serviceaccounts", "resourcequotas")


def clone(value: Any) -> Any:
    """A copy of plain data, several times faster than the general one."""
    if isinstance(value, dict):
        return {key: clone(each) for key, each in value.items()}
    return [clone(each) for each in value] if isinstance(value, list) else value


def now(later_s: float = 0.0) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + later_s))


def suffix(length: int = 5) -> str:
    return "".join(secrets.choice(_LETTERS) for _ in range(length))


@dataclass(frozen=True, slots=True)
class Change:
    version: int
    how: str
    resource: Resource
    object: Object


class State:
    def __init__(self, remembered: int = 5000) -> None:
        self.changed = threading.Condition(threading.RLock())
        self.version = 1
        self.history: deque[Change] = deque(maxlen=remembered)
        self._objects: dict[Key, Object] = {}
        self._events = itertools.count(1)

    @property
    def oldest(self) -> int:
        """The last version that a watch may no longer start from."""
        return self.history[0].version - 1 if len(self.history) == self.history.maxlen else 0

    def compact(self) -> None:
        """Forget the history, as etcd does every five minutes: watches that lag must list again."""
        with self.changed:
            self.history = deque(list(self.history)[-1:], maxlen=1)

    def find(self, resource: Resource, namespace: str, name: str) -> Object | None:
        with self.changed:
            return clone(self._objects.get((resource, namespace, name)))

    def get(self, resource: Resource, namespace: str, name: str) -> Object:
        found = self.find(resource, namespace, name)
        if found is None:
            raise refusals.not_found(resource, name)
        return found

    def list(self, resource: Resource, namespace: str | None = None) -> list[Object]:
        """In the order of their names; None: of all namespaces."""
        with self.changed:
            keys = [k for k in self._objects if k[0] == resource and namespace in (None, k[1])]
            return [clone(self._objects[key]) for key in sorted(keys, key=lambda k: k[1:])]

    def everything(self) -> Iterator[tuple[Resource, Object]]:
        """Except events, which are many and owned by nobody."""
        with self.changed:
            found = [(key[0], clone(obj)) for key, obj in self._objects.items() if key[0] != EVENTS]
        yield from found

    def names(self, namespace: str) -> list[tuple[str, str]]:
        """Kind and name of everything in a namespace."""
        with self.changed:
            return [(key[0].kind, key[2]) for key in self._objects if key[1] == namespace]

    def create(self, resource: Resource, namespace: str, given: Object, *, dry: bool = False) -> Object:
        obj = clone(given)
        meta = obj.setdefault("metadata", {})
        if not meta.get("name") and meta.get("generateName"):
            meta["name"] = meta["generateName"] + suffix()
        with self.changed:
            self.check_namespace(resource, namespace, meta["name"])
            key = (resource, namespace, meta["name"])
            if key in self._objects:
                raise refusals.already_exists(resource, meta["name"])
            obj = {"apiVersion": resource.api_version, "kind": resource.kind, **obj}
            meta.update(uid=str(uuid.uuid4()), creationTimestamp=now(), generation=1)
            meta |= {"namespace": namespace} if resource.namespaced else {}
            if not dry:
                self._write("ADDED", key, obj)
            return clone(obj)

    def check_namespace(self, resource: Resource, namespace: str, name: str) -> None:
        """Refuse a creation in a namespace that does not exist, or is being deleted."""
        space = self.find(NAMESPACES, "", namespace)
        if resource.namespaced and space is None:
            raise refusals.not_found(NAMESPACES, namespace)
        if resource.namespaced and space["metadata"].get("deletionTimestamp"):
            why = f"unable to create new content in namespace {namespace} because it is being terminated"
            raise refusals.forbidden(resource, name, why)

    def update(self, resource: Resource, namespace: str, given: Object, *, dry: bool = False) -> Object:
        """PUT: refused when the object was changed since it was read."""
        name, meta = given["metadata"]["name"], given["metadata"]
        with self.changed:
            old = self.get(resource, namespace, name)
            if meta.get("resourceVersion") not in (None, "", old["metadata"]["resourceVersion"]):
                raise refusals.conflict(resource, name)
            obj = clone(given)
            for kept in ("uid", "creationTimestamp", "namespace", "deletionTimestamp"):
                if kept in old["metadata"]:
                    obj["metadata"][kept] = old["metadata"][kept]
            changed = obj.get("spec") != old.get("spec")
            obj["metadata"]["generation"] = old["metadata"].get("generation", 1) + changed
            if not dry:
                self._write("MODIFIED", (resource, namespace, name), obj)
                self._drop_if_done(resource, namespace, name)
            return clone(obj)

    def modify(self, resource: Resource, obj: Object, change: Callable[[Object], None]) -> Object | None:
        """A controller's write: applied to what is there now; nothing when it is gone or stays the same."""
        namespace, name = obj["metadata"].get("namespace", ""), obj["metadata"]["name"]
        with self.changed:
            old = self.find(resource, namespace, name)
            if old is None or old["metadata"]["uid"] != obj["metadata"]["uid"]:
                return None
            new = clone(old)
            change(new)
            return old if new == old else self.update(resource, namespace, new)

    def delete(
        self, resource: Resource, namespace: str, name: str, policy: str = "", grace: int | None = None
    ) -> Object:
        """What DELETE answers with. A pod with a node ends first; foreground waits for what it owns."""
        with self.changed:
            obj = self.get(resource, namespace, name)
            policy = policy or ("Orphan" if resource == JOBS else "Background")
            if policy == "Orphan":
                self._orphan(obj)
            waits = policy == "Foreground" or (resource == PODS and grace != 0 and obj["spec"].get("nodeName"))
            if not waits and not obj["metadata"].get("finalizers") and resource != NAMESPACES:
                self._remove((resource, namespace, name))
                return _success(resource, obj)

            def mark(each: Object) -> None:
                meta, seconds = each["metadata"], 0
                if resource == PODS:
                    usual = each["spec"].get("terminationGracePeriodSeconds", 30) if each["spec"].get("nodeName") else 0
                    seconds = usual if grace is None else grace
                    meta.setdefault("deletionGracePeriodSeconds", seconds)
                # The time at which the grace period ends.
                meta.setdefault("deletionTimestamp", now(seconds))
                if policy == "Foreground" and FOREGROUND not in meta.get("finalizers", []):
                    meta["finalizers"] = [*meta.get("finalizers", []), FOREGROUND]

            return self.modify(resource, obj, mark) or obj

    def remove(self, resource: Resource, obj: Object) -> None:
        """Take an object away for good, unless a finalizer holds it."""
        meta = obj["metadata"]
        with self.changed:
            found = self.find(resource, meta.get("namespace", ""), meta["name"])
            if found is not None and found["metadata"]["uid"] == meta["uid"]:
                if found["metadata"].get("finalizers"):
                    gone = {"deletionTimestamp": meta.get("deletionTimestamp") or now()}
                    # With no grace left nothing but the finalizer holds a pod.
                    gone |= {"deletionGracePeriodSeconds": 0} if resource == PODS else {}
                    self.modify(resource, found, lambda o: o["metadata"].update(gone))
                else:
                    self._remove((resource, meta.get("namespace", ""), meta["name"]))

    def event(self, about: Object, kind: str, reason: str, message: str, source: str, *, new_api: bool = False) -> None:
        """Recorded once more where the same was said before. new_api: as a controller that uses events.k8s.io, whose
        events have `eventTime` and neither counts nor the other times."""
        meta = about["metadata"]
        namespace = meta.get("namespace") or "default"
        with self.changed:
            told = [o for key, o in self._objects.items() if key[:2] == (EVENTS, namespace)]
            told = [o for o in told if (o["involvedObject"]["uid"], o["reason"]) == (meta["uid"], reason)]
        for known in told:
            if known["message"] == message and not new_api:
                self.modify(EVENTS, known, lambda e: e.update(count=e["count"] + 1, lastTimestamp=now()))
                return
        whom = {"kind": about["kind"], "namespace": namespace, "name": meta["name"], "uid": meta["uid"]}
        entry = {
            "metadata": {"name": f"{meta['name']}.{next(self._events):016x}"},
            "involvedObject": whom | {"apiVersion": about["apiVersion"]},
            "reason": reason,
            "message": message,
            "type": kind,
            "reportingComponent": source,
            "reportingInstance": "",
        }
        if new_api:
            at = datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
            entry |= {"eventTime": at, "action": reason, "firstTimestamp": None, "lastTimestamp": None, "source": {}}
        else:
            entry |= {"count": 1, "firstTimestamp": now(), "lastTimestamp": now(), "source": {"component": source}}
        with suppress(Refusal):
            self.create(EVENTS, namespace, entry)

    def owned(self, owner: Object) -> list[tuple[Resource, Object]]:
        uid = owner["metadata"]["uid"]
        return [(r, o) for r, o in self.everything() if uid in {w["uid"] for w in owners(o)}]

    def _orphan(self, owner: Object) -> None:
        uid = owner["metadata"]["uid"]
        for resource, child in self.owned(owner):

            def forget(each: Object) -> None:
                each["metadata"]["ownerReferences"] = [o for o in owners(each) if o["uid"] != uid]

            self.modify(resource, child, forget)

    def _write(self, how: str, key: Key, obj: Object) -> None:
        self.version += 1
        obj["metadata"]["resourceVersion"] = str(self.version)
        self._objects[key] = clone(obj)
        self.history.append(Change(self.version, how, key[0], clone(obj)))
        self.changed.notify_all()

    def _remove(self, key: Key) -> None:
        obj = self._objects.pop(key)
        self.version += 1
        obj["metadata"]["resourceVersion"] = str(self.version)
        self.history.append(Change(self.version, "DELETED", key[0], obj))
        self.changed.notify_all()

    def _drop_if_done(self, resource: Resource, namespace: str, name: str) -> None:
        """An object under deletion goes when its last finalizer does; a pod waits for its kubelet besides."""
        meta = self._objects[resource, namespace, name]["metadata"]
        runs = resource == PODS and meta.get("deletionGracePeriodSeconds") != 0
        held = meta.get("finalizers") or runs or resource == NAMESPACES
        if meta.get("deletionTimestamp") and not held:
            self._remove((resource, namespace, name))


def owners(obj: Object) -> list[Object]:
    found: list[Object] = obj["metadata"].get("ownerReferences") or []
    return found


def owner_reference(owner: Object) -> Object:
    meta = owner["metadata"]
    about = {"apiVersion": owner["apiVersion"], "kind": owner["kind"], "name": meta["name"], "uid": meta["uid"]}
    return about | {"controller": True, "blockOwnerDeletion": True}


def _success(resource: Resource, obj: Object) -> Object:
    meta = obj["metadata"]
    if resource.plural in _RETURNED:
        return obj
    details = {"name": meta["name"], "group": resource.group, "kind": resource.plural, "uid": meta["uid"]}
    details = {key: value for key, value in details.items() if value}
    return {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "details": details}
