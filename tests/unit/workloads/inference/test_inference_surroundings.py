"""What else runs where an engine is started: counted before it is there, and told like that of a training run."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from served_records import record, request

from paceline.analysis import report as reports
from paceline.contract import Seat
from paceline.experiment.choices import Choice
from paceline.experiment.serving import Serving
from paceline.experiment.spec import RunSpec
from paceline.launchers.node import placement
from paceline.workloads.inference import Surroundings, evidence, surroundings

if TYPE_CHECKING:
    from conftest import FakeNvml

Around = Callable[..., Surroundings]


@pytest.fixture
def around(make_spec: Callable[..., RunSpec], monkeypatch: pytest.MonkeyPatch) -> Around:
    """As rank 0 of a run sees it under an environment of known switches."""
    for name in [name for name in os.environ if name.startswith(("NCCL_", "TORCH_", "CUDA_", "PYTHON"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")

    def look(engine: str, device: str = "cuda", local_rank: int = 0, **options: Any) -> Surroundings:
        spec = make_spec(None, engine=Choice(engine, options), serving=Serving(), workload="inference", device=device)
        return surroundings(spec, Seat(rank=0, local_rank=local_rank, world_size=1, device=device))

    return look


@pytest.mark.parametrize("engine", ["vllm", "transformers", "deepspeed"])
def test_an_engine_that_is_started_has_its_surroundings_counted(
    engine: str, around: Around, fake_nvml: FakeNvml
) -> None:
    fake_nvml.pids = [41, 42]
    assert around(engine) == Surroundings(2, {"CUDA_LAUNCH_BLOCKING": "1"})
    fake_nvml.pids = []
    assert around(engine).neighbours == 0


def test_of_several_devices_the_fullest_counts(
    around: Around, fake_nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_gpu = {0: 9, 1: 1, 2: 0, 3: 3}
    monkeypatch.setattr("paceline.host.machine.neighbours", on_gpu.get)
    assert around("vllm", local_rank=1, tensor_parallel=2).neighbours == 3
    assert around("vllm", local_rank=1).neighbours == 1
    # What the driver does not tell is unknown, not none.
    assert around("vllm", local_rank=4).neighbours is None


def test_where_nothing_can_be_said_nothing_is(
    around: Around, fake_nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_nvml.pids = [41]
    assert around("openai", url="http://x") == Surroundings(None, {})
    assert around("transformers", device="cpu") == Surroundings(None, {"CUDA_LAUNCH_BLOCKING": "1"})
    monkeypatch.setenv(placement.SHARED_GPU, "1")
    assert around("transformers").neighbours is None


def test_a_served_run_uses_the_same_sentences(golden: object) -> None:
    found = record([request(0)])
    told = evidence([], Surroundings(2, {"NCCL_DEBUG": "INFO"}))
    outcomes = tuple(replace(outcome, evidence=told) for outcome in found.outcomes)
    (run,) = reports.build((replace(found, outcomes=outcomes),), "served").runs
    assert run.health[0] == "debug switches: NCCL_DEBUG=INFO"
    assert run.health[1] == golden
