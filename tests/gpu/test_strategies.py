"""Every strategy on one rank and on two NCCL ranks that share the GPU: real kernels, equal work, bf16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.analysis.report import build
from paceline.campaign.run.controller import campaign
from paceline.experiment import expansion
from paceline.results import store
from paceline.results.records import RunRecord, Status

STRATEGIES = ("ddp", "fsdp2", "zero:stage=1", "zero:stage=2", "zero:stage=3")
EXPERIMENT = """
name: gpu
base: {model: tiny-llama, precision: bf16, sequence_length: 128, micro_batch: 2, accumulation: 2, steps: 8,
       warmup: {minimum: 2, maximum: 4, window: 2}, timeout_s: 240, stall_s: 120}
matrix:
  - {strategy: [ddp, fsdp2, "zero:stage=1", "zero:stage=2", "zero:stage=3"], processes: [1]}
  - {strategy: [ddp, fsdp2, "zero:stage=1", "zero:stage=2", "zero:stage=3"], processes: [2],
     launcher: ["local:shared_gpu=true"]}
  - {strategy: ["mesh:tp=2", "mesh:cp=2", "mesh:pp=2", "mesh:shard=2"], processes: [2],
     launcher: ["local:shared_gpu=true"]}
"""


@pytest.fixture(scope="session")
def records(tmp_path_factory: pytest.TempPathFactory, remember: Any) -> dict[tuple[str, int], RunRecord]:
    folder = tmp_path_factory.mktemp("gpu")
    (folder / "gpu.yaml").write_text(EXPERIMENT)
    campaign(expansion.load(str(folder / "gpu.yaml")), folder, remember)
    runs, skipped = store.read_runs(folder / "gpu")
    assert not skipped
    return {(str(r.spec.strategy), r.spec.topology.world_size): r for r in runs}


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_certificate_passes(strategy: str, processes: int, records: dict[tuple[str, int], RunRecord]) -> None:
    """status is ok only when the certificate, trajectory included, agrees with the one-process reference."""
    record = records[strategy, processes]
    assert (record.status, record.error) == (Status.OK, None)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_ranks_talk_through_nccl(strategy: str, records: dict[tuple[str, int], RunRecord]) -> None:
    record = records[strategy, 2]
    assert sum(w.payload_bytes for w in record.wire if w.group_size == 2) > 0
    assert all(trace.communication_s > 0 for trace in record.traces)


@pytest.mark.parametrize("dimension", ["tp", "cp", "pp", "shard"])
def test_communication_of_a_layout_belongs_to_its_dimension(
    dimension: str, records: dict[tuple[str, int], RunRecord]
) -> None:
    """Messages of a ring and of a pipeline are launched together, outside of all operators."""
    record = records[f"mesh:{dimension}=2", 2]
    assert (record.status, record.error) == (Status.OK, None)
    found = {sample.rank: sample for sample in record.exposures if sample.dimension == dimension}
    assert sorted(found) == [0, 1]
    assert all(0 <= sample.exposed_s <= sample.communication_s + 1e-9 for sample in found.values())
    assert all(sample.communication_s > 0 for sample in found.values())


def test_device_is_observed(records: dict[tuple[str, int], RunRecord]) -> None:
    record = records["ddp", 1]
    peak = next(m for m in record.memory if m.moment == "steps")
    assert peak.allocated_bytes is not None
    assert peak.reserved_bytes is not None
    assert peak.device_bytes is not None
    assert 0 < peak.allocated_bytes <= peak.reserved_bytes <= peak.device_bytes
    assert all(step.h2d_s and step.h2d_bytes for step in record.steps)
    assert record.machines[0]["gpus"][0]["name"]


def test_event_time_covers_the_window(records: dict[tuple[str, int], RunRecord]) -> None:
    """Work queued on the device is inside some step: the events add up to the host's wall time of the window."""
    record = records["ddp", 1]
    assert record.evidence is not None
    assert record.evidence.window_wall_s is not None
    total = sum(step.duration_s for step in record.steps)
    assert 0.9 * record.evidence.window_wall_s < total <= 1.01 * record.evidence.window_wall_s


def test_shared_gpu_is_never_a_speed(records: dict[tuple[str, int], RunRecord], tmp_path: Path) -> None:
    shared = [r for r in records.values() if r.spec.topology.world_size == 2 or r.is_reference]
    report = build(shared, title="shared")
    assert not [r for r in report.recommendations if r.metric in ("tokens_per_s", "step_time_s")]
    assert any("not a speed" in text for run in report.runs for text in run.health) or any(
        "not a speed" in note for note in report.notes
    )


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "zero:stage=2"])
def test_fp16_with_loss_scaling(strategy: str, tmp_path: Path, remember: Any) -> None:
    """Runs and is certified, or is a record that says why not; never a traceback."""
    file = tmp_path / "fp16.yaml"
    file.write_text(EXPERIMENT.replace("bf16", "fp16").replace("name: gpu", "name: fp16").split("matrix:")[0])
    campaign(expansion.load(str(file), [f"strategy={strategy}", "processes=1"]), tmp_path, remember)
    runs, _ = store.read_runs(tmp_path / "fp16")
    statuses = {r.spec.run_id: (r.status, r.error) for r in runs if not r.is_reference}
    assert all(status in (Status.OK, Status.UNSUPPORTED) for status, _ in statuses.values()), statuses
