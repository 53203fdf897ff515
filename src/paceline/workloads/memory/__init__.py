"""Memory of a training step by component, predicted from the shape beside what was really held."""

from __future__ import annotations

import contextlib
import gc
import importlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from paceline.contract import Recorder, Seat, Trainer
from paceline.errors import require
from paceline.experiment.choices import Choice
from paceline.experiment.plugins import Traits, load
from paceline.experiment.spec import RunSpec
from paceline.host.processes import end_with_parent
from paceline.results.records import ComponentSample, MemorySample
from paceline.training import instruments
from paceline.training.instruments import collection_paused
from paceline.workloads import pretrain

if TYPE_CHECKING:
    from concurrent.futures import Future

    from paceline.results.memory_components import Held
    from paceline.workloads.memory.ledger import Ledger
    from paceline.workloads.memory.rehearsal import Answer

TRAITS = Traits(trains=True, measures_memory=True)
# Taken at least: the first step makes the optimizer's state, the second lets DDP and DeepSpeed settle; the last is
# watched.
FEWEST_STEPS = 3
HOPPER = 9
# What gloo's threads need to let go of a buffer, and a ledger waits before it believes a new peak.
YIELD_S = 0.005
# What every rehearsal imports: torch's optimizers the second, at their first step, the fake process group the third.
REHEARSAL = ("paceline.workloads.memory.rehearsal", "torch._dynamo", "torch.testing._internal.distributed.fake_pg")


def check(spec: RunSpec) -> str | None:
    require(not spec.workload.options, "option of memory", dict(spec.workload.options), "none")
    return check_training(spec)


def check_training(spec: RunSpec) -> str | None:
    return pretrain.check(replace(spec, workload=Choice("pretrain")))


def run(spec: RunSpec, seat: Seat, recorder: Recorder) -> None:
    with Prediction.asked(spec, seat, recorder) as prediction:
        observe(spec, seat, recorder, prediction)


def observe(spec: RunSpec, seat: Seat, recorder: Recorder, prediction: Prediction) -> None:
    """Train a few steps and leave the memory of every moment of the last one."""
    from paceline.models.arithmetic import load as load_shape
    from paceline.training.data.corpus import Partition, open_corpus
    from paceline.training.instruments import clock_for, release_unused
    from paceline.workloads._loop import Loop
    from paceline.workloads.memory.watch import Watched

    assert spec.strategy is not None
    steps = max(spec.steps, FEWEST_STEPS)
    corpus = open_corpus(spec.training.data, load_shape(spec.model).vocab, spec.training.sequence_length, spec.seed)
    recorder.progress(0, "setup")
    with instruments.attention_backends(seat.device), gauge(seat) as meter:
        trainer: Trainer = load("strategies", spec.strategy.name).wrap(spec, seat)
        start = pretrain.read_standing(spec, trainer)
        release_unused(seat.device)
        recorder.add(meter.now("setup"))
        watched = Watched(trainer, steps - 1, lambda moment: recorder.add(meter.now(moment)), meter.start)
        loop = Loop(watched, corpus, Partition.of(spec, seat.rank), seat, clock_for(seat.device), recorder, steps)
        wall_s = loop.window(range(steps))
        recorder.add(meter.peak("steps"))
        for sample in held_samples(spec, seat, watched.held):
            recorder.add(sample)
        found = pretrain.evidence(spec, seat, trainer, start, wall_s)
        recorder.conclude(replace(found, settings={**found.settings, "prediction": prediction.state()}))


def held_samples(spec: RunSpec, seat: Seat, held: Held | None) -> Iterator[ComponentSample]:
    import dataclasses

    assert held is not None
    for component, size in dataclasses.asdict(held).items():
        yield ComponentSample(
            rank=seat.rank,
            component=component,
            source="held",
            bytes=size,
            micro_batch=spec.training.micro_batch,
        )


# --- the gauge -----------------------------------------------------------------------------------------------------


