"""One cluster's API server through the official client: plain data in and out, refusals as one sentence.

Jobs, JobSets and TrainJobs are all asked for by group, version and plural: one way for every kind, and a field that
the installed client does not know yet is sent as it stands.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from paceline.errors import LaunchError, MissingPackageError
from paceline.launchers.kubernetes.manifests import Resource
from paceline.results.safe_text import text as neutral

DEFAULT_NAMESPACE = "paceline"
RETRY_S = 1.0
# Connecting, and the longest pause in an answer. A log may be silent for longer: it is then asked for again.
REQUEST_S = (10.0, 60.0)
# The server is starting, overloaded, or behind a proxy that cannot reach it.
_AWAY = (429, 500, 502, 503, 504)
_SERVICE = Resource("v1", "services", "")

Object = dict[str, Any]
_TRY = "; try: "


class Gone(LaunchError):
    """What was asked for is not there."""


class Forbidden(LaunchError):
    """This is not permitted to whoever asks."""


class NotYet(LaunchError):
    """A container that is still being created has no log."""


class Taken(LaunchError):
    """Something of that name is there already."""


@dataclass
class Cluster:
    """Answers within `patience_s` of an API server that is away, or LaunchError. Used by several threads."""

    context: str | None
    namespace: str
    patience_s: float
    client: Any = field(default=None, repr=False)

    @classmethod
    def reach(cls, context: str | None, namespace: str | None, patience_s: float) -> Cluster:
        """By the kubeconfig, or from within a pod by its service account."""
        client, usual = _connect(context)
        return cls(context, namespace or usual or DEFAULT_NAMESPACE, patience_s, client)

    def create(self, resource: Resource, manifest: Mapping[str, Any]) -> Object:
        body = dict(manifest)
        if resource.api == "v1":
            return self._ask(
                "create", resource, lambda: self._core.create_namespaced_service(self.namespace, body, **_RAW)
            )
        return self._ask(
            "create",
            resource,
            lambda: self._custom.create_namespaced_custom_object(
                *resource.group_and_version, self.namespace, resource.plural, body, **_RAW
            ),
        )

    def read(self, resource: Resource, name: str) -> Object | None:
        """The object, or None where there is none."""
        with contextlib.suppress(Gone):
            return self._ask(
                "get",
                resource,
                lambda: self._custom.get_namespaced_custom_object(
                    *resource.group_and_version, self.namespace, resource.plural, name, **_RAW
                ),
            )
        return None

    def delete(self, resource: Resource, name: str) -> None:
        """Its pods go with it; what is gone already is no mistake."""

        def call() -> Any:
            if resource.api == "v1":
                return self._core.delete_namespaced_service(name, self.namespace, **_RAW)
            return self._custom.delete_namespaced_custom_object(
                *resource.group_and_version,
                self.namespace,
                resource.plural,
                name,
                propagation_policy="Background",
                **_RAW,
            )

        with contextlib.suppress(Gone):
            self._ask("delete", resource, call)

    def create_service(self, manifest: Mapping[str, Any]) -> None:
        """An earlier controller may have come this far."""
        with contextlib.suppress(Taken):
            self.create(_SERVICE, manifest)

    def delete_service(self, name: str) -> None:
        self.delete(_SERVICE, name)

    def pods(self, selector: str) -> list[Object]:
        found = self._ask(
            "list",
            _named("pods"),
            lambda: self._core.list_namespaced_pod(self.namespace, label_selector=selector, **_RAW),
        )
        return list(found.get("items", ()))

    def pod(self, name: str) -> Object | None:
        with contextlib.suppress(Gone):
            return self._ask(
                "get", _named("pods"), lambda: self._core.read_namespaced_pod(name, self.namespace, **_RAW)
            )
        return None

    def events(self, uid: str) -> list[Object]:
        """What was said about one object."""
        selector = f"involvedObject.uid={uid}"
        found = self._ask(
            "list",
            _named("events"),
            lambda: self._core.list_namespaced_event(self.namespace, field_selector=selector, **_RAW),
        )
        return list(found.get("items", ()))

    def log(self, pod: str, container: str, follow: bool) -> Iterator[bytes]:
        """A pod's output from its beginning, as it comes. Away when the connection breaks: it is not all then."""
        import urllib3

        response = self._attempt(
            "get",
            _named("pods/log"),
            lambda: self._core.read_namespaced_pod_log(
                pod, self.namespace, container=container, follow=follow, timestamps=False, **_RAW
            ),
        )
        try:
            yield from response.stream(1 << 16, decode_content=False)
        except urllib3.exceptions.HTTPError as error:
            raise Away(f"the log of pod {pod} broke off ({type(error).__name__})") from None
        finally:
            response.release_conn()

    def call(self, verb: str, plural: str, api: str, method: str, *arguments: Any, **more: Any) -> Object:
        """Any other method of the official client, with the same answers and refusals."""
        from kubernetes import client

        method_of = getattr(getattr(client, api)(self.client), method)
        return self._ask(verb, _named(plural), lambda: method_of(*arguments, **more, **_RAW))

    def _ask(self, verb: str, resource: Resource, call: Callable[[], Any]) -> Object:
        """The answer as data; a server that is away is asked again until the patience is at its end."""
        deadline = time.monotonic() + self.patience_s
        while True:
            try:
                answer: Object = self._attempt(verb, resource, lambda: json.loads(call().data))
                return answer
            except Away as trouble:
                if time.monotonic() > deadline:
                    what, command = parted(trouble)
                    tried = f"{what} (tried for {self.patience_s:g} s)"
                    raise LaunchError(f"{tried}{_TRY}{command}" if command else tried) from None
            time.sleep(RETRY_S)

    def _attempt(self, verb: str, resource: Resource, call: Callable[[], Any]) -> Any:
        import urllib3
        from kubernetes.client.exceptions import ApiException

        try:
            return call()
        except ApiException as refusal:
            raise self._refused(verb, resource, int(refusal.status or 0), _message(refusal)) from None
        except urllib3.exceptions.HTTPError as error:
            host = self.client.configuration.host
            raise Away(f"the API server {host} does not answer ({type(error).__name__}){_TRY}kubectl version") from None
        except ValueError as error:
            # Newer clients look at what is sent before they send it; a proxy may answer with a page.
            sentence = neutral(str(error)).split("\n")[0]
            raise LaunchError(f"the Kubernetes client could not {verb} {resource.plural}: {sentence}") from None

    def _refused(self, verb: str, resource: Resource, status: int, message: str) -> LaunchError:
        where = f"in namespace {self.namespace}"
        if status in _AWAY:
            return Away(f"the API server could not {verb} {resource.plural} ({status}: {message})")
        if status == 401:
            # Nobody was recognised, so there is no right to ask for: `auth can-i` would be refused as well.
            renew = "log in again, or renew the token or certificate of this context"
            shown = f"kubectl config view --minify{self._by_context}"
            return LaunchError(f"the cluster does not know these credentials ({message}): {renew}{_TRY}{shown}")
        if status == 403:
            allowed = f"kubectl auth can-i {verb} {resource.plural} --namespace {self.namespace}"
            return Forbidden(f"not permitted to {verb} {resource.plural} {where} ({message}){_TRY}{allowed}")
        if status == 404 and verb == "create" and "namespaces" in message:
            made = f"paceline cluster init --namespace {self.namespace} --apply{self._by_context}"
            return Gone(f"cannot {verb} {resource.plural} {where} ({message}){_TRY}{made}")
        if status == 404 and verb == "create":
            known = f"kubectl api-resources --api-group={resource.group_and_version[0]}"
            return Gone(f"the cluster knows no {resource.plural} of {resource.api} ({message}){_TRY}{known}")
        if status == 404:
            return Gone(f"cannot {verb} {resource.plural} {where} ({message}){_TRY}kubectl get namespaces")
        if status == 400 and resource.plural == "pods/log":
            return NotYet(message)
        if status == 409:
            return Taken(f"{resource.plural} {where}: {message}")
        return LaunchError(f"the API server refuses to {verb} {resource.plural} {where} ({status}: {message})")

    @property
    def _by_context(self) -> str:
        return f" --context {self.context}" if self.context else ""

    @property
    def _core(self) -> Any:
        from kubernetes import client

        return client.CoreV1Api(self.client)

    @property
    def _custom(self) -> Any:
        from kubernetes import client

        return client.CustomObjectsApi(self.client)


