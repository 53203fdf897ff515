"""What one run of thousands of ranks takes to read, show and report: time and peak memory.

Run `python benchmarks/ranks.py [RANKS[xSTEPS] ...]` (default: 4096x100 4096x500). It makes up a run of that many ranks,
eight to a node, with gauges of every GPU and the facts of every host, beside its reference, and prints one JSON line
for each command. Nothing here passes or fails.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
from multiprocessing import get_context
from pathlib import Path

from report import TIMED, _outcome, _timed, seal, timed_command, write_run

from paceline.campaign.run.references import reference_of
from paceline.experiment import expansion
from paceline.experiment.spec import RunSpec
from paceline.host import machine
from paceline.results import store
from paceline.results.records import GaugeSample

STEPS, PER_NODE, READINGS = 100, 8, 20


def write_large_run(folder: Path, ranks: int, steps: int = STEPS) -> Path:
    """One run of that many ranks and its reference; returns the directory of the run."""
    file = folder / "large.yaml"
    file.write_text(
        "name: large\nbase: {model: tiny, strategy: ddp, sequence_length: 64, precision: fp32, device: cuda}\n"
    )
    sizes = (f"nodes={ranks // PER_NODE}", f"processes={PER_NODE}")
    (spec,) = expansion.load(str(file), [f"steps={steps}", "reference_steps=10", *sizes])
    seal(write_run(folder, reference_of(spec)))
    run_dir = write_run(folder, spec)
    _add_hosts(run_dir, spec)
    seal(run_dir)
    return run_dir


def _add_hosts(run_dir: Path, spec: RunSpec) -> None:
    """The facts of each host, the host of each rank, and readings of its device."""
    facts = json.loads(json.dumps(machine.to_dict(machine.probe())))
    for node in range(spec.topology.nodes):
        store.write_json(run_dir / f"machine-node{node}.json", {**facts, "host": f"node{node}"})
    for rank in range(spec.topology.world_size):
        host = f"node{rank // PER_NODE}"
        outcome = _outcome(spec, rank)
        assert outcome.evidence is not None
        evidence = dataclasses.replace(outcome.evidence, window_began_at_s=0.5)
        store.write_outcome(run_dir, dataclasses.replace(outcome, host=host, evidence=evidence))
        with (run_dir / f"samples-gauges-{rank - rank % PER_NODE}.jsonl").open("a") as lines:
            for i in range(READINGS):
                reading = GaugeSample(
                    rank=rank, host=host, at_s=2.5 * i, device=rank % PER_NODE, power_w=400.0 + i % 7,
                    energy_j=1000.0 * i, throttle_reasons=(),
                )  # fmt: skip
                lines.write(store.sample_line(reading))


def main() -> None:
    for words in sys.argv[1:] or ("4096x100", "4096x500"):
        ranks, _, steps = words.partition("x")
        with tempfile.TemporaryDirectory() as name:
            # In a process of its own: the peak of a command is at least what the process that starts it has in memory.
            with get_context("spawn").Pool(1) as one:
                run_dir = one.apply(write_large_run, (Path(name), int(ranks), int(steps or STEPS)))
            megabytes = round(sum(path.stat().st_size for path in run_dir.iterdir()) / 1e6)
            said = {"ranks": int(ranks), "steps": int(steps or STEPS), "stored_mb": megabytes}
            for formats in ("json and csv", "all"):
                found = _timed(run_dir.parent, TIMED[formats])
                print(json.dumps({**said, "command": f"report, {formats}", **found}), flush=True)
            print(json.dumps({**said, "command": "show", **timed_command("show", str(run_dir))}), flush=True)


if __name__ == "__main__":
    main()
