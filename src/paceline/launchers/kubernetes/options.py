"""What a user may say about pods, checked before anything is sent."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.errors import require
from paceline.host.environment import is_secret
from paceline.launchers.node.placement import RENDEZVOUS_PORT

KINDS = ("job", "jobset", "trainjob")
PULL_POLICIES = ("Always", "IfNotPresent", "Never")
_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_SUBDOMAIN = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_QUANTITY = re.compile(r"\d+(\.\d+)?(m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei)?")


@dataclass(frozen=True, kw_only=True)
class Options:
    """kind: which object carries the pods: job (an Indexed Job), jobset, or trainjob (Kubeflow Trainer).

    namespace: where everything is created; without it that of the kubeconfig's context, else paceline. context: which
    one of the kubeconfig. image: one that holds Paceline; image_pull_policy and image_pull_secrets as in a pod.
    python: the interpreter in the image.

    gpus: per pod, 0 for CPU pods; gpu_resource: under which name the cluster counts them. cpu_request, cpu_limit: in
    cores. memory_request, memory_limit, shm: quantities such as 32Gi; shm is the size of /dev/shm, which counts towards
    the memory limit. threads: CPU threads of each rank.

    node_selector, tolerations, affinity: as in a pod. spread: one pod per node. host_network: the node's own network,
    with the DNS policy that still finds the other pods. priority_class, service_account: names. queue: a Kueue queue,
    which then decides when the job starts. labels: more labels for everything that is created.

    env: variables; what looks like a secret is refused. secret_env: variables from Kubernetes Secrets, `{HF_TOKEN:
    {secret: NAME, key: KEY}}`. nccl: NCCL's variables without their prefix, `{SOCKET_IFNAME: eth0, IB_DISABLE: 1}`.

    results_claim: a PersistentVolumeClaim on which runs are kept besides; one that many nodes may write
    (ReadWriteMany) when there is more than one. pod_patch: merged over the pod template at the end, lists of named
    things by their names, null removes.

    user, group: the numbers that processes run under. port: where ranks meet. pending_s: how long pods may wait for a
    node or an image. patience_s: how long an API server that does not answer is waited for. keep_s: how long a
    finished job stays when no controller removes it.
    """

    kind: str = "job"
    namespace: str | None = None
    context: str | None = None
    image: str | None = None
    image_pull_policy: str = "IfNotPresent"
    image_pull_secrets: Sequence[str] | None = None
    python: str = "python"
    gpus: int = 0
    gpu_resource: str = "nvidia.com/gpu"
    cpu_request: float = 8.0
    cpu_limit: float = 16.0
    memory_request: str = "32Gi"
    memory_limit: str = "64Gi"
    shm: str = "8Gi"
    threads: int = 1
    node_selector: Mapping[str, str] | None = None
    tolerations: Sequence[Mapping[str, Any]] | None = None
    affinity: Mapping[str, Any] | None = None
    spread: bool = True
    host_network: bool = False
    priority_class: str | None = None
    service_account: str | None = None
    queue: str | None = None
    labels: Mapping[str, str] | None = None
    env: Mapping[str, Any] | None = None
    secret_env: Mapping[str, Any] | None = None
    nccl: Mapping[str, Any] | None = None
    results_claim: str | None = None
    pod_patch: Mapping[str, Any] | None = None
    user: int = 1000
    group: int = 1000
    port: int = RENDEZVOUS_PORT
    pending_s: float = 600.0
    patience_s: float = 120.0
    keep_s: int = 86400

    def __post_init__(self) -> None:
        _require(self.kind in KINDS, "kind", self.kind, ", ".join(KINDS))
        _require(self.image_pull_policy in PULL_POLICIES, "image_pull_policy", self.image_pull_policy, _POLICIES)
        self._check_names()
        self._check_amounts()
        self._check_structures()
        for name, value in self.variables().items():
            _require(bool(_VARIABLE.fullmatch(name)), "env", name, "names of variables")
            _refuse_secret("env", name, value)
        for name, source in (self.secret_env or {}).items():
            keys = set(source) if isinstance(source, Mapping) else set()
            texts = keys and all(isinstance(source[key], str) for key in keys)
            sound = _VARIABLE.fullmatch(name) and keys == {"secret", "key"} and texts
            _require(bool(sound), f"secret_env.{name}", source, "{secret: NAME, key: KEY}")
        for name, value in _variables_in(self.pod_patch):
            _refuse_secret("pod_patch", name, value)

    def _check_names(self) -> None:
        words = "a lower-case name of letters, digits and '-'"
        for field in ("namespace", "queue"):
            value = getattr(self, field)
            _require(value is None or _is_label(value), field, value, words)
        for field in ("priority_class", "service_account", "results_claim"):
            value = getattr(self, field)
            _require(value is None or _is_subdomain(value), field, value, f"{words}, '.' between them")
        for field in ("image", "context"):
            value = getattr(self, field)
            sound = value is None or (isinstance(value, str) and value.strip() and not re.search(r"\s", value))
            _require(bool(sound), field, value, "text without spaces")

    def _check_amounts(self) -> None:
        _require(self.gpus >= 0, "gpus", self.gpus, "a whole number from 0")
        _require(self.threads >= 1, "threads", self.threads, "a whole number from 1")
        _require(0 < self.port < 65536, "port", self.port, "a number below 65536")
        for field in ("memory_request", "memory_limit", "shm"):
            value = getattr(self, field)
            _require(bool(_QUANTITY.fullmatch(value)), field, value, "a quantity such as 32Gi")
        for field in ("cpu_request", "cpu_limit", "pending_s", "patience_s"):
            _require(getattr(self, field) > 0, field, getattr(self, field), "a positive number")
        _require(self.cpu_request <= self.cpu_limit, "cpu_request", self.cpu_request, f"at most {self.cpu_limit:g}")
        for field in ("user", "group"):
            # Pods that run as root are refused wherever Pod Security is "restricted".
            _require(getattr(self, field) > 0, field, getattr(self, field), "a number from 1: 0 is root")
        _require(self.keep_s >= 60, "keep_s", self.keep_s, "seconds from 60")

    def _check_structures(self) -> None:
        for field in ("node_selector", "labels"):
            value = getattr(self, field)
            texts = isinstance(value, Mapping) and all(isinstance(v, str) for v in value.values())
            _require(value is None or texts, field, value, "a mapping of texts")
        for field in ("affinity", "env", "secret_env", "nccl", "pod_patch"):
            value = getattr(self, field)
            _require(value is None or isinstance(value, Mapping), field, value, "a mapping")
        for field, item in (("image_pull_secrets", str), ("tolerations", Mapping)):
            value = getattr(self, field)
            listed = isinstance(value, list | tuple) and all(isinstance(entry, item) for entry in value)
            _require(value is None or listed, field, value, "a list of texts" if item is str else "a list of mappings")

    def variables(self) -> dict[str, str]:
        """env and nccl together, as text."""
        prefixed = {f"NCCL_{str(name).upper().removeprefix('NCCL_')}": v for name, v in (self.nccl or {}).items()}
        return {str(name): _text(value) for name, value in {**prefixed, **(self.env or {})}.items()}


_POLICIES = ", ".join(PULL_POLICIES)
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4, "P": 5, "E": 6}


def quantity(text: str) -> float:
    """`32Gi`, `500m`, `8` as a number; of a form that is not known, 0."""
    found = re.fullmatch(r"([0-9.]+)(m|[kKMGTPE]?i?)", text)
    if found is None:
        return 0.0
    if found[2] == "m":
        return float(found[1]) / 1000
    scale = 1024.0 if found[2].endswith("i") else 1000.0
    return float(found[1]) * scale ** _POWERS[found[2].removesuffix("i").upper()]


def _require(condition: bool, field: str, given: object, accepted: str) -> None:
    require(condition, f"kubernetes.{field}", given, accepted)


def _is_label(value: object) -> bool:
    return isinstance(value, str) and _LABEL.fullmatch(value) is not None


def _is_subdomain(value: object) -> bool:
    return isinstance(value, str) and _SUBDOMAIN.fullmatch(value) is not None


def _text(value: object) -> str:
    """YAML's true is 'true', as a shell would have it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _refuse_secret(field: str, name: str, value: str) -> None:
    """The value itself is not repeated: the sentence may end up in a log."""
    accepted = "no secret there; put it into a Kubernetes Secret and name it under secret_env"
    _require(not is_secret(name, value), f"{field}.{name}", "what looks like a secret", accepted)


def _variables_in(patch: object) -> Iterator[tuple[str, str]]:
    """Every `{name: ..., value: ...}` of a patch, however deep."""
    if isinstance(patch, Mapping):
        if isinstance(patch.get("name"), str) and "value" in patch:
            yield patch["name"], _text(patch["value"])
        for value in patch.values():
            yield from _variables_in(value)
    elif isinstance(patch, list | tuple):
        for value in patch:
            yield from _variables_in(value)
