"""Start the processes of one node of a job whose engine starts only one per node, as TorchX does.

    python -m paceline.launchers.here.start --job ID --nodes 2 --node-rank 0 --processes 8 -- run quick --out DIR

It is torchrun without its rendezvous: the processes find each other through the results directory (see `here`), so no
port is opened for it. They end with this process, and it returns the worst of their exit codes.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from paceline.host.processes import end_with_parent
from paceline.launchers.here.processes_of_job import JOB

COMPONENT = "torchx_component.py"


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="paceline.launchers.here.start", description=__doc__)
    parser.add_argument("--job", required=True, help="a name that no other job has")
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--node-rank", type=int, default=0)
    parser.add_argument("--processes", type=int, default=1, help="processes on each node")
    parser.add_argument("--module", default="paceline", help="module to start instead of Paceline itself, for tests")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of paceline, after --")
    parser.add_argument("--torchx-component", action="store_true", help="print the path of the TorchX component")
    if argv[1:] == ["--torchx-component"]:
        sys.stdout.write(f"{Path(__file__).with_name(COMPONENT)}\n")
        return 0
    given = parser.parse_args(argv[1:])
    if not 0 <= given.node_rank < given.nodes or given.processes < 1:
        parser.error(f"--node-rank {given.node_rank}: expected a number below --nodes {given.nodes}")
    words = given.arguments[1:] if given.arguments[:1] == ["--"] else given.arguments
    children = []
    for local_rank in range(given.processes):
        position = {
            JOB: given.job,
            "RANK": str(given.node_rank * given.processes + local_rank),
            "WORLD_SIZE": str(given.nodes * given.processes),
            "LOCAL_RANK": str(local_rank),
            "LOCAL_WORLD_SIZE": str(given.processes),
        }
        command = (sys.executable, "-m", given.module, *words)
        environment = {name: value for name, value in os.environ.items() if name not in ("MASTER_ADDR", "MASTER_PORT")}
        children.append(
            subprocess.Popen(command, env=environment | position, preexec_fn=lambda: end_with_parent(signal.SIGTERM))
        )

    def pass_on(number: int, frame: FrameType | None) -> None:
        for child in children:
            if child.poll() is None:
                child.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, pass_on)
    codes = [child.wait() for child in children]
    return max(128 - code if code < 0 else code for code in codes)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv))
