"""A real Ray of several nodes on this host, in a network namespace of its own, for as long as a test module needs it.

`start` runs this module as a program there. It answers each line of its input with a line of JSON, and takes the whole
cluster down when its input is closed.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from testbed import EXHAUSTIVE

# The third is one to lose.
NODES = ("head", "left", "right") if EXHAUSTIVE else ("head", "left")
CPUS = 16
_ENTER = 'ip link set lo up && exec "$0" -m testbed.ray_cluster'


def obstacle() -> str | None:
    """Why no cluster can be started here; None when one can."""
    if importlib.util.find_spec("ray") is None:
        return "needs the package ray: pip install 'paceline[ray]'"
    missing = [command for command in ("ip", "unshare", "nsenter") if shutil.which(command) is None]
    if missing:
        return f"needs the commands {', '.join(missing)} (iproute2, util-linux)"
    if os.geteuid() != 0:
        return "needs root: the cluster gets a network namespace of its own"
    return None


@dataclass(frozen=True)
class RayCluster:
    """A cluster that runs. net: its network namespace, as a file."""

    address: str
    net: str
    child: subprocess.Popen[str]

    def ask(self, **question: Any) -> Any:
        assert self.child.stdin is not None
        assert self.child.stdout is not None
        self.child.stdin.write(json.dumps(question) + "\n")
        self.child.stdin.flush()
        return json.loads(self.child.stdout.readline())

    def leftovers(self) -> dict[str, Any]:
        """Placement groups that are there, and CPUs that anybody holds."""
        found: dict[str, Any] = self.ask(what="leftovers")
        return found


@contextmanager
def start(environ: Mapping[str, str]) -> Iterator[RayCluster]:
    # Sockets of Ray lie below it, and a path of theirs ends at 107 characters.
    folder = tempfile.mkdtemp(prefix="pl-ray-")
    env = {
        **environ,
        "RAY_TMPDIR": folder,
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_raylet_start_wait_time_s": "180",
        # Else each node starts a worker per CPU for the first job, which needs two.
        "RAY_prestart_worker_first_driver": "0",
        # A machine with little room left on its disk is no matter of these tests.
        "RAY_local_fs_capacity_threshold": "1",
    }
    log = Path(folder) / "log.txt"
    with log.open("w") as errors:
        child = subprocess.Popen(
            ["unshare", "--net", "sh", "-c", _ENTER, sys.executable],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        )
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        first = child.stdout.readline()
        assert first, f"no Ray cluster came up: {log.read_text()[-2000:]}"
        yield RayCluster(json.loads(first)["address"], f"/proc/{child.pid}/ns/net", child)
    finally:
        child.stdin.close()
        child.wait(120)
        child.stdout.close()
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    from ray.cluster_utils import Cluster

    cluster = Cluster(shutdown_at_exit=True)
    sizes = {"num_cpus": CPUS, "object_store_memory": 100 << 20, "include_dashboard": False}
    nodes = {name: cluster.add_node(node_name=name, **sizes) for name in NODES}
    say({"address": cluster.address})
    for line in sys.stdin:
        question = json.loads(line)
        if question["what"] == "remove":
            cluster.remove_node(nodes.pop(question["node"]), allow_graceful=False)
            say({})
        else:
            say(held(cluster.global_state))
    cluster.shutdown()


def held(state: Any) -> dict[str, Any]:
    groups = state.placement_group_table().values()
    standing = [group["name"] for group in groups if group["state"] != "REMOVED"]
    cpus = state.cluster_resources().get("CPU", 0) - state.available_resources().get("CPU", 0)
    return {"groups": standing, "cpus": cpus}


def say(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
