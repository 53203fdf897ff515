"""What Paceline's clock costs a collective: its bus bandwidth over that of a bare torch loop, on the same buffers.

Both loops launch the same collective back to back. Paceline's marks every launch (`Ensemble.durations`, as the workload
uses it); the bare one reads the clock at both ends. They alternate in one run, every second pair in reverse order, so
that drift cancels; segments are short, so that a disturbance hits both. Goal: the median ratio of every size from 1 MiB
up within 0.98 and 1.02. The 95 % interval of that median says whether the machine was quiet enough to tell.

Run `python benchmarks/collectives.py [OPERATION ...]` (all_reduce by default; it starts one process per GPU, or two on
a CPU), or under torchrun. One JSON line per operation and size. Nothing here passes or fails.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

from paceline.experiment.choices import Choice
from paceline.experiment.spec import RunSpec, Topology, Training
from paceline.host import machine
from paceline.models.arithmetic import wire_factor
from paceline.workloads import worker

# Launches of one segment take about this long, and all pairs of a size together about that long.
SEGMENT_S, SIZE_S = 0.02, 15.0
FEWEST_LAUNCHES, FEWEST_PAIRS = 2, 16
SIZES = {"cpu": [1 << 20, 4 << 20, 16 << 20, 64 << 20], "cuda": [1 << 20, 16 << 20, 256 << 20, 1 << 30]}
GOAL = (0.98, 1.02)


class NoRecorder:
    """The sweep's own recorder is outside the timed window, and so is this."""

    def add(self, sample: Any) -> None: ...
    def progress(self, step: int, phase: str) -> None: ...
    def conclude(self, evidence: Any) -> None: ...


def start_processes() -> int:
    """This script again, once per device."""
    processes = machine.device_count() if machine.device_kind() == "cuda" else 2
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore::FutureWarning"}
    environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return subprocess.run([sys.executable, *launch, *sys.argv], env=environment, check=False).returncode


def compare(ensemble: Any, name: str, size_bytes: int) -> dict[str, Any]:
    """Alternating segments of one operation at one size; both times are the slowest rank's."""
    from paceline.workloads.collectives.operations import OPERATIONS

    operation, place = OPERATIONS[name], ensemble.place
    count = operation.count(size_bytes, 4, place.ranks)
    buffers, reason = ensemble.allocate(operation, "fp32", count, operation.in_place[0])
    if buffers is None:
        return {"operation": name, "size_bytes": 4 * count, "error": reason}
    buffers.send.fill_(0.0)
    launch = operation.bind(buffers, place, None, False)
    for _ in range(5):
        launch()
    each_s = ensemble.largest([min(ensemble.wall_s(launch) for _ in range(5))])[0]
    iterations = max(FEWEST_LAUNCHES, int(SEGMENT_S / each_s))
    pairs = max(FEWEST_PAIRS, int(SIZE_S / (2 * iterations * each_s)))
    loops = {
        "bare": lambda: bare_s(ensemble, launch, iterations),
        "paceline": lambda: statistics.fmean(ensemble.durations(launch, iterations)),
    }
    seconds: dict[str, list[float]] = {"bare": [], "paceline": []}
    for pair in range(pairs):
        for loop in ("bare", "paceline")[:: -1 if pair % 2 else 1]:
            seconds[loop].append(ensemble.largest([loops[loop]()])[0])
    ratios = [bare / ours for bare, ours in zip(seconds["bare"], seconds["paceline"], strict=True)]
    moved = 4 * count * wire_factor(name, place.ranks)
    return {
        "operation": name,
        "size_bytes": 4 * count,
        "ranks": place.ranks,
        "iterations_per_segment": iterations,
        "pairs": pairs,
        "bare_busbw_gb_per_s": round(moved / statistics.median(seconds["bare"]) / 1e9, 3),
        "paceline_busbw_gb_per_s": round(moved / statistics.median(seconds["paceline"]) / 1e9, 3),
        "ratio_median": round(statistics.median(ratios), 4),
        "ratio_low": round(min(ratios), 4),
        "ratio_high": round(max(ratios), 4),
        "median_interval": median_interval(ratios),
        "goal": GOAL,
    }


def median_interval(values: list[float]) -> tuple[float, float]:
    """95 % interval of the median: the order statistics 0.98 sqrt(n) away from the middle."""
    ordered, reach = sorted(values), 0.98 * len(values) ** 0.5
    low, high = int(len(values) / 2 - reach), min(len(values) - 1, int(len(values) / 2 + reach))
    return round(ordered[low], 4), round(ordered[high], 4)


def bare_s(ensemble: Any, launch: Any, iterations: int) -> float:
    """What a user would write: seconds per launch, one clock around all of them."""
    import torch
    import torch.distributed as dist

    on_gpu = ensemble.seat.device == "cuda"
    dist.barrier()
    if on_gpu:
        torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(iterations):
        launch()
    if on_gpu:
        torch.cuda.synchronize()
    return (time.perf_counter() - begin) / iterations


def main() -> int:
    if "RANK" not in os.environ:
        return start_processes()
    from paceline.workloads.collectives.ensemble import Ensemble

    device = machine.device_kind()
    topology = Topology(device=device, processes_per_node=int(os.environ["WORLD_SIZE"]))
    training = Training(sequence_length=1, micro_batch=1)
    spec = RunSpec(
        experiment="benchmark", workload=Choice("collectives"), model=Choice("tiny"), topology=topology,
        training=training, steps=1,
    )  # fmt: skip
    seat = worker.take_seat(spec, int(os.environ["RANK"]))
    worker.join(spec, seat)
    ensemble = Ensemble(seat, NoRecorder())
    for name in sys.argv[1:] or ["all_reduce"]:
        for size_bytes in SIZES[device]:
            found = compare(ensemble, name, size_bytes)
            if seat.rank == 0:
                print(json.dumps(found), flush=True)
    worker.leave()
    return 0


if __name__ == "__main__":
    sys.exit(main())
