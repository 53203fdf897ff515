"""The real programs: their files, flags and ends. Every one of them listens on loopback only."""

from __future__ import annotations

import base64
import shlex
import signal
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from paceline.host.processes import end_with_parent
from testbed.ports import free_port
from testbed.waiting import until

# From the start of a program to its first answer, on a machine that others keep busy.
READY_S = 300.0
NO_METRICS: dict[str, Any] = {"metrics": {"bindAddress": "0"}, "leaderElection": {"leaderElect": False}}
# Manager -> the kind of its configuration, and what ours says besides addresses.
MANAGERS: dict[str, dict[str, Any]] = {
    "jobset": {"apiVersion": "config.jobset.x-k8s.io/v1alpha1", "internalCertManagement": {"enable": False}},
    "trainer": {"apiVersion": "config.trainer.kubeflow.org/v1alpha1", "certManagement": {"enable": False}},
    "kueue": {
        "apiVersion": "config.kueue.x-k8s.io/v1beta2",
        "internalCertManagement": {"enable": False},
        "manageJobsWithoutQueueName": False,
        "integrations": {"frameworks": ["batch/job", "jobset.x-k8s.io/jobset", "trainer.kubeflow.org/trainjob"]},
        "featureGates": {"VisibilityOnDemand": False},
    },
}


class Program:
    """One program, started again by `start` with the same words."""

    def __init__(self, words: Sequence[str], log: Path, env: Mapping[str, str] | None = None) -> None:
        self._words, self._log, self._env = words, log, env
        self._child: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self._log.open("ab") as log:
            self._child = subprocess.Popen(
                self._words,
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=end_with_parent,
            )

    def await_ready(self, ready: Callable[[], bool]) -> None:
        def is_ready() -> bool:
            assert self._child is not None
            assert self._child.poll() is None, f"{self._words[0]} ended: {self._log.read_text()[-3000:]}"
            return ready()

        until(is_ready, f"the first answer of {self._words[0]}", READY_S)

    def stop(self) -> None:
        if self._child is not None and self._child.poll() is None:
            self._child.send_signal(signal.SIGTERM)
            try:
                self._child.wait(20)
            except subprocess.TimeoutExpired:
                self._child.kill()
                self._child.wait()


def certificate(folder: Path) -> Path:
    """A key and a certificate of 127.0.0.1 that signs itself (tls.key, tls.crt), and a pair for service accounts."""
    folder.mkdir(parents=True, exist_ok=True)
    new = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=127.0.0.1"]
    files = ["-keyout", str(folder / "tls.key"), "-out", str(folder / "tls.crt")]
    quiet: dict[str, Any] = {"check": True, "capture_output": True}
    subprocess.run([*new, "-addext", "subjectAltName=IP:127.0.0.1", *files], **quiet)
    subprocess.run(["openssl", "genrsa", "-out", str(folder / "sa.key"), "2048"], **quiet)
    words = ["openssl", "rsa", "-in", str(folder / "sa.key"), "-pubout", "-out", str(folder / "sa.pub")]
    subprocess.run(words, **quiet)
    return folder


def etcd_words(program: Path, folder: Path, port: int) -> list[str]:
    client, peer = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{free_port()}"
    return [
        str(program),
        f"--data-dir={folder / 'etcd'}",
        f"--listen-client-urls={client}",
        f"--advertise-client-urls={client}",
        f"--listen-peer-urls={peer}",
        f"--initial-advertise-peer-urls={peer}",
        f"--initial-cluster=default={peer}",
        "--unsafe-no-fsync",
    ]


def api_server_words(program: Path, folder: Path, port: int, etcd_port: int) -> list[str]:
    return [
        str(program),
        f"--etcd-servers=http://127.0.0.1:{etcd_port}",
        "--bind-address=127.0.0.1",
        f"--secure-port={port}",
        f"--tls-cert-file={folder / 'tls.crt'}",
        f"--tls-private-key-file={folder / 'tls.key'}",
        f"--token-auth-file={folder / 'tokens.csv'}",
        "--authorization-mode=RBAC",
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-account-key-file={folder / 'sa.pub'}",
        f"--service-account-signing-key-file={folder / 'sa.key'}",
        "--service-cluster-ip-range=10.96.0.0/16",
        # Nobody reaches the API server by its Service here: pods of Paceline do not call it.
        "--endpoint-reconciler-type=none",
        "--advertise-address=192.0.2.1",
        "--kubelet-preferred-address-types=InternalIP",
        "--enable-priority-and-fairness=false",
    ]


