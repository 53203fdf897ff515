"""Fine-tuning on the GPU: every method alone, qlora on two NCCL ranks that share it, eager and compiled, certified."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline import experiment, store
from paceline.records import RunRecord, Status
from paceline.run import campaign

for package in ("transformers", "peft", "bitsandbytes"):
    pytest.importorskip(package)

EXPERIMENT = """
name: tuned
base: {workload: finetune, model: "tiny-llama:hidden=256,ffn=512", precision: bf16, sequence_length: 128,
       micro_batch: 2, accumulation: 2, rank: 32, checkpointing: full, data: "instructions:mean=80", steps: 8,
       reference_steps: 6, warmup: {minimum: 2, maximum: 4, window: 2}, timeout_s: 400, stall_s: 200}
matrix:
  - {method: [qlora, lora], strategy: [single], processes: [1], compile: [false, true]}
  - {method: [full], reduce_dtype: [bf16], strategy: [single], processes: [1], compile: [false, true]}
  - {method: [qlora], strategy: [single], processes: [1], data: ["instructions:mean=40,packed=true"]}
  - {method: [qlora], strategy: [ddp, fsdp2], processes: [2], launcher: ["local:shared_gpu=true"],
     compile: [false, true]}
  - {method: [lora, full], reduce_dtype: [bf16, fp32], strategy: [ddp, fsdp2], processes: [2],
     launcher: ["local:shared_gpu=true"]}
exclude:
  - {method: lora, reduce_dtype: bf16}
  - {method: full, reduce_dtype: fp32}
"""


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory, remember: Any) -> list[RunRecord]:
    folder: Path = tmp_path_factory.mktemp("tuned")
    (folder / "tuned.yaml").write_text(EXPERIMENT)
    campaign(experiment.load(str(folder / "tuned.yaml")), folder, remember)
    found, skipped = store.read_runs(folder / "tuned")
    assert not skipped
    return found


def test_every_run_is_certified(runs: list[RunRecord]) -> None:
    """status is ok only when the certificate, trajectory included, agrees with the one-process reference."""
    wrong = {r.spec.run_id: (r.status, r.error) for r in runs if r.status is not Status.OK}
    assert not wrong
    assert sum(not r.is_reference for r in runs) == 15


def test_only_adapters_cross_under_ddp(runs: list[RunRecord]) -> None:
    """The certificate holds reductions to the adapters; here is the other half: nothing else is sent at all."""
    shared = [r for r in runs if str(r.spec.strategy) == "ddp" and r.spec.tuning and r.spec.tuning.has_adapters]
    assert shared
    assert {w.operation for r in shared for w in r.wire if w.payload_bytes > 1024} == {"all_reduce"}


def test_4bit_weights_hold_less(runs: list[RunRecord]) -> None:
    held = {}
    for record in runs:
        tuning, alone = record.spec.tuning, str(record.spec.strategy) == "single"
        if tuning and alone and not record.spec.training.compile and "packed" not in str(record.spec.training.data):
            held[tuning.method] = next(m.allocated_bytes for m in record.memory if m.moment == "setup")
    assert held["qlora"] < held["lora"] <= held["full"]


@pytest.mark.parametrize("optimizer", ["adamw", "adamw_8bit", "paged_adamw_8bit"])
def test_optimizers(optimizer: str, tmp_path: Path, remember: Any) -> None:
    file = tmp_path / "tuned.yaml"
    file.write_text(EXPERIMENT.split("matrix:")[0])
    settings = [f"optimizer={optimizer}", "strategy=single", "processes=1", "method=qlora"]
    campaign(experiment.load(str(file), settings), tmp_path, remember)
    found, _ = store.read_runs(tmp_path / "tuned")
    assert {r.status for r in found} == {Status.OK}
    states = {r.evidence.dtypes["optimizer_state"] for r in found if r.evidence}
    assert states == {"fp32" if optimizer == "adamw" else "8bit"}
