"""Fine-tuning on the GPU: every method alone, qlora on two NCCL ranks that share it, eager and compiled, certified."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from paceline.campaign.run.controller import campaign
from paceline.experiment import expansion
from paceline.results import store
from paceline.results.records import RunRecord, Status

PACKAGES = ("transformers", "peft", "bitsandbytes")
pytestmark = pytest.mark.skipif(not all(map(find_spec, PACKAGES)), reason="pip install 'paceline[finetune]'")

EXPERIMENT = """
name: tuned
base: {workload: finetune, model: "tiny-llama:hidden=256,ffn=512", precision: bf16, sequence_length: 128,
       micro_batch: 2, accumulation: 2, rank: 32, checkpointing: full, data: "instructions:mean=80", steps: 8,
       warmup: {minimum: 2, maximum: 4, window: 2}, timeout_s: 400, stall_s: 200}
"""
ALONE = ["strategy=single", "processes=1"]
SHARED = ["strategy=[ddp, fsdp2]", "processes=2", "launcher=local:shared_gpu=true"]
# Each is a campaign of its own, with a reference of its own, so that they can run beside each other.
GROUPS = {
    "qlora alone": [*ALONE, "method=qlora", "compile=[false, true]"],
    "lora alone": [*ALONE, "method=lora", "compile=[false, true]"],
    "full alone": [*ALONE, "method=full", "reduce_dtype=bf16", "compile=[false, true]"],
    "qlora packed": [*ALONE, "method=qlora", "data=instructions:mean=40,packed=true"],
    "qlora on two ranks": [*SHARED, "method=qlora"],
    "qlora on two ranks, compiled": [*SHARED, "method=qlora", "compile=true"],
    "lora on two ranks": [*SHARED, "method=lora"],
    "full on two ranks": [*SHARED, "method=full", "reduce_dtype=bf16"],
}


def tuned(folder: Path, remember: Any, settings: list[str]) -> list[RunRecord]:
    file = folder / "tuned.yaml"
    file.write_text(EXPERIMENT)
    campaign(expansion.load(str(file), settings), folder, remember)
    found, skipped = store.read_runs(folder / "tuned")
    assert not skipped
    return found


@pytest.mark.parametrize("group", GROUPS)
def test_every_run_is_certified(group: str, tmp_path: Path, remember: Any) -> None:
    """status is ok only when the certificate, trajectory included, agrees with the one-process reference."""
    runs = tuned(tmp_path, remember, GROUPS[group])
    assert not {r.spec.run_id: (r.status, r.error) for r in runs if r.status is not Status.OK}
    assert sum(not r.is_reference for r in runs) == (1 if group == "qlora packed" else 2)
    # The certificate holds reductions to the adapters; here is the other half: under DDP nothing else is sent at all.
    adapted = [r for r in runs if str(r.spec.strategy) == "ddp" and r.spec.tuning and r.spec.tuning.has_adapters]
    for record in adapted:
        assert {w.operation for w in record.wire if w.payload_bytes > 1024} == {"all_reduce"}


def test_4bit_weights_hold_less(tmp_path: Path, remember: Any) -> None:
    runs = tuned(tmp_path, remember, [*ALONE, "method=[qlora, lora]", "steps=2"])
    held = {}
    for record in runs:
        if record.spec.tuning and not record.is_reference:
            held[record.spec.tuning.method] = next(m.allocated_bytes for m in record.memory if m.moment == "setup")
    assert held["qlora"] < held["lora"]


@pytest.mark.parametrize("optimizer", ["adamw", "adamw_8bit", "paged_adamw_8bit"])
def test_optimizers(optimizer: str, tmp_path: Path, remember: Any) -> None:
    found = tuned(tmp_path, remember, [*ALONE, f"optimizer={optimizer}", "method=qlora"])
    assert {r.status for r in found} == {Status.OK}
    states = {r.evidence.dtypes["optimizer_state"] for r in found if r.evidence}
    assert states == {"fp32" if optimizer == "adamw" else "8bit"}
