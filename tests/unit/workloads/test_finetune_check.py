"""What fine-tuning refuses before anything starts, and with which words."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from paceline.experiment.choices import Choice
from paceline.experiment.plugins import load
from paceline.experiment.spec import Precision, RunSpec, Topology, Training, Tuning


def spec(method: str = "qlora", compute: str = "fp32", reduce: str = "fp32", **changes: Any) -> RunSpec:
    tuning = Tuning(method=method, optimizer=changes.pop("optimizer", "adamw"))
    training = Training(
        sequence_length=16,
        micro_batch=1,
        precision=Precision(compute=compute, reduce=reduce),
        data=Choice("instructions"),
    )
    defaults = {"model": Choice("tiny-llama"), "strategy": Choice("ddp"), **changes}
    return RunSpec(
        experiment="x",
        workload=Choice("finetune"),
        topology=Topology(device="cpu", processes_per_node=2),
        training=training,
        tuning=tuning,
        steps=1,
        **defaults,
    )


def reason(asked: RunSpec) -> str | None:
    assert asked.strategy is not None
    found = load("workloads", "finetune").check(asked) or load("strategies", asked.strategy.name).check(asked)
    assert found is None or isinstance(found, str)
    return found


@pytest.mark.parametrize(
    "changes",
    [
        {"model": Choice("tiny")},
        {"compute": "bf16", "reduce": "bf16"},
        {"method": "full", "compute": "bf16"},
        {"compute": "fp16", "strategy": Choice("zero", {"stage": 2})},
        {"compute": "fp16", "strategy": Choice("fsdp2"), "optimizer": "adamw_8bit"},
    ],
)
def test_refused_with_a_reason(changes: dict[str, Any], golden: object) -> None:
    found = reason(spec(**changes))
    assert found is not None
    assert found == golden


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "zero:stage=3"])
@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
def test_accepted(method: str, strategy: str) -> None:
    reduce = "bf16" if method == "full" else "fp32"
    assert reason(spec(method, "bf16", reduce, strategy=Choice.parse(strategy))) is None


def test_single_keeps_to_one_process() -> None:
    asked = spec(strategy=Choice("single"))
    assert reason(asked) is not None
    assert reason(replace(asked, topology=Topology(device="cpu"))) is None
