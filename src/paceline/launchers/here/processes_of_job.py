"""The processes of a job that runs already: which one this is, and how all of them find each other.

They share the results directory (`--out`) and nothing else: no port is opened, so there is nothing to protect. Rank 0
leads; the others follow it by the files of one directory in it, which only this user can read:

    member-RANK.json   written by a process when it starts: its host, pid, GPUs and a random token
    leader.json        written by rank 0: the tokens it has seen, its own process, and the name of the session
    SESSION/           everything after that, so that files of an earlier job with the same name are never read
        ready-RANK     this process has seen its own token
        beat-RANK      a counter, by which the others on other hosts see that it is alive
        job-N.json     a run, and which processes take part
        exit-N-RANK    the exit code of a rank of it
        cancel-N       end the ranks of it
        left-RANK      why a process has left in an orderly way
        end            the exit code of the command, for all
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
import socket
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.errors import RequestError
from paceline.experiment.spec import Topology
from paceline.host import machine
from paceline.launchers.node import placement

# How long the processes of a job may take to start: hundreds of them import Python from a shared disk.
PATIENCE_S = 180.0
POLL_S = 0.1
# How long the counter of a process on another host may stand still: a shared disk may show it a minute late.
SILENCE_S = 150.0
BEAT_S = 1.0
USE = "Start it as in `torchrun --nproc-per-node 2 -m paceline run quick --launcher here`"

# The name of the job, set by `start`.
JOB = "PACELINE_JOB"
# engine -> variables of rank, number of processes, local rank and local number; then those that name the job.
_ENGINES: dict[str, tuple[tuple[str, str, str, str], tuple[str, ...]]] = {
    "torchrun": (
        ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
        (JOB, "TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT"),
    ),
    "mpirun": (
        (
            *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
            *("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
        ),
        ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_hnp_uri"),
    ),
    "mpiexec": (("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"), ("PMI_ID", "HYDI_CONTROL_FD")),
    # Inside a batch script there is no step yet, and one process only.
    "srun": (
        ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
        ("SLURM_JOB_ID", "SLURM_STEP_ID"),
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """This process in its job. local_size: processes on its host."""

    engine: str
    job: str
    rank: int
    size: int
    local_rank: int
    local_size: int


def position(environ: Mapping[str, str]) -> Position:
    """Read the position that the engine set; RequestError outside of a job.

    >>> position({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}).rank
    3
    """
    for engine, (names, job) in _ENGINES.items():
        # `2(x3),1`: tasks of the nodes of a step.
        texts = [re.split(r"\D", environ.get(name, ""))[0] for name in names]
        if engine == "srun" and "SLURM_STEP_ID" not in environ:
            continue
        if all(texts[:3]):
            rank, size, local_rank = (int(text) for text in texts[:3])
            local_size = int(texts[3] or size)
            name = " ".join((engine, *(environ.get(variable, "") for variable in job)))
            if environ.get("MASTER_ADDR", "") in ("localhost", "127.0.0.1", "::1"):
                # Another host may have a job of the same name.
                name += f" {socket.gethostname()}"
            if rank < size and local_rank < local_size <= size:
                return Position(
                    engine=engine, job=name, rank=rank, size=size, local_rank=local_rank, local_size=local_size
                )
    raise RequestError(f"launcher here: got no running job, expected a process of torchrun, srun or mpirun. {USE}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One process of the job as it describes itself."""

    rank: int
    token: str
    node: str
    host: str
    pid: int
    began_at: float
    gpus: int


def this_member(rank: int) -> Member:
    import psutil

    return Member(
        rank=rank,
        token=secrets.token_hex(8),
        node=placement.node_name(os.environ),
        host=socket.gethostname(),
        pid=os.getpid(),
        began_at=float(psutil.Process().create_time()),
        gpus=machine.device_count(),
    )


@dataclass(slots=True)
class Session:
    """The directory of one job, and who takes part. beats: the last counter of each process and when it changed. jobs:
    how many runs were started."""

    directory: Path
    own: Member
    members: Mapping[int, Member]
    beats: dict[int, tuple[str, float]]
    beaten_at: float = float("-inf")
    counter: int = 0
    jobs: int = 0

    def beat(self) -> None:
        """Show the others that this process is alive, at most once a second."""
        if time.monotonic() - self.beaten_at >= 0.9 * BEAT_S:
            self.beaten_at, self.counter = time.monotonic(), self.counter + 1
            write(self.directory / f"beat-{self.own.rank}", str(self.counter))

    def is_gone(self, rank: int) -> bool:
        """Whether a process is not there any more: by its pid on this host, by its counter on others."""
        member = self.members[rank]
        if (self.directory / f"left-{rank}").exists():
            return True
        if member.host == self.own.host:
            return not _is_alive(member)
        text, now = read(self.directory / f"beat-{rank}"), time.monotonic()
        if rank not in self.beats or self.beats[rank][0] != text:
            self.beats[rank] = (text, now)
        return now - self.beats[rank][1] > SILENCE_S

    def has_died(self, rank: int) -> bool:
        """Whether a process of this host has ended without saying so."""
        member = self.members[rank]
        own = member.host == self.own.host and not (self.directory / f"left-{rank}").exists()
        return own and not _is_alive(member)


