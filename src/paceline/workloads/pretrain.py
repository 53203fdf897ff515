"""Pretraining: optimizer steps from scratch, with a fixed global batch, under one strategy."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from paceline.contract import Recorder, Seat, Trainer
from paceline.errors import Scalar, require
from paceline.experiment import plugins
from paceline.experiment.layout import Layout, declared_layout, layout_of
from paceline.experiment.plugins import Traits, load, parse_options
from paceline.experiment.spec import RunSpec
from paceline.host.memory_limit import allowed_bytes, check_limit, confine, release
from paceline.launchers.node import placement
from paceline.models.arithmetic import load as load_shape
from paceline.results.records import ComponentSample, Evidence, PipelineSample, WireSample
from paceline.training.data.corpus import check_data, row_bytes
from paceline.training.instruments import attention_backends

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.training.instruments import Weights
    from paceline.workloads._checkpoints import Checkpointer
    from paceline.workloads._loop import Loop

TRAITS = Traits(trains=True, certified=True)
# See `observation.movements`.
Initial: TypeAlias = "Callable[[str, int, int, Tensor], Tensor | None]"
PROFILED_STEPS = 2
# Steps in which exposed communication is split by mesh dimension.
DIMENSION_STEPS = 1
# Steps in which every piece of a pipeline's work is timed.
PIPELINE_STEPS = 2
# Of so many steps after the window, some chosen at random are audited, operator by operator.
SECOND_PASS = 3
AUDITED_STEPS = 2


@dataclass(frozen=True)
class Options:
    """limit_gib: memory each process may use: of the GPU, or on a CPU on top of what the process uses at its start.
    Allocations beyond it fail as on a smaller device. Without it the device is the limit."""

    limit_gib: float | None = None

    def __post_init__(self) -> None:
        check_limit(self.limit_gib, "pretrain.limit_gib")


def check(spec: RunSpec) -> str | None:
    parse_options(Options, spec.workload)
    require(spec.strategy is not None, "strategy", None, "a strategy; `paceline list strategies` shows them")
    check_data(spec.training.data, spec.training.sequence_length)
    shape = load_shape(spec.model)
    if shape.experts and shape.bias:
        return f"the reference decoder has no experts with biases, which {spec.model} needs"
    if shape.experts and (reason := _uncompiled_mixture(spec)):
        return reason
    if shape.qkv_bias or shape.qk_norm:
        part = "bias on q, k and v alone" if shape.qkv_bias else "norm of q and k"
        return f"the reference decoder has no {part}, which {spec.model} needs"
    if shape.positions == "learned" and spec.training.sequence_length > shape.context:
        length = spec.training.sequence_length
        return f"{spec.model} has {shape.context} positions, fewer than the sequence length {length}"
    return why_no_precision(spec)


def _uncompiled_mixture(spec: RunSpec) -> str | None:
    """Why this mixture of experts cannot be compiled so; None if it can."""
    wanted = spec.training.compilation
    if wanted is None:
        return None
    if wanted.records_graphs:
        return (
            f"compile {wanted.mode} needs fixed shapes, and the number of tokens of an expert changes with every batch"
        )
    if wanted.scope == "model":
        return (
            f"products of experts are plain code between the graphs of each block; got compile {spec.training.compile}"
        )
    if layout_of(spec).tp > 1 and spec.training.checkpointing != "none":
        return "torch.compile skips stages with checkpointing around the plain code of experts: remove one of the two"
    return None


def why_no_precision(spec: RunSpec) -> str | None:
    """Why this model and strategy cannot be trained in the requested precision; None if they can.

    Whether the device has such products is known in the worker only.
    """
    precision = spec.training.precision
    if precision.compute == "tf32" and spec.topology.device == "cpu":
        return "precision tf32 is a format of NVIDIA GPUs; a CPU multiplies in fp32"
    if not precision.is_8bit:
        return None
    if spec.tuning is not None:
        return f"precision {precision.compute} trains every weight from 16-bit copies; fine-tuning does not support it"
    if spec.strategy is not None:
        declared = plugins.declared("strategies", spec.strategy.name, imports=True)
        if not (declared and declared["EIGHT_BIT"]):
            return f"the strategy {spec.strategy.name} does not train in 8 bit (precision {precision.compute})"
    multiple, shape = precision.side_multiple, load_shape(spec.model)
    if shape.experts:
        return f"precision {precision.compute} is for dense models: experts and their router stay in 16 bit"
    sizes = {
        "hidden": shape.hidden,
        "ffn": shape.ffn,
        "heads x head_dim": shape.heads * shape.head_dim,
        "kv_heads x head_dim": shape.kv_heads * shape.head_dim,
        "micro_batch x sequence_length": spec.training.micro_batch * spec.training.sequence_length,
    }
    odd = next((f"{name} = {size:,}" for name, size in sizes.items() if size % multiple), None)
    return odd and f"precision {precision.compute} needs matrices whose sides are multiples of {multiple}, got {odd}"


def run(spec: RunSpec, seat: Seat, recorder: Recorder) -> None:
    """Wrap the model, run the timed window, then profile and count bytes on extra steps."""
    from paceline.training.data.corpus import Partition, facts_of, open_data
    from paceline.training.instruments import clock_for, read_memory, release_unused
    from paceline.training.precision import matrix_products
    from paceline.workloads._loop import Loop

    assert spec.strategy is not None
    corpus = open_data(spec, load_shape(spec.model).vocab)
    recorder.progress(0, "setup")
    with attention_backends(seat.device), matrix_products(spec.training.precision):
        # The limit applies to training only, not to the instruments that run after the window.
        with memory_limited(parse_options(Options, spec.workload).limit_gib, spec, seat, recorder):
            trainer: Trainer = load("strategies", spec.strategy.name).wrap(spec, seat)
            start, initial = digest_weights(spec, trainer), initial_weights(spec, trainer)
            release_unused(seat.device)
            recorder.add(read_memory(seat.rank, "setup", seat.device, peak=False))
            partition = Partition.of(spec, seat.rank)
            loop = Loop(trainer, corpus, partition, seat, clock_for(seat.device), recorder, spec.steps)
            checkpoints: Checkpointer | None = None
            if spec.max_restarts or spec.checkpoint_every is not None:
                from paceline.workloads._checkpoints import Checkpointer

                checkpoints = Checkpointer(spec, seat, trainer, recorder, start.trainable)
            first = checkpoints.resume() if checkpoints else 0
            reset_at = min(first + spec.warmup.minimum, spec.steps - 1)
            wall_s = loop.window(range(first, spec.steps), reset_at, checkpoints)
            recorder.add(read_memory(seat.rank, "steps", seat.device, peak=True))
        observed = evidence(spec, seat, trainer, start, loop, wall_s, facts_of(corpus))
        recorder.conclude(with_final_weights(observed, spec, trainer, initial))
        profile_steps(spec, seat, loop, recorder)
        first_audited = spec.steps + PROFILED_STEPS
        if getattr(trainer, "interleaves", False):
            time_pipeline(seat, trainer, loop, recorder, first_audited)
            first_audited += PIPELINE_STEPS
        if layout := declared_layout(spec):
            profile_dimensions(layout, seat, loop, recorder, first_audited)
            first_audited += DIMENSION_STEPS
        audit(spec, seat, loop, recorder, first=first_audited)
    if checkpoints:
        checkpoints.remove()


@contextlib.contextmanager
def memory_limited(limit_gib: float | None, spec: RunSpec, seat: Seat, recorder: Recorder) -> Iterator[None]:
    """Enforce and record a limit of memory; does nothing without one."""
    if limit_gib is None:
        yield
        return
    capacity = allowed_bytes(limit_gib, seat.device, spec.topology.processes_per_node)
    recorder.add(capacity_sample(spec, seat, capacity))
    confine(limit_gib, capacity, seat.device)
    try:
        yield
    finally:
        release(seat.device)


def capacity_sample(spec: RunSpec, seat: Seat, capacity: int) -> ComponentSample:
    """The memory this rank may use, as a sample."""
    return ComponentSample(
        rank=seat.rank, component="capacity", source="held", bytes=capacity, micro_batch=spec.training.micro_batch
    )


def profile_steps(spec: RunSpec, seat: Seat, loop: Loop, recorder: Recorder) -> None:
    """Profile the first steps after the timed window."""
    from paceline.training.step_profile import Profile, timeline

    profile, training = Profile(seat.device, loop.clock), spec.training
    with profile.recording():
        loop.unrecorded(range(spec.steps, spec.steps + PROFILED_STEPS))
    batch_bytes = training.micro_batch * row_bytes(spec)
    recorder.add(profile.sample(seat.rank, PROFILED_STEPS, PROFILED_STEPS * training.accumulation, batch_bytes))
    recorder.add(timeline(profile, seat.rank, PROFILED_STEPS))


def profile_dimensions(layout: Layout, seat: Seat, loop: Loop, recorder: Recorder, first: int) -> None:
    """Profile another step and split what is exposed by mesh dimension. Observing every operator slows the host and
    stops compiled code, so this step comes after those of the profile."""
    from paceline.training.step_profile import DimensionProfile, timeline

    dimensions = layout.sizes()
    if not dimensions:
        return
    profile = DimensionProfile(seat.device, loop.clock)
    with profile.recording():
        loop.unrecorded(range(first, first + DIMENSION_STEPS))
    samples = profile.samples(seat.rank, DIMENSION_STEPS, dimensions)
    for sample in samples:
        recorder.add(sample)
    if samples:
        sent = profile.spans()
        recorder.add(timeline(profile, seat.rank, DIMENSION_STEPS, {name: sent.get(name, []) for name in dimensions}))


def time_pipeline(seat: Seat, trainer: Any, loop: Loop, recorder: Recorder, first: int) -> None:
    """Time each piece of work of a pipeline's schedule. It waits for the device, so these steps are extra."""
    for step in range(first, first + PIPELINE_STEPS):
        with trainer.timing() as times:
            loop.unrecorded(range(step, step + 1))
        recorder.add(
            PipelineSample(
                rank=seat.rank,
                step=step,
                wall_s=times.wall_s,
                busy_s=times.busy_s,
                embedding_s=times.part_s("embedding"),
                block_s=times.part_s("block"),
                head_s=times.part_s("head"),
            )
        )


