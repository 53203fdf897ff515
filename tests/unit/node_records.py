"""Synthetic node tests whose every number is known: healthy nodes, and one that is not."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from paceline.experiment.choices import Choice
from paceline.experiment.spec import RunSpec, Topology, Training
from paceline.results.machine_samples import HealthSample, KernelSample, ProductSample, TrajectorySample
from paceline.results.records import Evidence, GaugeSample, MemorySample, Outcome, RunRecord, Status, StepSample

GIB = 2**30
# Rate of one repeat of one rank over the usual one.
Pace = Callable[[int, int], float]
GPU = {"index": 0, "name": "NVIDIA H200", "power_limit_w": 700.0, "pcie_width": 16}
FACTS = {
    "host.kernel": "6.8.0",
    "gpu.vbios": "96.00.A5.00.01",
    "gpu.power_limit_w": 700.0,
    "gpu.pcie_width": 16,
    "gpu.pcie_width_max": 16,
    "gpu.pcie_generation": 5,
    "gpu.pcie_generation_max": 5,
    "gpu.ecc_volatile_uncorrected": 0,
    "gpu.remap_pending": False,
    "gpu.nvlinks_up": "0 1 2",
    "gpu.nvlinks_down": "",
}


def spec_of(nodes: int, workload: str = "nodes", device: str = "cuda") -> RunSpec:
    return RunSpec(
        experiment="nodes",
        workload=Choice.parse(workload),
        model=Choice("tiny"),
        topology=Topology(device=device, nodes=nodes),
        training=Training(sequence_length=512, micro_batch=8),
        steps=2,
    )


def healthy(nodes: int = 8, repeats: int = 5, pace: Pace = lambda rank, repeat: 1.0, **more: Any) -> RunRecord:
    """One GPU per host: node-0, node-1, ... pace slows every rate of a rank; more replaces fields of the record."""
    spec = more.pop("spec", None) or spec_of(nodes)
    fields: dict[str, Any] = {
        "outcomes": tuple(_outcome(rank) for rank in range(nodes)),
        "machines": tuple(machine(rank) for rank in range(nodes)),
        "kernels": tuple(k for r in range(nodes) for i in range(repeats) for k in _kernels(r, i, pace(r, i))),
        "steps": tuple(s for r in range(nodes) for i in range(repeats) for s in _steps(r, i, pace(r, i))),
        "memory": tuple(_memory(r) for r in range(nodes) for _ in range(repeats)),
        "products": tuple(_product(r, i) for r in range(nodes) for i in range(repeats)),
        "trajectories": tuple(trajectory(r, turn) for r in range(nodes) for turn in (0, 1)),
        "health": tuple(HealthSample(rank=r, moment="loaded", facts=FACTS) for r in range(nodes)),
        "gauges": tuple(g for r in range(nodes) for g in gauges(r)),
    }
    return RunRecord(
        spec=spec, status=Status.OK, error=None, started_at=100.0, ended_at=160.0, path="", **fields | more
    )


def machine(rank: int, **more: Any) -> dict[str, Any]:
    usual = {"host": f"node-{rank}", "cpu": "Xeon", "driver": "580.95.05", "memory_bytes": 2**41 - 1000 * rank}
    return {**usual, "gpus": [GPU], "versions": {"torch": "2.11.0"}, "environment": {"RANK": str(rank)}, **more}


def _outcome(rank: int) -> Outcome:
    facts = Evidence(
        init_digest="",
        parameters=1,
        dtypes={},
        optimizer={},
        settings={},
        switches={},
        neighbours=0,
        window_wall_s=None,
    )
    end = {"started_at": 0.0, "ended_at": 1.0, "evidence": facts}
    return Outcome(rank=rank, status=Status.OK, error=None, host=f"node-{rank}", pid=rank, **end)


def _kernels(rank: int, repeat: int, pace: float) -> Iterable[KernelSample]:
    rows = (
        ("matmul", "bf16", 10**12, None, 1e-3),
        ("copy", "bytes", None, 2**31, 1e-3),
        ("h2d", "bytes", None, 2**30, 0.02),
    )
    for kernel, dtype, flops, moved, seconds in rows:
        yield KernelSample(
            rank=rank,
            kernel=kernel,
            dtype=dtype,
            label="large",
            variant="",
            flops=flops,
            moved_bytes=moved,
            durations_s=(seconds / pace,) * 5,
            wrong=0,
            repeat=repeat,
        )


def _steps(rank: int, repeat: int, pace: float) -> Iterable[StepSample]:
    """The first step of a window is slow on every node, and counts on none."""
    for step, seconds in enumerate((0.9, 0.5 / pace)):
        yield StepSample(
            rank=rank,
            step=4 + 2 * repeat + step,
            duration_s=seconds,
            data_wait_s=None,
            h2d_s=None,
            h2d_bytes=None,
            forward_s=None,
            backward_s=None,
            optimizer_s=None,
            tokens=4096,
            samples=8,
            micro_batches=1,
            updates=1,
            loss=5.0,
            grad_norm=1.0,
            data_digest=1,
            variant=repeat,
        )


def _memory(rank: int, allocated: int = 7 * GIB) -> MemorySample:
    whole = {"reserved_bytes": 8 * GIB, "device_bytes": 9 * GIB, "resident_bytes": GIB}
    return MemorySample(rank=rank, moment="steps", allocated_bytes=allocated, **whole)


def _product(rank: int, repeat: int) -> ProductSample:
    return ProductSample(rank=rank, repeat=repeat, dtype="bf16", sides=(8192, 8192, 256), wrong=0)


def trajectory(rank: int, turn: int, losses: tuple[float, ...] = (5.5, 5.25), weights: str = "abc") -> TrajectorySample:
    return TrajectorySample(rank=rank, turn=turn, losses=losses, weights=weights)


def gauges(
    rank: int, clock_hz: float = 1.98e9, reasons: tuple[str, ...] = (), celsius: float = 60.0
) -> list[GaugeSample]:
    """Twenty readings; a healthy GPU meets its power cap now and then."""
    cap = "software power cap"
    return [
        GaugeSample(
            rank=rank,
            host=f"node-{rank}",
            at_s=100.0 + i,
            device=0,
            temperature_c=celsius + rank % 3,
            sm_clock_hz=clock_hz,
            power_w=690.0,
            throttle_reasons=(*reasons, cap) if i % 5 == 0 else reasons,
        )
        for i in range(20)
    ]


def noisy(seed: int, nodes: int = 8, repeats: int = 5, noise: float = 0.015) -> Pace:
    """What real nodes do: parts differ a little for good, the room warms up for all, each node drifts by itself from
    repeat to repeat (half of the last repeat's deviation stays), and every repeat has noise of its own."""
    rng = np.random.default_rng(seed)
    parts = rng.normal(0, 0.005, (nodes, 1))
    common = np.cumsum(rng.normal(-0.002, 0.008, repeats))
    drift = np.zeros((nodes, repeats))
    for i in range(1, repeats):
        drift[:, i] = 0.5 * drift[:, i - 1] + rng.normal(0, 0.006, nodes)
    paces = np.exp(parts + common + drift + rng.normal(0, noise, (nodes, repeats)))
    return lambda rank, repeat: float(paces[rank, repeat])
