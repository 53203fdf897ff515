"""Runs of scripts from what the observer wrote, without a launcher."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from training_records import build_record, build_spec

from paceline.contract import Seat
from paceline.experiment.script import Script
from paceline.results.records import Outcome, RunRecord, Status, StepSample, WireSample
from paceline.workloads.script.evidence import evidence_of
from paceline.workloads.script.process import read_facts


def observe_code(code: str, *arguments: str, folder: Path, **more: str) -> None:
    """Run Python code with the observer, which writes into `folder`, forked from the nursery; more: variables of its
    environment."""
    path = os.pathsep.join((str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")))
    env = {**os.environ, "PYTHONPATH": path, "PACELINE_OBSERVE": str(folder), "OMP_NUM_THREADS": "1", **more}
    words = ["testbed.nursery", "start", "-m", "testbed.observed", code, *arguments]
    subprocess.run([sys.executable, "-m", *words], env=env, cwd=folder, check=True)


def record_of(folder: Path, ranks: Sequence[int], name: str, at: float) -> RunRecord:
    """The run whose ranks the observer saw as those numbers."""
    script = Script(command=("train.py", "{name}"), parameters={"name": name}, code="v1")
    spec = replace(build_spec(None, len(ranks), workload="script"), script=script)
    steps, wire, outcomes = [], [], []
    for rank, seen in enumerate(ranks):
        lines = (folder / f"rank-{seen}.jsonl").read_text().splitlines()
        for row in map(json.loads, lines):
            kind = row.pop("kind")
            if kind == "step":
                steps.append(StepSample(**{**row, "rank": rank}))
            elif kind == "wire":
                wire.append(WireSample(**{**row, "rank": rank}))
        seat = Seat(rank=rank, local_rank=rank, world_size=len(ranks), device="cpu")
        usual: dict[str, Any] = {"host": "here", "pid": 1, "started_at": at, "ended_at": at + 1}
        evidence = evidence_of(read_facts(folder, seen), 1.0, seat)
        outcomes.append(Outcome(rank=rank, status=Status.OK, error=None, evidence=evidence, **usual))
    samples = tuple(sorted(steps, key=lambda sample: sample.step))
    return build_record(spec, steps=samples, wire=tuple(wire), outcomes=tuple(outcomes), started_at=at, ended_at=at + 1)
