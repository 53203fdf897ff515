"""Ranks without torch, instead of torchrun (`agent --runner testbed.light`), to test engines.

They write what real ranks write, where they write it: position, samples, gauges, machine, outcome. The variable
LIGHT_FAULT (`WHAT:RANK`) plants a fault: die (killed by signal 9), fail (an error as its outcome), hang (makes no more
progress), mute (ends without an outcome), full (the disk is full), fill (fills the disk, then fails). LIGHT_S is how
long a rank runs. Deaths are reported in torchrun's words. If LIGHT_MEETING names a directory, ranks are the real ones
of served replicas (see `folder_store`).

A spec with the workload `reference` ends ok with them, because its verdict needs finite losses only.
"""

from __future__ import annotations

import argparse
import errno
import faulthandler
import os
import signal
import socket
import sys
import time
from pathlib import Path

from paceline.experiment.spec import RunSpec
from paceline.host.processes import end_with_parent
from paceline.launchers.node import placement
from paceline.results import store
from paceline.results.records import GaugeSample, Outcome, Status, StepSample


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--nproc-per-node", type=int, default=1)
    parser.add_argument("--store-fd", type=int)
    known, rest = parser.parse_known_args(argv[1:])
    run_dir = Path(rest[-1])
    spec, place = store.read_spec(run_dir), placement.here(os.environ)
    # Where ranks would meet; agents have met before.
    _kept = socket.socket(fileno=known.store_fd) if known.store_fd is not None else None
    first = place.node * known.nproc_per_node
    ranks = {fork(spec, run_dir, first + local): first + local for local in range(known.nproc_per_node)}
    while ranks:
        pid, status = os.wait()
        code, rank = os.waitstatus_to_exitcode(status), ranks.pop(pid)
        if code:
            told = (
                f"Root Cause:\n  rank      : {rank} (local_rank: {rank - first})\n  exitcode  : {code} (pid: {pid})\n"
            )
            sys.stdout.write(told)
            sys.stdout.flush()
            for other in ranks:
                os.kill(other, signal.SIGKILL)
            return 1
    if "LIGHT_MEETING" in os.environ:
        from testbed import folder_store

        folder_store.leave_together(place.node, spec.topology.nodes)
    return 0


def fork(spec: RunSpec, run_dir: Path, rank: int) -> int:
    pid = os.fork()
    if pid == 0:
        code = 1
        end_with_parent()
        try:
            with (run_dir / f"stack-{rank}.txt").open("w") as stacks:
                faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
                code = live(spec, run_dir, rank)
        finally:
            os._exit(code)
    return pid


def live(spec: RunSpec, run_dir: Path, rank: int) -> int:
    if "LIGHT_MEETING" in os.environ:
        from testbed import folder_store

        return folder_store.serve(run_dir, rank, spec.topology.world_size, spec.topology.processes_per_node)
    what, _, whom = os.environ.get("LIGHT_FAULT", "").partition(":")
    fault = what if whom and int(whom) == rank else ""
    host = placement.node_name(os.environ)
    store.write_json(run_dir / f"machine-{host}.json", {"host": host, "cpu": None, "gpus": [], "versions": {}})
    position, began = store.ProgressFile(run_dir, rank), time.time()
    pause = float(os.environ.get("LIGHT_S", "0.5")) / spec.steps
    error = None
    # A host has one file of gauges.
    gauges = run_dir / f"samples-gauges-{rank}.jsonl" if rank % spec.topology.processes_per_node == 0 else None
    with (run_dir / f"samples-{rank}.jsonl").open("w", buffering=1) as file:
        for step in range(spec.steps):
            if gauges is not None:
                with gauges.open("a") as readings:
                    readings.write(
                        store.sample_line(GaugeSample(rank=rank, host=host, at_s=time.time(), cpu_ratio=0.25))
                    )
            time.sleep(pause)
            if step == spec.steps // 2:
                error = suffer(fault, run_dir)
            if error:
                break
            position.mark(step, "forward")
            file.write(store.sample_line(step_sample(rank, step, pause)))
    if fault == "mute":
        return 3
    status = Status.FAILED if error else Status.OK
    outcome = Outcome(
        rank=rank,
        status=status,
        error=error,
        host=host,
        pid=os.getpid(),
        started_at=began,
        ended_at=time.time(),
    )
    if fault == "fill":
        from paceline.workloads.worker import leave_outcome

        leave_outcome(run_dir, outcome)
    else:
        store.write_outcome(run_dir, outcome)
    return 1 if error else 0


def suffer(fault: str, run_dir: Path) -> str | None:
    if fault == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "hang":
        time.sleep(3600)
    if fault == "full":
        return f"OSError: {os.strerror(errno.ENOSPC)}"
    if fault == "fill":
        try:
            with (run_dir / "ballast").open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(4096))
        except OSError as error:
            return f"OSError: {error}"
    return "ValueError: asked to fail" if fault == "fail" else None


def step_sample(rank: int, step: int, duration_s: float) -> StepSample:
    unknown = dict.fromkeys(("data_wait_s", "h2d_s", "h2d_bytes", "forward_s", "backward_s", "optimizer_s"))
    return StepSample(
        rank=rank,
        step=step,
        duration_s=duration_s,
        **unknown,
        tokens=64,
        samples=1,
        micro_batches=1,
        updates=1,
        loss=3.0,
        grad_norm=1.0,
        data_digest=step,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv))
