"""Here: the processes of a torchrun, srun or mpirun that Paceline itself was started by; rank 0 leads the others."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from paceline.contract import Job, JobState
from paceline.errors import LaunchError, PacelineError, require
from paceline.experiment.choices import Choice
from paceline.experiment.plugins import Offer, parse_options
from paceline.experiment.spec import RunSpec, Topology
from paceline.host import machine
from paceline.launchers._job import rank_environment
from paceline.launchers.here import ranks
from paceline.launchers.here.processes_of_job import BEAT_S, Session, gather, position, read, seats, write
from paceline.launchers.node import rendezvous, torchrun
from paceline.results.records import Status

# After a rank has failed, how long the others may take to notice: most notice at once.
AFTERMATH_S = 3.0
# How long the other processes may take to end their ranks, and to leave at the end.
END_S, LEAVE_S = 30.0, 10.0


@dataclass(frozen=True)
class Options:
    """threads: CPU threads per process."""

    threads: int = 1

    def __post_init__(self) -> None:
        require(self.threads >= 1, "here.threads", self.threads, "a whole number, 1 or more")


@dataclass(slots=True)
class Running:
    """A run in progress. places: rank in the job -> rank in the run. child: the rank of this process. on_term: the
    handler of SIGTERM outside of a run. failed_at: when the first rank failed. lost: which process is gone."""

    number: int
    run_dir: str
    places: Mapping[int, int]
    child: subprocess.Popen[bytes]
    on_term: Any
    failed_at: float | None = None
    lost: str | None = None


_session: Session | None = None
_running: dict[int, Running] = {}


# --- the whole command ---


def attend(out: Path, control: Callable[[], int]) -> int:
    """Call `control` in rank 0 of the running job; in every other process, take part in its runs.

    Returns the exit code of `control` in all of them. RequestError outside of a job.
    """
    global _session
    where = position(os.environ)
    if where.rank != 0:
        return ranks.follow(out, where)
    _session = gather(out, where)
    code, done = 1, threading.Event()
    # A report may take minutes, in which the others must not believe that this process is gone.
    threading.Thread(target=_keep_beating, args=(_session, done), daemon=True).start()
    try:
        code = control()
        return code
    except KeyboardInterrupt:
        code = 130
        raise
    except PacelineError:
        code = 2
        raise
    finally:
        done.set()
        with contextlib.suppress(OSError):
            write(_session.directory / "end", str(code))
            _await_leaving(_session)
            shutil.rmtree(_session.directory.parent)
        _session = None


def _keep_beating(session: Session, done: threading.Event) -> None:
    with contextlib.suppress(FileNotFoundError):
        while not done.wait(BEAT_S):
            session.beat()


def _await_leaving(session: Session) -> None:
    deadline = time.monotonic() + LEAVE_S
    others = [rank for rank in session.members if rank != 0]
    while time.monotonic() < deadline and not all(session.is_gone(rank) for rank in others):
        time.sleep(0.05)


# --- one run ---


def offer(choice: Choice) -> Offer:
    parse_options(Options, choice)
    where = position(os.environ)
    return Offer(device=machine.device_kind(), processes=where.local_size, nodes=max(1, where.size // where.local_size))


def check(spec: RunSpec) -> str | None:
    parse_options(Options, spec.launcher)
    where, topology = position(os.environ), spec.topology
    if topology.world_size > where.size:
        return f"{topology.world_size} processes are needed; this job has {where.size}"
    members = _session.members.values() if _session else ()
    places = seats(members, topology) if _session else {}
    if places is None:
        per_node = topology.processes_per_node
        return f"{topology.nodes} x {per_node} processes (nodes x processes) are needed; this job has them elsewhere"
    blind = [m for m in members if m.rank in places and m.gpus < topology.processes_per_node]
    if topology.device == "cuda" and blind:
        return (
            f"every process must see all GPUs that its node uses ({topology.processes_per_node}); rank {blind[0].rank} "
            f"sees {blind[0].gpus}. With srun, use --gpus-per-node and --gpu-bind=none instead of --gpus-per-task"
        )
    return None


def preflight(specs: Sequence[RunSpec]) -> None:
    """Only `paceline run` has all processes of the job take part."""
    if _session is None:
        raise LaunchError("it takes part in a running job with `paceline run` only")


def prepare(spec: RunSpec, run_dir: Path) -> Job:
    chosen = parse_options(Options, spec.launcher)
    run_dir = run_dir.absolute()
    argv = (sys.executable, "-m", ranks.WORKER, str(run_dir))
    settings = {"run_dir": str(run_dir), "topology": spec.to_dict()["topology"]}
    return Job(argv=argv, env=rank_environment(spec, chosen.threads), log=str(run_dir / "log.txt"), settings=settings)


def submit(job: Job) -> Mapping[str, Any]:
    """Let the first processes of the job start their ranks. KeyboardInterrupt if one of them is gone: no later run
    could start either, and what was measured is kept."""
    session = _session
    assert session is not None
    topology = Topology(**job.settings["topology"])
    places = seats(session.members.values(), topology)
    assert places is not None
    if gone := [rank for rank in places if rank != 0 and session.is_gone(rank)]:
        raise KeyboardInterrupt(f"rank {gone[0]} of the running job on {session.members[gone[0]].node} is gone")
    listener = torchrun.listen(_address(session, places))
    master, port = listener.getsockname()[:2]
    world = {rank: node * topology.processes_per_node + local for rank, (node, local) in places.items()}
    each = {}
    for rank, (node, local) in places.items():
        each[rank] = {
            "RANK": str(world[rank]),
            "WORLD_SIZE": str(topology.world_size),
            "LOCAL_RANK": str(local),
            "LOCAL_WORLD_SIZE": str(topology.processes_per_node),
            "GROUP_RANK": str(node),
            "GROUP_WORLD_SIZE": str(topology.nodes),
            **torchrun.store_variables(master, port, listener.fileno() if rank == 0 else None),
        }
    names = ("GLOO_SOCKET_IFNAME", *(("NCCL_SOCKET_IFNAME",) if topology.device == "cuda" else ()))
    interface = rendezvous.interface_of(master)
    network = {} if interface is None else {name: interface for name in names if name not in os.environ}
    session.jobs += 1
    env, number, run_dir = {**network, **job.env}, session.jobs, job.settings["run_dir"]
    Path(run_dir, "log.txt").write_bytes(b"")
    with listener:
        child = ranks.start(run_dir, {**env, **each[0]}, [listener.fileno()])
    request = {"run_dir": run_dir, "env": env, "ranks": {str(rank): own for rank, own in each.items() if rank != 0}}
    write(session.directory / f"job-{number}.json", json.dumps(request))
    _running[number] = Running(number, run_dir, world, child, signal.getsignal(signal.SIGTERM))
    _note_deaths(_running[number], session)
    return {"number": number, "pid": child.pid, "processes": sorted(places)}


def _address(session: Session, places: Mapping[int, tuple[int, int]]) -> str:
    """The address of this host by which the other hosts of a run reach it."""
    if len({session.members[rank].host for rank in places}) == 1:
        return torchrun.LOOPBACK
    name = os.environ.get("MASTER_ADDR") or socket.gethostname()
    try:
        return str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise LaunchError(f"the name of this host, {name}, does not resolve ({error}); set MASTER_ADDR") from None


def _note_deaths(running: Running, session: Session) -> None:
    """When torchrun loses a process, it ends all others with SIGTERM. Then the run has failed, and was not interrupted:
    `poll` reports it before this process ends."""

    def ended(number: int, frame: FrameType | None) -> None:
        dead = [rank for rank in running.places if rank != 0 and session.has_died(rank)]
        if dead:
            running.lost = _lost(session, dead[0], running.places[dead[0]])
        elif callable(running.on_term):
            running.on_term(number, frame)

    signal.signal(signal.SIGTERM, ended)


def _lost(session: Session, rank: int, own: int) -> str:
    return f"rank {own}: its process in the running job, number {rank} on {session.members[rank].node}, is gone"


def poll(handle: Mapping[str, Any]) -> JobState:
    running, session = _running.get(int(handle["number"])), _session
    if running is None or session is None:
        # A job of an earlier controller: it ended with it.
        return JobState(running=False)
    codes = {0: running.child.poll()}
    for rank in running.places:
        if rank != 0:
            text = read(session.directory / f"exit-{running.number}-{rank}")
            codes[rank] = int(text) if text else None
            if codes[rank] is None and running.lost is None and session.is_gone(rank):
                running.lost = _lost(session, rank, running.places[rank])
    if running.lost is not None:
        return JobState(running=False, status=Status.FAILED, reason=running.lost)
    failed = {rank: code for rank, code in codes.items() if code}
    if failed and running.failed_at is None:
        running.failed_at = time.monotonic()
    late = running.failed_at is not None and time.monotonic() - running.failed_at > AFTERMATH_S
    if None in codes.values() and not late:
        return JobState(running=True)
    with Path(running.run_dir, "log.txt").open("a") as log:
        for rank, code in failed.items():
            # In the format of torchrun's report, which the controller parses.
            own = running.places[rank]
            log.write(f"Root Cause:\n  rank      : {own} (local_rank: {own})\n  exitcode  : {code} (pid: 0)\n")
    return JobState(running=False, exit_code=next(iter(failed.values()), 0))


def cancel(handle: Mapping[str, Any]) -> None:
    """End all ranks of the run and wait until they have ended."""
    running, session = _running.pop(int(handle["number"]), None), _session
    if running is None or session is None:
        return
    if running.lost is None:
        # Otherwise SIGTERM is about to come, and must not prevent the seal.
        signal.signal(signal.SIGTERM, running.on_term)
    write(session.directory / f"cancel-{running.number}", "")
    ranks.end(running.child, with_stack=True)
    deadline = time.monotonic() + END_S
    others = [rank for rank in running.places if rank != 0]
    while time.monotonic() < deadline:
        if all((session.directory / f"exit-{running.number}-{r}").exists() or session.is_gone(r) for r in others):
            break
        time.sleep(0.05)
