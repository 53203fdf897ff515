"""This machine, as the launcher local, but with ranks forked from a process that has imported torch (see nursery).

Importing torch and DeepSpeed in every rank, and once more in torchrun, is nine tenths of a tiny run. Forked ranks are
processes of their own that meet over gloo all the same. They are supervised as those of the launcher local, which has
one such process per campaign; here all campaigns of the tests share it. References are started as the runs are,
because this launcher does not say that its ranks are HERE.
"""

from __future__ import annotations

import gc
import importlib
import os
import signal
import socket
import sys
from dataclasses import replace
from pathlib import Path

from paceline.contract import Job
from paceline.experiment.plugins import load
from paceline.experiment.spec import RunSpec
from paceline.host.processes import end_with_parent
from paceline.launchers import _warm, local
from paceline.launchers.local import cancel, check, poll, submit
from paceline.results import store
from paceline.training.instruments import collection_paused
from paceline.training.strategies import zero
from testbed import mortal, networks

__all__ = ["cancel", "check", "poll", "prepare", "submit"]

# Of fine-tuning: transformers imports models only when they are asked for.
TUNED = ("bitsandbytes", "peft", "transformers.models.mistral.modeling_mistral")


def prepare(spec: RunSpec, run_dir: Path) -> Job:
    words = ("-m", "testbed.nursery", "run", kind_of(spec), str(run_dir))
    return replace(local.prepare(spec, run_dir), argv=(sys.executable, *words), settings={})


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
    hosts = os.environ.get("FORKED_HOSTS", "").split()

    def prepare_rank(rank: int) -> None:
        on_host(hosts, rank) if hosts else mortal.arm(rank, run_dir)

    return _warm.supervise(run_dir, store.read_spec(run_dir).topology.world_size, link, prepare_rank)


def on_host(hosts: list[str], rank: int) -> None:
    """As a scheduler starts it: on its host, under a name of its own, with torchrun's variables, store in rank 0."""
    networks.enter(hosts[rank], f"node{rank}")
    networks.put_first()
    master, _, port = os.environ["FORKED_MASTER"].partition(":")
    for name in [name for name in os.environ if name.startswith(("TORCHELASTIC_", "GROUP_", "ROLE_"))]:
        del os.environ[name]
    os.environ |= {"MASTER_ADDR": master, "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "eth0"}
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