def other_words(programs: Path, folder: Path, kubeconfig: Path) -> dict[str, list[str]]:
    """The controllers and the scheduler of Kubernetes itself."""
    shared = [f"--kubeconfig={kubeconfig}", "--leader-elect=false", "--secure-port=0"]
    key = f"--service-account-private-key-file={folder / 'sa.key'}"
    more = [key, "--allocate-node-cidrs=false", "--kube-api-qps=200", "--kube-api-burst=400"]
    return {
        "kube-controller-manager": [str(programs / "kube-controller-manager"), *shared, *more],
        "kube-scheduler": [str(programs / "kube-scheduler"), *shared],
    }


class Manager:
    """The manager of JobSet, Trainer or Kueue: its manifests with addresses on loopback, and its process."""

    def __init__(self, name: str, programs: Path, folder: Path, kubeconfig: Path) -> None:
        self._name, self._manifests = name, programs / name
        self.port, self._health = free_port(), free_port()
        own = folder / name
        # Where the library of JobSet and Trainer looks for the certificate of its webhooks; Kueue is told.
        certificates = own / "k8s-webhook-server/serving-certs"
        certificates.mkdir(parents=True)
        for file in ("tls.crt", "tls.key"):
            (certificates / file).write_bytes((folder / file).read_bytes())
        self._bundle = base64.b64encode((folder / "tls.crt").read_bytes()).decode()
        config: dict[str, Any] = {
            **MANAGERS[name],
            **NO_METRICS,
            "kind": "Configuration",
            "webhook": {"host": "127.0.0.1", "port": self.port},
            "health": {"healthProbeBindAddress": f"127.0.0.1:{self._health}"},
        }
        if name == "kueue":
            config["webhook"]["certDir"] = str(certificates)
        (own / "config.yaml").write_text(yaml.safe_dump(config))
        words = [str(programs / f"{name}-manager"), f"--config={own / 'config.yaml'}"]
        if name == "kueue":
            words = _with_certificates(words, certificates, own)
        env = {"KUBECONFIG": str(kubeconfig), "TMPDIR": str(own), "HOME": str(own), "PATH": "/usr/bin:/bin"}
        self.program = Program(words, own / "log.txt", env | {"POD_NAMESPACE": "kube-system"})

    def objects(self) -> list[dict[str, Any]]:
        """Definitions of its resources and its webhooks; what a release has besides is for a Deployment."""
        texts = [file.read_text() for file in sorted(self._manifests.glob("*.yaml"))]
        documents = [document for text in texts for document in yaml.safe_load_all(text) if document]
        wanted = ("CustomResourceDefinition", "MutatingWebhookConfiguration", "ValidatingWebhookConfiguration")
        found = sorted((d for d in documents if d["kind"] in wanted), key=lambda d: wanted.index(d["kind"]))
        for each in found:
            if each["kind"] != wanted[0]:
                each["metadata"]["name"] = f"{self._name}-{each['metadata']['name']}"
            self._redirect(each)
        return found

    def _redirect(self, value: Any) -> None:
        """Every webhook at its address on loopback instead of a Service."""
        if isinstance(value, list):
            for item in value:
                self._redirect(item)
        elif isinstance(value, dict):
            service = (value.get("clientConfig") or {}).get("service")
            if service:
                url = f"https://127.0.0.1:{self.port}{service.get('path', '')}"
                value["clientConfig"] = {"url": url, "caBundle": self._bundle}
            for item in value.values():
                self._redirect(item)

    def is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._health}/readyz", timeout=5) as answer:
                return bool(answer.status == 200)
        except (OSError, urllib.error.URLError):
            return False


def _with_certificates(words: Sequence[str], certificates: Path, own: Path) -> list[str]:
    """Kueue looks for the certificate of its metrics below /etc, whatever its configuration says: it gets an /etc of
    its own, in memory."""
    etc = own / "etc"
    etc.mkdir()
    place = f"{etc}/kueue/metrics/certs"
    script = (
        f"mount -t tmpfs none {etc} && cp /etc/hosts /etc/nsswitch.conf {etc} && mkdir -p {place} "
        f"&& cp {certificates}/* {place} && mount --bind {etc} /etc && exec {shlex.join(words)}"
    )
    return ["unshare", "--mount", "--propagation", "private", "sh", "-c", script]
