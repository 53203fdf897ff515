"""Paceline's own runs: as setups to predict, and as anchors that update predictions."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from paceline.errors import RequestError
from paceline.experiment.choices import Choice
from paceline.experiment.layout import layout_of
from paceline.experiment.spec import RunSpec
from paceline.models import arithmetic
from paceline.models.adapters import trained_parameters
from paceline.models.shape import Shape
from paceline.prediction import hardware, published
from paceline.prediction.hardware import Accelerator
from paceline.prediction.offsets import MEASURED, Anchor, Observation
from paceline.prediction.parameters import Fitted, load
from paceline.prediction.setup import Setup
from paceline.results.records import RunRecord, Status

# How far a rate that was measured alone may differ from what a step gets; products are only a part of its level.
OBSERVED_SD = {"link": 0.15, "network": 0.15, "level": 0.25}
# Messages this large measure bandwidth, not latency; products this large measure arithmetic, not memory.
LARGE_MESSAGE_BYTES, LARGE_PRODUCT_FLOPS = 64 * 2**20, 5e11
_SHARDS = {0: "none", 1: "zero1", 2: "zero2", 3: "zero3"}


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A training run as a setup with its measured step time; sd: of the logarithm of the step times' median."""

    run: str
    cell: str
    setup: Setup
    step_s: float
    steps: int
    sd: float

    def anchor(self) -> Anchor:
        return Anchor(self.setup, self.step_s, self.run, max(self.sd, MEASURED))


