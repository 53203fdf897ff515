"""Ranks that work through many run folders in one process each: `python -m adversary.ranks FOLDERS PORT`.

FOLDERS is a file with one run folder per line. Every run has a process group of its own, and torch is imported once.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from paceline.results import store
from paceline.results.records import RunRecord, Status

TESTS = Path(__file__).parent.parent


def main(argv: Sequence[str]) -> None:
    import torch
    import torch.distributed as dist

    from paceline.workloads import pretrain, worker

    pretrain.profile_steps = lambda *_: None  # a profile says nothing about equal work
    worker.probe = functools.cache(worker.probe)
    torch.set_num_threads(1)
    for number, folder in enumerate(Path(argv[1]).read_text().splitlines()):
        os.environ["MASTER_PORT"] = str(int(argv[2]) + number)
        torch.manual_seed(0)
        if os.environ["RANK"] != "0":
            wait_for_store(int(os.environ["MASTER_PORT"]))
        worker.main(["worker", folder])
        if dist.is_initialized():  # the run failed
            dist.destroy_process_group()


def wait_for_store(port: int) -> None:
    """Until rank 0 listens: torch would try again only after half a second."""
    for _ in range(6000):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            return
        time.sleep(0.01)


def run_all(out: Path, folders: Sequence[Path], world_size: int, port: int) -> list[RunRecord]:
    """Run these folders one after another on `world_size` ranks, and seal them as ok."""
    listing = out / f"folders-{world_size}-{port}"
    listing.write_text("".join(f"{folder}\n" for folder in folders))
    shared = {**os.environ, "WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
    shared |= {"PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]), "USE_LIBUV": "0"}
    command = [sys.executable, "-m", "adversary.ranks", str(listing), str(port)]
    logs = [(out / f"log-{world_size}-{port}-{rank}.txt").open("w") for rank in range(world_size)]
    ranks = [
        subprocess.Popen(command, env={**shared, "RANK": str(r), "LOCAL_RANK": str(r)}, stdout=logs[r], stderr=logs[r])
        for r in range(world_size)
    ]
    for rank in ranks:
        rank.wait()
    for log in logs:
        log.close()
    records = []
    for folder in folders:
        outcomes = store.read_outcomes(folder)
        bad = next((o for o in outcomes if o.status is not Status.OK), None)
        status, error = (bad.status, bad.error) if bad else (Status.OK, None)
        store.seal(folder, status if outcomes else Status.FAILED, error, time.time(), time.time())
        records.append(store.read_run(folder))
    return records


if __name__ == "__main__":
    main(sys.argv)
