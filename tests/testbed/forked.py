"""This machine, as the launcher local, but with ranks forked from one process that has imported torch.

Importing torch and DeepSpeed in every rank, and once more in torchrun, is nine tenths of a tiny run. Forked ranks are
processes of their own that meet over gloo all the same. What torchrun does (ending peers, saying who died, following
the controller) is tested by the campaigns that stay with the launcher local, and so is every reference.
"""

from __future__ import annotations

import gc
import importlib
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from paceline import store, worker
from paceline.launchers import local
from paceline.launchers.local import HERE, cancel, check, poll, submit
from paceline.measure import collection_paused
from paceline.plugins import Job, load
from paceline.processes import end_with_parent
from paceline.spec import RunSpec
from paceline.strategies import zero
from testbed import mortal

__all__ = ["HERE", "cancel", "check", "poll", "prepare", "submit"]

HOST = "127.0.0.1"


def prepare(spec: RunSpec, run_dir: Path) -> Job:
    return replace(local.prepare(spec, run_dir), argv=(sys.executable, "-m", "testbed.forked", str(run_dir)))


def main(run_dir: Path) -> int:
    end_with_parent(signal.SIGTERM)
    spec = store.read_spec(run_dir)
    import_for(spec)
    from torch.distributed import TCPStore

    # Connections wait in this socket until the ranks' store answers, which is made after forking: it starts a thread.
    meeting = socket.create_server((HOST, 0))
    port = meeting.getsockname()[1]
    size = spec.topology.world_size
    variables = {"MASTER_ADDR": HOST, "MASTER_PORT": str(port), "WORLD_SIZE": str(size)}
    os.environ |= {**variables, "TORCHELASTIC_USE_AGENT_STORE": "True"}
    ranks = {fork(lambda rank=rank: as_rank(rank, run_dir, meeting)): rank for rank in range(size)}
    _kept = TCPStore(HOST, port, is_master=True, wait_for_workers=False, master_listen_fd=meeting.detach())
    return await_all(ranks)


def import_for(spec: RunSpec) -> None:
    """What the ranks of this run will import, as far as it starts no thread."""
    with collection_paused():
        importlib.import_module("torch._dynamo" if spec.is_trained else "torch")
        load("workloads", spec.workload.name)
        if spec.strategy is not None and load("strategies", spec.strategy.name) is zero:
            zero.import_deepspeed(spec.topology.device)
    # Else the ranks' first collection would touch, and so copy, every page of what they share.
    gc.freeze()


def fork(body: Callable[[], int]) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        code = body()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def as_rank(rank: int, run_dir: Path, meeting: socket.socket) -> int:
    meeting.close()
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    mortal.arm(rank, run_dir)
    return worker.main(["paceline.worker", str(run_dir)])


def await_all(ranks: dict[int, int]) -> int:
    """0 when every rank ended well; the first that did not ends the others."""
    while ranks:
        pid, status = os.wait()
        rank, code = ranks.pop(pid), os.waitstatus_to_exitcode(status)
        if code == 0:
            continue
        sys.stderr.write(f"rank {rank} ended with exit code {code}\n")
        for other in ranks:
            os.kill(other, signal.SIGKILL)
            os.waitpid(other, 0)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
