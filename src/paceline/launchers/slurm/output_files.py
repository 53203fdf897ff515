"""The output files of nodes that share no disk with the controller, received as they grow.

Slurm writes them into a directory that the controller sees, or on the disks of the nodes. From the nodes they are
fetched with srun: inside the job's own allocation while it runs, afterwards by a small job on the same nodes.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from paceline.host.rank_lines import LineSplitter
from paceline.launchers.node import log_transport
from paceline.launchers.slurm import states
from paceline.launchers.slurm.script import batch_output, node_output

# Interval of fetches from the nodes' disks; each is a step of the job.
FETCH_S = 10.0
# How long a later job may wait for a node that was released.
RETURN_S = 120
_BATCH = -1
# Contains the id of the job whose results are completely in the run directory.
COMPLETE = "home.txt"


class OutputFiles:
    """The output of one job: files of ranks go into the run directory, all other lines into its log.txt."""

    def __init__(self, handle: Mapping[str, Any]) -> None:
        self._handle = handle
        self._run_dir = Path(handle["run_dir"])
        self._nodes = int(handle["nodes"])
        self._fetched_at = float("-inf")
        self._marker = self._run_dir / COMPLETE
        # An earlier controller may have received everything and removed the files before it died.
        self._is_complete = self._marker.is_file() and self._marker.read_text() == self._handle["job_id"]
        self._begin()

    def _begin(self) -> None:
        self._receiver = log_transport.Receiver(self._run_dir)
        self._taken = dict.fromkeys((*range(self._nodes), _BATCH), 0)
        self._lines = {node: LineSplitter() for node in self._taken}
        if not self._is_complete:
            (self._run_dir / "log.txt").write_bytes(b"")

    def restart(self) -> None:
        """Forget everything: a requeued job writes its output again from the start."""
        for path in log_transport.carried(self._run_dir):
            path.unlink()
        self._begin()

    def take(self, is_running: bool) -> None:
        """Take what is new. Nodes whose files are fetched are released once all files have arrived."""
        if self._is_complete:
            return
        if not self._handle["fetched"]:
            self._read()
        elif is_running and time.monotonic() - self._fetched_at > FETCH_S:
            inside = [f"--jobid={self._handle['job_id']}", "--overlap", "--mem=0"]
            for node in range(self._nodes):
                if not self._is_whole(node):
                    self._feed(node, _visit(*inside, f"--relative={node}", *self._tail(node)) or b"")
            self._fetched_at = time.monotonic()
            if self._missing() is None:
                # The script waits until its first file is removed, so take the script's own output before that.
                self._feed(_BATCH, _visit(*inside, "--relative=0", *self._tail(_BATCH)) or b"")
                for node in reversed(range(self._nodes)):
                    _visit(*inside, f"--relative={node}", "rm", "-f", "--", *self._paths(node))

    def take_last(self, nodes: str, but: Collection[int] = ()) -> str | None:
        """Take the rest after the end of the job. Returns a sentence about what is missing, except for some nodes."""
        if self._is_complete:
            return None
        if not self._handle["fetched"]:
            self._read()
            return self._missing(but)
        try:
            hosts = states.hosts(nodes)
        except states.Unavailable:
            hosts = []
        for node, host in enumerate(hosts):
            # The job has left the node, so a job of its own fetches and removes the files.
            name = f"--job-name={self._handle['name']}-fetch"
            job = [*self._handle["limits"], name, f"--nodelist={host}", f"--immediate={RETURN_S}", "--time=5"]
            if not self._is_whole(node):
                self._feed(node, _visit(*job, *self._tail(node)) or b"")
            _visit(*job, "rm", "-f", "--", *self._paths(node))
        return self._missing(but)

    def remove(self) -> None:
        """Remove the files from a directory that the controller sees. Fetching already removed those on the nodes."""
        if not self._handle["fetched"]:
            for node in self._taken:
                Path(self._path(node)).unlink(missing_ok=True)

    def _read(self) -> None:
        for node in self._taken:
            path = Path(self._path(node))
            if path.is_file():
                with path.open("rb") as file:
                    file.seek(self._taken[node])
                    self._feed(node, file.read())

    def _tail(self, node: int) -> list[str]:
        return ["tail", "-c", f"+{self._taken[node] + 1}", "--", self._path(node)]

    def _missing(self, but: Collection[int] = ()) -> str | None:
        missing = self._receiver.missing(self._nodes, but)
        if missing is None:
            self._marker.write_text(self._handle["job_id"])
            self._is_complete = True
        return missing

    def _is_whole(self, node: int) -> bool:
        arrival = self._receiver.arrivals.get(node)
        return arrival is not None and arrival.is_whole and arrival.exit_code is not None

    def _path(self, node: int) -> str:
        folder, name, job_id = (str(self._handle[key]) for key in ("folder", "name", "job_id"))
        return batch_output(folder, name, job_id) if node == _BATCH else node_output(folder, name, job_id, node)

    def _paths(self, node: int) -> list[str]:
        return [self._path(node), *([self._path(_BATCH)] if node == 0 else [])]

    def _feed(self, node: int, data: bytes) -> None:
        self._taken[node] += len(data)
        with (self._run_dir / "log.txt").open("a", encoding="utf-8") as log:
            for line in self._lines[node].add(data):
                printed = self._receiver.feed(line.decode(errors="replace"))
                if printed is not None:
                    log.write(printed + "\n")


def _visit(*words: str) -> bytes | None:
    """Return the output of a command on one node, or None if it could not be run there."""
    command = ["srun", "--quiet", "--nodes=1", "--ntasks=1", *words]
    try:
        done = subprocess.run(
            command,
            env=states.environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=RETURN_S + states.COMMAND_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
