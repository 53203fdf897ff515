"""Suggestions after an out-of-memory error: other settings that would fit, predicted on fake tensors.

Used as `python -m paceline.workloads.memory.adviser RUN_DIR`.

It runs as a separate process because the controller does not import torch, and can end this one when its time is up.
Each prediction is written as soon as it is made, the least intrusive change first. Changes that keep the work (global
batch, data, arithmetic) come before those that do not.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

from paceline.errors import RequestError
from paceline.experiment.choices import Choice
from paceline.experiment.layout import declared_layout, layout_of
from paceline.experiment.plugins import load
from paceline.experiment.spec import RunSpec
from paceline.host.processes import end_with_parent
from paceline.results import store
from paceline.results.memory_components import goal_bytes, room_bytes
from paceline.results.records import AlternativeSample, RunRecord
from paceline.workloads import memory

MOST_PROCESSES = 4
COMPILED = "rehearsed without compilation"
# Strategies that shard more, the least communication first, and how many of them a strategy already covers.
SHARDING = ("zero:stage=1", "zero:stage=2", "zero:stage=3", "fsdp2")
_COVERED = {"zero:stage=1": 1, "zero:stage=2": 2, "zero:stage=3": 4, "fsdp2": 4}
# The fastest first.
FEWER_ACTIVATIONS: tuple[str, ...] = ("none", "selective", "full")
SHORTEST_SEQUENCE = 128
# 8-bit moments take 2 bytes instead of 8 per parameter; paged ones may leave the device.
_SMALLER_OPTIMIZERS = {"adamw": ("adamw_8bit",), "adamw_8bit": ("paged_adamw_8bit",)}
_SMALLER_METHODS = {"full": ("lora", "qlora"), "lora": ("qlora",)}
# Sequences of a micro batch, and their length.
Batch: TypeAlias = tuple[int, int]
Peaks: TypeAlias = dict[Batch, int | None]


# --- what to try ---


@dataclass(frozen=True)
class Alternative:
    """One changed spec. falling: batches to try in this order until one fits; the first is the spec's own.
    keeps_work: see `records.AlternativeSample`."""

    spec: RunSpec
    falling: tuple[Batch, ...]
    change: str = ""
    settings: str = ""
    keeps_work: bool = True

    def words(self, batch: Batch, requested: RunSpec) -> tuple[str, str]:
        """The change, in words and as settings, of one of its batches compared with the requested spec."""
        (micro_batch, length), training = batch, requested.training
        change, settings = [self.change], [self.settings]
        if micro_batch != training.micro_batch:
            accumulation = training.micro_batch * training.accumulation // micro_batch
            change.append(f"micro batch {micro_batch} with accumulation {accumulation}")
            settings.append(f"micro_batch={micro_batch} accumulation={accumulation}")
        if length != training.sequence_length:
            change.append(f"sequence length {length}")
            settings.append(f"sequence_length={length}")
        return " and ".join(filter(None, change)), " ".join(filter(None, settings))


def single_changes(spec: RunSpec) -> Iterator[Alternative]:
    """The unchanged run, then alternatives that change one setting each."""
    own = ((spec.training.micro_batch, spec.training.sequence_length),)
    yield Alternative(spec, own)
    if smaller := smaller_batches(spec):
        yield smaller
    for mode in _more_checkpointing(spec):
        changed = replace(spec, training=replace(spec.training, checkpointing=mode))
        yield Alternative(changed, own, f"checkpointing {mode}", f"checkpointing={mode}")
    for strategy in _more_sharding(spec):
        yield Alternative(replace(spec, strategy=Choice.parse(strategy)), own, strategy, f"strategy={strategy}")
    # Another optimizer, or frozen or 4-bit weights, change the work.
    if spec.tuning is not None:
        for name in _SMALLER_OPTIMIZERS.get(spec.tuning.optimizer, ()):
            changed = replace(spec, tuning=replace(spec.tuning, optimizer=name))
            yield Alternative(changed, own, f"optimizer {name}", f"optimizer={name}", keeps_work=False)
        for method in _SMALLER_METHODS.get(spec.tuning.method, ()):
            # Adapters are fp32, and so is their reduction.
            precision = replace(spec.training.precision, reduce="fp32")
            reduced = "" if precision == spec.training.precision else " reduce_dtype=fp32"
            training = replace(spec.training, precision=precision)
            changed = replace(spec, training=training, tuning=replace(spec.tuning, method=method))
            yield Alternative(changed, own, f"method {method}", f"method={method}{reduced}", keeps_work=False)
    if shorter := shorter_sequences(spec):
        yield shorter


def combined_changes(spec: RunSpec) -> Iterator[Alternative]:
    """For a run that no single change makes fit: all changes that keep the work, without and then with sharding."""
    modes = _more_checkpointing(spec)[-1:]
    for strategy in ((), _more_sharding(spec)[-1:]):
        words = [*(f"checkpointing {mode}" for mode in modes), *strategy]
        settings = [*(f"checkpointing={mode}" for mode in modes), *(f"strategy={name}" for name in strategy)]
        changed = replace(spec, strategy=Choice.parse(strategy[0])) if strategy else spec
        changed = replace(changed, training=replace(changed.training, checkpointing=modes[0])) if modes else changed
        smaller = smaller_batches(changed)
        if len(words) + (smaller is not None) > 1 and (strategy or words):
            own = (changed.training.micro_batch, changed.training.sequence_length)
            alternative = smaller or Alternative(changed, (own,))
            yield replace(alternative, change=" and ".join(words), settings=" ".join(settings))
        if not _more_sharding(spec):
            return


def smaller_batches(spec: RunSpec) -> Alternative | None:
    """All smaller micro batches that keep the global batch through more accumulation, the largest first."""
    t = spec.training
    share = t.micro_batch * t.accumulation
    sizes = [size for size in range(t.micro_batch - 1, 0, -1) if share % size == 0]
    if not sizes:
        return None
    # Accumulating at all takes memory for gradients; accumulating more often takes no more.
    training = replace(t, micro_batch=sizes[0], accumulation=share // sizes[0])
    return Alternative(replace(spec, training=training), tuple((size, t.sequence_length) for size in sizes))


def shorter_sequences(spec: RunSpec) -> Alternative | None:
    """The sequence length halved again and again: fewer tokens per step, so the work changes."""
    t, lengths = spec.training, []
    length = t.sequence_length // 2
    while length >= SHORTEST_SEQUENCE:
        lengths.append(length)
        length //= 2
    if not lengths:
        return None
    if layout_of(spec).cp > 1:
        # Ranks that share a sequence know its length since their set-up.
        lengths = lengths[:1]
    shorter = replace(spec, training=replace(t, sequence_length=lengths[0]))
    return Alternative(shorter, tuple((t.micro_batch, length) for length in lengths), keeps_work=False)


def _more_checkpointing(spec: RunSpec) -> tuple[str, ...]:
    """Modes that keep fewer activations than the run's."""
    return FEWER_ACTIVATIONS[FEWER_ACTIVATIONS.index(spec.training.checkpointing) + 1 :]


