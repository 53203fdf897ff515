"""Runs on the GPU whose last rank is killed: they go on from their checkpoints and learn what an unbroken run does.

Alone and on two NCCL ranks that share the GPU; in bf16, where kernels that add in any order leave the last bits open.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.analysis.training.goodput import goodput
from paceline.campaign.run.controller import campaign
from paceline.experiment import expansion
from paceline.results import store
from paceline.results.records import RunRecord, Status

EVERY, KILLED_AT, STEPS = 3, 5, 8
EXPERIMENT = """
name: broken
base: {model: "tiny-llama:hidden=256,ffn=512", precision: bf16, sequence_length: 128, micro_batch: 2, accumulation: 2,
       steps: 8, warmup: {minimum: 2, maximum: 4, window: 2}, timeout_s: 400, stall_s: 200,
       max_restarts: 1, rank: 32, data: "instructions:mean=80", checkpointing: full}
matrix: {checkpoint_every: [null, 3]}
"""
TRAINED = ["data=synthetic", "checkpointing=none"]
TUNED = ["workload=finetune", "method=qlora", "optimizer=paged_adamw_8bit"]
# Each is a campaign of its own, so that they can run beside each other.
GROUPS = {
    "ddp alone": (1, [*TRAINED, "strategy=ddp"]),
    "ddp": (2, [*TRAINED, "strategy=ddp"]),
    "fsdp2": (2, [*TRAINED, "strategy=fsdp2"]),
    "zero 1": (2, [*TRAINED, "strategy=zero:stage=1"]),
    "zero 2": (2, [*TRAINED, "strategy=zero:stage=2"]),
    "zero 3": (2, [*TRAINED, "strategy=zero:stage=3"]),
    "qlora alone": (1, [*TUNED, "strategy=single"]),
    "qlora ddp": (2, [*TUNED, "strategy=ddp"]),
    "qlora fsdp2": (2, [*TUNED, "strategy=fsdp2"]),
}


def settings_of(group: str) -> list[str]:
    processes, settings = GROUPS[group]
    shared = "true" if processes > 1 else "false"
    return [*settings, f"processes={processes}", f"launcher=testbed.deadly:shared_gpu={shared}"]


def losses(record: RunRecord) -> dict[tuple[int, int], float]:
    return {(step.rank, step.step): step.loss for step in record.steps}


@pytest.mark.parametrize("group", GROUPS)
def test_a_killed_run_goes_on(
    group: str, tmp_path: Path, remember: Any, environment: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    last = GROUPS[group][0] - 1
    for name, value in environment(MORTAL_AT=f"{last}:{KILLED_AT}").items():
        monkeypatch.setenv(name, value)
    file = tmp_path / "broken.yaml"
    file.write_text(EXPERIMENT)
    campaign(expansion.load(str(file), settings_of(group)), tmp_path, remember)
    records, _ = store.read_runs(tmp_path / "broken")
    runs = [record for record in records if not record.is_reference]
    assert {(r.status, r.error) for r in records} == {(Status.OK, None)}
    whole, broken = sorted(runs, key=lambda r: r.spec.checkpoint_every is not None)
    assert {(s.attempt, s.step) for s in broken.starts} == {(1, 0), (2, EVERY)}
    assert len(broken.steps) == len(whole.steps) == STEPS * (last + 1)
    assert losses(broken) == pytest.approx(losses(whole), rel=2e-3)
    assert goodput(broken) is not None
    assert goodput(whole) is None
