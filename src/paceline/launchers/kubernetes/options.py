"""The options of the Kubernetes launcher, checked before anything is sent."""

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
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4, "P": 5, "E": 6}


@dataclass(frozen=True, kw_only=True)
class Options:
    """kind: the object that owns the pods: job (an Indexed Job), jobset, or trainjob (Kubeflow Trainer).

    namespace: where everything is created; default: the namespace of the kubeconfig context, else paceline. context: a
    context of the kubeconfig. image: an image that contains Paceline. image_pull_policy, image_pull_secrets: as in a
    pod. python: the interpreter in the image.

    gpus: GPUs per pod, 0 for CPU pods. gpu_resource: the resource name of the GPUs. cpu_request, cpu_limit: in cores.
    memory_request, memory_limit, shm: quantities such as 32Gi; shm is the size of /dev/shm, which counts towards the
    memory limit. threads: CPU threads per rank.

    node_selector, tolerations, affinity: as in a pod. spread: one pod per node. host_network: use the node's network,
    with a DNS policy that still resolves pod names. priority_class, service_account: names. queue: a Kueue queue, which
    then decides when the job starts. labels: extra labels for every created object.

    env: variables; values that look like secrets are rejected. secret_env: variables from Kubernetes Secrets,
    `{HF_TOKEN: {secret: NAME, key: KEY}}`. nccl: NCCL variables without the prefix, `{SOCKET_IFNAME: eth0}`.

    results_claim: a PersistentVolumeClaim that also keeps the runs; it must be ReadWriteMany if there is more than one
    node. pod_patch: merged over the finished pod template; lists of named items merge by name, null removes.

    user, group: numeric ids of the processes. port: rendezvous port of the ranks. pending_s: how long pods may wait for
    a node or an image. patience_s: how long to wait for an API server that does not answer. keep_s: how long a finished
    job stays if no controller removes it.
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
        policies = ", ".join(PULL_POLICIES)
        _require(self.image_pull_policy in PULL_POLICIES, "image_pull_policy", self.image_pull_policy, policies)
        words = "a lower-case name of letters, digits and '-'"
        patterns = {"namespace": _LABEL, "queue": _LABEL}
        patterns |= dict.fromkeys(("priority_class", "service_account", "results_claim"), _SUBDOMAIN)
        for field, pattern in patterns.items():
            value = getattr(self, field)
            is_valid = value is None or (isinstance(value, str) and pattern.fullmatch(value) is not None)
            _require(is_valid, field, value, words if pattern is _LABEL else f"{words}, joined by '.'")
        for field in ("image", "context"):
            value = getattr(self, field)
            is_word = value is None or (isinstance(value, str) and value.strip() and not re.search(r"\s", value))
            _require(bool(is_word), field, value, "text without spaces")
        _require(self.gpus >= 0, "gpus", self.gpus, "a whole number, 0 or more")
        _require(self.threads >= 1, "threads", self.threads, "a whole number, 1 or more")
        _require(0 < self.port < 65536, "port", self.port, "a number below 65536")
        for field in ("memory_request", "memory_limit", "shm"):
            value = getattr(self, field)
            _require(bool(_QUANTITY.fullmatch(value)), field, value, "a quantity such as 32Gi")
        for field in ("cpu_request", "cpu_limit", "pending_s", "patience_s"):
            _require(getattr(self, field) > 0, field, getattr(self, field), "a positive number")
        _require(self.cpu_request <= self.cpu_limit, "cpu_request", self.cpu_request, f"at most {self.cpu_limit:g}")
        for field in ("user", "group"):
            # Pod Security "restricted" rejects pods that run as root.
            _require(getattr(self, field) > 0, field, getattr(self, field), "1 or more (0 is root)")
        _require(self.keep_s >= 60, "keep_s", self.keep_s, "at least 60 seconds")
        for field in ("node_selector", "labels"):
            value = getattr(self, field)
            is_text = isinstance(value, Mapping) and all(isinstance(v, str) for v in value.values())
            _require(value is None or is_text, field, value, "a mapping of names to text")
        for field in ("affinity", "env", "secret_env", "nccl", "pod_patch"):
            value = getattr(self, field)
            _require(value is None or isinstance(value, Mapping), field, value, "a mapping")
        for field, item in (("image_pull_secrets", str), ("tolerations", Mapping)):
            value = getattr(self, field)
            is_list = isinstance(value, list | tuple) and all(isinstance(entry, item) for entry in value)
            _require(value is None or is_list, field, value, "a list of names" if item is str else "a list of mappings")
        for name, value in self.variables().items():
            _require(bool(_VARIABLE.fullmatch(name)), "env", name, "variable names")
            _reject_secret("env", name, value)
        for name, source in (self.secret_env or {}).items():
            keys = set(source) if isinstance(source, Mapping) else set()
            is_source = keys == {"secret", "key"} and all(isinstance(source[key], str) for key in keys)
            is_valid = is_source and _VARIABLE.fullmatch(name) is not None
            _require(is_valid, f"secret_env.{name}", source, "{secret: NAME, key: KEY}")
        for name, value in _variables_in(self.pod_patch):
            _reject_secret("pod_patch", name, value)

    def variables(self) -> dict[str, str]:
        """env and nccl together, as text."""
        prefixed = {f"NCCL_{str(name).upper().removeprefix('NCCL_')}": v for name, v in (self.nccl or {}).items()}
        return {str(name): _text(value) for name, value in {**prefixed, **(self.env or {})}.items()}


def quantity(text: str) -> float:
    """Return `32Gi`, `500m` or `8` as a number, 0 if the form is unknown.

    >>> quantity("32Gi") == 32 * 2**30, quantity("500m"), quantity("many")
    (True, 0.5, 0.0)
    """
    match = re.fullmatch(r"([0-9.]+)(m|[kKMGTPE]?i?)", text)
    if match is None:
        return 0.0
    if match[2] == "m":
        return float(match[1]) / 1000
    scale = 1024.0 if match[2].endswith("i") else 1000.0
    return float(match[1]) * scale ** _POWERS[match[2].removesuffix("i").upper()]


def _require(condition: bool, field: str, given: object, accepted: str) -> None:
    require(condition, f"kubernetes.{field}", given, accepted)


def _text(value: object) -> str:
    """Write YAML's true as 'true', as in a shell."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _reject_secret(field: str, name: str, value: str) -> None:
    """The error does not repeat the value, because it may end up in a log."""
    accepted = "no secret; store it in a Kubernetes Secret and name that under secret_env"
    _require(not is_secret(name, value), f"{field}.{name}", "a value that looks like a secret", accepted)


def _variables_in(patch: object) -> Iterator[tuple[str, str]]:
    """Yield every `{name: ..., value: ...}` of a patch, at any depth."""
    if isinstance(patch, Mapping):
        if isinstance(patch.get("name"), str) and "value" in patch:
            yield patch["name"], _text(patch["value"])
        for value in patch.values():
            yield from _variables_in(value)
    elif isinstance(patch, list | tuple):
        for value in patch:
            yield from _variables_in(value)