def _is_alive(member: Member) -> bool:
    import psutil

    try:
        process = psutil.Process(member.pid)
        return process.status() != psutil.STATUS_ZOMBIE and abs(process.create_time() - member.began_at) < 1
    except psutil.Error:
        return False


# --- files ---


def write(path: Path, text: str) -> None:
    """Write a file as a whole: nobody ever reads a part of it."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_text(text)
    part.replace(path)


def read(path: Path) -> str:
    """Return the text of a file, empty if it does not exist."""
    try:
        return path.read_text()
    except OSError:
        return ""


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(read(path) or "{}")
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def directory_of(out: Path, where: Position) -> Path:
    """Return the directory of the job, private to this user; RequestError if it cannot be."""
    path = out.absolute() / f".here-{hashlib.sha256(where.job.encode()).hexdigest()[:12]}"
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        state = path.stat()
    except OSError as error:
        raise RequestError(f"--out: cannot write in {out} ({error.strerror}).") from None
    if state.st_uid != os.geteuid() or state.st_mode & 0o022:
        raise RequestError(f"--out: got {str(out)!r}, where {path.name} is writable by others; expected your own.")
    return path


# --- how the processes find each other ---


def gather(out: Path, where: Position) -> Session:
    """Rank 0: wait until every process of the job has answered; RequestError if one does not."""
    directory, own = directory_of(out, where), this_member(0)
    session, others = directory / secrets.token_hex(8), range(1, where.size)
    session.mkdir(mode=0o700)
    deadline = time.monotonic() + PATIENCE_S
    while True:
        members = {own.rank: own} | {rank: m for rank in others if (m := _read_member(directory, rank)) is not None}
        tokens = {str(member.rank): member.token for member in members.values()}
        write(directory / "leader.json", json.dumps({"session": session.name, "tokens": tokens, "own": asdict(own)}))
        missing = [rank for rank in others if not (session / f"ready-{rank}").exists()]
        if not missing:
            return Session(session, own, members, {})
        if time.monotonic() > deadline:
            names = ", ".join(map(str, missing[:8])) + (" ..." if len(missing) > 8 else "")
            shutil.rmtree(session, ignore_errors=True)
            raise RequestError(
                f"launcher here: got {where.size - len(missing)} of {where.size} processes within {PATIENCE_S:g} s, "
                f"expected all of them; missing: rank {names}. All processes must run the same command, and all nodes "
                f"must share the directory {out}."
            )
        time.sleep(POLL_S)


def _read_member(directory: Path, rank: int) -> Member | None:
    try:
        return Member(**_read_json(directory / f"member-{rank}.json"))
    except TypeError:
        return None


def find_leader(out: Path, where: Position) -> Session:
    """Any other rank: wait until rank 0 has seen this process; RequestError if it does not."""
    directory, own = directory_of(out, where), this_member(where.rank)
    write(directory / f"member-{where.rank}.json", json.dumps(asdict(own)))
    deadline = time.monotonic() + PATIENCE_S
    while True:
        seen = _read_json(directory / "leader.json")
        if seen.get("tokens", {}).get(str(where.rank)) == own.token:
            session = directory / Path(str(seen["session"])).name
            write(session / f"ready-{where.rank}", "")
            return Session(session, own, {0: Member(**seen["own"])}, {})
        if time.monotonic() > deadline:
            raise RequestError(
                f"launcher here: got no answer from rank 0 within {PATIENCE_S:g} s, expected one in "
                f"{directory.parent}. All processes must run the same command, and all nodes must share that directory."
            )
        time.sleep(POLL_S)


def seats(members: Iterable[Member], topology: Topology) -> dict[int, tuple[int, int]] | None:
    """Which processes take part in a run: rank in the job -> node and local rank in the run; None if they are too few.

    Nodes are numbered by their first process. On each, the first processes take part.
    """
    nodes: dict[str, list[int]] = {}
    for member in sorted(members, key=lambda member: member.rank):
        nodes.setdefault(member.node, []).append(member.rank)
    fitting = [ranks for ranks in nodes.values() if len(ranks) >= topology.processes_per_node]
    # The store of the ranks is on the host of rank 0.
    if len(fitting) < topology.nodes or 0 not in fitting[0]:
        return None
    chosen = fitting[: topology.nodes]
    return {
        rank: (node, local)
        for node, ranks in enumerate(chosen)
        for local, rank in enumerate(ranks[: topology.processes_per_node])
    }
