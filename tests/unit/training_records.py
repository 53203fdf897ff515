"""Synthetic runs whose every number is known: the tests change one thing and see who notices."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from paceline.experiment.choices import Choice
from paceline.experiment.spec import Precision, RunSpec, Topology, Training, WarmUp
from paceline.models import arithmetic
from paceline.results.records import (
    Evidence,
    MemorySample,
    Outcome,
    RunRecord,
    Status,
    StepSample,
    TraceSample,
    WireSample,
)

MiB = 2**20
H200 = {"name": "NVIDIA H200", "peak_flops": {"bf16": 989e12, "fp16": 989e12, "fp32": 67e12}}
NO_WARMUP = WarmUp(minimum=1, maximum=1, window=2)


def build_spec(strategy: str | None = "ddp", world_size: int = 2, **more: Any) -> RunSpec:
    """A spec on CPU; any field of Training or RunSpec by its name, precision as `bf16/fp32` (compute/reduce)."""
    values: dict[str, Any] = {"device": "cpu", "model": "tiny", "workload": "pretrain", "precision": "fp32", **more}
    compute, _, reduce = values.pop("precision").partition("/")
    training: dict[str, Any] = {"sequence_length": 64, "micro_batch": 2, "accumulation": 2}
    training |= {f.name: values.pop(f.name) for f in dataclasses.fields(Training) if f.name in values}
    topology = Topology(device=values.pop("device"), processes_per_node=world_size)
    spec: dict[str, Any] = {"experiment": "test", "steps": 30, "warmup": NO_WARMUP, **values}
    spec |= {"workload": Choice.parse(spec["workload"]), "model": Choice.parse(spec["model"])}
    training["precision"] = Precision(compute=compute, reduce=reduce or "fp32")
    strategy_choice = Choice.parse(strategy) if strategy else None
    return RunSpec(strategy=strategy_choice, topology=topology, training=Training(**training), **spec)


def sequence_digest(step: int, index: int, data: str = "") -> int:
    return int.from_bytes(hashlib.blake2b(f"{step} {index} {data}".encode(), digest_size=8).digest(), "little")


def build_evidence(spec: RunSpec, **more: Any) -> Evidence:
    precision = spec.training.precision
    usual: dict[str, Any] = {
        "init_digest": "5f2c9e",
        "parameters": arithmetic.parameters(arithmetic.load(spec.model)),
        "dtypes": {
            "parameters": precision.base,
            "compute": precision.compute,
            "gradient": precision.reduce,
            "gradient_reduction": precision.reduce,
            "optimizer_state": "fp32",
            "master_weights": "fp32",
        },
        "optimizer": {"implementation": "torch.optim.AdamW", "lr": spec.training.learning_rate, "clip_norm": 1.0},
        "settings": {},
        "switches": {},
        "neighbours": None,
        "window_wall_s": None,
    }
    return Evidence(**usual | more)


def build_steps(
    spec: RunSpec, seconds: Sequence[float] | float = 1.0, variant: int = 0, off: float = 0.0, **more: Any
) -> tuple[StepSample, ...]:
    """Every rank's samples; rank 0 takes `seconds`, the others 90 % of it. off shifts loss and norm, relatively."""
    t, n = spec.training, spec.topology.world_size
    per_rank = spec.global_batch // n
    times = [seconds] * spec.steps if isinstance(seconds, int | float) else list(seconds)
    samples = []
    for step, duration in enumerate(times):
        for rank in range(n):
            share = range(rank * per_rank, (rank + 1) * per_rank)
            usual: dict[str, Any] = {
                "duration_s": duration if rank == 0 else 0.9 * duration,
                "data_wait_s": 0.01 * duration,
                "h2d_s": None,
                "h2d_bytes": None,
                "forward_s": 0.3 * duration,
                "backward_s": 0.5 * duration,
                "optimizer_s": 0.1 * duration,
                "tokens": per_rank * t.sequence_length,
                "samples": per_rank,
                "micro_batches": t.accumulation,
                "updates": 1,
                "loss": (5.0 - 0.01 * step) * (1 + off),
                "grad_norm": (2.0 - 0.01 * step) * (1 + off),
                "data_digest": sum(sequence_digest(step, i) for i in share) % 2**64,
            }
            samples.append(StepSample(rank=rank, step=step, variant=variant, **usual | more))
    return tuple(samples)


