"""This machine, as the launcher local, but with ranks forked from a process that has imported torch (see nursery).

Importing torch and DeepSpeed in every rank, and once more in torchrun, is nine tenths of a tiny run. Forked ranks are
processes of their own that meet over gloo all the same. What torchrun does (ending peers, saying who died, following
the controller) is tested by the campaigns that stay with the launcher local.
"""

from __future__ import annotations

import gc
import importlib
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from paceline import store, worker
from paceline.launchers import local
from paceline.launchers.local import cancel, check, poll, submit
from paceline.measure import collection_paused
from paceline.plugins import Job, load
from paceline.processes import end_with_parent
from paceline.spec import RunSpec
from paceline.strategies import zero
from testbed import mortal, nursery

__all__ = ["cancel", "check", "poll", "prepare", "submit"]

HOST = "127.0.0.1"
POLL_S = 0.02


def prepare(spec: RunSpec, run_dir: Path) -> Job:
    words = ("-m", "testbed.nursery", "run", kind_of(spec), str(run_dir))
    return replace(local.prepare(spec, run_dir), argv=(sys.executable, *words))


def kind_of(spec: RunSpec) -> str:
    """What its ranks import: runs of one kind can be forked from one process. OpenMP reads its threads only once."""
    stage = "zero" if spec.strategy is not None and load("strategies", spec.strategy.name) is zero else "plain"
    return f"{spec.workload.name}-{stage}-{spec.is_trained}-{spec.launcher.options.get('threads', 1)}"


def import_for(kind: str) -> None:
    """What the ranks of such runs will import, as far as it starts no thread."""
    workload, stage, trained, _ = kind.rsplit("-", 3)
    with collection_paused():
        importlib.import_module("torch._dynamo" if trained == "True" else "torch")
        load("workloads", workload)
        if stage == "zero":
            zero.import_deepspeed("cpu")
    # Else the ranks' first collection would touch, and so copy, every page of what they share.
    gc.freeze()


def bring_up(run_dir: Path, link: socket.socket) -> int:
    """All ranks of one run, from here to their end, or until nobody waits for them."""
    end_with_parent(signal.SIGKILL)
    sys.path += [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path not in sys.path]
    from torch.distributed import TCPStore

    # Connections wait in this socket until the ranks' store answers, which is made after forking: it starts a thread.
    meeting = socket.create_server((HOST, 0))
    port = meeting.getsockname()[1]
    size = store.read_spec(run_dir).topology.world_size
    variables = {"MASTER_ADDR": HOST, "MASTER_PORT": str(port), "WORLD_SIZE": str(size)}
    os.environ |= {**variables, "TORCHELASTIC_USE_AGENT_STORE": "True"}
    ranks = {fork(lambda rank=rank: as_rank(rank, run_dir, meeting)): rank for rank in range(size)}
    _kept = TCPStore(HOST, port, is_master=True, wait_for_workers=False, master_listen_fd=meeting.detach())
    return await_all(ranks, link)


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


def await_all(ranks: dict[int, int], link: socket.socket) -> int:
    """0 when every rank ended well; the first that did not ends the others, and so does nobody's waiting for them."""
    while ranks:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            if nursery.is_alone(link):
                return end(ranks)
            time.sleep(POLL_S)
            continue
        rank, code = ranks.pop(pid), os.waitstatus_to_exitcode(status)
        if code:
            sys.stderr.write(f"rank {rank} ended with exit code {code}\n")
            return end(ranks)
    return 0


def end(ranks: dict[int, int]) -> int:
    for rank in ranks:
        os.kill(rank, signal.SIGKILL)
        os.waitpid(rank, 0)
    return 1