def audit(spec: RunSpec, seat: Seat, loop: Loop, recorder: Recorder, first: int) -> None:
    """Train a few more steps and look at every operator of some of them, the same ones on all ranks.

    This comes last: under its dispatch mode compiled code falls back to plain operators, and may stay there.
    """
    from paceline.training.observation import Audit

    # A trainer that does not communicate in every step is followed until it repeats itself.
    period = getattr(loop.trainer, "period", 1)
    steps = range(first, first + max(SECOND_PASS, period))
    audited = random.Random(spec.run_id).sample(steps, AUDITED_STEPS) if period == 1 else steps[:period]
    for step in steps:
        watch = Audit()
        with watch.watching() if step in audited else contextlib.nullcontext():
            loop.unrecorded(range(step, step + 1))
        if step in audited:
            for operators in watch.samples(seat.rank, step):
                recorder.add(operators)
            counted = watch.wire.samples(seat.rank, step) if spec.topology.world_size > 1 else []
            for collectives in counted or ([nothing_sent(seat, step)] if period > 1 else []):
                recorder.add(collectives)


def nothing_sent(seat: Seat, step: int) -> WireSample:
    """A step without a collective, which counts in the mean of its period."""
    return WireSample(
        rank=seat.rank,
        step=step,
        operation="all_reduce",
        dtype="fp32",
        group_size=seat.world_size,
        calls=0,
        payload_bytes=0,
    )


