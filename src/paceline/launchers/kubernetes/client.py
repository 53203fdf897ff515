"""Requests to the API server of one cluster, through the official client.

Input and output are plain data. Every refusal becomes one sentence. Jobs, JobSets and TrainJobs are addressed by group,
version and plural, so fields that the installed client does not know are sent unchanged.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from paceline.errors import LaunchError, MissingPackageError
from paceline.launchers.kubernetes.manifests import Resource
from paceline.results.safe_text import text as safe_text

DEFAULT_NAMESPACE = "paceline"
RETRY_S = 1.0
# Time to connect, and the longest pause in a response. A log that is silent for longer is requested again.
REQUEST_S = (10.0, 60.0)
# A starting API server answers 403 until it has read its roles, about 2 s. A right that worked before is requested
# again for so long before it counts as withdrawn.
FORBIDDEN_S = 20.0
# The server's answer to a missing right. Quotas, policies and a namespace under deletion answer 403 too.
_NO_RIGHT = re.compile(r"\bcannot \S+ (resource|path)\b")
# The server's answers to a creation in a namespace that is being deleted, or is gone.
_NO_NAMESPACE = re.compile(r"because it is being terminated|\bnamespaces \S+ not found")
# The server is starting, overloaded, or behind a proxy that cannot reach it.
_UNAVAILABLE = (429, 500, 502, 503, 504)
_SERVICE = Resource("v1", "services", "")
_RAW: dict[str, Any] = {"_preload_content": False, "_request_timeout": REQUEST_S}
_TRY = "; try: "
# For `apply`: kind -> class of the official client, part of its method names, plural in the API.
_METHODS = {
    "Namespace": ("CoreV1Api", "namespace", "namespaces"),
    "ServiceAccount": ("CoreV1Api", "namespaced_service_account", "serviceaccounts"),
    "ResourceQuota": ("CoreV1Api", "namespaced_resource_quota", "resourcequotas"),
    "Role": ("RbacAuthorizationV1Api", "namespaced_role", "roles"),
    "RoleBinding": ("RbacAuthorizationV1Api", "namespaced_role_binding", "rolebindings"),
    "NetworkPolicy": ("NetworkingV1Api", "namespaced_network_policy", "networkpolicies"),
}

Object = dict[str, Any]


class NotFound(LaunchError):
    """The requested object does not exist."""


class Forbidden(LaunchError):
    """The user does not have this permission."""


class LogNotReady(LaunchError):
    """The container is still being created and has no log."""


class AlreadyExists(LaunchError):
    """An object of that name exists."""


class Unavailable(LaunchError):
    """The server does not answer now; it may in a moment."""


@dataclass
class Rights:
    """The rights that worked, as (verb, resource), and when the server first refused one after that."""

    worked: set[tuple[str, str]] = field(default_factory=set)
    refused_at: dict[tuple[str, str], float] = field(default_factory=dict)

    def confirm(self, verb: str, plural: str) -> None:
        self.worked.add((verb, plural))
        self.refused_at.pop((verb, plural), None)

    def may_return(self, verb: str, plural: str) -> bool:
        """Whether a refused right worked before and was first refused less than FORBIDDEN_S ago.

        Whoever could create or read an object is assumed to be allowed to delete it: a job that is left behind costs
        more than a few requests.
        """
        first = self.refused_at.setdefault((verb, plural), time.monotonic())
        return self.are_known(verb, plural) and time.monotonic() - first < FORBIDDEN_S

    def are_known(self, verb: str, plural: str) -> bool:
        """Whether the right worked before."""
        return any(name == plural for _, name in self.worked) if verb == "delete" else (verb, plural) in self.worked


# By context, server and namespace. All runs of a campaign share what is known.
_rights: dict[tuple[str | None, str, str], Rights] = {}


@dataclass
class Cluster:
    """One API server and namespace. Requests are retried for `patience_s`, then raise LaunchError. Thread-safe."""

    context: str | None
    namespace: str
    patience_s: float
    client: Any = field(default=None, repr=False)
    rights: Rights = field(default_factory=Rights, repr=False)

    @classmethod
    def reach(cls, context: str | None, namespace: str | None, patience_s: float) -> Cluster:
        """Connect by the kubeconfig, or inside a pod by its service account."""
        client, usual = _connect(context)
        namespace = namespace or usual or DEFAULT_NAMESPACE
        rights = _rights.setdefault((context, client.configuration.host, namespace), Rights())
        return cls(context, namespace, patience_s, client, rights)

    def create(self, resource: Resource, manifest: Mapping[str, Any]) -> Object:
        is_core = resource.api == "v1"
        where = (self.namespace,) if is_core else self._path(resource)
        method = self._core.create_namespaced_service if is_core else self._custom.create_namespaced_custom_object
        return self._request("create", resource, method, *where, dict(manifest))

    def read(self, resource: Resource, name: str) -> Object | None:
        """Return the object, or None if it does not exist."""
        with contextlib.suppress(NotFound):
            method = self._custom.get_namespaced_custom_object
            return self._request("get", resource, method, *self._path(resource), name)
        return None

    def delete(self, resource: Resource, name: str) -> None:
        """Delete an object and its pods, if it exists."""
        with contextlib.suppress(NotFound):
            if resource.api == "v1":
                self._request("delete", resource, self._core.delete_namespaced_service, name, self.namespace)
            else:
                method, where = self._custom.delete_namespaced_custom_object, (*self._path(resource), name)
                self._request("delete", resource, method, *where, propagation_policy="Background")

    def has_namespace(self, resource: Resource, name: str) -> bool:
        """Whether the namespace exists and is not being deleted. Reading it needs more rights than a run has, so this
        is a dry run of a creation: the server checks the namespace before it reads the object."""
        manifest = {"apiVersion": resource.api, "kind": resource.kind, "metadata": {"name": name}}
        method = self._custom.create_namespaced_custom_object
        # Long enough to see that a right is gone for good. A webhook that fails would be retried for much longer.
        brief = replace(self, patience_s=min(self.patience_s, FORBIDDEN_S + 5.0))
        try:
            brief._request("create", resource, method, *self._path(resource), manifest, dry_run="All")
        except Forbidden:
            # The roles of a namespace are deleted with it; the refusal says so.
            if self.rights.are_known("create", resource.plural):
                raise
        except LaunchError as refusal:
            return _NO_NAMESPACE.search(str(refusal)) is None
        return True

    def create_service(self, manifest: Mapping[str, Any]) -> None:
        """Create a Service, unless an earlier controller already did."""
        with contextlib.suppress(AlreadyExists):
            self.create(_SERVICE, manifest)

    def delete_service(self, name: str) -> None:
        self.delete(_SERVICE, name)

    def pods(self, selector: str) -> list[Object]:
        return self._list("pods", self._core.list_namespaced_pod, label_selector=selector)

    def pod(self, name: str) -> Object | None:
        with contextlib.suppress(NotFound):
            return self._request("get", _core("pods"), self._core.read_namespaced_pod, name, self.namespace)
        return None

    def events(self, uid: str) -> list[Object]:
        """Return the events of one object."""
        return self._list("events", self._core.list_namespaced_event, field_selector=f"involvedObject.uid={uid}")

    def log(self, pod: str, container: str, follow: bool) -> Iterator[bytes]:
        """Yield the log of a pod from its beginning. Raises Unavailable if the connection breaks before the end."""
        import urllib3

        more = {"container": container, "follow": follow, "timestamps": False, **_RAW}
        read = self._core.read_namespaced_pod_log
        response = self._attempt("get", _core("pods/log"), lambda: read(pod, self.namespace, **more))
        try:
            yield from response.stream(1 << 16, decode_content=False)
        except urllib3.exceptions.HTTPError as error:
            raise Unavailable(f"the log of pod {pod} broke off ({type(error).__name__})") from None
        finally:
            response.release_conn()

    def call(self, verb: str, plural: str, api: str, method: str, *arguments: Any, **more: Any) -> Object:
        """Call any other method of the official client, with the same retries and errors."""
        from kubernetes import client

        method_of = getattr(getattr(client, api)(self.client), method)
        return self._request(verb, _core(plural), method_of, *arguments, **more)

    def apply(self, manifests: Iterable[dict[str, Any]]) -> list[str]:
        """Create or update objects. Returns one line each, `created Role NAME`; raises at the first refusal."""
        lines = []
        for manifest in manifests:
            api, method, plural = _METHODS[manifest["kind"]]
            name = manifest["metadata"]["name"]
            namespace = [manifest["metadata"]["namespace"]] if "namespaced" in method else []
            try:
                self.call("create", plural, api, f"create_{method}", *namespace, manifest)
                lines.append(f"created {manifest['kind']} {name}")
            except AlreadyExists:
                self.call("patch", plural, api, f"patch_{method}", name, *namespace, manifest)
                lines.append(f"updated {manifest['kind']} {name}")
        return lines

    def _path(self, resource: Resource) -> tuple[str, ...]:
        return (*resource.group_and_version, self.namespace, resource.plural)

    def _list(self, plural: str, method: Callable[..., Any], **selector: str) -> list[Object]:
        return list(self._request("list", _core(plural), method, self.namespace, **selector).get("items", ()))

    def _request(
        self, verb: str, resource: Resource, method: Callable[..., Any], *arguments: Any, **more: Any
    ) -> Object:
        """Return the answer as data. Retries for `patience_s` while the server is unavailable."""
        deadline = time.monotonic() + self.patience_s
        while True:
            try:
                answer: Object = self._attempt(
                    verb, resource, lambda: json.loads(method(*arguments, **more, **_RAW).data)
                )
                return answer
            except Unavailable as trouble:
                if time.monotonic() > deadline:
                    what, command = split_hint(trouble)
                    tried = f"{what} (tried for {self.patience_s:g} s)"
                    raise LaunchError(f"{tried}{_TRY}{command}" if command else tried) from None
            time.sleep(RETRY_S)

    def _attempt(self, verb: str, resource: Resource, call: Callable[[], Any]) -> Any:
        import urllib3
        from kubernetes.client.exceptions import ApiException

        try:
            answer = call()
        except ApiException as refusal:
            refused = self._refused(verb, resource, int(refusal.status or 0), _message(refusal))
            if isinstance(refused, Forbidden) and self.rights.may_return(verb, resource.plural):
                raise Unavailable(str(refused)) from None
            if isinstance(refused, NotFound | AlreadyExists | LogNotReady):
                self.rights.confirm(verb, resource.plural)
            raise refused from None
        except urllib3.exceptions.HTTPError as error:
            host = self.client.configuration.host
            why = type(error).__name__
            raise Unavailable(f"the API server {host} does not answer ({why}){_TRY}kubectl version") from None
        except ValueError as error:
            # Newer clients validate what they send; a proxy may answer with an HTML page.
            sentence = safe_text(str(error)).split("\n")[0]
            raise LaunchError(f"the Kubernetes client could not {verb} {resource.plural}: {sentence}") from None
        self.rights.confirm(verb, resource.plural)
        return answer

    def _refused(self, verb: str, resource: Resource, status: int, message: str) -> LaunchError:
        where = f"in namespace {self.namespace}"
        by_context = f" --context {self.context}" if self.context else ""
        if status in _UNAVAILABLE:
            return Unavailable(f"the API server could not {verb} {resource.plural} ({status}: {message})")
        if status == 401:
            # The user is unknown, so `auth can-i` would be refused as well.
            renew = "log in again, or renew the token or certificate of this context"
            shown = f"kubectl config view --minify{by_context}"
            text = f"the cluster rejected these credentials ({message}): {renew}{_TRY}{shown}"
            return LaunchError(text, recurs=True)
        if status == 403 and "exceeded quota" in message:
            shown = f"kubectl describe quota --namespace {self.namespace}{by_context}"
            return LaunchError(f"cannot {verb} {resource.plural} {where} ({message}){_TRY}{shown}", recurs=True)
        if status == 403 and not _NO_RIGHT.search(message):
            return LaunchError(f"the cluster refuses to {verb} {resource.plural} {where} ({message})", recurs=True)
        if status == 403:
            allowed = f"kubectl auth can-i {verb} {resource.plural} --namespace {self.namespace}"
            # The roles of a namespace are deleted with it.
            gone = ": it was permitted before; the permission was removed, or the namespace deleted"
            lost = gone if self.rights.are_known(verb, resource.plural) else ""
            text = f"not permitted to {verb} {resource.plural} {where} ({message}){lost}{_TRY}{allowed}"
            return Forbidden(text, recurs=True)
        if status == 404 and verb == "create" and "namespaces" in message:
            made = f"paceline cluster init --namespace {self.namespace} --apply{by_context}"
            return NotFound(f"cannot {verb} {resource.plural} {where} ({message}){_TRY}{made}", recurs=True)
        if status == 404 and verb == "create":
            known = f"kubectl api-resources --api-group={resource.group_and_version[0]}"
            text = f"the cluster has no {resource.plural} of {resource.api} ({message}){_TRY}{known}"
            return NotFound(text, recurs=True)
        if status == 404:
            return NotFound(f"cannot {verb} {resource.plural} {where} ({message}){_TRY}kubectl get namespaces")
        if status == 400 and resource.plural == "pods/log":
            return LogNotReady(message)
        if status == 409:
            return AlreadyExists(f"{resource.plural} {where}: {message}")
        return LaunchError(f"the API server refuses to {verb} {resource.plural} {where} ({status}: {message})")

    @property
    def _core(self) -> Any:
        from kubernetes import client

        return client.CoreV1Api(self.client)

    @property
    def _custom(self) -> Any:
        from kubernetes import client

        return client.CustomObjectsApi(self.client)


def split_hint(trouble: LaunchError) -> tuple[str, str]:
    """Split an error into the problem and the command after "try:", which may be empty."""
    what, _, command = str(trouble).partition(_TRY)
    return what, command


def _core(plural: str) -> Resource:
    return Resource("v1", plural, "")


def _message(refusal: Any) -> str:
    """Return the server's message in one line: that of its Status object, or the HTTP reason."""
    try:
        message = json.loads(refusal.body).get("message") or refusal.reason
    except (TypeError, ValueError, AttributeError):
        message = refusal.reason or refusal.body or "no reason given"
    return " ".join(safe_text(str(message)).split())[:500]


