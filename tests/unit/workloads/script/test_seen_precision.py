"""The dtype of products where a framework hides it from hooks, and switches of torch that cannot be read."""

from __future__ import annotations

from pathlib import Path

import pytest
from script_records import observe_code

from paceline.workloads.script.process import read_facts

pytestmark = pytest.mark.slow

# Rank 0 has an inner module, as most models; that of rank 1 is compiled, and hooks cannot see into it.
TRAIN = """
import os, sys, types
import torch, torch._dynamo

torch.backends.cuda.matmul.fp32_precision = "tf32"
rank = 0 if (child := os.fork()) else 1
os.environ["RANK"] = str(rank)


class Bare(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4, 4))

    def forward(self, x):
        return (x @ self.weight).float().sum()


class Nested(Bare):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(4, 4)

    def forward(self, x):
        return super().forward(self.inner(x))


model = (Nested, Bare)[rank]()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
if rank == 0:
    # As accelerate does it.
    autocast = torch.autocast("cpu", dtype=torch.bfloat16)
    model.forward = types.MethodType(autocast(model.forward.__func__), model)
else:
    from accelerate import Accelerator

    model = Accelerator(mixed_precision="bf16", dynamo_backend="eager", cpu=True).prepare(model)
for _ in range(2):
    model(torch.ones(2, 4)).backward()
    optimizer.step()
if rank == 0:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_autocast_inside_the_model_and_unreadable_switches_are_noted(tmp_path: Path, nursery: None) -> None:
    observe_code(TRAIN, folder=tmp_path)
    for rank in range(2):
        facts = read_facts(tmp_path, rank)
        assert facts["broken"] is None
        assert facts["autocast"] == "bf16"
        assert facts["dtypes"]["parameters"] == "fp32"
        assert facts["flags"]["float32_matmul_precision"] == "unknown"
