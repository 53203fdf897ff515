"""The time from a command to its first measured step, with forked ranks and with new interpreters, side by side.

`paceline run` of one certified cell, in pairs (`local` and `local:warm=false`). The first command of each way also
computes the reference of its certificate and does not count. One JSON line per command, in seconds since the command:

    launch_s    the controller has read, checked and predicted the experiment, and asks for the ranks
    rank_s      rank 0 runs; a new interpreter has not imported torch yet
    window_s    imports, device, process group, model and data are ready: the first step begins, in warm-up
    measured_s  the first step after warm-up begins
    total_s     the command has ended
    later_s     with `--set repeats=N`: from the request of a later launch until its first measured step, median

The last line has the medians of both ways and their difference. Run `python benchmarks/first_step.py [--device cuda]
[--model gpt2-124m] [--pairs 1] [--compile] [--set repeats=3]`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from paceline.analysis.training.time_spent import analyse
from paceline.analysis.training.window import open_window
from paceline.host import machine
from paceline.results import store
from paceline.results.records import RunRecord

WAYS = {"forked": "local", "new interpreters": "local:warm=false"}
# Without telemetry, no launch is repeated because the host was busy.
EXPERIMENT = """
name: first-step
base: {workload: pretrain, strategy: ddp, processes: 1, sequence_length: SEQUENCE, micro_batch: MICRO_BATCH,
       precision: PRECISION, steps: 16, warmup: {minimum: 4, maximum: 6, window: 2}, telemetry_hz: 0}
"""
SIZES = {"cuda": ("1024", "8", "bf16"), "cpu": ("64", "1", "fp32")}


def timed(file: Path, out: Path, launcher: str, settings: list[str], environment: dict[str, str]) -> dict[str, Any]:
    """The moments of one command."""
    words = ["run", str(file), "--out", str(out), "--launcher", launcher, "--format", "json"]
    words += [word for setting in settings for word in ("--set", setting)]
    began_at = time.time()
    done = subprocess.run(
        [sys.executable, "-m", "paceline.cli", *words], env=environment, capture_output=True, text=True, check=False
    )
    total_s = time.time() - began_at
    if done.returncode:
        sys.exit(f"paceline {' '.join(words)}\n{done.stdout}{done.stderr}")
    records = [record for record in store.read_runs(out / "first-step")[0] if not record.proves_only]
    first, *later = (moments(record) for record in sorted(records, key=lambda record: record.started_at))
    evidence = records[0].evidence
    settings_seen = evidence.settings if evidence is not None else {}
    return {
        "started": settings_seen.get("started", "new interpreters"),
        **({"not_forked": why} if (why := settings_seen.get("not_forked")) else {}),
        **{name: round(moment - began_at, 2) for name, moment in first.items()},
        "total_s": round(total_s, 2),
        "later_s": round(statistics.median(m["measured_s"] - m["launch_s"] for m in later), 2) if later else None,
    }


def moments(record: RunRecord) -> dict[str, float]:
    """The times of one launch, by `time.time()`."""
    spent = analyse([record], {record.spec.run_id: open_window(record)})
    assert spent is not None
    assert spent.first_measured_s is not None
    assert record.evidence is not None
    assert record.evidence.window_began_at_s is not None
    return {
        "launch_s": record.started_at,
        "rank_s": record.outcomes[0].started_at,
        "window_s": record.evidence.window_began_at_s,
        "measured_s": record.started_at + spent.first_measured_s,
    }


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=tuple(SIZES), default=machine.device_kind())
    parser.add_argument("--model", help="default: gpt2-124m on a GPU, tiny on a CPU")
    parser.add_argument("--pairs", type=int, default=1)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    chosen = parser.parse_args(arguments)
    text = EXPERIMENT
    for name, value in zip(("SEQUENCE", "MICRO_BATCH", "PRECISION"), SIZES[chosen.device], strict=True):
        text = text.replace(name, value)
    model = chosen.model or ("gpt2-124m" if chosen.device == "cuda" else "tiny")
    settings = [f"device={chosen.device}", f"model={model}", f"compile={str(chosen.compile).lower()}", *chosen.set]
    rows: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "first-step.yaml")
        file.write_text(text)
        # References are kept in the state directory.
        environment = {**os.environ, "XDG_STATE_HOME": folder}
        for way, launcher in WAYS.items():
            row = timed(file, Path(folder, f"{way}-reference"), launcher, settings, environment)
            sys.stdout.write(json.dumps({"way": f"{way}, after its reference", **row}) + "\n")
            sys.stdout.flush()
        for pair in range(chosen.pairs):
            # ABBA: what drifts meets both ways alike.
            for way in WAYS if pair % 2 == 0 else reversed(WAYS):
                row = timed(file, Path(folder, f"{way}-{pair}"), WAYS[way], settings, environment)
                rows[way].append(row)
                sys.stdout.write(json.dumps({"way": way, **row}) + "\n")
                sys.stdout.flush()
    names = ("launch_s", "rank_s", "window_s", "measured_s", "total_s", "later_s")
    known = [name for name in names if all(row[name] is not None for way in WAYS for row in rows[way])]
    medians = {way: {name: round(statistics.median(r[name] for r in rows[way]), 2) for name in known} for way in WAYS}
    saved = {name: round(medians["new interpreters"][name] - medians["forked"][name], 2) for name in known}
    summary = {"benchmark": "first_step", "device": chosen.device, "model": model, **medians, "saved": saved}
    sys.stdout.write(json.dumps(summary) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