def _connect(context: str | None) -> tuple[Any, str | None]:
    """Return a client and the namespace that its configuration names."""
    try:
        from kubernetes import client, config
    except ImportError:
        raise MissingPackageError("kubernetes", "the launcher kubernetes", "'paceline[kubernetes]'") from None

    own = client.Configuration()
    # Retries happen in `_request`, where they count against the patience.
    own.retries = False
    location = config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION
    _check_files(location)
    try:
        config.load_kube_config(context=context, client_configuration=own)
        contexts, current = config.list_kube_config_contexts()
        by_name = {entry["name"]: entry for entry in contexts}
        chosen = by_name.get(context or current["name"], current)
        return client.ApiClient(own), chosen["context"].get("namespace")
    except config.ConfigException as missing:
        contexts_command = f"{_TRY}kubectl config get-contexts"
        if context is not None:
            raise LaunchError(f"context {context!r} is not in the kubeconfig ({missing}){contexts_command}") from None
        try:
            config.load_incluster_config(client_configuration=own)
        except config.ConfigException:
            raise LaunchError(f"no cluster is configured here ({missing}){contexts_command}") from None
        namespace = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
        return client.ApiClient(own), namespace.read_text().strip() if namespace.is_file() else None
    except (AttributeError, LookupError, OSError, TypeError, ValueError) as error:
        # The client does not validate the structure of the file.
        why = type(error).__name__
        raise LaunchError(f"the kubeconfig {location} cannot be used ({why}){_TRY}kubectl config view") from None


def _check_files(location: str) -> None:
    """Check that every kubeconfig file is a YAML mapping or empty. The client would raise a traceback otherwise."""
    for path in (Path(part).expanduser() for part in location.split(os.pathsep) if part):
        if not path.exists():
            continue
        try:
            content = yaml.safe_load(path.read_text(encoding="utf-8"))
        except yaml.YAMLError as error:
            # Only the position: the full message quotes lines of the file, which may contain a token.
            mark = getattr(error, "problem_mark", None)
            where = f" (line {mark.line + 1}, column {mark.column + 1})" if mark else ""
            raise LaunchError(f"the kubeconfig {path} is not valid YAML{where}") from None
        except (OSError, UnicodeDecodeError, RecursionError) as error:
            why = getattr(error, "strerror", None) or type(error).__name__
            raise LaunchError(f"the kubeconfig {path} cannot be read ({why})") from None
        if not isinstance(content, dict | None):
            raise LaunchError(f"the kubeconfig {path} is not a mapping{_TRY}kubectl config view")
