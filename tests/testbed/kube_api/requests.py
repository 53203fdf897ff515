"""What each verb does to the state: the storage side of the API server."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING

from testbed.kube_api import admission, refusals
from testbed.kube_api.access import Access, User
from testbed.kube_api.logs import LogQuery
from testbed.kube_api.patching import patched
from testbed.kube_api.refusals import Refusal
from testbed.kube_api.resources import JOBS, NODES, PODS, Object, Resource
from testbed.kube_api.selectors import fields_match, labels_match
from testbed.kube_api.state import State

if TYPE_CHECKING:
    from testbed.kube_api.kubelet import Kubelet
    from testbed.kube_api.server import Request

Answer = tuple[int, Object]


class Api:
    def __init__(self, state: State, access: Access, kubelet: Kubelet) -> None:
        self.state, self.access, self._kubelet = state, access, kubelet

    def answer(self, request: Request, user: User) -> Answer:
        if request.verb == "create":
            return self._create(request, user)
        return {
            "get": self._get,
            "list": self._list,
            "update": self._update,
            "patch": self._patch,
            "delete": self._delete,
            "deletecollection": self._delete_all,
        }[request.verb](request)

    def _where(self, request: Request) -> str:
        return request.namespace if request.resource.namespaced else ""

    def _create(self, request: Request, user: User) -> Answer:
        resource, body = request.resource, request.body
        if resource.plural == "selfsubjectaccessreviews":
            return 201, self.access.review(user, body)
        if request.sub == "eviction":
            return self._evict(request)
        given = (body.get("metadata") or {}).get("namespace")
        if resource.namespaced and given not in (None, request.namespace):
            message = "the namespace of the provided object does not match the namespace sent on the request"
            raise refusals.bad_request(message)
        with self.state.changed:
            # The real one checks the namespace before it reads the object.
            self.state.check_namespace(resource, self._where(request), (body.get("metadata") or {}).get("name") or "")
            obj = admission.admit(self.state, resource, self._where(request), body)
            created = self.state.create(resource, self._where(request), obj, dry=request.is_dry)
            if resource == JOBS and not request.is_dry:
                created = self.state.modify(JOBS, created, admission.give_job_defaults) or created
        return 201, created

    def _evict(self, request: Request) -> Answer:
        from testbed.kube_api.jobs import set_condition

        pod = self.state.get(PODS, request.namespace, request.name or "")
        said = ("EvictionByEvictionAPI", "Eviction API: evicting")
        self.state.modify(PODS, pod, lambda p: set_condition(p, "DisruptionTarget", *said))
        self.state.delete(PODS, request.namespace, request.name or "")
        return 201, {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "code": 201}

    def _get(self, request: Request) -> Answer:
        return 200, self.state.get(request.resource, self._where(request), request.name or "")

    def _list(self, request: Request) -> Answer:
        resource = request.resource
        with self.state.changed:
            items = [o for o in self.state.list(resource, self._scope(request)) if _chosen(request, o)]
            # Entries of a list do not repeat what they are.
            items = [{k: v for k, v in o.items() if k not in ("kind", "apiVersion")} for o in items]
            meta = {"resourceVersion": str(self.state.version)}
        return 200, {
            "kind": f"{resource.kind}List",
            "apiVersion": resource.api_version,
            "metadata": meta,
            "items": items,
        }

    def _scope(self, request: Request) -> str | None:
        return (request.namespace or None) if request.resource.namespaced else ""

    def _update(self, request: Request) -> Answer:
        if request.body["metadata"].get("name") != request.name:
            raise refusals.bad_request("the name of the object does not match the name on the URL")
        return 200, self.state.update(request.resource, self._where(request), request.body, dry=request.is_dry)

    def _patch(self, request: Request) -> Answer:
        with self.state.changed:
            old = self.state.get(request.resource, self._where(request), request.name or "")
            new = patched(old, request.body, request.content_type)
            _keep_template(request.resource, old, new)
            return 200, self.state.update(request.resource, self._where(request), new, dry=request.is_dry)

    def _delete(self, request: Request) -> Answer:
        with self.state.changed:
            found = self.state.get(request.resource, self._where(request), request.name or "")
            options = request.body or {}
            wanted = (options.get("preconditions") or {}).get("uid")
            if wanted and wanted != found["metadata"]["uid"]:
                raise refusals.conflict(request.resource, request.name or "")
            if request.is_dry or options.get("dryRun"):
                return 200, found
            policy = options.get("propagationPolicy") or request.query.get("propagationPolicy") or ""
            grace = options.get("gracePeriodSeconds", request.query.get("gracePeriodSeconds"))
            place = (request.resource, self._where(request), request.name or "")
            return 200, self.state.delete(*place, policy, None if grace is None else int(grace))

    def _delete_all(self, request: Request) -> Answer:
        _, found = self._list(request)
        options = request.body or {}
        policy = options.get("propagationPolicy") or request.query.get("propagationPolicy") or ""
        for each in found["items"]:
            with suppress(Refusal):
                self.state.delete(
                    request.resource, each["metadata"].get("namespace", ""), each["metadata"]["name"], policy
                )
        return 200, found

    def watch(self, request: Request, stopped: threading.Event) -> Iterator[Object]:
        """Changes since a version; without one, first all that exists. An expired version is sent as an event."""
        asked = int(request.query.get("resourceVersion") or 0)
        end = time.monotonic() + float(request.query.get("timeoutSeconds") or 1800)
        with self.state.changed:
            start = asked or self.state.version
            present = [] if asked else self.state.list(request.resource, self._scope(request))
        yield from ({"type": "ADDED", "object": o} for o in present if _chosen(request, o))
        yield from self._changes(request, start, end, stopped)

    def _changes(self, request: Request, start: int, end: float, stopped: threading.Event) -> Iterator[Object]:
        scope, seen = self._scope(request), set[str]()
        while not stopped.is_set() and time.monotonic() < end:
            with self.state.changed:
                fresh = [c for c in self.state.history if c.version > start]
                if not fresh:
                    self.state.changed.wait(0.1)
                lagging = start < self.state.oldest
            if lagging:
                yield {"type": "ERROR", "object": refusals.expired(start, self.state.oldest).body}
                return
            for change in fresh:
                start, meta = change.version, change.object["metadata"]
                if change.resource == request.resource and scope in (None, meta.get("namespace", "")):
                    chosen = _chosen(request, change.object)
                    if chosen:
                        seen.add(meta["uid"])
                        yield {"type": change.how, "object": change.object}
                    elif meta["uid"] in seen:
                        # It left the selection, which for this watch is its end.
                        seen.discard(meta["uid"])
                        yield {"type": "DELETED", "object": change.object}

    def log(self, request: Request, stopped: threading.Event) -> Iterator[bytes]:
        pod = self.state.get(PODS, request.namespace, request.name or "")
        name, wanted = pod["metadata"]["name"], request.query.get("container")
        containers = [c["name"] for c in pod["spec"]["containers"]]
        if wanted is None and len(containers) > 1:
            raise refusals.bad_request(
                f"a container name must be specified for pod {name}, choose one of: {containers}"
            )
        if wanted not in (None, *containers):
            raise refusals.bad_request(f"container {wanted} is not valid for pod {name}")
        if not pod["spec"].get("nodeName"):
            return iter(())
        self._check_node(pod["spec"]["nodeName"])
        running = self._kubelet.containers.get(pod["metadata"]["uid"], {}).get(wanted or containers[0])
        if running is None:
            raise refusals.bad_request(
                f'container "{wanted or containers[0]}" in pod "{name}" is waiting to start: {_waiting(pod)}'
            )
        return running.log.read(_log_query(request.query), stopped)

    def _check_node(self, node: str) -> None:
        if self.state.find(NODES, "", node) is None:
            raise refusals.not_found(NODES, node)
        if node in self._kubelet.silent:
            raise refusals.internal(f'Get "https://{node}:10250/containerLogs": dial tcp: connect: no route to host')


def _chosen(request: Request, obj: Object) -> bool:
    labels, fields = request.query.get("labelSelector", ""), request.query.get("fieldSelector", "")
    return labels_match(labels, obj) and fields_match(fields, obj)


def _keep_template(resource: Resource, old: Object, new: Object) -> None:
    if (
        resource == JOBS
        and new["spec"].get("template") != old["spec"].get("template")
        and not old["spec"].get("suspend")
    ):
        cause = ("spec.template", "FieldValueInvalid", "Invalid value: field is immutable")
        raise refusals.invalid(JOBS, old["metadata"]["name"], [cause])


def _waiting(pod: Object) -> str:
    for status in pod["status"].get("containerStatuses", []):
        reason = (status.get("state", {}).get("waiting") or {}).get("reason")
        if reason in ("ErrImagePull", "ImagePullBackOff"):
            return "trying and failing to pull image"
        if reason:
            return str(reason)
    return "ContainerCreating"


def _log_query(query: dict[str, str]) -> LogQuery:
    def number(key: str) -> int | None:
        return int(query[key]) if key in query else None

    return LogQuery(
        follow=query.get("follow") in ("true", "True", "1"),
        tail_lines=number("tailLines"),
        since_seconds=number("sinceSeconds"),
        limit_bytes=number("limitBytes"),
        timestamps=query.get("timestamps") in ("true", "True", "1"),
    )
