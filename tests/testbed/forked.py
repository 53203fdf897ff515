"""This machine, as the launcher local, but with ranks forked from a process that has imported torch (see nursery).

Importing torch and DeepSpeed in every rank, and once more in torchrun, is nine tenths of a tiny run. Forked ranks are
processes of their own that meet over gloo all the same. What torchrun does (ending peers, saying who died, following
the controller) is tested by the campaigns that stay with the launcher local. References are started as the runs are,
because this launcher does not say that its ranks are HERE.
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
from testbed import mortal, networks, nursery

__all__ = ["cancel", "check", "poll", "prepare", "submit"]

HOST = "127.0.0.1"
POLL_S = 0.02
# Of fine-tuning: transformers imports models only when they are asked for.
TUNED = ("bitsandbytes", "peft", "transformers.models.mistral.modeling_mistral")


def prepare(spec: RunSpec, run_dir: Path) -> Job:
    words = ("-m", "testbed.nursery", "run", kind_of(spec), str(run_dir))
    return replace(local.prepare(spec, run_dir), argv=(sys.executable, *words))


def kind_of(spec: RunSpec) -> str:
    """What its ranks import beside torch: runs of one kind can be forked from one process. OpenMP reads its threads
    only once."""
    sharded = spec.strategy is not None and load("strategies", spec.strategy.name) is zero
    extras = (*(["zero"] if sharded else []), *(["tuned"] if spec.tuning is not None else []))
    return "-".join((*extras, str(spec.launcher.options.get("threads", 1))))


def import_for(kind: str) -> None:
    """What the ranks of such runs will import, as far as it starts no thread."""
    *extras, _ = kind.split("-")
    with collection_paused():
        # The optimizers import the first at their first step, sharding the second.
        for name in ("torch._dynamo", "torch.distributed.fsdp", *(TUNED if "tuned" in extras else ())):
            importlib.import_module(name)
        if "zero" in extras:
            zero.import_deepspeed("cpu")
    # Else the ranks' first collection would touch, and so copy, every page of what they share.
    gc.freeze()


def bring_up(run_dir: Path, link: socket.socket) -> int:
    """All ranks of one run, from here to their end, or until nobody waits for them. Where FORKED_HOSTS names network
    namespaces, each rank is on a host of its own."""
    end_with_parent(signal.SIGKILL)
    sys.path[:0] = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path not in sys.path]
    if hosts := os.environ.get("FORKED_HOSTS", "").split():
        ranks = {fork(lambda rank=rank: on_host(hosts, rank, run_dir)): rank for rank in range(len(hosts))}
        return await_all(ranks, link)
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


def on_host(hosts: list[str], rank: int, run_dir: Path) -> int:
    """As a scheduler starts it: on its host, under a name of its own, with torchrun's variables."""
    networks.enter(hosts[rank], f"node{rank}")
    networks.put_first()
    master, _, port = os.environ["FORKED_MASTER"].partition(":")
    os.environ |= {"MASTER_ADDR": master, "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "eth0"}
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(len(hosts)), "LOCAL_WORLD_SIZE": "1"}
    return worker.main(["paceline.worker", str(run_dir)])


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