class Away(LaunchError):
    """The server is not answering now; it may in a moment."""


_RAW: dict[str, Any] = {"_preload_content": False, "_request_timeout": REQUEST_S}


def parted(trouble: LaunchError) -> tuple[str, str]:
    """What is wrong, and the command that its sentence ends with, where it has one."""
    what, _, command = str(trouble).partition(_TRY)
    return what, command


def _named(plural: str) -> Resource:
    return Resource("v1", plural, "")


def _package() -> tuple[Any, Any]:
    try:
        from kubernetes import client, config
    except ImportError:
        raise MissingPackageError("kubernetes", "the launcher kubernetes", "'paceline[kubernetes]'") from None
    return client, config


def _connect(context: str | None) -> tuple[Any, str | None]:
    """A client, and the namespace that its configuration names."""
    client, config = _package()
    own = client.Configuration()
    # Asking again is done here, where it can be counted against the patience.
    own.retries = False
    _check_files(config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION)
    try:
        config.load_kube_config(context=context, client_configuration=own)
        contexts, current = config.list_kube_config_contexts()
        known = {entry["name"]: entry for entry in contexts}
        chosen = known.get(context or current["name"], current)
        return client.ApiClient(own), chosen["context"].get("namespace")
    except config.ConfigException as missing:
        if context is not None:
            known_by = "kubectl config get-contexts"
            raise LaunchError(f"context {context!r} is not in the kubeconfig ({missing}){_TRY}{known_by}") from None
        return _connect_from_pod(own, str(missing))
    except (AttributeError, LookupError, OSError, TypeError, ValueError) as error:
        # The client takes the shape of the file for granted, and fails wherever it is another.
        place = config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION
        why = type(error).__name__
        raise LaunchError(f"the kubeconfig {place} cannot be used ({why}){_TRY}kubectl config view") from None


