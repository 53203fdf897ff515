"""Forward passes inside compiled code: steps, losses and weights are observed, the data only where they are shown."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from script_records import observe_code

from paceline.contract import Seat
from paceline.workloads.script.evidence import evidence_of
from paceline.workloads.script.process import read_facts

pytestmark = pytest.mark.slow

# Rank 0 compiles nothing, but begins with a backward pass that is no training; rank 1 compiles a function that calls
# the model, rank 2 the model in place, and gives the optimizer a closure. Rank 2 shows its data, and so does rank 0,
# where they are seen anyway.
TRAIN = """
import os, sys
import torch, torch._dynamo
from paceline import track

children = [child := os.fork()]
children += [child := os.fork()] if child else []
rank = 0 if child else len(children)
os.environ["RANK"], os.environ["WORLD_SIZE"] = str(rank), "3"
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Embedding(40, 8), torch.nn.Flatten(), torch.nn.Linear(48, 40))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
batches = torch.Generator().manual_seed(1)
if rank == 0:
    torch.ones(2, requires_grad=True).sum().backward()


def loss_of(ids):
    return torch.nn.functional.cross_entropy(model(ids), ids[:, 0])


if rank == 1:
    loss_of = torch.compile(loss_of, backend="eager")
if rank == 2:
    model.compile(backend="eager")


def compute():
    for micro in range(2):
        ids = torch.randint(0, 40, (3, 6), generator=batches)
        if rank != 1:
            track.batch({"input_ids": ids} if rank else [ids])
        (loss_of(ids) / 2).backward()


for step in range(5):
    if rank == 2:
        optimizer.step(compute)
    else:
        compute()
        optimizer.step()
    schedule.step()
    optimizer.zero_grad()
if rank == 0:
    sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children))
"""


def test_steps_are_seen_by_their_backward_passes(tmp_path: Path, nursery: None) -> None:
    observe_code(TRAIN, folder=tmp_path)
    steps, facts = [], []
    for rank in range(3):
        lines = map(json.loads, (tmp_path / f"rank-{rank}.jsonl").read_text().splitlines())
        steps.append([line for line in lines if line["kind"] == "step"])
        facts.append(read_facts(tmp_path, rank))
    losses = [[line["loss"] for line in lines] for lines in steps]
    assert len(losses[0]) == 5
    assert losses[0][0] == pytest.approx(3.9, abs=0.3), "of a micro batch, not half of it"
    assert losses[0] == pytest.approx(losses[1])
    assert losses[0] == pytest.approx(losses[2])
    assert [each["broken"] for each in facts] == [None] * 3
    for rank, (lines, own) in enumerate(zip(steps, facts, strict=True)):
        assert {line["micro_batches"] for line in lines} == {2}
        assert {line["tokens"] for line in lines} == {2 if rank == 1 else 36}
        digests = [0] * 5 if rank == 1 else [line["data_digest"] for line in steps[0]]
        assert [line["data_digest"] for line in lines] == digests
        assert own["weights"] == facts[0]["weights"]
        assert own["rates"] == facts[0]["rates"]
        assert own["final_weights"] == facts[0]["final_weights"] != own["weights"]
        found = evidence_of(own, 1.0, Seat(rank=rank, local_rank=rank, world_size=3, device="cpu"))
        assert found.settings["data"] == ("unseen" if rank == 1 else "tokens")
        assert found.dtypes["compute"] == ("fp32" if rank == 0 else "unknown")
