"""After an out-of-memory error: which other settings would fit, computed on fake tensors.

Used as `python -m paceline.workloads.memory.adviser RUN_DIR`.

A process of its own, because the controller stays without torch and may end this one when its time is up. Each
prediction is handed to the system as soon as it is made, the least intrusive change first.
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
from paceline.experiment.plugins import load
from paceline.experiment.spec import RunSpec
from paceline.host.processes import end_with_parent
from paceline.results import store
from paceline.results.memory_components import goal_bytes, room_bytes
from paceline.results.records import AlternativeSample, RunRecord
from paceline.workloads import memory
from paceline.workloads.memory.alternatives import Alternative, combined_changes, single_changes

MOST_PROCESSES = 4
COMPILED = "rehearsed without compilation"
# Sequences of a micro batch, and their length.
Batch: TypeAlias = tuple[int, int]
Peaks: TypeAlias = dict[Batch, int | None]


def rehearsed(spec: RunSpec, workspace_bytes: int, falling: tuple[Batch, ...], goal: int) -> Peaks:
    """Peaks of the batches, in their order, up to the first that is at most `goal`. Called in a fresh process."""
    from paceline.workloads.memory.rehearsal import Question, rehearse

    answer = rehearse(Question(spec, workspace_bytes, falling=falling[1:], goal_bytes=goal))
    return {falling[0]: answer.components["peak"], **answer.falling}


@dataclass(frozen=True)
class Rehearsals:
    """Asks for rehearsals of one run's alternatives, each in a fresh process."""

    record: RunRecord
    pool: ProcessPoolExecutor
    room: int

    def told(self, alternatives: Iterable[Alternative], goal: int) -> Iterator[AlternativeSample]:
        """In the order of `alternatives`: every batch that was rehearsed, or why none was."""
        asked = [(each, self._ask(each, goal)) for each in alternatives if _runs(each)]
        for alternative, future in asked:
            yield from self._samples(alternative, future)

    def _ask(self, alternative: Alternative, goal: int) -> Future[Peaks]:
        # Compiled code is not predicted; its eager form is, and says so.
        spec = replace(alternative.spec, training=replace(alternative.spec.training, compile=False))
        return self.pool.submit(rehearsed, spec, _workspace(self.record), alternative.falling, goal)

    def _samples(self, alternative: Alternative, future: Future[Peaks]) -> Iterator[AlternativeSample]:
        error = future.exception()
        if error is not None:
            sentence = f"{type(error).__name__}: {error}".strip().split("\n")[0]
            yield self._sample(alternative, alternative.falling[0], None, sentence)
            return
        note = COMPILED if self.record.spec.training.compile else None
        for batch, peak in future.result().items():
            yield self._sample(alternative, batch, peak, note)

    def _sample(self, alternative: Alternative, batch: Batch, peak: int | None, note: str | None) -> AlternativeSample:
        change, settings = alternative.words(batch, self.record.spec)
        return AlternativeSample(
            rank=0,
            change=change,
            settings=settings,
            keeps_work=alternative.keeps_work,
            bytes=peak,
            note=note,
        )


def _runs(alternative: Alternative) -> bool:
    """Whether its workload and its strategy could run it at all."""
    spec = alternative.spec
    if spec.strategy is None:
        return False
    plugins = (("workloads", spec.workload), ("strategies", spec.strategy))
    try:
        return all(load(kind, choice.name).check(spec) is None for kind, choice in plugins)
    except RequestError:
        return False


def _workspace(record: RunRecord) -> int:
    """By the GPU that was recorded: this process may stand on a host without one."""
    gpus = [gpu for machine in record.machines for gpu in machine.get("gpus") or ()]
    found = [str(gpu["capability"]).partition(".")[0] for gpu in gpus if gpu.get("capability")]
    on_gpu = record.spec.topology.device == "cuda"
    return memory.gpu_workspace_bytes(int(found[0])) if on_gpu and found else 0


def advise(rehearsals: Rehearsals) -> Iterator[AlternativeSample]:
    """The run as it was first: what it was predicted to hold decides what less must mean."""
    spec = rehearsals.record.spec
    own, *others = single_changes(spec)
    goal, fitting = goal_bytes(rehearsals.room, None), False
    for sample in rehearsals.told([own], goal):
        goal = goal_bytes(rehearsals.room, sample.bytes)
        yield sample
    for changes in (others, combined_changes(spec)):
        if not fitting:
            for sample in rehearsals.told(changes, goal):
                fitting |= sample.keeps_work and sample.bytes is not None and sample.bytes <= goal
                yield sample


def main(argv: list[str]) -> None:
    """Writes samples-advice.jsonl; nothing where no rank told how much memory it had."""
    end_with_parent()
    run_dir = Path(argv[1])
    record = store.read_unsealed(run_dir, started_at=0.0, ended_at=0.0)
    room = room_bytes(record.components)
    if room is None:
        return
    # Children begin where torch is imported already, which takes longer than most rehearsals.
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
