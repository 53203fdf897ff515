"""A whole cluster for a test, of real programs, with the methods of the double's `Cluster`."""

from __future__ import annotations

import contextlib
import http.server
import ssl
import threading
import time
import traceback
import urllib.parse
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any

import yaml

from testbed.kube_api.access import ADMIN_TOKEN
from testbed.kube_api.cluster import Node, _image
from testbed.kube_api.faults import Accidents
from testbed.kube_api.kubelet import Kubelet
from testbed.kube_api.logs import LogQuery
from testbed.kube_api.resources import (
    BY_KIND,
    CONFIG_MAPS,
    JOB_SETS,
    JOBS,
    NODES,
    PODS,
    SECRETS,
    SERVICES,
    TRAIN_JOBS,
    Object,
    Resource,
)
from testbed.kube_real import programs
from testbed.kube_real.api import Api, Refused, path
from testbed.kube_real.programs import Manager, Program
from testbed.ports import free_port
from testbed.waiting import until

TICK_S = 0.25
HEARTBEAT_S = 10.0
DEFINITIONS = Resource("apiextensions.k8s.io", "v1", "customresourcedefinitions", "CustomResourceDefinition", False)
_ADMISSION = ("admissionregistration.k8s.io", "v1")
LEASES = Resource("coordination.k8s.io", "v1", "leases", "Lease")
FLAVORS = Resource("kueue.x-k8s.io", "v1beta2", "resourceflavors", "ResourceFlavor", False)
QUEUES = Resource("kueue.x-k8s.io", "v1beta2", "clusterqueues", "ClusterQueue", False)
VOLUMES = Resource("", "v1", "persistentvolumes", "PersistentVolume", False)
MORE = (
    DEFINITIONS,
    Resource(*_ADMISSION, "mutatingwebhookconfigurations", "MutatingWebhookConfiguration", False),
    Resource(*_ADMISSION, "validatingwebhookconfigurations", "ValidatingWebhookConfiguration", False),
    LEASES,
    FLAVORS,
    QUEUES,
    VOLUMES,
)
KINDS = {**BY_KIND, **{resource.kind: resource for resource in MORE}}
RUNTIMES = BY_KIND["TrainingRuntime"]


class Access:
    """Tokens of service accounts."""

    def __init__(self, api: Api) -> None:
        self._api = api

    def token_for(self, namespace: str, account: str) -> str:
        where = path(BY_KIND["ServiceAccount"], namespace, account) + "/token"
        body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {"expirationSeconds": 7200}}
        return str(self._api.call("POST", where, body)["status"]["token"])