@dataclass(frozen=True, slots=True)
class WeightDigests:
    """Digests of all weights at one moment: trainable ones, and frozen ones (None if all are trainable)."""

    trainable: Weights
    frozen: Weights | None


def digest_weights(spec: RunSpec, trainer: Trainer) -> WeightDigests:
    """Digests of the whole weights, gathered from shards where necessary; called on every rank."""
    from paceline.training.instruments import digest_parameters

    tuning = spec.tuning
    if tuning is None or not tuning.has_adapters:
        return WeightDigests(digest_parameters(trainer.full_parameters()), None)
    from paceline.training.finetuned import is_trainable

    def selected(trainable: bool) -> Iterator[tuple[str, Tensor]]:
        weights = trainer.full_parameters()
        return ((name, value) for name, value in weights if is_trainable(name, tuning) is trainable)

    return WeightDigests(digest_parameters(selected(True)), digest_parameters(selected(False)))


def initial_weights(spec: RunSpec, trainer: Trainer) -> Initial:
    """Initial elements of each trainable tensor, for `observation.movements`: computed again from the seed, or for
    adapters, which are small, copied. Full fine-tuning may start from a user's weights, so it has none."""
    from paceline.training.decoder import initial_part, rounded

    if spec.tuning is None:
        layers, compute = load_shape(spec.model).layers, spec.training.precision.base

        def part(name: str, start: int, stop: int, value: Tensor) -> Tensor:
            return rounded(name, initial_part(name, start, stop, layers, spec.seed, value.device), compute)

        return part
    copies: dict[str, Tensor] = {}
    if spec.tuning.has_adapters:
        from paceline.training.finetuned import is_trainable

        weights = trainer.full_parameters()
        copies = {n: value.detach().reshape(-1).clone() for n, value in weights if is_trainable(n, spec.tuning)}
    return lambda name, start, stop, value: copies[name][start:stop] if name in copies else None