def build_record(
    spec: RunSpec,
    seconds: Sequence[float] | float = 1.0,
    evidence: Mapping[str, Any] | None = None,
    gpus: Sequence[Mapping[str, Any]] = (),
    memory_bytes: float = 100 * MiB,
    **more: Any,
) -> RunRecord:
    """A complete run; rank r peaks r MiB above memory_bytes, reductions are counted in the asked dtype."""
    n, cuda = spec.topology.world_size, spec.topology.device == "cuda"
    facts = build_evidence(spec, **(evidence or {}))
    outcomes = [
        Outcome(
            rank=r, status=Status.OK, error=None, host="node-a", pid=r, started_at=0.0, ended_at=1.0, evidence=facts
        )
        for r in range(n)
    ]
    peaks = [int(memory_bytes) + r * MiB for r in range(n)]
    usual: dict[str, Any] = {
        "status": Status.OK,
        "error": None,
        "started_at": 100.0 + spec.repeat,
        "ended_at": 160.0 + spec.repeat,
        "path": f"/results/{spec.run_id}",
        "outcomes": tuple(outcomes),
        "machines": ({"host": "node-a", "cpu": "Xeon", "gpus": list(gpus)},),
        "steps": build_steps(spec, seconds),
        "memory": tuple(
            MemorySample(
                rank=r,
                moment="steps",
                allocated_bytes=peak if cuda else None,
                reserved_bytes=peak + MiB if cuda else None,
                device_bytes=peak + 2 * MiB if cuda else None,
                resident_bytes=peak + 3 * MiB,
            )
            for r, peak in enumerate(peaks)
        ),
        "wire": build_wire(spec, facts.parameters) if n > 1 else (),
        "traces": tuple(
            TraceSample(rank=r, steps=2, wall_s=2.0, compute_s=1.8, communication_s=0.4, exposed_s=0.1 + 0.1 * r)
            for r in range(n)
        ),
    }
    return RunRecord(spec=spec, **usual | more)


def build_wire(spec: RunSpec, parameters: int, dtype: str | None = None) -> tuple[WireSample, ...]:
    """Gradients all-reduced once, and the loss, one fp32 number, beside them."""
    n, reduce = spec.topology.world_size, dtype or spec.training.precision.reduce
    size = parameters * (4 if reduce == "fp32" else 2)
    shared: dict[str, Any] = {"step": spec.steps, "operation": "all_reduce", "group_size": n, "calls": 1}
    return tuple(
        WireSample(rank=r, dtype=kind, payload_bytes=payload, **shared)
        for r in range(n)
        for kind, payload in {reduce: size, "fp32": 4 + size * (reduce == "fp32")}.items()
    )


def build_reference(spec: RunSpec, variants: Sequence[float] = (0.0,), steps: int = 10, **more: Any) -> RunRecord:
    """One process over the same global batches; variants are relative shifts of loss and norm."""
    alone = dataclasses.replace(
        spec,
        workload=Choice("reference"),
        strategy=None,
        topology=Topology(device=spec.topology.device),
        training=dataclasses.replace(spec.training, micro_batch=spec.global_batch, accumulation=1),
        steps=steps,
        repeat=0,
    )
    assert alone.work == spec.work
    samples = [s for number, off in enumerate(variants) for s in build_steps(alone, 1.0, number, off)]
    return build_record(alone, **{"steps": tuple(samples)} | more)


def build_supplement(reference: RunRecord, variants: Sequence[float]) -> RunRecord:
    """More copies of a reference, with these relative shifts."""
    first = 1 + max(step.variant for step in reference.steps)
    workload = Choice("reference", {"first": first, "variants": first + len(variants)})
    spec = dataclasses.replace(reference.spec, workload=workload)
    samples = [s for number, off in enumerate(variants, first) for s in build_steps(spec, 1.0, number, off)]
    path = reference.path.replace(reference.spec.run_id, spec.run_id)
    return dataclasses.replace(reference, spec=spec, steps=tuple(samples), path=path)


def noisy(n: int, mean: float, spread: float, seed: int, launch_spread: float = 0.0) -> list[float]:
    """n step times around mean; spread and launch_spread are relative standard deviations."""
    rng = np.random.default_rng(seed)
    launch = mean * (1 + launch_spread * rng.standard_normal())
    return [float(x) for x in launch * (1 + spread * rng.standard_normal(n))]


def build_cell(mean_s: float, repeats: int = 3, spread: float = 0.002, steps: int = 30, **more: Any) -> list[RunRecord]:
    """Repeats of one configuration; `record` holds keywords for build_record."""
    record = more.pop("record", {})
    memory = record.pop("memory_bytes", 100 * MiB)
    found = []
    for repeat in range(repeats):
        spec = build_spec(steps=steps, repeat=repeat, **more)
        seed = int(spec.run_id[-10:], 16) % 2**32
        jitter = 1 + 0.0005 * (repeat - 1)
        seconds = noisy(steps, mean_s, spread, seed, spread / 2)
        found.append(build_record(spec, seconds, memory_bytes=memory * jitter, **record))
    return found


Builder = Callable[..., Any]


@pytest.fixture
def make_spec() -> Builder:
    return build_spec


@pytest.fixture
def make_steps() -> Builder:
    return build_steps


@pytest.fixture
def make_record() -> Builder:
    return build_record


@pytest.fixture
def make_wire() -> Builder:
    return build_wire


@pytest.fixture
def make_reference() -> Builder:
    return build_reference


@pytest.fixture
def make_cell() -> Builder:
    return build_cell


@pytest.fixture
def h200() -> Mapping[str, Any]:
    return H200
