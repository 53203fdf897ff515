"""Node acceptance on a real GPU: proofs hold to the bit, the condition is told, and a healthy device passes."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.analysis.machine import nodes
from paceline.campaign.run.controller import campaign
from paceline.experiment import expansion
from paceline.results import store
from paceline.results.records import RunRecord, Status

# As long a sequence as the preset's: over a few keys even an attention without an order of sums repeats its bits.
EXPERIMENT = """
name: nodes
base: {workload: "nodes:node=process,repeats=3,side=2048,copy_bytes=67108864,iters=10,budget_s=0.2", model: gpt2-124m,
  processes: 1, precision: bf16, sequence_length: 1024, micro_batch: 4, steps: 5,
  warmup: {minimum: 2, maximum: 4, window: 2}, timeout_s: 300, stall_s: 120}
"""


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory, remember: Any) -> RunRecord:
    folder = tmp_path_factory.mktemp("nodes")
    (folder / "nodes.yaml").write_text(EXPERIMENT)
    campaign(expansion.load(str(folder / "nodes.yaml")), folder, remember)
    (found,), skipped = store.read_runs(folder / "nodes")
    assert not skipped
    return found


def test_every_stage_leaves_its_samples(record: RunRecord) -> None:
    assert (record.status, record.error) == (Status.OK, None)
    assert {(s.kernel, s.status, s.wrong) for s in record.kernels} == {
        (kernel, "ok", 0) for kernel in ("matmul", "copy", "h2d", "d2h")
    }
    assert {(p.dtype, p.wrong) for p in record.products} == {("bf16", 0), ("fp32", 0)}
    assert all(m.allocated_bytes for m in record.memory)


def test_the_seeded_steps_give_the_same_bits_twice(record: RunRecord) -> None:
    first, second = sorted(record.trajectories, key=lambda t: t.turn)
    assert (first.losses, first.weights) == (second.losses, second.weights)


def test_the_condition_of_a_data_centre_gpu_is_reported(record: RunRecord) -> None:
    loaded = next(s.facts for s in record.health if s.moment == "loaded")
    for fact in ("vbios", "power_limit_w", "sm_clock_hz", "pcie_width", "pcie_width_max", "ecc_volatile_uncorrected"):
        assert loaded[f"gpu.{fact}"] is not None, fact


def test_proofs_and_measures_accuse_nobody(record: RunRecord) -> None:
    """What the driver says of this one GPU is its own affair; what was computed on it must be right."""
    (verdict,) = nodes.judge(record).verdicts
    assert not [e for e in verdict.evidence if e.kind in ("wrong result", "other bits") or e.kind.startswith("slow")]
