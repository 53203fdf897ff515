"""The experiment that repeats one cell: every field that was asked, none left to a default that may change."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import yaml

from paceline.findings import Recipe
from paceline.records import RunRecord
from paceline.spec import RunSpec


def recipes(records: Iterable[RunRecord]) -> tuple[Recipe, ...]:
    """One per cell in the order of its first run; references follow from the cells that need them."""
    specs: dict[str, list[RunSpec]] = {}
    for record in records:
        if not record.is_reference:
            specs.setdefault(record.spec.cell, []).append(record.spec)
    return tuple(_recipe(found[0], repeats=max(spec.repeat for spec in found) + 1) for found in specs.values())


def _recipe(spec: RunSpec, repeats: int) -> Recipe:
    # A name of its own: runs of the same name in the same folder are sealed, so nothing would run.
    name = f"{spec.run_id.rpartition(f'-r{spec.repeat}-')[0]}-{spec.cell[:8]}"
    document = {"name": name, "repeats": repeats, "base": _fields(spec)}
    return Recipe(
        cell=spec.cell,
        file=f"{name}.yaml",
        experiment=yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=10_000),
        command=f"paceline run {name}.yaml",
    )


def _fields(spec: RunSpec) -> dict[str, Any]:
    """As a user writes them; what was not set (null) is left out."""
    places: dict[str, Any] = {
        "workload": str(spec.workload),
        "model": str(spec.model),
        "strategy": str(spec.strategy) if spec.strategy else None,
        "launcher": str(spec.launcher),
        "device": spec.topology.device,
        "nodes": spec.topology.nodes,
        "processes": spec.topology.processes_per_node,
    }
    asked = {**places, **(_training(spec) if spec.is_trained else {}), "seed": spec.seed}
    limits = {"timeout_s": spec.timeout_s, "stall_s": spec.stall_s}
    return {name: value for name, value in {**asked, **limits}.items() if value is not None}


def _training(spec: RunSpec) -> Mapping[str, Any]:
    t, w = spec.training, spec.warmup
    return {
        "precision": t.precision.compute,
        "reduce_dtype": t.precision.reduce,
        "sequence_length": t.sequence_length,
        "micro_batch": t.micro_batch,
        "accumulation": t.accumulation,
        "checkpointing": t.checkpointing,
        "compile": t.compile,
        "bucket_mb": t.bucket_mb,
        "learning_rate": t.learning_rate,
        "weight_decay": t.weight_decay,
        "clip_norm": t.clip_norm,
        "data": str(t.data),
        "steps": spec.steps,
        "warmup": {
            "minimum": w.minimum,
            "maximum": w.maximum,
            "window": w.window,
            "slope_ratio": w.slope_ratio,
        },
        "reference_steps": spec.reference_steps,
    }
