"""Runs on the Kubernetes double, each in its own namespace, on two nodes of its own, with the least permissions.

Ranks need no torch (see `light`). Runs with different names do not affect each other, so many can run at once.
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from paceline.campaign.run import controller as run
from paceline.experiment.choices import Choice
from paceline.experiment.spec import RunSpec
from paceline.launchers import _job
from paceline.launchers.kubernetes import run as _kube_run
from paceline.launchers.kubernetes import states as _kube_states
from paceline.launchers.kubernetes.cluster import CONTROLLER_ACCOUNT, cluster_manifests
from paceline.launchers.kubernetes.options import KINDS
from paceline.results import store
from paceline.results.records import RunRecord
from paceline.workloads import reference
from testbed.kube_api import Cluster, Node
from testbed.kube_api.access import ADMIN_TOKEN
from testbed.kube_api.resources import JOBS, Object
from testbed.observers import Unseen
from testbed.ports import free_port

OWN = "tests/bed"
# The fixtures `experiment_file` and `paceline`.
Tools = tuple[Callable[..., Path], Callable[..., Any]]


@dataclass
class Bed:
    """A cluster with a kubeconfig that has a context for every name that was asked for."""

    cluster: Cluster
    folder: Path
    spec: RunSpec
    users: dict[str, tuple[str, str | None]] = field(default_factory=lambda: {"admin": (ADMIN_TOKEN, None)})
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def kubeconfig(self) -> Path:
        return self.folder / "kubeconfig"

    def prepare(self, name: str) -> None:
        """Namespace, rights and nodes of one run."""
        with self._lock:
            for made in cluster_manifests(name, KINDS).values():
                self.cluster.apply(made)
            for letter in "ab":
                self.cluster.add_node(Node(name=f"{name}-{letter}", labels={OWN: name}))
            self.users[name] = (self.cluster.access.token_for(name, CONTROLLER_ACCOUNT), name)
            self.cluster.contexts(self.kubeconfig, self.users)

    def spec_of(self, name: str, *, fields: dict[str, Any] | None = None, **options: Any) -> RunSpec:
        """Two nodes with a rank each; `env` has the wishes of `light`."""
        usual = {"context": name, "image": "paceline", "node_selector": {OWN: name}, "port": free_port()}
        choice = Choice(
            "kubernetes", {**usual, "patience_s": 60.0, "cpu_request": 1.0, "memory_request": "1Gi", **options}
        )
        return replace(self.spec, experiment=name, launcher=choice, **fields or {})

    def run(self, spec: RunSpec) -> RunRecord:
        """To its seal, in this thread."""
        out = self.folder / "out"
        run.execute(spec, out, Unseen(), None)
        return store.read_run(out / spec.experiment / spec.run_id)

    def run_dir(self, spec: RunSpec) -> Path:
        return self.folder / "out" / spec.experiment / spec.run_id

    def campaign(
        self,
        tools: Tools,
        name: str,
        matrix: Any,
        launcher: dict[str, Any] | None = None,
        runner: str | None = None,
        **base: Any,
    ) -> Path:
        """The results of a campaign of real ranks in two pods that find each other by name. Torchrun starts the ranks
        unless there is another runner."""
        usual = {"name": "kubernetes", "image": "paceline", "context": name, "node_selector": {OWN: name}}
        out = self.folder / f"campaign-{name}"
        out.mkdir()
        (out / "where.yaml").write_text(yaml.safe_dump({**usual, "port": free_port(), **(launcher or {})}))
        experiment_file, paceline = tools
        file = experiment_file(out, name, matrix, **base, nodes=2, processes=1)
        words = ["run", str(file), "--launcher", str(out / "where.yaml"), "--out", str(out), "--format", "json"]
        env = {"KUBECONFIG": str(self.kubeconfig), **({"FORKED_RUNNER": runner} if runner else {})}
        done = paceline(*words, env=env)
        assert done.returncode == 0, done.stdout + done.stderr
        return out / name

    def pods(self, name: str, phase: str = "Running") -> list[Object]:
        return [p for p in self.cluster.pods(name) if p["status"].get("phase") == phase]

    def jobs(self, name: str) -> list[Object]:
        return self.cluster.state.list(JOBS, name)


@contextlib.contextmanager
def open_bed(cluster: Any, folder: Path, make_spec: Callable[..., RunSpec]) -> Iterator[Bed]:
    """A bed on the cluster, which runs while the block lasts; the controllers of this process know no other one."""
    import pytest
    from kubernetes.client import configuration
    from kubernetes.config import kube_config

    spec = make_spec(None, processes=1, nodes=2, workload="reference", steps=8, timeout_s=300.0, stall_s=200.0)
    with cluster, pytest.MonkeyPatch.context() as patch:
        bed = Bed(cluster, folder, spec)
        light(patch.setattr)
        # The client reads the variable KUBECONFIG once, when it is imported.
        patch.setattr(kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", str(bed.kubeconfig))
        # It looks through all variables for proxies, while pytest names its next test in one.
        patch.setattr(configuration, "getproxies", dict)
        cluster.contexts(bed.kubeconfig, bed.users)
        yield bed


def main(argv: list[str]) -> int:
    """`python -m testbed.kube_bed OUT SPEC.json`: a controller of its own, which can be killed."""
    light()
    spec = RunSpec.from_dict(json.loads(Path(argv[2]).read_text()))
    try:
        run.interruptible(lambda: [run.execute(spec, Path(argv[1]), Unseen(), None)[0]])
    except KeyboardInterrupt:
        return 130
    return 0


def light(replace: Callable[[object, str, object], None] = setattr) -> None:
    """Have ranks without torch started, and polls often. The only workload whose verdict needs no torch is meant for
    one process, which these ranks do not mind."""
    replace(_job, "RUNNER", "testbed.light")
    replace(reference, "check", lambda spec: None)
    replace(_kube_run, "POLL_S", 0.25)
    replace(_kube_run, "EVENTS_S", 0.5)
    # A pod on a node that answers no more never goes; nobody waits for it for long here.
    replace(_kube_run, "REMOVAL_S", 5.0)
    replace(_kube_run, "REMOVAL_PATIENCE_S", 4.0)
    replace(_kube_states, "OVERDUE_S", 4.0)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
