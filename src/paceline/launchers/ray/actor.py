"""The actor of one rank on its node: keeps an agent as a child process and hands on what it prints.

Ray carries this class to the nodes by its own bytes, so it imports nothing of Paceline at its top: a node without the
package, or with another version of it, can still say so.
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

# Ray kills the direct children of an actor that ends, without a word. The shell takes that blow; the agent below it is
# told to end (by the kernel, and by its closed input), and then ends the rank and removes its files.
_SHIELD = ("sh", "-c", '"$@"; exit $?', "paceline-rank")


class RankActor:
    """`facts` first, then `start` once, `read` until it says that all has come; `end` at any time."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None
        self._lines: list[str] = []
        self._taken = 0

    def facts(self, scratch: str) -> dict[str, Any]:
        import ray

        context = ray.get_runtime_context()
        address = ray.util.get_node_ip_address()
        return {
            "node_id": context.get_node_id(),
            "address": address,
            "interface": _interface_of(address),
            "port": _free_port(),
            "gpus": [str(gpu) for gpu in context.get_accelerator_ids().get("GPU", [])],
            "python": ".".join(map(str, sys.version_info[:3])),
            "version": _paceline_version(),
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
        self._reader = threading.Thread(target=self._take_lines, daemon=True)
        self._reader.start()

    def _take_lines(self) -> None:
        assert self._child is not None
        assert self._child.stdout is not None
        for line in self._child.stdout:
            self._lines.append(line)

    def read(self, taken: int) -> tuple[list[str], int | None]:
        """The lines after the first `taken`, and the exit code once there will be no more. What is read stays here
        until the next call says that it has come."""
        assert self._child is not None
        assert self._reader is not None
        over = not self._reader.is_alive() and self._child.poll() is not None
        # In place: the reader appends to it meanwhile.
        del self._lines[: taken - self._taken]
        self._taken = taken
        return list(self._lines), self._child.returncode if over else None

    def end(self, taken: int, grace_s: float) -> list[str]:
        """End the rank and return its last lines; an agent that does not listen is killed with all it started."""
        if self._child is None or self._reader is None:
            return []
        assert self._child.stdin is not None
        # By its parent's death the agent is told to end. A closed input would say that nobody hears it any more.
        self._child.kill()
        self._reader.join(grace_s)
        with contextlib.suppress(OSError):
            self._child.stdin.close()
        self._reader.join(grace_s / 4)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGKILL)
        self._child.wait()
        return self.read(taken)[0]


def _paceline_version() -> str | None:
    try:
        from paceline import __version__
    except ImportError:
        return None
    return __version__


def _interface_of(address: str) -> str | None:
    """The interface by which Ray's nodes reach this one; ranks take the same."""
    try:
        import psutil
    except ImportError:
        return None
    for name, found in psutil.net_if_addrs().items():
        if address in [entry.address for entry in found]:
            return str(name)
    return None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
