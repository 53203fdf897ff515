"""One rank of a run, as a child of its process of the job; and what every process but the first does: follow.

A rank is a new process for every run, so nothing of one run is left in the next. It inherits what the engine bound its
parent to: cores, GPUs, limits.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from paceline.host.processes import end_all, end_with_parent
from paceline.launchers.here.processes_of_job import POLL_S, Position, Session, find_leader, read, write

# What a rank runs; tests have ranks without torch.
WORKER = "paceline.workloads.worker"
# How long ranks have to write their stacks before they are ended.
STACKS_S = 0.5
# Less often while a rank measures.
BUSY_POLL_S = 0.2
_ENDS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# Variables by which the engine of the job would be taken for the starter of the ranks.
_OF_STARTER = ("TORCHELASTIC_", "ROLE_", "GROUP_")


class Ended(Exception):
    """This process was asked to end."""


def start(run_dir: str, variables: Mapping[str, str], descriptors: Collection[int] = ()) -> subprocess.Popen[bytes]:
    """Start the rank of this process."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(_OF_STARTER)}
    with (Path(run_dir) / "log.txt").open("ab") as log:
        return subprocess.Popen(
            (sys.executable, "-m", WORKER, run_dir),
            env={**inherited, **variables},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=descriptors,
            preexec_fn=end_with_parent,
        )


def end(child: subprocess.Popen[bytes], with_stack: bool) -> None:
    """End a rank with all its processes; it may write its stack first."""
    if child.poll() is None:
        if with_stack:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.pid, signal.SIGUSR1)
            time.sleep(STACKS_S)
        end_all(child)


def follow(out: Path, where: Position) -> int:
    """Take part in the runs of rank 0 until it ends. Returns the exit code of the whole command."""
    for each in _ENDS:
        signal.signal(each, _end)
    session: Session | None = None
    try:
        session = find_leader(out, where)
        for job, number in _jobs(session):
            if str(where.rank) in job["ranks"]:
                code = _take_part(session, job, number)
                write(session.directory / f"exit-{number}-{where.rank}", str(code))
        return int(read(session.directory / "end") or 1)
    except Ended:
        return 128 + signal.SIGTERM
    finally:
        # The directory is gone if rank 0 has ended.
        with contextlib.suppress(OSError):
            if session is not None:
                write(session.directory / f"left-{where.rank}", "")


def _end(number: int, frame: FrameType | None) -> None:
    """Raise Ended once. Further signals must not interrupt the cleanup."""
    for each in _ENDS:
        signal.signal(each, signal.SIG_IGN)
    raise Ended


def _jobs(session: Session) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield the runs of rank 0 with their numbers, until it has ended or is gone."""
    number = 1
    while not (session.directory / "end").exists() and not _leader_is_gone(session):
        if text := read(session.directory / f"job-{number}.json"):
            yield json.loads(text), number
            number += 1
        else:
            time.sleep(POLL_S)


def _leader_is_gone(session: Session) -> bool:
    with contextlib.suppress(FileNotFoundError):
        session.beat()
        return session.is_gone(0)
    return True


def _take_part(session: Session, job: Mapping[str, Any], number: int) -> int:
    child = start(job["run_dir"], {**job["env"], **job["ranks"][str(session.own.rank)]})
    try:
        while child.poll() is None:
            if (session.directory / f"cancel-{number}").exists() or _leader_is_gone(session):
                end(child, with_stack=True)
            time.sleep(BUSY_POLL_S)
    finally:
        end(child, with_stack=False)
    assert child.returncode is not None
    return child.returncode
