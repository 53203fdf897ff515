"""The ranks of a job on one node, started as torchrun starts them but before torch is imported.

torchrun imports torch first, which takes seconds in which no rank does anything. Here the ranks start at once and
import it themselves, beside this process, which needs it for the store alone: connections wait in the open socket until
the store answers.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from types import FrameType
from typing import NoReturn

from paceline.host.processes import end_with_parent

_ENDS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
POLL_S = 0.05
# How long ranks have to end after SIGTERM, as with torchrun.
GRACE_S = 30.0


class Ended(Exception):
    """This process was asked to end."""


def variables(address: str, port: int, processes: int) -> dict[str, str]:
    """The variables that torchrun sets in every rank of a job on one node; `own_variables` has the others."""
    return {
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_NAME": "default",
        "ROLE_WORLD_SIZE": str(processes),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": "paceline",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        # These two unless they are set.
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        **({"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")} if processes > 1 else {}),
    }


def own_variables(rank: int) -> dict[str, str]:
    """The variables that torchrun sets in this rank."""
    return {name: str(rank) for name in ("RANK", "LOCAL_RANK", "ROLE_RANK")}


def death_text(rank: int, code: int, pid: int) -> str:
    """How a rank ended, in the format of torchrun's report, which the controller parses."""
    return f"Root Cause:\n  rank      : {rank} (local_rank: {rank})\n  exitcode  : {code} (pid: {pid})\n"


def run(
    command: Sequence[str], processes: int, listener: socket.socket, serve: Callable[[socket.socket], object]
) -> int:
    """Run `python COMMAND` as `processes` ranks and wait for them. `serve` returns the store of the job, which takes
    over the listener; it is called after the ranks have started.

    Returns 0 if all succeeded. After a failure, or a signal to end, the others get SIGTERM and later SIGKILL.
    """
    for each in _ENDS:
        signal.signal(each, _end)
    address, port = listener.getsockname()[:2]
    shared = {**os.environ, **variables(address, port, processes)}
    running: dict[int, subprocess.Popen[bytes]] = {}
    try:
        for rank in range(processes):
            running[rank] = _start(command, {**shared, **own_variables(rank)})
        # In this process, so that it outlives the rank that ends first.
        _store = serve(listener)
        return _wait(running)
    except Ended:
        return 128 + signal.SIGTERM
    finally:
        for each in _ENDS:
            signal.signal(each, signal.SIG_IGN)
        _end_all(running.values())


def _start(command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    # As with torchrun, each rank leads a session, by which it is ended together with what it started.
    return subprocess.Popen(
        [sys.executable, "-u", *command], env=environment, start_new_session=True, preexec_fn=end_with_parent
    )


def _wait(running: dict[int, subprocess.Popen[bytes]]) -> int:
    """Wait for the ranks and remove those that have ended. Returns 1 at the first failures, which are reported."""
    while running:
        codes = {rank: code for rank, child in running.items() if (code := child.poll()) is not None}
        for rank, code in codes.items():
            child = running.pop(rank)
            if code:
                sys.stderr.write(death_text(rank, code, child.pid))
        sys.stderr.flush()
        if any(codes.values()):
            return 1
        time.sleep(POLL_S)
    return 0


def _end_all(children: Collection[subprocess.Popen[bytes]]) -> None:
    for how in (signal.SIGTERM, signal.SIGKILL):
        left = [child for child in children if child.poll() is None]
        for child in left:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, how)
        deadline = time.monotonic() + GRACE_S
        for child in left:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(max(0.0, deadline - time.monotonic()))


def _end(number: int, frame: FrameType | None) -> NoReturn:
    raise Ended
