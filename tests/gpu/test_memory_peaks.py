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
"""
# Each is a campaign of its own, so that they can run beside each other.
GROUPS = {
    "replicated and sharded": ["strategy=[ddp, fsdp2]"],
    "zero": ["strategy=[zero:stage=2, zero:stage=3]"],
    "recomputed": ["strategy=ddp", "checkpointing=[full, selective]"],
    "accumulated": ["strategy=fsdp2", "model=llama-1b", "micro_batch=1", "accumulation=2"],
}
FRONTIER = ["workload=frontier:limit_gib=8,most=64", "strategy=single", "micro_batch=1"]


def report(folder: Path, remember: Any, settings: list[str]) -> Report:
    file = folder / "gpu-memory.yaml"
    file.write_text(EXPERIMENT)
    campaign(expansion.load(str(file), settings), folder, remember)
    records, skipped = store.read_runs(folder / "gpu-memory")
    assert not skipped
    return build(records, "gpu-memory")


@pytest.mark.parametrize("group", GROUPS)
def test_peaks_are_predicted(group: str, tmp_path: Path, remember: Any) -> None:
    rows = report(tmp_path, remember, GROUPS[group]).memory
    assert len(rows) == (1 if group == "accumulated" else 2)
    for row in rows:
        assert row.error_ratio is not None, row.note
        assert abs(row.error_ratio) < LOOSE, (row.axes["strategy"], row.axes["checkpointing"], row.error_ratio)
        # What the allocator says.
        assert (row.measured["peak"] or 0) <= (row.measured["reserved"] or 0) <= (row.measured["device"] or 0)
        assert (row.measured["fragmentation"] or 0) >= 0
        assert row.capacity_bytes


def test_the_frontier_closes_under_a_limit(tmp_path: Path, remember: Any) -> None:
    (point,) = report(tmp_path, remember, FRONTIER).frontier
    assert point.settled
    assert point.largest_fitting is not None
    assert point.smallest_failing == point.largest_fitting + 1
    assert {probe.status for probe in point.probes} == {"ok", "oom"}
    assert len(point.probes) <= 8
