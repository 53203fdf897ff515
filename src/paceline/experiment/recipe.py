"""The YAML of an experiment, recreated from its run specs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from paceline.errors import Scalar, require
from paceline.experiment import variables
from paceline.experiment.proof import Proof
from paceline.experiment.script import UNKNOWN_MODEL
from paceline.experiment.spec import RunSpec


def recreate(specs: Sequence[RunSpec]) -> dict[str, Any]:
    """The mapping from which `expansion.load` makes the same cells with the same run ids.

    Fields in which all cells agree become the base; each cell becomes a matrix of one point. All specs must be of one
    experiment and one kind of device. The order of the runs is not preserved.
    """
    for name, values in (("experiment", {s.experiment for s in specs}), ("device", {s.topology.device for s in specs})):
        require(len(values) == 1, f"{name} of a recreated experiment", sorted(values), f"specs of one {name}")
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
    """Every field a user may set, by its name in an experiment file, without those that the workload does not use."""
    t, topology = spec.training, spec.topology
    if spec.script:
        return _script_fields(spec)
    return {
        "workload": str(spec.workload),
        "model": str(spec.model),
        **({"strategy": spec.strategy_text} if spec.strategy else {}),
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
        **_proof_field(spec),
        "timeout_s": spec.timeout_s,
        "stall_s": spec.stall_s,
        "telemetry_hz": spec.telemetry_hz,
        **({"max_restarts": spec.max_restarts} if spec.max_restarts else {}),
        **({"checkpoint_every": spec.checkpoint_every} if spec.checkpoint_every else {}),
        **({"checkpoint_async": True} if spec.checkpoint_async else {}),
        **{f"{variables.PREFIX}{name}": value for name, value in spec.env.items()},
    }


def _proof_field(spec: RunSpec) -> dict[str, Any]:
    if spec.proof == Proof():
        return {}
    given = {name: value for name, value in dataclasses.asdict(spec.proof).items() if value is not None}
    mode = given.pop("mode")
    return {"proof": given or mode}


def _script_fields(spec: RunSpec) -> dict[str, Any]:
    """As `fields`, for a command of the user. Config files are in it with their text, so that nothing is read again."""
    assert spec.script is not None
    script, topology = dataclasses.asdict(spec.script), spec.topology
    return {
        "workload": str(spec.workload),
        **({} if spec.model.name == UNKNOWN_MODEL else {"model": str(spec.model)}),
        "launcher": str(spec.launcher),
        "device": topology.device,
        "nodes": topology.nodes,
        "processes": topology.processes_per_node,
        "command": list(script["command"]),
        **{name: dict(script[name]) for name in ("parameters", "files") if script[name]},
        **({"work": list(script["work"])} if script["work"] else {}),
        **({"steps": spec.steps} if spec.steps else {}),
        "warmup": dataclasses.asdict(spec.warmup),
        "seed": spec.seed,
        "timeout_s": spec.timeout_s,
        "stall_s": spec.stall_s,
        "telemetry_hz": spec.telemetry_hz,
        **({"max_restarts": spec.max_restarts} if spec.max_restarts else {}),
        **{f"{variables.PREFIX}{name}": value for name, value in spec.env.items()},
    }


def setting(spec: RunSpec, name: str) -> Scalar:
    """The value of one field by its name in an experiment file; None if the spec does not have it."""
    value = spec.global_batch if name == "global_batch" else fields(spec).get(name)
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def text(specs: Sequence[RunSpec]) -> str:
    """The YAML text, as a file for `paceline run FILE`."""
    # Not at the top: few commands write one.
    import yaml

    return yaml.safe_dump(recreate(specs), sort_keys=False, allow_unicode=True, default_flow_style=None, width=120)
