"""This machine: one process per GPU or CPU share, nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.contract import Job, JobState
from paceline.errors import require
from paceline.experiment.plugins import load, parse_options
from paceline.experiment.spec import RunSpec
from paceline.host import machine
from paceline.host.processes import end_all, end_with_parent
from paceline.launchers import _warm
from paceline.launchers._start import rank_environment
from paceline.launchers.node import placement

# Ranks are processes of this host.
HERE = True
_children: dict[int | str, subprocess.Popen[bytes] | _warm.ForkedRun] = {}


@dataclass(frozen=True)
class Options:
    """threads: CPU threads of each process.

    warm: on a CPU with one thread, fork the ranks that train from a process that has imported torch; false: torchrun.
    Torchrun starts them in all other cases: CUDA and thread pools do not survive a fork.

    shared_gpu: all ranks on GPU 0, each under an NCCL host name of its own; a test of multi-rank code, never a speed.
    """

    threads: int = 1
    warm: bool = True
    shared_gpu: bool = False

    def __post_init__(self) -> None:
        require(self.threads >= 1, "local.threads", self.threads, "a whole number from 1")


def check(spec: RunSpec) -> str | None:
    chosen = parse_options(Options, spec.launcher)
    topology = spec.topology
    if topology.nodes != 1:
        return f"the launcher local has one node, not {topology.nodes}"
    gpus = machine.device_count()
    if topology.device == "cuda" and not chosen.shared_gpu and topology.processes_per_node > gpus:
        count = topology.processes_per_node
        needed = f"{count} processes need as many GPUs" if count > 1 else "1 process needs a GPU"
        return f"{needed}; this machine shows {gpus or 'none'}"
    return None


def prepare(spec: RunSpec, run_dir: Path) -> Job:
    chosen = parse_options(Options, spec.launcher)
    topology = spec.topology
    processes = f"--nproc-per-node={topology.processes_per_node}"
    # What the ranks print is in log.txt; without this torchrun leaves an empty folder among the temporary files.
    no_logs = f"--log-dir={os.devnull}"
    # By its own name torchrun would wait for itself for minutes, where that name does not resolve.
    alone = ("--standalone", "--local-addr=127.0.0.1")
    torchrun = (sys.executable, "-m", "torch.distributed.run", *alone, no_logs, processes)
    argv = (*torchrun, "-m", "paceline.workloads.worker", str(run_dir))
    env = rank_environment(chosen.threads)
    if sys.platform == "linux":
        # A host name that does not resolve would leave gloo without an address; one host needs only loopback.
        env["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    if chosen.shared_gpu:
        env |= {placement.SHARED_GPU: "1", "NCCL_SOCKET_IFNAME": "lo"}
    # What the command above does is then done by forking; see _warm.
    forks = chosen.warm and chosen.threads == 1 and topology.device == "cpu" and spec.is_trained
    settings: dict[str, Any] = {}
    if forks and sys.platform == "linux":
        settings = {"run_dir": str(run_dir), "processes": topology.processes_per_node, "preload": _preloading(spec)}
    return Job(argv=argv, env=env, log=str(run_dir / "log.txt"), settings=settings)


def _preloading(spec: RunSpec) -> str:
    """The strategy, where it has imports of its own: such runs have a warm process of their own, because the resident
    memory of other strategies must not contain them."""
    known = spec.strategy is not None and hasattr(load("strategies", spec.strategy.name), "preload")
    return spec.strategy.name if spec.strategy is not None and known else ""


def submit(job: Job) -> Mapping[str, Any]:
    assert job.log is not None
    environment = {**os.environ, **job.env}
    if job.settings:
        run = _warm.start(job.settings, environment, Path(job.log))
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
            preexec_fn=_end_with_controller,
        )
    _children[child.pid] = child
    return {"pid": child.pid, "ranks": "torchrun", "started_at": time.time()}


def _end_with_controller() -> None:
    """torchrun is told to stop when this process dies; ranks follow torchrun (see worker.py)."""
    end_with_parent(signal.SIGTERM)


def poll(handle: Mapping[str, Any]) -> JobState:
    child = _children.get(handle.get("run", handle["pid"]))
    if child is None:
        # A job of an earlier controller: it was told to stop when that one died.
        return JobState(running=False)
    code = child.poll()
    return JobState(running=code is None, exit_code=code)


def cancel(handle: Mapping[str, Any]) -> None:
    """End torchrun, or the supervisor of forked ranks, and every process below it."""
    child = _children.get(handle.get("run", handle["pid"]))
    if child is not None and child.poll() is None:
        end_all(child)


def close() -> None:
    """No more runs follow: end the warm processes."""
    _warm.close()