@dataclass
class Gauge:
    """Reads a rank's memory: the CUDA allocator's counters, or on a CPU a ledger of live tensors."""

    seat: Seat
    ledger: Ledger | None = None

    def start(self) -> None:
        from paceline.training.instruments import reset_peak

        reset_peak(self.seat.device)
        if self.ledger is not None:
            self.ledger.reset_peak()

    def now(self, moment: str) -> MemorySample:
        return self._read(moment, peak=False)

    def peak(self, moment: str) -> MemorySample:
        return self._read(moment, peak=True)

    def _read(self, moment: str, *, peak: bool) -> MemorySample:
        from paceline.training.instruments import read_memory

        sample = read_memory(self.seat.rank, moment, self.seat.device, peak=peak)
        if self.ledger is None:
            return sample
        return replace(sample, allocated_bytes=self.ledger.peak_bytes if peak else self.ledger.settled_bytes())


@contextlib.contextmanager
def gauge(seat: Seat) -> Iterator[Gauge]:
    """A ledger slows every operator down, which does not matter here: memory runs are not timed."""
    if seat.device == "cuda":
        yield Gauge(seat)
        return
    from paceline.workloads.memory.ledger import Ledger

    with Ledger(yield_s=YIELD_S).counting() as ledger:
        yield Gauge(seat, ledger)


# --- the prediction ------------------------------------------------------------------------------------------------


@dataclass
class Prediction:
    """A rehearsal in a process of its own, beside the run: neither sees the other's memory.

    Only rank 0 asks. Whatever becomes of the run, what was predicted is recorded; a rehearsal that fails leaves its
    reason in the evidence and no number.
    """

    spec: RunSpec
    future: Future[Answer] | None = None
    reason: str = "asked by rank 0 only"
    _pool: Any = field(default=None, repr=False)

    @classmethod
    @contextlib.contextmanager
    def asked(
        cls, spec: RunSpec, seat: Seat, recorder: Recorder, capacity_bytes: int | None = None, most: int = 1
    ) -> Iterator[Prediction]:
        if seat.rank != 0 or spec.training.compile:
            yield cls(spec, reason="compiled code is not predicted" if spec.training.compile else cls.reason)
            return
        import multiprocessing
        from concurrent.futures import ProcessPoolExecutor

        from paceline.workloads.memory.rehearsal import Question, rehearse

        question = Question(spec, workspace_bytes(seat), capacity_bytes, most)
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, mp_context=context, initializer=begin_rehearsals) as pool:
            asked = cls(spec, pool.submit(rehearse, question))
            try:
                yield asked
            finally:
                for sample in asked.samples(seat.rank):
                    recorder.add(sample)

    def state(self) -> str:
        """`made`, or why there is none; waits for the rehearsal."""
        if self.future is None:
            return f"none: {self.reason}"
        error = self.future.exception()
        return "made" if error is None else f"none: {type(error).__name__}: {error}".split("\n")[0]

    def samples(self, rank: int) -> Iterator[ComponentSample]:
        if self.future is None or self.future.exception() is not None:
            return
        answer, own = self.future.result(), self.spec.training.micro_batch
        found = [(name, size, own) for name, size in answer.components.items() if size is not None]
        found += [("peak", size, micro_batch) for micro_batch, size in answer.peaks.items() if micro_batch != own]
        for component, size, micro_batch in found:
            yield ComponentSample(
                rank=rank, component=component, source="predicted", bytes=size, micro_batch=micro_batch
            )


def begin_rehearsals() -> None:
    """What a process does before its rehearsals. All that it imports stays, and is never looked through for garbage."""
    end_with_parent()
    with collection_paused():
        for name in REHEARSAL:
            importlib.import_module(name)
    gc.freeze()


def workspace_bytes(seat: Seat) -> int:
    if seat.device != "cuda":
        return 0
    import torch

    major, _ = torch.cuda.get_device_capability()
    return gpu_workspace_bytes(major)


def gpu_workspace_bytes(major: int) -> int:
    """What cuBLAS keeps of the allocator's memory: one workspace for the thread that runs forward, one for autograd's.

    32 MiB each on Hopper and later, 8.125 MiB before: torch's defaults (CUBLAS_WORKSPACE_CONFIG, torch's CUDA notes).
    major is the first number of the GPU's compute capability.
    """
    return 2 * (4096 * 8 * 1024 if major >= HOPPER else 4096 * 1024 * 2 + 16 * 1024 * 8)