def _more_sharding(spec: RunSpec) -> tuple[str, ...]:
    """Strategies that shard more than the run's; none for one process. A layout shards its weights over all data
    parallel ranks: another strategy would have other replicas, and so another global batch."""
    if spec.topology.world_size == 1 or spec.strategy is None:
        return ()
    if layout := declared_layout(spec):
        if layout.shard == layout.data_ranks:
            return ()
        return (str(replace(spec.strategy, options={**spec.strategy.options, "shard": layout.data_ranks})),)
    stage = spec.strategy.options.get("stage", 1)
    name = f"zero:stage={stage}" if spec.strategy.name == "zero" else spec.strategy.name
    return SHARDING[_COVERED.get(name, 0) :]


# --- predictions ---


def rehearsed(spec: RunSpec, workspace_bytes: int, falling: tuple[Batch, ...], goal: int) -> Peaks:
    """Peaks of the batches, in order, up to the first of at most `goal` bytes. Called in a fresh process."""
    from paceline.workloads.memory.rehearsal import Question, rehearse

    answer = rehearse(Question(spec, workspace_bytes, falling=falling[1:], goal_bytes=goal))
    return {falling[0]: answer.components["peak"], **answer.falling}


@dataclass(frozen=True)
class Rehearsals:
    """Rehearses alternatives of one run, each in a fresh process."""

    record: RunRecord
    pool: ProcessPoolExecutor
    room: int

    def samples(self, alternatives: Iterable[Alternative], goal: int) -> Iterator[AlternativeSample]:
        """Every batch that was rehearsed, or why none was, in the order of `alternatives`."""
        # The compute capability comes from the record: this process may run on a host without a GPU.
        gpus = [gpu for machine in self.record.machines for gpu in machine.get("gpus") or ()]
        majors = [int(str(gpu["capability"]).partition(".")[0]) for gpu in gpus if gpu.get("capability")]
        on_gpu = self.record.spec.topology.device == "cuda"
        workspace = memory.gpu_workspace_bytes(majors[0]) if on_gpu and majors else 0
        futures: list[tuple[Alternative, Future[Peaks]]] = []
        for each in alternatives:
            if is_supported(each.spec):
                # Compiled code cannot be predicted; its eager form can, and the note says so.
                eager = replace(each.spec, training=replace(each.spec.training, compile=False))
                futures.append((each, self.pool.submit(rehearsed, eager, workspace, each.falling, goal)))
        for alternative, future in futures:
            note = COMPILED if self.record.spec.training.compile else None
            peaks: Peaks = {alternative.falling[0]: None}
            if error := future.exception():
                note = f"{type(error).__name__}: {error}".strip().split("\n")[0]
            else:
                peaks = future.result()
            for batch, peak in peaks.items():
                change, settings = alternative.words(batch, self.record.spec)
                yield AlternativeSample(
                    rank=0, change=change, settings=settings, keeps_work=alternative.keeps_work, bytes=peak, note=note
                )