def evidence(
    spec: RunSpec,
    seat: Seat,
    trainer: Trainer,
    start: WeightDigests,
    loop: Loop,
    wall_s: float,
    data_facts: Mapping[str, Scalar] | None = None,
) -> Evidence:
    """What the certificate checks: initial weights, dtypes, optimizer and settings as they really were."""
    from paceline.host.machine import debug_switches, neighbours

    dtypes, optimizer, settings = trainer.declare()
    launch: dict[str, Scalar] = {"shared_gpu": True} if placement.shares_gpu(os.environ) else {}
    launch |= {"started": "forked"} if placement.FORKED in os.environ else {}
    launch |= {"not_forked": why} if (why := os.environ.get(placement.NOT_FORKED)) else {}
    launch |= loop.routing.products(spec.training.precision.base)
    return Evidence(
        init_digest=start.trainable.digest,
        init_digests=start.trainable.by_name,
        parameters=start.trainable.count,
        frozen_digest=start.frozen.digest if start.frozen else None,
        dtypes=dtypes,
        optimizer=optimizer,
        groups=loop.watch.groups,
        flags=loop.watch.flags,
        settings={**settings, **(data_facts or {}), **launch},
        switches=debug_switches(os.environ),
        neighbours=neighbours(seat.local_rank) if seat.device == "cuda" else None,
        window_wall_s=wall_s,
        window_began_at_s=loop.window_began_at_s,
        shape=dataclasses.asdict(load_shape(spec.model)),
    )


def with_final_weights(observed: Evidence, spec: RunSpec, trainer: Trainer, initial: Initial) -> Evidence:
    """The evidence with the weights after the window; called on every rank, for they may have to be gathered."""
    from paceline.training.observation import movements

    end = digest_weights(spec, trainer)
    updated = getattr(trainer, "master_parameters", trainer.full_parameters)
    return dataclasses.replace(
        observed,
        final_digests=end.trainable.by_name,
        final_frozen_digest=end.frozen.digest if end.frozen else None,
        movements=movements(updated(), initial),
    )
