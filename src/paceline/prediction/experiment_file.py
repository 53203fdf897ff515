"""Setups as experiment files of Paceline, so that a predicted layout can be run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline.prediction.predict import ADAPTER_RANK
from paceline.prediction.setup import Setup

_STRATEGIES = {"none": "ddp", "zero1": "zero:stage=1", "zero2": "zero:stage=2", "zero3": "fsdp2"}


def runnable(one: Setup) -> str | None:
    """Why Paceline cannot run this setup itself; None if it can."""
    for name in ("tp", "pp", "cp"):
        if getattr(one, name) > 1:
            return f"Paceline has no strategy with {name}={getattr(one, name)}"
    if one.fp8:
        return "Paceline does not train in fp8"
    return None if one.shard in _STRATEGIES else f"Paceline has no strategy {one.shard}"


def document(model: str, setups: Sequence[Setup], name: str, steps: int) -> dict[str, Any]:
    """One experiment with a cell for each setup; all must be runnable and on the same number of GPUs."""
    first = setups[0]
    nodes = max(first.gpus // first.per_node, 1)
    base: dict[str, Any] = {
        "model": model,
        "precision": "bf16",
        "sequence_length": first.sequence_length,
        "nodes": nodes,
        "processes": first.gpus // nodes,
        "steps": steps,
        "warmup": {"minimum": 3, "maximum": max(steps // 2, 4), "window": 3},
    }
    if first.has_adapters:
        targets = "q+k+v+o+gate+up+down" if first.shape.gated else "q+k+v+o+up+down"
        method = "qlora" if first.quantised else "lora"
        base |= {"workload": "finetune", "method": method, "rank": ADAPTER_RANK, "targets": targets}
    cells = [
        {
            "strategy": ["single" if one.gpus == 1 else _STRATEGIES[one.shard]],
            "micro_batch": [one.micro_batch],
            "accumulation": [int(one.micro_batches)],
            "checkpointing": [one.checkpointing],
        }
        for one in setups
    ]
    return {"name": name, "description": "Written by paceline choose", "base": base, "matrix": cells}