class RealCluster(Accidents):
    """Runs from `with` to its end; nothing of it stays behind. managers: those of JobSet, Trainer and Kueue."""

    def __init__(self, folder: Path, directory: Path, managers: Sequence[str] = ()) -> None:
        self.folder = programs.certificate(folder)
        self._port, etcd_port = free_port(), free_port()
        self.url = f"https://127.0.0.1:{self._port}"
        self.state = self.api = Api(self.url, ADMIN_TOKEN)  # type: ignore[assignment]
        self.access = Access(self.api)  # type: ignore[assignment]
        self.kubelet = Kubelet(self.state, folder, _image())
        (folder / "tokens.csv").write_text(f'{ADMIN_TOKEN},admin,admin,"system:masters"\n')
        self._kubeconfig = self.contexts(folder / "kubeconfig", {"admin": (ADMIN_TOKEN, None)})
        self._etcd = Program(programs.etcd_words(directory / "etcd", folder, etcd_port), folder / "etcd.txt")
        words = programs.api_server_words(directory / "kube-apiserver", folder, self._port, etcd_port)
        self._api_server = Program(words, folder / "kube-apiserver.txt")
        others = programs.other_words(directory, folder, self._kubeconfig)
        self._others = [Program(words, folder / f"{name}.txt") for name, words in others.items()]
        self._managers = [Manager(name, directory, folder, self._kubeconfig) for name in managers]
        self._kept = {name: directory / name for name in managers}
        self._logs = LogServer(self)
        self._ending = threading.Event()
        self._loop = threading.Thread(target=self._run, daemon=True)

    # --- beginning and end ---

    def __enter__(self) -> RealCluster:
        try:
            self._start()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def _start(self) -> None:
        self._etcd.start()
        self._api_server.start()
        self._api_server.await_ready(self.is_answering)
        for program in self._others:
            program.start()
        spaces = BY_KIND["Namespace"]
        until(lambda: self._finds(spaces, "kube-node-lease"), "the first namespaces")
        for manager in self._managers:
            objects = manager.objects()
            self.apply([each for each in objects if each["kind"] == DEFINITIONS.kind])
            for each in objects:
                if each["kind"] == DEFINITIONS.kind:
                    until(lambda each=each: self._is_served(each["metadata"]["name"]), "a definition")
            manager.program.start()
            manager.program.await_ready(manager.is_ready)
            self.apply([each for each in objects if each["kind"] != DEFINITIONS.kind])
        self._logs.start()
        self._loop.start()

    def is_answering(self) -> bool:
        with contextlib.suppress(Refused, ValueError):
            self.api.call("GET", "/api/v1/namespaces/kube-system")
            return True
        return False

    def _finds(self, resource: Resource, name: str) -> bool:
        with contextlib.suppress(Refused):
            return self.api.find(resource, "", name) is not None
        return False

    def _is_served(self, name: str) -> bool:
        conditions = self.api.get(DEFINITIONS, "", name).get("status", {}).get("conditions") or []
        return any(c["type"] == "Established" and c["status"] == "True" for c in conditions)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ending.set()
        if self._loop.is_alive():
            self._loop.join()
            self._logs.stop()
        self.kubelet.stop()
        for program in (*(m.program for m in self._managers), *self._others, self._api_server, self._etcd):
            program.stop()

    def _run(self) -> None:
        """The kubelets: an API server that is away is waited for."""
        beaten_at = float("-inf")
        while not self._ending.is_set():
            try:
                if time.monotonic() - beaten_at > HEARTBEAT_S:
                    beaten_at = time.monotonic()
                    self._beat()
                self.kubelet.sync()
            except Refused as refusal:
                if refusal.status:
                    traceback.print_exc()
            except Exception:
                traceback.print_exc()
            self._ending.wait(TICK_S)

    def _beat(self) -> None:
        """Renew the lease of every node that is heard."""
        for node in self.api.list(NODES):
            name = node["metadata"]["name"]
            if name in self.kubelet.silent:
                continue
            at = datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
            spec = {"holderIdentity": name, "leaseDurationSeconds": 40, "renewTime": at}
            known = self.api.find(LEASES, "kube-node-lease", name)
            if known is None:
                self.api.create(LEASES, "kube-node-lease", {"metadata": {"name": name}, "spec": spec})
            else:
                self.api.modify(LEASES, known, lambda lease, spec=spec: lease["spec"].update(spec))  # type: ignore[misc]

    # --- what tests do ---

    def add_node(self, node: Node) -> None:
        manifest = node.manifest()
        status = manifest.pop("status") | {
            "addresses": [{"type": "InternalIP", "address": "127.0.0.1"}],
            "daemonEndpoints": {"kubeletEndpoint": {"Port": self._logs.port}},
        }
        made = self.api.create(NODES, "", manifest)
        self.api.modify(NODES, made, lambda each: each["status"].update(status))
        self._beat()
        until(lambda: self._is_usable(node.name), f"a usable node {node.name}")

    def _is_usable(self, name: str) -> bool:
        return not (self.api.get(NODES, "", name)["spec"].get("taints") or [])

    def contexts(self, file: Path, users: Mapping[str, tuple[str, str | None]]) -> Path:
        """A kubeconfig with a context for each name, of a token and a namespace."""
        cluster = {"server": self.url, "certificate-authority": str(self.folder / "tls.crt")}
        places = [
            {"name": name, "context": {"cluster": "real", "user": name} | ({"namespace": space} if space else {})}
            for name, (_, space) in users.items()
        ]
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "real", "cluster": cluster}],
            "users": [{"name": name, "user": {"token": token}} for name, (token, _) in users.items()],
            "contexts": places,
            "current-context": next(iter(users)),
        }
        fresh = file.with_suffix(".new")
        fresh.write_text(yaml.safe_dump(config))
        return fresh.rename(file)

    def apply(self, manifests: Iterable[Object]) -> None:
        for manifest in manifests:
            meta = manifest["metadata"]
            self.api.create(KINDS[manifest["kind"]], meta.get("namespace", ""), dict(manifest))

    def leftovers(self, namespace: str) -> list[str]:
        """Names of everything in a namespace that some run has made, and the processes and directories of its pods."""
        made = [PODS, JOBS, SERVICES, *([JOB_SETS] if "jobset" in self._kept else [])]
        made += [TRAIN_JOBS, RUNTIMES] if "trainer" in self._kept else []
        found = [f"{r.kind}/{o['metadata']['name']}" for r in made for o in self.api.list(r, namespace)]
        found += [f"Secret/{o['metadata']['name']}" for o in self.api.list(SECRETS, namespace)]
        own = (o["metadata"]["name"] for o in self.api.list(CONFIG_MAPS, namespace))
        found += [f"ConfigMap/{name}" for name in own if name != "kube-root-ca.crt"]
        return sorted([*found, *self.kubelet.traces(namespace)])

    def stop_api_server(self) -> None:
        self._api_server.stop()

    def start_api_server(self, cold_s: float = 0.0) -> None:
        """On the same port, with what etcd has."""
        self._api_server.start()


class LogServer:
    """The port of every kubelet, where the API server reads logs."""

    def __init__(self, cluster: RealCluster) -> None:
        stopped = self._stopped = threading.Event()

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                url = urllib.parse.urlsplit(self.path)
                words = url.path.strip("/").split("/")
                found = _container(cluster, words[1:]) if words[0] == "containerLogs" and len(words) == 4 else None
                if found is None:
                    self.send_error(404)
                    return
                self.send_response(200)
                self.send_header("Content-Type", "text/plain")
                self.end_headers()
                with contextlib.suppress(OSError):
                    for piece in found.log.read(_query(url.query), stopped):
                        self.wfile.write(piece)

            def log_message(self, format: str, *args: Any) -> None: ...

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        trust = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        trust.load_cert_chain(cluster.folder / "tls.crt", cluster.folder / "tls.key")
        self._server.socket = trust.wrap_socket(self._server.socket, server_side=True, do_handshake_on_connect=False)
        self.port = self._server.server_address[1]

    def start(self) -> None:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()
        self._server.shutdown()
        self._server.server_close()


def _container(cluster: RealCluster, words: Sequence[str]) -> Any:
    namespace, pod, container = words
    with contextlib.suppress(Refused):
        found = cluster.api.find(PODS, namespace, pod)
        return cluster.kubelet.containers.get(found["metadata"]["uid"], {}).get(container) if found else None
    return None


def _query(text: str) -> LogQuery:
    given = dict(urllib.parse.parse_qsl(text))

    def number(name: str) -> int | None:
        return int(given[name]) if name in given else None

    return LogQuery(
        follow=given.get("follow") == "true",
        tail_lines=number("tailLines"),
        since_seconds=number("sinceSeconds"),
        limit_bytes=number("limitBytes"),
        timestamps=given.get("timestamps") == "true",
    )