def is_supported(spec: RunSpec) -> bool:
    """Whether the workload and the strategy of the spec can run it."""
    if spec.strategy is None:
        return False
    plugins = (("workloads", spec.workload), ("strategies", spec.strategy))
    try:
        return all(load(kind, choice.name).check(spec) is None for kind, choice in plugins)
    except RequestError:
        return False


def advise(rehearsals: Rehearsals) -> Iterator[AlternativeSample]:
    """Rehearse the unchanged run, whose predicted peak sets the goal, then single changes, then combined ones."""
    spec = rehearsals.record.spec
    own, *others = single_changes(spec)
    goal, fits = goal_bytes(rehearsals.room, None), False
    for sample in rehearsals.samples([own], goal):
        goal = goal_bytes(rehearsals.room, sample.bytes)
        yield sample
    for changes in (others, combined_changes(spec)):
        if not fits:
            for sample in rehearsals.samples(changes, goal):
                fits |= sample.keeps_work and sample.bytes is not None and sample.bytes <= goal
                yield sample


def main(argv: list[str]) -> None:
    """Write samples-advice.jsonl; nothing if no rank recorded how much memory it had."""
    end_with_parent()
    run_dir = Path(argv[1])
    record = store.read_unsealed(run_dir, started_at=0.0, ended_at=0.0)
    room = room_bytes(record.components)
    if room is None:
        return
    # The fork server has torch imported already: importing it takes longer than most rehearsals.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(memory.REHEARSAL))
    workers = min(MOST_PROCESSES, os.cpu_count() or 1)
    with (
        (run_dir / "samples-advice.jsonl").open("w", buffering=1) as file,
        ProcessPoolExecutor(
            workers, mp_context=context, max_tasks_per_child=1, initializer=memory.begin_rehearsals
        ) as pool,
    ):
        for sample in advise(Rehearsals(record, pool, room)):
            file.write(store.sample_line(sample))


if __name__ == "__main__":
    main(sys.argv)