def _check_files(location: str) -> None:
    """Every file of the kubeconfig holds a mapping, or nothing: the client answers anything else with a traceback."""
    for path in (Path(part).expanduser() for part in location.split(os.pathsep) if part):
        if not path.exists():
            continue
        try:
            found = yaml.safe_load(path.read_text(encoding="utf-8"))
        except yaml.YAMLError as error:
            raise LaunchError(f"the kubeconfig {path} is not valid YAML{_spot(error)}") from None
        except (OSError, UnicodeDecodeError, RecursionError) as error:
            why = getattr(error, "strerror", None) or type(error).__name__
            raise LaunchError(f"the kubeconfig {path} cannot be read ({why})") from None
        if not isinstance(found, dict | None):
            raise LaunchError(f"the kubeconfig {path} holds no mapping{_TRY}kubectl config view")


def _spot(error: yaml.YAMLError) -> str:
    """Where, never what: the whole message quotes lines of the file, and a token may be in them."""
    mark = getattr(error, "problem_mark", None)
    return f" (line {mark.line + 1}, column {mark.column + 1})" if mark else ""


def _connect_from_pod(own: Any, missing: str) -> tuple[Any, str | None]:
    client, config = _package()
    try:
        config.load_incluster_config(client_configuration=own)
    except config.ConfigException:
        raise LaunchError(f"no cluster is known here ({missing}){_TRY}kubectl config get-contexts") from None
    namespace = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
    return client.ApiClient(own), namespace.read_text().strip() if namespace.is_file() else None


def _message(refusal: Any) -> str:
    """What the server said, in one line: a Status object's message, or the reason of the HTTP answer."""
    try:
        said = json.loads(refusal.body).get("message") or refusal.reason
    except (TypeError, ValueError, AttributeError):
        said = refusal.reason or refusal.body or "no reason given"
    return " ".join(neutral(str(said)).split())[:500]
