"""The dtype of products where a framework hides it from hooks, and switches of torch that cannot be read."""

from __future__ import annotations

from pathlib import Path

import pytest
from script_records import observe_code, record_of

from paceline.analysis.training.certificate import certify_all
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
        assert facts["flags"]["fp32 products"] == "ieee", "on a CPU, where TF32 of CUDA has no effect"


SWITCHES = """
import torch

model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.1))
for step in range(3):
    if (step > 0) == {late}:
        torch.set_float32_matmul_precision("{precision}")
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
"""


def test_products_of_less_precision_are_other_work(tmp_path: Path, nursery: None) -> None:
    records = {}
    cases = {"highest": (False, "highest"), "medium": (False, "medium"), "late": (True, "medium")}
    for number, (name, (late, precision)) in enumerate(cases.items()):
        folder = tmp_path / name
        folder.mkdir()
        observe_code(SWITCHES.format(late=late, precision=precision), folder=folder)
        assert read_facts(folder, 0)["groups"][0]["lr"] == 0.1, "a rate in a tensor is read as well"
        records[name] = record_of(folder, (0,), name, float(number))
    found = certify_all(list(records.values()))
    seen = {name: found[record.spec.run_id].differs for name, record in records.items()}
    assert seen["highest"] == ()
    assert seen["medium"] == ("precision of fp32: fp32 products bf16 instead of ieee", *seen["medium"][1:])
    assert seen["late"][0].startswith("optimizer: during training, float32_matmul_precision highest to medium")
