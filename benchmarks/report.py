"""What `paceline report` takes: time and peak memory by number of runs, for JSON and CSV and for every format alone.

Run `python benchmarks/report.py [RUNS ...]` (default: 250 1000); it makes that many up, of 8 ranks x 100 steps, and
prints one JSON line for each report. `all` is what `paceline report` writes without --format. Nothing here passes or
fails.
"""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from paceline.cli.results import DEFAULT_FORMATS
from paceline.experiment import expansion
from paceline.experiment.spec import RunSpec
from paceline.models import arithmetic
from paceline.results import store
from paceline.results.records import Evidence, MemorySample, Outcome, Status, StepSample, WireSample

STEPS, RANKS = 100, 8
TIMED = {"json and csv": ("json", "csv"), **{name: (name,) for name in DEFAULT_FORMATS}, "all": DEFAULT_FORMATS}


def time_reports(runs: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_store(folder, runs, STEPS, RANKS)
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        for formats in TIMED:
            found = _timed(folder / "many", TIMED[formats])
            print(json.dumps({"runs": runs, "stored_mb": round(size / 1e6), "formats": formats, **found}), flush=True)


def _timed(directory: Path, formats: tuple[str, ...]) -> dict[str, Any]:
    flags = [word for format_ in formats for word in ("--format", format_)]
    return timed_command("report", str(directory), *flags)


def timed_command(*words: str) -> dict[str, Any]:
    """Wall time of a command of Paceline, and the peak memory of the largest of the processes it took."""
    command = [sys.executable, "-m", "paceline.cli", *words]
    begin = time.perf_counter()
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(child.pid, 0)
    wall_s = time.perf_counter() - begin
    # Reaped here for its usage, which Popen would not tell.
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise SystemExit(f"{' '.join(command)} ended with exit code {child.returncode}")
    cpu_s = usage.ru_utime + usage.ru_stime
    return {"wall_s": round(wall_s, 1), "cpu_s": round(cpu_s, 1), "peak_mb": round(usage.ru_maxrss * 1024 / 1e6)}


# --- runs made up ---


def write_store(folder: Path, runs: int, steps: int, ranks: int) -> None:
    """Made-up but complete runs: five repeats of cells that differ in strategy and micro batch, and references."""
    from paceline.campaign.run.references import references_of

    file = folder / "many.yaml"
    file.write_text("name: many\nbase: {model: tiny, sequence_length: 64, precision: fp32, device: cpu}\n")
    sizes = list(range(1, -(-runs // 25) + 1))
    settings = [
        f"steps={steps}", f"processes={ranks}", "reference_steps=10", "repeats=5", f"micro_batch={sizes}",
        "strategy=[ddp, fsdp2, 'zero:stage=1', 'zero:stage=2', 'zero:stage=3']",
    ]  # fmt: skip
    specs = expansion.load(str(file), settings)[:runs]
    for spec in [*references_of(specs).values(), *specs]:
        seal(write_run(folder, spec))


def write_run(folder: Path, spec: RunSpec) -> Path:
    """What the ranks of a run leave, made up; returns its directory."""
    run_dir = store.create(folder, spec)
    noise = random.Random(spec.run_id)
    reduced = 4 * _parameters(spec)
    for rank in range(spec.topology.world_size):
        with (run_dir / f"samples-{rank}.jsonl").open("w") as lines:
            for step in range(spec.steps):
                lines.write(store.sample_line(_step(spec, rank, step, noise)))
            lines.write(store.sample_line(_memory(rank)))
            wire = WireSample(
                rank=rank, step=spec.steps, operation="all_reduce", dtype="fp32", group_size=spec.topology.world_size,
                calls=1, payload_bytes=reduced,
            )  # fmt: skip
            lines.write(store.sample_line(wire))
        store.write_outcome(run_dir, _outcome(spec, rank))
    return run_dir


def seal(run_dir: Path) -> None:
    steps = store.read_unsealed(run_dir, started_at=0.0, ended_at=1.0).steps
    store.seal(run_dir, Status.OK, None, 0.0, 1.0, steps=steps)


def _step(spec: RunSpec, rank: int, step: int, noise: random.Random) -> StepSample:
    seconds = 0.1 * (1 + 0.02 * noise.random())
    return StepSample(
        rank=rank, step=step, duration_s=seconds, data_wait_s=0.0, h2d_s=None, h2d_bytes=None, forward_s=seconds / 3,
        backward_s=seconds / 2, optimizer_s=seconds / 10, tokens=spec.tokens_per_step // spec.topology.world_size,
        samples=spec.global_batch // spec.topology.world_size, micro_batches=spec.training.accumulation, updates=1,
        loss=5.0 * math.exp(-step / 100), grad_norm=1.0, data_digest=step if rank == 0 else 0,
    )  # fmt: skip


def _parameters(spec: RunSpec) -> int:
    return arithmetic.parameters(arithmetic.load(spec.model))


def _memory(rank: int) -> MemorySample:
    return MemorySample(
        rank=rank, moment="steps", allocated_bytes=None, reserved_bytes=None, device_bytes=None, resident_bytes=2**28
    )


def _outcome(spec: RunSpec, rank: int) -> Outcome:
    names = ("parameters", "compute", "gradient", "gradient_reduction", "optimizer_state", "master_weights")
    evidence = Evidence(
        init_digest="0", parameters=_parameters(spec), dtypes=dict.fromkeys(names, "fp32"),
        optimizer={"kind": "made up"}, settings={}, switches={}, neighbours=None, window_wall_s=0.1 * spec.steps,
    )  # fmt: skip
    return Outcome(
        rank=rank, status=Status.OK, error=None, host="made-up", pid=1, started_at=0.0, ended_at=1.0, evidence=evidence
    )


def main() -> None:
    for runs in map(int, sys.argv[1:] or ("250", "1000")):
        time_reports(runs)


if __name__ == "__main__":
    main()
