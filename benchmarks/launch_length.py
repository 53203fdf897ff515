"""How long a launch should be: its cost beside the measured steps, and how much of the scatter is between launches.

Repeating a cell costs `overhead_s` and `step_s` per measured step. Its mean varies by `between` from launch to launch,
and by `within` / sqrt(steps) inside one. For a given time, the interval over all launches is narrowest with
sqrt(overhead_s / step_s) * within / between steps in each: `best_steps`, or null if launches differ by no more than
their steps explain. Beyond that, longer launches raise the share of measured steps and widen the interval.

Run `python benchmarks/launch_length.py DIRECTORY ...` on results or on unpacked runs of docs/measured. One JSON line
per cell with at least three launches, most steps first. With so few launches `between` is a rough estimate.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from pathlib import Path
from typing import Any

from paceline.analysis.grouping import grouped
from paceline.analysis.training.time_spent import analyse
from paceline.analysis.training.window import open_window
from paceline.errors import StoreError
from paceline.results import store
from paceline.results.records import RunRecord, Status

FEWEST_LAUNCHES, FEWEST_STEPS = 3, 5


def of_cell(records: list[RunRecord]) -> dict[str, Any] | None:
    """The row of one cell; None if too little is known."""
    seconds, overheads, shares = [], [], []
    for record in records:
        window = open_window(record)
        spent = analyse([record], {record.spec.run_id: window})
        if spent is None or len(window.seconds) < FEWEST_STEPS:
            continue
        seconds.append(window.seconds.tolist())
        overheads.append(spent.total_s - spent.measured_s)
        shares.append(spent.measured_s / spent.total_s)
    if len(seconds) < FEWEST_LAUNCHES:
        return None
    steps, step_s = statistics.mean(map(len, seconds)), statistics.mean(map(statistics.mean, seconds))
    # Of one step, from means of blocks: neighbours are alike.
    within = statistics.mean(map(error_of_mean, seconds)) * math.sqrt(steps) / step_s
    total = statistics.stdev(map(statistics.mean, seconds)) / step_s
    between = math.sqrt(max(total**2 - within**2 / steps, 0.0))
    overhead_s = statistics.mean(overheads)
    best = math.sqrt(overhead_s / step_s) * within / between if between else None
    first = records[0].spec
    return {
        "cell": f"{first.strategy or first.workload} {first.model} compile={first.training.compile}",
        "launches": len(seconds),
        "steps": round(steps),
        "step_s": round(step_s, 4),
        "overhead_s": round(overhead_s, 1),
        "measured_share": round(statistics.mean(shares), 3),
        "error_of_a_launch": round(within / math.sqrt(steps), 5),
        "between_launches": round(between, 5),
        "best_steps": best and round(best),
    }


def error_of_mean(seconds: list[float]) -> float:
    length = max(1, math.isqrt(len(seconds)))
    blocks = [statistics.mean(seconds[at : at + length]) for at in range(0, len(seconds) - length + 1, length)]
    return statistics.stdev(blocks) / math.sqrt(len(blocks))


def read(directory: Path) -> list[RunRecord]:
    records = []
    for file in sorted(directory.rglob("spec.json")):
        try:
            record = store.read_run(file.parent)
        except StoreError:
            continue
        if record.status is Status.OK and record.spec.is_trained and not record.proves_only:
            records.append(record)
    return records


def main(arguments: list[str]) -> None:
    for directory in map(Path, arguments):
        rows = filter(None, (of_cell(list(runs)) for runs in grouped(read(directory), lambda r: r.spec.cell).values()))
        for row in sorted(rows, key=lambda row: row["steps"], reverse=True):
            sys.stdout.write(json.dumps({"from": directory.name, **row}) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
