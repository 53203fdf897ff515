"""A report made by hand: five strategies at 2 processes (two equal, one invalid), ddp at 1, a refusal and an oom."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path

import pytest
from training_records import h200, make_cell, make_record, make_reference, make_spec, make_steps, make_wire

from paceline.analysis.findings import (
    Certificate,
    Check,
    Comparison,
    Measurement,
    Recommendation,
    Report,
    RunFinding,
    ScalingPoint,
    WarmUpOutcome,
)
from paceline.errors import Scalar
from paceline.experiment import plugins

__all__ = ["h200", "make_cell", "make_record", "make_reference", "make_spec", "make_steps", "make_wire"]

TIMES = (1753000000.0, 1753000300.0)
REFERENCE = "reference-gpt-tiny-1x-r0-aa11bb22cc"
SHARED = "two processes share one device: not a speed"
# strategy: tokens/s, relative half width, step time s, peak bytes, exposed, counted wire bytes, formula
SPEEDS: dict[str, tuple[float, float, float, float, float | None, float, float]] = {
    "ddp": (12345.0, 0.0045, 0.6636, 512e6, 0.113, 40.1e6, 40.1e6),
    "fsdp2": (12310.0, 0.0061, 0.6655, 421e6, 0.142, 120.4e6, 120.3e6),
    "zero:stage=1": (11020.0, 0.0088, 0.7434, 455e6, 0.171, 40.1e6, 40.1e6),
    "zero:stage=2": (10480.0, 0.0127, 0.7817, 433e6, None, 100.3e6, 100.3e6),
    "zero:stage=3": (14020.0, 0.0070, 0.5843, 380e6, 0.080, 30.1e6, 120.3e6),
}


def axes(strategy: str | None, world_size: int = 2, **other: Scalar) -> dict[str, Scalar]:
    plain: dict[str, Scalar] = {
        "workload": "pretrain",
        "strategy": strategy,
        "model": "gpt-tiny",
        "launcher": "local",
        "device": "cpu",
        "nodes": 1,
        "world_size": world_size,
        "precision": "fp32",
        "reduce_dtype": "fp32",
        "sequence_length": 512,
        "micro_batch": 2,
        "accumulation": 4,
        "global_batch": 8 * world_size,
        "checkpointing": "none",
        "compile": False,
        "bucket_mb": None,
        "data": "synthetic",
        "seed": 42,
        "steps": 40,
    }
    return plain | other


def cell_of(strategy: str, world_size: int = 2) -> str:
    return f"{strategy.replace(':', '-').replace('=', '')}-{world_size}-cell"


def runs_of(strategy: str, world_size: int = 2) -> tuple[str, ...]:
    slug = strategy.replace(":", "-").replace("=", "-")
    return tuple(f"{slug}-gpt-tiny-{world_size}x-r{repeat}-0123456789" for repeat in range(3))


def measurement(
    strategy: str, metric: str, unit: str, value: float | None, half: float | None, world_size: int = 2, **more: str
) -> Measurement:
    known = value is not None and half is not None
    return Measurement(
        metric=metric,
        unit=unit,
        better="lower" if metric in {"step_time_s", "peak_memory_bytes", "comm_exposed_ratio"} else "higher",
        cell=cell_of(strategy, world_size),
        value=value,
        low=value * (1 - half) if known else None,
        high=value * (1 + half) if known else None,
        n=90,
        launches=3,
        axes=axes(strategy, world_size),
        runs=runs_of(strategy, world_size),
        **more,
    )


def measurements(strategy: str, world_size: int, numbers: tuple[float | None, ...]) -> list[Measurement]:
    speed, half, step, peak, exposed, wire, formula = numbers
    return [
        measurement(strategy, "tokens_per_s", "tokens/s", speed, half, world_size),
        measurement(strategy, "step_time_s", "s", step, half, world_size),
        measurement(strategy, "mfu_ratio", "ratio", None, None, world_size),
        measurement(strategy, "peak_memory_bytes", "bytes", peak, 0.004, world_size),
        measurement(strategy, "comm_exposed_ratio", "ratio", exposed, 0.05, world_size),
        measurement(strategy, "wire_bytes_per_step", "bytes/step", wire, None, world_size),
        measurement(strategy, "wire_bytes_formula_per_step", "bytes/step", formula, None, world_size),
    ]


def certificate(strategy: str, run: str, world_size: int = 2) -> Certificate:
    right = strategy != "zero:stage=3"
    checks = (
        Check(name="initial weights", ok=True, expected="5f2c9e", observed="5f2c9e"),
        Check(name="data", ok=True, expected="81d0aa", observed="81d0aa"),
        Check(name="tokens per step", ok=True, expected=str(4096 * world_size), observed=str(4096 * world_size)),
        Check(name="micro batches per step", ok=right, expected="4", observed="4" if right else "1"),
        Check(name="loss trajectory", ok=True, expected="within 1e-4 of the reference", observed="2.1e-06"),
    )
    return Certificate(
        run=run, cell=cell_of(strategy, world_size), work=f"work-{world_size}", reference=REFERENCE, checks=checks
    )


def finding(run: str, strategy: str | None, repeat: int = 0, world_size: int = 2, **more: object) -> RunFinding:
    done = {
        "status": "ok",
        "reason": None,
        "loss_first": 6.2383,
        "loss_last": 4.9127,
        "outlier_steps": repeat,
        "health": (),
        "warmup": WarmUpOutcome(
            run=run, excluded_steps=8 + repeat, measured_steps=30, by_rule=repeat < 2, text="median moved by 0.4 %"
        ),
        "is_reference": False,
        "cell": cell_of(strategy or "reference", world_size),
        "axes": axes(strategy, world_size),
    }
    done |= more
    workload = str(done["axes"]["workload"]).partition(":")[0]  # type: ignore[index]
    traits = (plugins.declared("workloads", workload) or {"TRAITS": plugins.Traits()})["TRAITS"]
    return RunFinding(run=run, repeat=repeat, started_at=TIMES[0], duration_s=31.5, traits=traits, **done)  # type: ignore[arg-type]


def comparison(strategy: str, other: str, verdict: str, metric: str = "tokens_per_s") -> Comparison:
    ratio = SPEEDS[strategy][0] / SPEEDS[other][0]
    half = math.sqrt(SPEEDS[strategy][1] ** 2 + SPEEDS[other][1] ** 2)
    return Comparison(
        metric=metric,
        better="higher",
        cell=cell_of(strategy),
        other=cell_of(other),
        label=strategy,
        other_label=other,
        ratio=ratio,
        low=ratio * (1 - half),
        high=ratio * (1 + half),
        detectable_ratio=half,
        verdict=verdict,
        reason="within 2 %" if verdict == "equal" else "the interval lies on one side of 1",
        certified=True,
        axes=axes(None),
        runs=runs_of(strategy) + runs_of(other),
        launches=3,
    )


COMPARISONS = (
    comparison("ddp", "fsdp2", "equal"),
    comparison("ddp", "zero:stage=1", "better"),
    comparison("zero:stage=2", "ddp", "worse"),
    comparison("fsdp2", "zero:stage=1", "better"),
    comparison("fsdp2", "zero:stage=2", "better"),
    comparison("zero:stage=1", "zero:stage=2", "better"),
)


def recommendations() -> tuple[Recommendation, ...]:
    throughput = Recommendation(
        category="highest throughput",
        metric="tokens_per_s",
        group="gpt-tiny, 2 processes",
        choose=("ddp", "fsdp2"),
        over=("zero:stage=1", "zero:stage=2"),
        because=COMPARISONS[1:3],
        text="ddp and fsdp2 are equal. ddp is at 1.12 times zero:stage=1 (95 % 1.11 to 1.13) in tokens/s. "
        "Also measured: 40.1 MB against 40.1 MB on the wire per step (ddp against zero:stage=1).",
        caveats=("gloo moves bytes through host memory: strategies may order otherwise over NCCL.",),
    )
    memory = dataclasses.replace(
        throughput,
        category="lowest memory",
        metric="peak_memory_bytes",
        choose=("fsdp2",),
        over=("ddp",),
        because=COMPARISONS[:1],
        text="fsdp2: 0.822 times ddp (95 % 0.82 to 0.83) in peak memory.",
        caveats=(),
    )
    return throughput, memory


def run_findings() -> tuple[RunFinding, ...]:
    two = [
        finding(run, s, repeat, health=(SHARED,) if s == "fsdp2" else ())
        for s in SPEEDS
        for repeat, run in enumerate(runs_of(s))
        if s != "zero:stage=3"
    ]
    wrong = [
        finding(run, "zero:stage=3", i, status="invalid", reason=None) for i, run in enumerate(runs_of("zero:stage=3"))
    ]
    one = [finding(run, "ddp", repeat, 1) for repeat, run in enumerate(runs_of("ddp", 1))]
    never: dict[str, object] = {"loss_first": None, "loss_last": None, "warmup": None}
    refused = finding(
        "mesh-gpt-tiny-2x-r0-77", "mesh:tp=3", status="unsupported", reason="tp=3 does not divide 4 heads", **never
    )
    burst = finding("ddp-gpt-13b-2x-r0-99", "ddp", status="oom", reason="out of memory on rank 1 in backward", **never)
    burst = dataclasses.replace(burst, cell="ddp-13b-cell", axes=axes("ddp", model="gpt-13b"))
    reference = finding(REFERENCE, None, is_reference=True, warmup=None, axes=axes(None) | {"workload": "reference"})
    return (reference, *two, *wrong, *one, refused, burst)


def scaling_points() -> tuple[ScalingPoint, ...]:
    base, two = cell_of("ddp", 1), cell_of("ddp", 2)
    whole = measurement("ddp", "scaling_efficiency_ratio", "ratio", 1.0, None, 1)
    return (
        ScalingPoint(
            kind="weak",
            series="ddp, gpt-tiny, fp32, sequence 512, 8 sequences per process",
            cell=base,
            baseline=base,
            world_size=1,
            baseline_world_size=1,
            speedup_ratio=1.0,
            efficiency=whole,
        ),
        ScalingPoint(
            kind="weak",
            series="ddp, gpt-tiny, fp32, sequence 512, 8 sequences per process",
            cell=two,
            baseline=base,
            world_size=2,
            baseline_world_size=1,
            speedup_ratio=1.82,
            efficiency=measurement("ddp", "scaling_efficiency_ratio", "ratio", 0.911, 0.012),
        ),
    )


def durations(step_s: float) -> tuple[float, ...]:
    """Thirty steps with a slow tail and three outliers, the same on every machine."""
    usual = [step_s * (1 + 0.012 * math.sin(7 * i) + 0.02 * (i % 13 == 0)) for i in range(27)]
    return tuple(round(x, 6) for x in (*usual, step_s * 1.19, step_s * 1.24, step_s * 1.31))


@pytest.fixture
def report() -> Report:
    machine: Mapping[str, object] = {
        "host": "node-a",
        "cpu": "Xeon Platinum 8480+",
        "memory_bytes": 64 * 2**30,
        "gpus": [],
        "driver": None,
        "versions": {"python": "3.11.2", "torch": "2.11.0", "deepspeed": None},
        "revision": "2ed9767",
    }
    cells = [(s, 2, numbers) for s, numbers in SPEEDS.items()]
    single = ("ddp", 1, (6780.0, 0.005, 0.6041, 498e6, None, None, None))
    return Report(
        title="quick",
        created_at=TIMES[1],
        paceline_version="0.1.0",
        machines=(machine,),
        runs=run_findings(),
        measurements=tuple(m for s, n, numbers in (*cells, single) for m in measurements(s, n, numbers)),
        certificates=tuple(
            certificate(s, run, n) for s, n in (*((s, 2) for s in SPEEDS), ("ddp", 1)) for run in runs_of(s, n)
        ),
        comparisons=COMPARISONS,
        recommendations=recommendations(),
        scaling=scaling_points(),
        distributions={cell_of(s): durations(numbers[2]) for s, numbers in SPEEDS.items()}
        | {cell_of("ddp", 1): durations(0.6041)},
        notes=("gloo on a CPU: what is measured here is host memory and processor, not a network of GPUs.",),
        skipped=("results/quick/half-written: spec.json is missing",),
    )


@pytest.fixture
def empty_report() -> Report:
    return Report(
        title="nothing yet",
        created_at=TIMES[1],
        paceline_version="0.1.0",
        machines=(),
        runs=(),
        measurements=(),
        certificates=(),
        comparisons=(),
        recommendations=(),
        scaling=(),
    )


@pytest.fixture
def golden_folder() -> Path:
    return Path(__file__).parents[2] / "golden" / "exporters"
