"""Ranks without torch, in the place of torchrun (`paceline.agent --runner testbed.light`): engines are tested by them.

They write what real ranks write, where they write it: position, samples, machine, outcome. What goes wrong is told by
the variable LIGHT_FAULT, `WHAT:RANK`: die (killed by signal 9), fail (a sentence as its outcome), hang (moves no more),
mute (ends without an outcome), full (no room on the disk). LIGHT_S is how long a rank lives.

A spec whose workload is `reference` ends ok with them: its verdict needs finite losses only.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import signal
import socket
import sys
import time
from pathlib import Path

from paceline import places, store
from paceline.records import Outcome, Status, StepSample
from paceline.spec import RunSpec


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--nproc-per-node", type=int, default=1)
    parser.add_argument("--master-port", type=int)
    parser.add_argument("--rdzv-endpoint", default=":0")
    known, rest = parser.parse_known_args(argv[1:])
    run_dir = Path(rest[-1])
    spec, place = store.read_spec(run_dir), places.here(os.environ)
    port = known.master_port or int(known.rdzv_endpoint.rpartition(":")[2])
    # Where ranks would meet: the other nodes look whether somebody answers.
    _kept = meet(port, place.nodes - 1) if port and place.node == 0 else None
    first = place.node * known.nproc_per_node
    ranks = {fork(spec, run_dir, first + local): first + local for local in range(known.nproc_per_node)}
    while ranks:
        pid, status = os.wait()
        code = os.waitstatus_to_exitcode(status)
        ranks.pop(pid)
        if code:
            for other in ranks:
                os.kill(other, signal.SIGKILL)
            return 1
    return 0


def meet(port: int, others: int) -> socket.socket:
    """As torchrun does: ranks begin when every node has come, or one that begins late would find nobody."""
    server = socket.create_server(("", port))
    server.settimeout(30)
    with contextlib.suppress(TimeoutError):
        for _ in range(others):
            server.accept()[0].close()
    return server


def fork(spec: RunSpec, run_dir: Path, rank: int) -> int:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = live(spec, run_dir, rank)
        finally:
            os._exit(code)
    return pid


def live(spec: RunSpec, run_dir: Path, rank: int) -> int:
    what, _, whom = os.environ.get("LIGHT_FAULT", "").partition(":")
    fault = what if whom and int(whom) == rank else ""
    host = places.node_name(os.environ)
    store.write_json(run_dir / f"machine-{host}.json", {"host": host})
    position, began = store.ProgressFile(run_dir, rank), time.time()
    pause = float(os.environ.get("LIGHT_S", "0.5")) / spec.steps
    error = None
    with (run_dir / f"samples-{rank}.jsonl").open("w", buffering=1) as file:
        for step in range(spec.steps):
            time.sleep(pause)
            if step == spec.steps // 2:
                error = suffer(fault)
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
    store.write_outcome(run_dir, outcome)
    return 1 if error else 0


def suffer(fault: str) -> str | None:
    if fault == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "hang":
        time.sleep(3600)
    if fault == "full":
        return f"OSError: {os.strerror(errno.ENOSPC)}"
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
