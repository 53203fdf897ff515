"""Training from scratch: optimizer steps of a fixed global token count under one strategy."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.contract import Recorder, Seat, Trainer
from paceline.errors import Scalar, require
from paceline.experiment.plugins import Traits, load, parse_options
from paceline.experiment.spec import RunSpec
from paceline.host.memory_limit import allowed_bytes, check_limit, confine, release
from paceline.launchers.node import placement
from paceline.models.arithmetic import load as load_shape
from paceline.results.records import ComponentSample, Evidence
from paceline.training.data.corpus import check_data, row_bytes
from paceline.training.instruments import attention_backends

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.training.instruments import Weights
    from paceline.workloads._checkpoints import Keeper
    from paceline.workloads._loop import Loop

TRAITS = Traits(trains=True, certified=True)
AUDITED_STEPS = 1
PROFILED_STEPS = 2


@dataclass(frozen=True, slots=True)
class Standing:
    """The weights at one moment: those that learn, and those that do not (None where all learn)."""

    learned: Weights
    frozen: Weights | None


@dataclass(frozen=True)
class Options:
    """limit_gib: memory each process may use, of the GPU or beyond what a CPU process holds at its start; more is
    refused as a smaller device would refuse it. Without it the device is the limit."""

    limit_gib: float | None = None

    def __post_init__(self) -> None:
        check_limit(self.limit_gib, "pretrain.limit_gib")


def check(spec: RunSpec) -> str | None:
    parse_options(Options, spec.workload)
    require(spec.strategy is not None, "strategy", None, "a strategy; `paceline list strategies` shows them")
    check_data(spec.training.data, spec.training.sequence_length)
    shape = load_shape(spec.model)
    if shape.experts:
        return f"the reference decoder has no mixture of experts, which {spec.model} needs"
    if shape.qkv_bias or shape.qk_norm:
        part = "bias on q, k and v alone" if shape.qkv_bias else "norm of q and k"
        return f"the reference decoder has no {part}, which {spec.model} needs"
    if shape.positions == "learned" and spec.training.sequence_length > shape.context:
        length = spec.training.sequence_length
        return f"{spec.model} knows {shape.context} positions, fewer than the sequence length {length}"
    return None


def run(spec: RunSpec, seat: Seat, recorder: Recorder) -> None:
    from paceline.training.data.corpus import Partition, facts_of, open_data
    from paceline.training.instruments import clock_for, read_memory, release_unused
    from paceline.workloads._loop import Loop

    assert spec.strategy is not None
    corpus = open_data(spec, load_shape(spec.model).vocab)
    recorder.progress(0, "setup")
    with attention_backends(seat.device):
        # What watches after the window is ours, so it is not held to the limit.
        with limited(spec, seat, recorder):
            trainer: Trainer = load("strategies", spec.strategy.name).wrap(spec, seat)
            start = read_standing(spec, trainer)
            release_unused(seat.device)
            recorder.add(read_memory(seat.rank, "setup", seat.device, peak=False))
            partition = Partition.of(spec, seat.rank)
            loop = Loop(trainer, corpus, partition, seat, clock_for(seat.device), recorder, spec.steps)
            keeper = keeper_of(spec, seat, trainer, recorder, start)
            first = keeper.resume() if keeper else 0
            reset_at = min(first + spec.warmup.minimum, spec.steps - 1)
            wall_s = loop.window(range(first, spec.steps), reset_at, keeper)
            recorder.add(read_memory(seat.rank, "steps", seat.device, peak=True))
            found = evidence(spec, seat, trainer, start, wall_s, facts_of(corpus), loop.window_began_at_s)
            recorder.conclude(_with_end(found, start, read_standing(spec, trainer) if start.frozen else None))
        watch_after_window(spec, seat, loop, recorder)
    if keeper:
        keeper.remove()


def keeper_of(spec: RunSpec, seat: Seat, trainer: Trainer, recorder: Recorder, start: Standing) -> Keeper | None:
    """None for a run that goes through in one piece or not at all."""
    if not spec.max_restarts and spec.checkpoint_every is None:
        return None
    from paceline.workloads._checkpoints import Keeper

    return Keeper(spec, seat, trainer, recorder, start.learned)


@contextlib.contextmanager
def limited(spec: RunSpec, seat: Seat, recorder: Recorder) -> Iterator[None]:
    """Hold the process to the memory that was asked for, and record it; nothing where none was."""
    chosen = parse_options(Options, spec.workload)
    if chosen.limit_gib is None:
        yield
        return
    capacity = allowed_bytes(chosen.limit_gib, seat.device, spec.topology.processes_per_node)
    recorder.add(capacity_sample(spec, seat, capacity))
    confine(chosen.limit_gib, capacity, seat.device)
    try:
        yield
    finally:
        release(seat.device)


def capacity_sample(spec: RunSpec, seat: Seat, capacity: int) -> ComponentSample:
    return ComponentSample(
        rank=seat.rank, component="capacity", source="held", bytes=capacity, micro_batch=spec.training.micro_batch
    )


def watch_after_window(spec: RunSpec, seat: Seat, loop: Loop, recorder: Recorder) -> None:
    """Profile, then count bytes, on steps of their own: watching slows a step and must not be inside the clock.

    Counting comes last because compiled code falls back to plain operators under a dispatch mode, and may stay there.
    """
    from paceline.training.instruments import WireCounter
    from paceline.training.step_profile import Profile

    profile, counter, training = Profile(seat.device, loop.clock), WireCounter(), spec.training
    profiled = range(spec.steps, spec.steps + PROFILED_STEPS)
    with profile.recording():
        loop.unrecorded(profiled)
    batch_bytes = training.micro_batch * row_bytes(spec)
    recorder.add(profile.sample(seat.rank, PROFILED_STEPS, PROFILED_STEPS * training.accumulation, batch_bytes))
    if spec.topology.world_size == 1:
        return
    with counter.counting():
        loop.unrecorded(range(profiled.stop, profiled.stop + AUDITED_STEPS))
    for sample in counter.samples(seat.rank, profiled.stop):
        recorder.add(sample)


def read_standing(spec: RunSpec, trainer: Trainer) -> Standing:
    """Digests of the weights as the strategy holds them, sharded ones gathered; called on every rank."""
    from paceline.training.instruments import digest_parameters

    if spec.tuning is None or not spec.tuning.has_adapters:
        return Standing(digest_parameters(trainer.full_parameters()), None)
    from paceline.training.finetuned import is_learned

    def kept(learned: bool) -> Iterator[tuple[str, Tensor]]:
        whole = trainer.full_parameters()
        return ((name, value) for name, value in whole if is_learned(name, tuning) is learned)

    tuning = spec.tuning
    return Standing(digest_parameters(kept(True)), digest_parameters(kept(False)))


def _with_end(found: Evidence, start: Standing, end: Standing | None) -> Evidence:
    """Adapters begin without effect and learn little in a few steps: that they moved at all is read, not inferred."""
    if end is None or end.frozen is None or start.frozen is None:
        return found
    still = [name for name, digest in start.learned.by_name.items() if end.learned.by_name[name] == digest]
    return dataclasses.replace(found, unmoved=tuple(still), final_frozen_digest=end.frozen.digest)


def evidence(
    spec: RunSpec,
    seat: Seat,
    trainer: Trainer,
    start: Standing,
    wall_s: float,
    facts: Mapping[str, Scalar] | None = None,
    began_at_s: float | None = None,
) -> Evidence:
    """facts are the data's: what was read, beyond what the spec says."""
    from paceline.host.machine import debug_switches, neighbours

    dtypes, optimizer, settings = trainer.declare()
    starting: dict[str, Scalar] = {"shared_gpu": True} if placement.shares_gpu(os.environ) else {}
    starting |= {"started": "forked"} if placement.FORKED in os.environ else {}
    return Evidence(
        init_digest=start.learned.digest,
        init_digests=start.learned.by_name,
        parameters=start.learned.count,
        frozen_digest=start.frozen.digest if start.frozen else None,
        dtypes=dtypes,
        optimizer=optimizer,
        settings={**settings, **(facts or {}), **starting},
        switches=debug_switches(os.environ),
        neighbours=neighbours(seat.local_rank) if seat.device == "cuda" else None,
        window_wall_s=wall_s,
        window_began_at_s=began_at_s,
        shape=dataclasses.asdict(load_shape(spec.model)),
    )
