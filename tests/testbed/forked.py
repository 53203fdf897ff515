"""The launcher local, with ranks forked from a process that has imported torch (see `nursery`).

Importing torch and DeepSpeed in every rank, and once more in torchrun, takes nine tenths of a tiny run. Forked ranks
are separate processes that communicate over gloo as usual, and are supervised as those of the launcher local. That
launcher has one such process per campaign; here all campaigns of the tests share one. References are started like the
runs, because this launcher does not declare HERE.
"""

from __future__ import annotations

import concurrent.futures
import functools
import gc
import importlib
import multiprocessing
import os
import runpy
import select
import signal
import socket
import sys
import traceback
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from paceline.contract import Job
from paceline.experiment.plugins import load
from paceline.experiment.spec import RunSpec
from paceline.host.processes import collection_paused, end_with_parent
from paceline.launchers import _warm, local
from paceline.launchers.local import cancel, check, close, poll, submit
from paceline.results import store
from paceline.training.strategies import zero
from testbed import mortal, networks, nursery

__all__ = ["cancel", "check", "close", "poll", "prepare", "submit"]

# The optimizers import the first at their first step, sharding the second.
RANKS = ("torch._dynamo", "torch.distributed.fsdp", "psutil", "paceline.workloads.worker", "paceline.workloads._loop")
RANKS += ("paceline.workloads.pretrain", "paceline.training.data.corpus", "paceline.training.step_profile")
RANKS += tuple(f"paceline.training.strategies.{name}" for name in ("_torch", "ddp", "fsdp2", "mesh", "_mesh.trainer"))
# Without torch.
COMMANDS = ("psutil", "pynvml", "rich.console", "rich.table", "numpy.random", "paceline.cli.experiments")
COMMANDS += (
    "paceline.cli.machines",
    "paceline.cli.results",
    "paceline.analysis.report",
    "paceline.analysis.compare.folders",
)
COMMANDS += tuple(
    f"paceline.report.{name}" for name in ("terminal", "exporters.html", "exporters.markdown", "exporters.json")
)
COMMANDS += tuple(f"paceline.campaign.run.{name}" for name in ("controller", "forecast", "findings"))
COMMANDS += ("paceline.campaign.live.display", "paceline.campaign.live.status_page", "paceline.cli.command")
COMMANDS += ("paceline.workloads.pretrain", "paceline.workloads.reference", "numpy.ma")
# Of fine-tuning: transformers imports models only when they are asked for.
TUNED = ("bitsandbytes", "peft", "transformers.models.mistral.modeling_mistral")


def prepare(spec: RunSpec, run_dir: Path) -> Job:
    words = ("-m", "testbed.nursery", "run", kind_of(spec), str(run_dir))
    return replace(local.prepare(spec, run_dir), argv=(sys.executable, *words), settings={})


def kind_of(spec: RunSpec) -> str:
    """What the ranks of a run import besides torch. Runs of one kind can be forked from one process; the number of
    threads is part of it, because OpenMP reads it only once."""
    sharded = spec.strategy is not None and load("strategies", spec.strategy.name) is zero
    extras = [*(["zero"] if sharded else []), *(["tuned"] if spec.tuning is not None else [])]
    return "-".join((*extras, str(spec.launcher.options.get("threads", 1))))


def import_for(kind: str) -> None:
    """Import what runs of this kind, or commands, will import, except modules that start threads."""
    *extras, _ = kind.split("-")
    names = COMMANDS if kind == nursery.COMMAND else (*RANKS, *(TUNED if "tuned" in extras else ()))
    with collection_paused():
        for name in names:
            importlib.import_module(name)
        if "zero" in extras:
            zero.import_deepspeed("cpu")
    # Else the ranks' first collection would touch, and so copy, every page of what they share.
    gc.freeze()


def run_command(request: Mapping[str, Any], link: socket.socket) -> int:
    """Run `paceline ARGUMENTS`, or a program. Nodes start ranks with the runner FORKED_RUNNER instead of torchrun. If
    FORKED_PROGRAMS is set, torchrun and the warm process of the launcher local are forked from the server."""
    from paceline import cli
    from paceline.launchers import _job

    if "module" in request:
        return run_program(request["module"], request["arguments"], link)

    # One that a test no longer waits for ends with the tests.
    end_with_parent(signal.SIGTERM)
    _job.RUNNER = os.environ.get("FORKED_RUNNER")
    if "FORKED_PROGRAMS" in os.environ:
        nursery.fork_programs()
    sys.argv = ["paceline", *request["arguments"]]
    try:
        return cli.main()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
        return 1


