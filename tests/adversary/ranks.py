"""Runs of many folders by a few ranks: torch is imported once for all of them.

The ranks of CPU runs are forked from the nursery. CUDA does not survive a fork: torchrun starts the ranks of GPU runs
(`python -m adversary.ranks LISTING`).
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from testbed import forked

from paceline.results import store
from paceline.results.records import RunRecord, Status


def run_all(out: Path, folders: Sequence[Path], environment: Mapping[str, str]) -> list[RunRecord]:
    """Run these folders, whose runs have equally many ranks, one after another, and seal them."""
    spec = store.read_spec(folders[0])
    listing = out / f"folders-{folders[0].name}"
    listing.write_text("".join(f"{folder}\n" for folder in folders))
    env = {**environment, **forked.prepare(spec, folders[0]).env}
    command = [sys.executable, "-m", "testbed.nursery", "run", "zero-1", str(listing)]
    if spec.topology.device == "cuda":
        torchrun = ["torch.distributed.run", "--standalone", f"--nproc-per-node={spec.topology.world_size}"]
        command = [sys.executable, "-m", *torchrun, "-m", __name__, str(listing)]
        env["PYTHONFAULTHANDLER"] = "1"  # the log says where a rank crashed
    with listing.with_suffix(".log").open("w") as log:
        subprocess.run(command, env=env, stdout=log, stderr=log, check=False)
    records = []
    for folder in folders:
        outcomes = store.read_outcomes(folder)
        bad = next((o for o in outcomes if o.status is not Status.OK), None)
        status, error = (bad.status, bad.error) if bad else (Status.OK, None)
        store.seal(folder, status if outcomes else Status.FAILED, error, time.time(), time.time())
        records.append(store.read_run(folder))
    return records


if __name__ == "__main__":
    forked.run_many([Path(line) for line in Path(sys.argv[1]).read_text().splitlines()])
