"""This machine: one process per GPU, or several on the CPU; nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.contract import Job, JobState
from paceline.errors import require
from paceline.experiment.plugins import load, parse_options
from paceline.experiment.spec import RunSpec
from paceline.host import machine
from paceline.host.processes import end_all, end_with_parent
from paceline.launchers import _network, _warm
from paceline.launchers._job import rank_environment
from paceline.launchers.node import placement

# Ranks are processes of this host.
HERE = True
# Tables name these beside the launcher.
AXES = ("network_mbit",)
# Imported before the ranks of a GPU start, where torch compiles (torchao and bitsandbytes import this too) and where
# models of transformers are fine-tuned. PEFT and their models would ask the driver, because they import torchao and
# bitsandbytes.
COMPILER = ("torch._inductor.compile_fx",)
TUNING = ("transformers.models.mistral.configuration_mistral",)
_children: dict[int | str, subprocess.Popen[bytes] | _warm.ForkedRun] = {}


@dataclass(frozen=True)
class Options:
    """threads: CPU threads per process.

    warm: for training with one thread per process, fork the ranks from a process that has already imported torch. They
    are new interpreters in all other cases, because thread pools do not survive a fork.

    shared_gpu: run all ranks on GPU 0, each with its own NCCL host name, to test multi-rank code; not a measurement.

    network_mbit: emulate a network between the ranks, with links of so many Mbit/s in each direction. 0: loopback.
    """

    threads: int = 1
    warm: bool = True
    shared_gpu: bool = False
    network_mbit: float = 0.0

    def __post_init__(self) -> None:
        require(self.threads >= 1, "local.threads", self.threads, "a whole number, 1 or more")
        low, high = _network.LOWEST_MBIT, _network.HIGHEST_MBIT
        valid = not self.network_mbit or low <= self.network_mbit <= high
        require(valid, "local.network_mbit", self.network_mbit, f"0 for none, or Mbit/s from {low:g} to {high:g}")


def check(spec: RunSpec) -> str | None:
    chosen = parse_options(Options, spec.launcher)
    topology = spec.topology
    if topology.nodes != 1:
        return f"the launcher local supports one node, not {topology.nodes}"
    if chosen.network_mbit and (reason := _why_no_network(spec, chosen)):
        return reason
    gpus = machine.device_count()
    if topology.device == "cuda" and not chosen.shared_gpu and topology.processes_per_node > gpus:
        count = topology.processes_per_node
        needed = f"{count} processes need {count} GPUs" if count > 1 else "1 process needs a GPU"
        return f"{needed}; this machine has {gpus or 'none'}"
    return None


def _why_no_network(spec: RunSpec, chosen: Options) -> str | None:
    if spec.topology.device != "cpu" or not _forks(spec, chosen):
        return "an emulated network (local:network_mbit) is for training on a CPU with one thread and warm=true"
    if spec.topology.world_size > _network.MOST_HOSTS:
        return f"an emulated network has at most {_network.MOST_HOSTS} hosts, got {spec.topology.world_size}"
    return _network.why_not()


def _forks(spec: RunSpec, chosen: Options) -> bool:
    """Whether the ranks are forked from a warm process; they are new interpreters otherwise."""
    trains_here = spec.is_trained and spec.script is None
    return chosen.warm and chosen.threads == 1 and trains_here and sys.platform == "linux"


def _kind(spec: RunSpec) -> _warm.Kind:
    """What the warm process of this run imports besides torch. More than one process keeps these imports out of the
    resident memory of other runs."""
    strategy = spec.strategy.name if spec.strategy is not None else ""
    own = strategy if strategy and hasattr(load("strategies", strategy), "preload") else ""
    # On a CPU they would change the memory that is measured, which is the resident one.
    on_gpu = spec.topology.device == "cuda"
    compiled = on_gpu and (spec.training.compilation is not None or spec.tuning is not None)
    tuned = on_gpu and spec.tuning is not None
    return _warm.Kind(spec.topology.device, own, (*(COMPILER if compiled else ()), *(TUNING if tuned else ())))


def prepare(spec: RunSpec, run_dir: Path) -> Job:
    chosen = parse_options(Options, spec.launcher)
    topology = spec.topology
    processes = f"--nproc-per-node={topology.processes_per_node}"
    # The output of the ranks is in log.txt. Without this, torchrun leaves an empty temporary directory.
    no_logs = f"--log-dir={os.devnull}"
    # Opens its store on loopback only.
    torchrun = (sys.executable, "-m", "paceline.launchers.node.torchrun", no_logs, processes)
    argv = (*torchrun, "-m", "paceline.workloads.worker", str(run_dir))
    env = rank_environment(spec, chosen.threads)
    if sys.platform == "linux":
        # One host needs only loopback, where no other host can connect. gloo also finds no other address if the host
        # name does not resolve.
        for name in ("GLOO_SOCKET_IFNAME", *(("NCCL_SOCKET_IFNAME",) if topology.device == "cuda" else ())):
            env.setdefault(name, os.environ.get(name, "lo"))
    if chosen.shared_gpu:
        env |= {placement.SHARED_GPU: "1", "NCCL_SOCKET_IFNAME": "lo"}
    # Forking then replaces the command above, unless the imports make that impossible; see _warm.
    settings: dict[str, Any] = {}
    if _forks(spec, chosen):
        settings = {"run_dir": str(run_dir), "processes": topology.processes_per_node, **asdict(_kind(spec))}
        settings |= {"network_mbit": chosen.network_mbit} if chosen.network_mbit else {}
    return Job(argv=argv, env=env, log=str(run_dir / "log.txt"), settings=settings)


def expect(specs: Sequence[RunSpec]) -> None:
    """Begin to import torch where ranks will be forked, while the controller prepares their campaign."""
    forked = [spec for spec in specs if check(spec) is None and _forks(spec, parse_options(Options, spec.launcher))]
    if not forked:
        return
    # A reference runs without variables of the spec.
    first = min(forked, key=lambda spec: len(spec.env))
    environment = prepare(first, Path()).env
    on_gpu = [spec for spec in forked if spec.topology.device == "cuda" and prepare(spec, Path()).env == environment]
    for kind in dict.fromkeys((_kind(first).first, *map(_kind, on_gpu))):
        _warm.begin(kind, {**os.environ, **environment})


def submit(job: Job) -> Mapping[str, Any]:
    assert job.log is not None
    environment = {**os.environ, **job.env}
    if job.settings:
        run = _warm.start({**job.settings, "argv": job.argv}, environment, Path(job.log))
        name = f"forked-{len(_children)}"
        _children[name] = run
        return {"run": name, "pid": run.server.pid, "ranks": "forked", "started_at": time.time()}
    with Path(job.log).open("wb") as log:
        child = subprocess.Popen(
            job.argv,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            # torchrun ends with this process, and the ranks with torchrun (see worker.py).
            preexec_fn=lambda: end_with_parent(signal.SIGTERM),
        )
    _children[child.pid] = child
    return {"pid": child.pid, "ranks": "torchrun", "started_at": time.time()}


def poll(handle: Mapping[str, Any]) -> JobState:
    child = _children.get(handle.get("run", handle["pid"]))
    if child is None:
        # A job of an earlier controller: it ended with it.
        return JobState(running=False)
    code = child.poll()
    return JobState(running=code is None, exit_code=code)


def cancel(handle: Mapping[str, Any]) -> bool:
    """End torchrun, or the supervisor of forked ranks, with all its processes, and return whether they are gone."""
    child = _children.get(handle.get("run", handle["pid"]))
    return child is None or child.poll() is not None or end_all(child)


def close() -> None:
    """End the warm processes."""
    _warm.close()
