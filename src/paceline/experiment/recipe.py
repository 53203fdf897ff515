"""An experiment's YAML, recreated from run specs: what was asked, in the words in which a user asks for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import yaml

from paceline.errors import Scalar, require
from paceline.experiment.spec import RunSpec


def recreate(specs: Sequence[RunSpec]) -> dict[str, Any]:
    """The mapping from which `experiment.load` makes these cells again, under the same run ids.

    Fields in which all cells agree are the base; each cell is a matrix of one point. The specs are of one experiment
    and one kind of device, because an experiment is. The order of the runs is not kept.
    """
    for name, found in (("experiment", {s.experiment for s in specs}), ("device", {s.topology.device for s in specs})):
        require(len(found) == 1, f"{name} of a recreated experiment", sorted(found), f"specs of one {name}")
    cells = [fields(spec) for spec in {spec.cell: spec for spec in specs}.values()]
    base = {k: v for k, v in cells[0].items() if all(k in cell and cell[k] == v for cell in cells)}
    points = [{k: [v] for k, v in cell.items() if k not in base} for cell in cells]
    return {
        "name": specs[0].experiment,
        "base": base,
        "matrix": points if any(points) else {},
        "repeats": max(spec.repeat for spec in specs) + 1,
    }


def fields(spec: RunSpec) -> dict[str, Any]:
    """Every field a user may set, by the names of an experiment file; what a workload has no use for is left out."""
    t, topology = spec.training, spec.topology
    return {
        "workload": str(spec.workload),
        "model": str(spec.model),
        **({"strategy": str(spec.strategy)} if spec.strategy else {}),
        "launcher": str(spec.launcher),
        "device": topology.device,
        "nodes": topology.nodes,
        "processes": topology.processes_per_node,
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
        **(dataclasses.asdict(spec.tuning) if spec.tuning else {}),
        **({"engine": str(spec.engine)} if spec.engine else {}),
        **(dataclasses.asdict(spec.serving) if spec.serving else {}),
        "steps": spec.steps,
        "warmup": dataclasses.asdict(spec.warmup),
        "seed": spec.seed,
        "reference_steps": spec.reference_steps,
        "timeout_s": spec.timeout_s,
        "stall_s": spec.stall_s,
        "telemetry_hz": spec.telemetry_hz,
        **({"max_restarts": spec.max_restarts} if spec.max_restarts else {}),
        **({"checkpoint_every": spec.checkpoint_every} if spec.checkpoint_every else {}),
    }


def setting(spec: RunSpec, name: str) -> Scalar:
    """The value of one field in which cells may differ, by the name of an experiment file; None where it has none."""
    value = spec.global_batch if name == "global_batch" else fields(spec).get(name)
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def text(specs: Sequence[RunSpec]) -> str:
    """As a file for `paceline run FILE`."""
    return yaml.safe_dump(recreate(specs), sort_keys=False, allow_unicode=True, default_flow_style=None, width=120)
