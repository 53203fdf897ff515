"""Setups as experiment files of Paceline, so that a predicted layout can be run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline.prediction.hardware import CPU
from paceline.prediction.predict import ADAPTER_RANK
from paceline.prediction.setup import Setup

_STRATEGIES = {"none": "ddp", "zero1": "zero:stage=1", "zero2": "zero:stage=2", "zero3": "fsdp2"}
_DEGREES = ("tp", "pp", "cp", "ep")


def runnable(one: Setup) -> str | None:
    """Why Paceline cannot run this setup itself; None if it can."""
    split = next((f"{name}={getattr(one, name)}" for name in _DEGREES if getattr(one, name) > 1), None)
    if split is not None and one.shard not in ("none", "zero1", "zero3"):
        return f"Paceline has no {one.shard} together with {split}"
    whole = one.tp == 1 and not one.shape.experts and not one.has_adapters and not one.offload
    if one.fp8 and not (whole and one.shard in ("none", "zero3")):
        return "Paceline trains in fp8 with ddp, fsdp2 and layouts without tp, and no mixtures of experts"
    if split is not None and one.has_adapters:
        return f"Paceline does not train adapters with {split}"
    return None if one.shard in _STRATEGIES else f"Paceline has no strategy {one.shard}"


def strategy(one: Setup) -> str:
    """The strategy of Paceline that does what the setup says, with its options."""
    if one.offload:
        return f"zero:stage={one.shard.removeprefix('zero')},offload=cpu"
    if one.gpus == 1:
        return "single"
    if all(getattr(one, name) == 1 for name in _DEGREES):
        return _STRATEGIES[one.shard]
    options = [f"{name}={n}" for name in _DEGREES if (n := getattr(one, name)) > 1]
    if one.shard != "none" and one.dp * one.cp > 1:
        options.append(f"shard={one.dp * one.cp}")
        # A pipeline does so by itself. Once per step each weight is gathered and each gradient is reduced: ZeRO-1.
        options += ["gather_once=true"] if one.shard == "zero1" and one.pp == 1 else []
    options += [f"schedule=interleaved-1f1b,virtual={one.stages}"] if one.stages > 1 else []
    return f"mesh:{','.join(options)}"


def method_suffix(one: Setup) -> str:
    """What the name of an experiment adds for adapters: setups of one experiment are trained by one method."""
    return "-qlora" if one.quantised else "-lora" if one.has_adapters else ""


def _precision(one: Setup) -> str:
    if not one.fp8:
        return "bf16"
    return "float8_rowwise" if one.fp8_rowwise else "float8"


def document(model: str, setups: Sequence[Setup], name: str, steps: int) -> dict[str, Any]:
    """One experiment with a cell for each setup; all must be runnable and on the same number of GPUs."""
    first = setups[0]
    nodes = max(first.gpus // first.per_node, 1)
    base: dict[str, Any] = {
        "model": model,
        "precision": "fp32" if first.gpu.name == CPU else _precision(first),
        "sequence_length": first.sequence_length,
        "nodes": nodes,
        "processes": first.gpus // nodes,
        "steps": steps,
        "warmup": {"minimum": 3, "maximum": max(steps // 2, 4), "window": 3},
    }
    if first.gpu.name == CPU:
        base["device"] = CPU
    if first.has_adapters:
        targets = "q+k+v+o+gate+up+down" if first.shape.gated else "q+k+v+o+up+down"
        method = "qlora" if first.quantised else "lora"
        base |= {"workload": "finetune", "method": method, "rank": ADAPTER_RANK, "targets": targets}
    cells = [
        {
            "strategy": [strategy(one)],
            "micro_batch": [one.micro_batch],
            "accumulation": [int(one.micro_batches)],
            "checkpointing": [one.checkpointing],
        }
        for one in setups
    ]
    return {"name": name, "description": "Written by paceline choose", "base": base, "matrix": cells}
