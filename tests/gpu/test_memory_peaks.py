"""Predicted and measured peaks on a real GPU, and a frontier under a limit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.analysis.findings import Report
from paceline.analysis.report import build
from paceline.campaign.run.controller import campaign
from paceline.experiment import expansion
from paceline.results import store

LOOSE = 0.15
EXPERIMENT = """
name: gpu-memory
base: {workload: memory, model: gpt2-124m, precision: bf16, sequence_length: 512, micro_batch: 8, steps: 3,
       processes: 1, timeout_s: 300, stall_s: 200}
matrix:
  - {strategy: [ddp, fsdp2, "zero:stage=2", "zero:stage=3"]}
  - {strategy: [ddp], checkpointing: [full, selective]}
  - {strategy: [fsdp2], model: [llama-1b], micro_batch: [1], accumulation: [2]}
  - {workload: ["frontier:limit_gib=8,most=64"], strategy: [single], micro_batch: [1]}
"""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory, remember: Any) -> Report:
    folder: Path = tmp_path_factory.mktemp("gpu-memory")
    (folder / "gpu-memory.yaml").write_text(EXPERIMENT)
    campaign(expansion.load(str(folder / "gpu-memory.yaml")), folder, remember)
    records, skipped = store.read_runs(folder / "gpu-memory")
    assert not skipped
    return build(records, "gpu-memory")


def test_peaks_are_predicted(report: Report) -> None:
    assert len(report.memory) == 7
    for row in report.memory:
        assert row.error_ratio is not None, row.note
        assert abs(row.error_ratio) < LOOSE, (row.axes["strategy"], row.axes["checkpointing"], row.error_ratio)


def test_the_allocator_is_read(report: Report) -> None:
    for row in report.memory:
        assert (row.measured["peak"] or 0) <= (row.measured["reserved"] or 0) <= (row.measured["device"] or 0)
        assert (row.measured["fragmentation"] or 0) >= 0
        assert row.capacity_bytes


def test_the_frontier_closes_under_a_limit(report: Report) -> None:
    (point,) = report.frontier
    assert point.settled
    assert point.largest_fitting is not None
    assert point.smallest_failing == point.largest_fitting + 1
    assert {probe.status for probe in point.probes} == {"ok", "oom"}
    assert len(point.probes) <= 8
