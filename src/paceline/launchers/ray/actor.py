"""The actor of one rank on its node: runs an agent as a child process and passes on its output.

Under the agent, `python -m paceline.launchers.ray.actor` replaces torchrun: it becomes the one rank of its actor, whose
variables (RANK, LOCAL_RANK, ...) are already set.

Ray sends this class to the nodes by value, so the module imports nothing of Paceline at its top. A node without the
package, or with another version of it, can then report that.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from typing import Any

# Ray kills the direct children of an actor that ends. This shell is that child. The agent below it gets SIGTERM from
# the kernel and a closed input, so it can end the rank and remove its files.
_SHIELD = ("sh", "-c", '"$@"; exit $?', "paceline-rank")


class RankActor:
    """Call `facts` first, then `start` once, `read` until it returns an exit code; `end` at any time."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None
        self._lines: list[str] = []
        self._taken = 0

    def facts(self, scratch: str) -> dict[str, Any]:
        import ray

        context = ray.get_runtime_context()
        address = ray.util.get_node_ip_address()
        version: str | None = None
        interface: str | None = None
        with contextlib.suppress(ImportError):
            from paceline import __version__ as version
        with contextlib.suppress(ImportError):
            import psutil

            # The interface that Ray uses; ranks use the same.
            owners = (name for name, own in psutil.net_if_addrs().items() if address in [each.address for each in own])
            interface = next(owners, None)
        with socket.socket() as probe:
            probe.bind(("", 0))
            port = int(probe.getsockname()[1])
        return {
            "node_id": context.get_node_id(),
            "address": address,
            "interface": interface,
            "port": port,
            "gpus": [str(gpu) for gpu in context.get_accelerator_ids().get("GPU", [])],
            "python": ".".join(map(str, sys.version_info[:3])),
            "version": version,
            "has_scratch": not scratch or os.access(scratch, os.W_OK | os.X_OK),
        }

    def start(self, arguments: list[str], variables: dict[str, str]) -> None:
        self._child = subprocess.Popen(
            [*_SHIELD, sys.executable, *arguments],
            env={**os.environ, **variables},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        stdout = self._child.stdout
        assert stdout is not None

        def take_lines() -> None:
            for line in stdout:
                self._lines.append(line)

        self._reader = threading.Thread(target=take_lines, daemon=True)
        self._reader.start()

    def read(self, taken: int) -> tuple[list[str], int | None]:
        """Return the lines after the first `taken`, and the exit code once no more will come.

        Lines are kept until the next call confirms that they arrived.
        """
        assert self._child is not None
        assert self._reader is not None
        over = not self._reader.is_alive() and self._child.poll() is not None
        # In place, because the reader appends to it meanwhile.
        del self._lines[: taken - self._taken]
        self._taken = taken
        return list(self._lines), self._child.returncode if over else None

    def end(self, taken: int, grace_s: float) -> list[str]:
        """End the rank and return its last lines. An agent that does not react is killed with all its processes."""
        if self._child is None or self._reader is None:
            return []
        assert self._child.stdin is not None
        # The agent gets SIGTERM when its parent dies. A closed input would mean that the controller is gone.
        self._child.kill()
        self._reader.join(grace_s)
        with contextlib.suppress(OSError):
            self._child.stdin.close()
        self._reader.join(grace_s / 4)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGKILL)
        self._child.wait()
        return self.read(taken)[0]


def main(argv: list[str]) -> None:
    from paceline.launchers.node import torchrun

    known, words = torchrun.parser().parse_known_args(argv[1:])
    os.environ.update(torchrun.store_variables(known.master_addr, known.master_port, known.store_fd))
    os.execv(sys.executable, [sys.executable, "-m", "paceline.workloads.worker", words[-1]])


if __name__ == "__main__":
    main(sys.argv)
