"""What nodes without a shared disk have to say: the output files that Slurm writes for them, brought home as they grow.

They lie in a folder that the controller sees, or on the disks of the nodes. From there they are fetched by srun: while
the job runs within its own allocation, afterwards by a small job on the same nodes.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from paceline.launchers.node import log_transport
from paceline.launchers.slurm import states
from paceline.launchers.slurm.script import batch_output, node_output
from paceline.launchers.slurm.states import Away

# Between two visits to the nodes' disks: each is a step of the job.
FETCH_S = 10.0
# How long a later job may wait for a node that was given back.
RETURN_S = 120
_BATCH = -1
# Holds the number of the job whose results are in the run folder, all of them.
HOME = "home.txt"


class Lines:
    """The lines of one job: files of ranks go into the run folder, whatever else was printed into its log.txt."""

    def __init__(self, handle: Mapping[str, Any]) -> None:
        self._handle = handle
        self._run_dir = Path(handle["run_dir"])
        self._nodes = int(handle["nodes"])
        self._fetched_at = float("-inf")
        # An earlier controller may have had everything, and removed it where it was, before it died.
        self._is_home = self._home.is_file() and self._home.read_text() == self._handle["job_id"]
        self._begin()

    @property
    def _home(self) -> Path:
        return self._run_dir / HOME

    def _begin(self) -> None:
        self._receiver = log_transport.Receiver(self._run_dir)
        self._taken = dict.fromkeys((*range(self._nodes), _BATCH), 0)
        self._cut = dict.fromkeys(self._taken, b"")
        if not self._is_home:
            (self._run_dir / "log.txt").write_bytes(b"")

    def forget(self) -> None:
        """Begin anew: a job that was put back into the queue writes its output again from the start."""
        for path in log_transport.carried(self._run_dir):
            path.unlink()
        self._begin()

    def take(self, under_way: bool) -> None:
        """Whatever is new. Nodes whose files are fetched are let go once all of them are home."""
        if self._is_home:
            return
        if not self._handle["fetched"]:
            self._read()
        elif under_way and time.monotonic() - self._fetched_at > FETCH_S:
            self._fetch()
            self._fetched_at = time.monotonic()
            if self._missing() is None:
                self._release()

    def _read(self) -> None:
        for node in self._taken:
            path = Path(self._path(node))
            if path.is_file():
                with path.open("rb") as file:
                    file.seek(self._taken[node])
                    self._feed(node, file.read())

    def _fetch(self) -> None:
        inside = [f"--jobid={self._handle['job_id']}", "--overlap", "--mem=0"]
        for node in range(self._nodes):
            if not self._is_whole(node):
                found = _visit(*inside, f"--relative={node}", *self._tail(node))
                self._feed(node, found or b"")

    def _tail(self, node: int) -> list[str]:
        return ["tail", "-c", f"+{self._taken[node] + 1}", "--", self._path(node)]

    def _release(self) -> None:
        """Bring the script's own words home, then remove the file that the script waits for, and the others."""
        inside = [f"--jobid={self._handle['job_id']}", "--overlap", "--mem=0"]
        self._feed(_BATCH, _visit(*inside, "--relative=0", *self._tail(_BATCH)) or b"")
        for node in reversed(range(self._nodes)):
            _visit(*inside, f"--relative={node}", "rm", "-f", "--", *self._paths(node))

    def last(self, nodes: str, but: Collection[int] = ()) -> str | None:
        """After the end of the job: what is left to bring home, and which of it could not be, but for some nodes."""
        if self._is_home:
            return None
        if not self._handle["fetched"]:
            self._read()
        else:
            for node, host in enumerate(_hosts(nodes)):
                self._return_to(host, node)
        return self._missing(but)

    def _missing(self, but: Collection[int] = ()) -> str | None:
        missing = self._receiver.missing(self._nodes, but)
        if missing is None:
            self._home.write_text(self._handle["job_id"])
            self._is_home = True
        return missing

    def _return_to(self, host: str, node: int) -> None:
        """A job of its own on a node that the job has left: fetch and remove what lies there."""
        name = f"--job-name={self._handle['name']}-fetch"
        job = [*self._handle["limits"], name, f"--nodelist={host}", f"--immediate={RETURN_S}", "--time=5"]
        if not self._is_whole(node):
            self._feed(node, _visit(*job, *self._tail(node)) or b"")
        _visit(*job, "rm", "-f", "--", *self._paths(node))

    def remove(self) -> None:
        """What lies in a folder that the controller sees; disks of nodes were cleared when it was fetched."""
        if not self._handle["fetched"]:
            for node in self._taken:
                Path(self._path(node)).unlink(missing_ok=True)

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
        *whole, self._cut[node] = (self._cut[node] + data).split(b"\n")
        with (self._run_dir / "log.txt").open("a") as log:
            log.writelines(self._foreign(whole))

    def _foreign(self, lines: list[bytes]) -> Iterator[str]:
        for line in lines:
            other = self._receiver.feed(line.decode(errors="replace"))
            if other is not None:
                yield other + "\n"


def _visit(*words: str) -> bytes | None:
    """What one command printed on one node; None when it could not be run there."""
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


def _hosts(nodes: str) -> list[str]:
    try:
        return list(states.hosts(nodes))
    except Away:
        return []