def setup_of_spec(spec: RunSpec, gpu: Accelerator, shape: Shape | None = None) -> Setup | None:
    """What a run computes, as a setup.

    None where it trains nothing, is a script, whose batch is its own, or has another precision than is predicted.
    """
    # A CPU is described by its fp32 products, a GPU by its 16-bit ones.
    on_cpu = gpu.name == hardware.CPU
    precision = spec.training.precision
    if (
        not spec.is_trained
        or spec.traits.scripted
        or precision.compute in ("tf32", "mxfp8")
        or (precision.base == "fp32") is not on_cpu
    ):
        return None
    try:
        dimensions = shape or arithmetic.load(spec.model)
    except RequestError:
        return None
    t, tuning, world = spec.training, spec.tuning, spec.topology.world_size
    software, _ = published.software("paceline")
    software = dataclasses.replace(
        software,
        compiled=bool(t.compile),
        # The rates of a CPU already count twice the bytes.
        reduce_bytes=4.0 if t.precision.reduce == "fp32" and not on_cpu else 2.0,
    )
    split = layout_of(spec)
    parts = arithmetic.sharded_parts(spec.strategy or Choice("single"))
    shard = _SHARDS.get(parts or 0, "none")
    if split.shard > 1:
        shard = "zero3" if split.shard == split.dp * split.cp else "hybrid"
    offload = spec.strategy is not None and spec.strategy.options.get("offload") in ("cpu", True)
    software = dataclasses.replace(software, sequence_parallel=split.sequence_parallel)
    if spec.strategy is not None and spec.strategy.name == "zero":
        software = published.with_deepspeed(software, parts or 0)
    return Setup(
        shape=dimensions,
        gpu=gpu,
        software=software,
        gpus=world,
        gpus_per_node=max(world // max(spec.topology.nodes, 1), 1),
        sequence_length=t.sequence_length,
        micro_batch=t.micro_batch,
        fp8=precision.is_8bit,
        fp8_rowwise="rowwise" in precision.compute,
        micro_batches=float(t.accumulation),
        tp=split.tp,
        pp=split.pp,
        cp=split.cp,
        ep=split.ep,
        stages=split.virtual,
        shard=shard if world > 1 or offload else "none",
        offload=offload,
        checkpointing=t.checkpointing,
        trained=trained_parameters(dimensions, tuning) if tuning and tuning.has_adapters else None,
        quantised=tuning is not None and tuning.method == "qlora",
    )


def gpu_of(record: RunRecord) -> Accelerator | None:
    """The GPU of a run, if all its machines have one kind and the table has it."""
    seen = {str(gpu.get("name")) for machine in record.machines for gpu in machine.get("gpus") or ()}
    if len(seen) != 1:
        return None
    try:
        return hardware.accelerator(seen.pop())
    except RequestError:
        return None


def setup_of_record(record: RunRecord, cpu: Accelerator | None = None) -> Setup | None:
    """What a run computed. cpu: what a process of a machine without GPUs is; such runs are left out without it."""
    without_gpu = bool(record.machines) and not any(machine.get("gpus") for machine in record.machines)
    gpu = cpu if without_gpu else gpu_of(record)
    try:
        return None if gpu is None else setup_of_spec(record.spec, gpu, record.shape)
    except RequestError:
        return None


def measured(record: RunRecord, cpu: Accelerator | None = None) -> Measured | None:
    """The median step of the second half of a successful training run; None for any other run.

    Runs that watch memory or search for its limit take too few steps to be timed.
    """
    counts = record.spec.is_certified and not record.proves_only and not record.shares_gpu
    if record.status is not Status.OK or not counts or not len(record.steps):
        return None
    setup = setup_of_record(record, cpu)
    if setup is None:
        return None
    slowest: dict[int, float] = {}
    for sample in record.steps:
        slowest[sample.step] = max(slowest.get(sample.step, 0.0), sample.duration_s)
    times = np.array([slowest[step] for step in sorted(slowest)])[len(slowest) // 2 :]
    if not len(times) or not np.all(times > 0):
        return None
    spread = float(np.std(np.log(times)) / math.sqrt(len(times)))
    return Measured(
        run=record.spec.run_id,
        cell=record.spec.cell,
        setup=setup,
        step_s=float(np.median(times)),
        steps=len(times),
        sd=spread,
    )


def anchors(records: Iterable[RunRecord], cpu: Accelerator | None = None) -> list[Anchor]:
    """One anchor for each configuration that was trained: the mean of its launches."""
    by_cell: dict[str, list[Measured]] = {}
    for record in records:
        if (one := measured(record, cpu)) is not None:
            by_cell.setdefault(one.cell, []).append(one)
    found = []
    for group in by_cell.values():
        step_s = math.exp(float(np.mean([math.log(one.step_s) for one in group])))
        found.append(dataclasses.replace(group[0].anchor(), step_s=step_s))
    return found


def observations(records: Sequence[RunRecord], fitted: Fitted | None = None) -> list[Observation]:
    """What sweeps of collectives and products say about the network and the level of a cluster."""
    fit = fitted or load()
    found = [_network(record, fit) for record in records] + [_level(record, fit) for record in records]
    return [one for one in found if one is not None]


def _network(record: RunRecord, fit: Fitted) -> Observation | None:
    gpu = gpu_of(record)
    rates = []
    for sample in record.collectives:
        whole = sample.status == "ok" and sample.size_bytes >= LARGE_MESSAGE_BYTES and sample.durations_s
        if whole and sample.operation == "all_reduce" and sample.group_size > 1:
            seconds = float(np.median(sample.durations_s)) / sample.batch
            rates.append(arithmetic.wire_factor("all_reduce", sample.group_size) * sample.size_bytes / seconds)
    if gpu is None or not rates:
        return None
    topology = record.spec.topology
    link = math.exp(fit.values["link"]) * gpu.link_bytes_per_s
    node = math.exp(fit.values["nic"]) * gpu.node_bytes_per_s
    offset, expected = ("network", min(link, node)) if topology.nodes > 1 else ("link", link)
    value = math.log(expected / float(np.max(rates)))
    return Observation(offset, value, OBSERVED_SD[offset], record.spec.run_id)


def _level(record: RunRecord, fit: Fitted) -> Observation | None:
    gpu, rates = gpu_of(record), []
    for sample in record.kernels:
        large = sample.kernel == "matmul" and sample.flops is not None and sample.flops >= LARGE_PRODUCT_FLOPS
        if large and sample.status == "ok" and sample.durations_s and sample.dtype in ("bf16", "fp16"):
            rates.append((sample.flops or 0) / float(np.median(sample.durations_s)))
    if gpu is None or not rates:
        return None
    share = math.exp(fit.values["efficiency"]) * gpu.matmul_ratio
    share *= math.exp(fit.values["hopper"]) if gpu.generation == "hopper" else 1.0
    return Observation(
        "level", math.log(share * gpu.flops / float(np.max(rates))), OBSERVED_SD["level"], record.spec.run_id
    )
