"""Mistakes planted into a training script with two ranks: the observer and the grades must notice each of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from training_records import build_record, build_spec

from paceline.analysis.findings import CERTIFIED, Certificate
from paceline.analysis.training.certificate import certify_all
from paceline.contract import Seat
from paceline.experiment.script import Script
from paceline.results.records import Outcome, RunRecord, Status, StepSample
from paceline.training import attachment
from paceline.workloads.script.evidence import evidence_of
from paceline.workloads.script.process import read_facts

MISTAKES = ("none", "again", "fewer micro batches", "other order", "frozen layer", "no reduction", "one group")
STEPS = 6
# One interpreter for all: each mistake gets two forked ranks, which average their gradients through shared memory.
TRAIN = """
import multiprocessing, os, sys
import torch, torch._dynamo  # the first step of an optimizer imports it: once here, not in every rank

mistakes = sys.argv[1].split(",")
steps, ranks = 6, 2 * len(mistakes)
shared = torch.zeros(ranks, 1000).share_memory_()
barriers = [multiprocessing.Barrier(2) for _ in mistakes]
children = []
for rank in range(ranks):
    children.append(os.fork())
    if children[-1] == 0:
        break
else:
    sys.exit(sum(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children))
os.environ["RANK"], os.environ["WORLD_SIZE"] = str(rank), str(ranks)
torch.set_num_threads(1)
mistake, barrier, part = mistakes[rank // 2], barriers[rank // 2], rank % 2
torch.manual_seed(0)
layers = torch.nn.Embedding(20, 4), torch.nn.Flatten(), torch.nn.Linear(16, 8), torch.nn.Linear(8, 20)
model = torch.nn.Sequential(*layers)
weights, biases = ([p for p in model.parameters() if (p.dim() > 1) == large] for large in (True, False))
groups = [{"params": weights, "weight_decay": 0.1}, {"params": biases, "weight_decay": 0.0}]
if mistake == "one group":
    groups = [{"params": weights + biases, "weight_decay": 0.1}]
optimizer = torch.optim.AdamW(groups, lr=0.01)
data = torch.randint(0, 20, (steps, 2, 2, 3, 4), generator=torch.Generator().manual_seed(1))
if mistake == "other order":
    data = data.flip(0)
for step in range(steps):
    micro_batches = data[step, :, part]
    if mistake == "fewer micro batches" and step == 4:
        micro_batches = micro_batches[:1]
    for ids in micro_batches:
        torch.nn.functional.cross_entropy(model(ids), ids[:, 0]).backward()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
    if mistake != "no reduction" or step != 3:
        shared[rank, : len(gradient)] = gradient
        barrier.wait()
        gradient = shared[rank - part : rank - part + 2, : len(gradient)].mean(0)
        barrier.wait()
    for p, g in zip(model.parameters(), gradient.split([p.numel() for p in model.parameters()])):
        p.grad = g.reshape(p.shape).clone()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if mistake == "frozen layer":
        model[2].weight.grad = None
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Certificate]:
    """By mistake, the certificate beside the run without one."""
    folder = tmp_path_factory.mktemp("observed")
    path = os.pathsep.join((str(Path(attachment.__file__).parent), os.environ.get("PYTHONPATH", "")))
    env = {**os.environ, "PYTHONPATH": path, "PACELINE_OBSERVE": str(folder), "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", TRAIN, ",".join(MISTAKES)], env=env, check=True)
    records = {mistake: _record(folder, number, mistake) for number, mistake in enumerate(MISTAKES)}
    found = certify_all(list(records.values()))
    return {mistake: found[record.spec.run_id] for mistake, record in records.items()}


def _record(folder: Path, number: int, mistake: str) -> RunRecord:
    """The two ranks of one mistake as a run."""
    script = Script(command=("train.py", "{mistake}"), parameters={"mistake": mistake}, code="v1")
    spec = replace(build_spec(None, 2, workload="script", steps=STEPS), script=script)
    steps, outcomes = [], []
    for rank in range(2):
        lines = (folder / f"rank-{2 * number + rank}.jsonl").read_text().splitlines()
        rows = [row for row in map(json.loads, lines) if row.pop("kind") == "step"]
        steps += [StepSample(**{**row, "rank": rank}) for row in rows]
        seat = Seat(rank=rank, local_rank=rank, world_size=2, device="cpu")
        evidence = evidence_of(read_facts(folder, 2 * number + rank), 1.0, seat)
        usual: dict[str, Any] = {
            "status": Status.OK,
            "error": None,
            "host": "here",
            "pid": 1,
            "started_at": 0.0,
            "ended_at": 1.0,
        }
        outcomes.append(Outcome(rank=rank, evidence=evidence, **usual))
    samples = tuple(sorted(steps, key=lambda sample: sample.step))
    return build_record(spec, steps=samples, outcomes=tuple(outcomes), started_at=float(number))


def test_the_same_work_is_certified(certificates: Mapping[str, Certificate]) -> None:
    assert certificates["again"].level == CERTIFIED
    assert certificates["again"].valid
    assert not certificates["again"].differs


@pytest.mark.parametrize(
    ("mistake", "what"),
    [
        ("fewer micro batches", "tokens per step: 24 instead of 48 at step 4"),
        ("other order", "data: other samples at step 0"),
        ("frozen layer", "trained tensors: 4 instead of 5"),
        ("no reduction", "losses: "),
        ("one group", "optimizer: elements 396 instead of 368"),
    ],
)
def test_each_mistake_is_different(certificates: Mapping[str, Certificate], mistake: str, what: str) -> None:
    assert certificates[mistake].level_text is not None
    assert any(difference.startswith(what) for difference in certificates[mistake].differs), certificates[mistake]
    assert str(certificates[mistake].level_text).startswith("different")


def test_a_step_without_reduction_is_invalid(certificates: Mapping[str, Certificate]) -> None:
    assert not certificates["no reduction"].valid
    assert "ranks ended with different weights" in certificates["no reduction"].reasons[0]