def bring_up(request: Mapping[str, Any], link: socket.socket) -> int:
    """Start all ranks of one run and wait for them; kill them if the client goes away.

    If FORKED_HOSTS names network namespaces, each rank runs on its own host. A file instead of a run directory lists
    many directories, or (with the suffix .call) has `MODULE FUNCTION RANKS`: a function to call in each rank."""
    end_with_parent(signal.SIGKILL)
    if "module" in request:
        return run_program(request["module"], request["arguments"], link)
    run_dir = Path(request["run_dir"])
    if run_dir.suffix == ".call":
        module, function, processes = run_dir.read_text().split()
        called = getattr(importlib.import_module(module), function)
        return _warm.supervise(run_dir, int(processes), link, called)
    if run_dir.is_file():
        folders = [Path(line) for line in run_dir.read_text().splitlines()]
        processes = store.read_spec(folders[0]).topology.world_size
        return _warm.supervise(run_dir, processes, link, lambda _: run_many(folders))
    hosts = os.environ.get("FORKED_HOSTS", "").split()

    def prepare_rank(rank: int) -> None:
        if not is_profiled(store.read_spec(run_dir)):
            profile_nothing()
        on_host(hosts, rank) if hosts else mortal.arm(rank, run_dir)
        if rank == 0 and "FORKED_REHEARSALS" in os.environ:
            fork_rehearsals()

    _warm.load_plugins(run_dir)
    return _warm.supervise(run_dir, store.read_spec(run_dir).topology.world_size, link, prepare_rank)


def run_program(module: str, arguments: list[str], link: socket.socket) -> int:
    """The exit code of `python -m MODULE ARGUMENTS`, negative for a signal. It is killed if the client goes away.

    What it starts with its own interpreter, as torchrun starts ranks, is forked by the server too."""
    nursery.fork_programs()
    program = os.fork()
    if program == 0:
        code = 1
        try:
            link.close()
            end_with_parent(signal.SIGKILL)
            sys.stdin, sys.stdout, sys.stderr = (os.fdopen(n, mode, buffering=1) for n, mode in enumerate("rww"))
            sys.argv = [module, *arguments]
            if not hasattr(sys.modules.get(module), "__path__"):
                sys.modules.pop(module, None)  # it becomes __main__, of a package another module does
            runpy.run_module(module, run_name="__main__", alter_sys=True)
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
            if isinstance(end.code, str):
                sys.stderr.write(f"{end.code}\n")
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    ended = os.pidfd_open(program)
    if ended not in select.select([ended, link], [], [])[0]:
        os.kill(program, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(program, 0)[1])


def is_profiled(spec: RunSpec) -> bool:
    """Whether a run is profiled: all are, unless FORKED_PROFILED lists the strategies (separated by `;`) that are."""
    chosen = os.environ.get("FORKED_PROFILED")
    return chosen is None or str(spec.strategy) in chosen.split(";")


def profile_nothing() -> None:
    """Turn profiles off: they say nothing about equal work."""
    from paceline.workloads import pretrain

    pretrain.profile_steps = pretrain.profile_dimensions = lambda *_: None


def fork_rehearsals() -> None:
    """Rehearse memory in a process forked from this one, before the rank does anything, to import torch only once."""
    from paceline.workloads import memory

    context = multiprocessing.get_context("fork")
    pool = concurrent.futures.ProcessPoolExecutor(1, mp_context=context, initializer=memory.begin_rehearsals)
    pool.submit(int).result()
    concurrent.futures.ProcessPoolExecutor = lambda *_, **__: pool


def run_many(folders: list[Path]) -> NoReturn:
    """Run these folders one after another in this rank, without profiles.

    Every run has its own process group and its own prefix in the store. On GPUs the group is not bound to its device:
    torch 2.11's split_group crashes (signal 11) if the caller provided the store.
    """
    import torch
    import torch.distributed as dist

    from paceline.workloads import worker

    profile_nothing()
    worker.probe = functools.cache(worker.probe)
    init, rank, world_size = dist.init_process_group, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    shared = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    for number, folder in enumerate(folders):
        meeting = {"store": dist.PrefixStore(str(number), shared), "rank": rank, "world_size": world_size}
        dist.init_process_group = lambda *words, given=meeting, **named: init(
            *words, **named | given | {"device_id": None}
        )
        torch.manual_seed(0)
        forget_groups_of_deepspeed()
        worker.main(["worker", str(folder)])
        if dist.is_initialized():  # the run failed
            dist.destroy_process_group()
    sys.exit(0)


def forget_groups_of_deepspeed() -> None:
    """Clear DeepSpeed's process groups: it keeps the first one that it sees as long as the process lives."""
    if groups := sys.modules.get("deepspeed.utils.groups"):
        groups._WORLD_GROUP = groups.mesh_device = None
        sys.modules["deepspeed.comm.comm"].cdb = None


def on_host(hosts: list[str], rank: int) -> None:
    """Run a rank as a scheduler would: on its own host, with torchrun's variables and the store in rank 0."""
    networks.enter(hosts[rank], f"node{rank}")
    networks.put_first()
    master, _, port = os.environ["FORKED_MASTER"].partition(":")
    for name in [name for name in os.environ if name.startswith(("TORCHELASTIC_", "GROUP_", "ROLE_"))]:
        del os.environ[name]
    os.environ |= {"MASTER_ADDR": master, "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "eth0"}
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
