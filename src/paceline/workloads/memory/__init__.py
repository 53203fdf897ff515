"""Memory of a training step by component: measured, and predicted without running it."""

from __future__ import annotations

import contextlib
import gc
import importlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from paceline.contract import Recorder, Seat, Trainer
from paceline.errors import require
from paceline.experiment.choices import Choice
from paceline.experiment.plugins import Traits, load
from paceline.experiment.spec import RunSpec
from paceline.host.processes import collection_paused, end_with_parent
from paceline.results.records import ComponentSample, MemorySample
from paceline.training import instruments
from paceline.workloads import finetune, pretrain

if TYPE_CHECKING:
    from concurrent.futures import Future

    from paceline.workloads.memory.ledger import Ledger
    from paceline.workloads.memory.rehearsal import Answer

TRAITS = Traits(trains=True, measures_memory=True, may_fine_tune=True)
# The first step creates the optimizer's state, the second lets DDP and DeepSpeed settle, the last one is measured.
FEWEST_STEPS = 3
HOPPER = 9
# Time that gloo's threads need to free a buffer; the ledger waits this long before it accepts a new peak.
YIELD_S = 0.005
# Imports of every rehearsal: torch's optimizers import the second at their first step; the third is the fake group.
REHEARSAL = ("paceline.workloads.memory.rehearsal", "torch._dynamo", "torch.testing._internal.distributed.fake_pg")


def check(spec: RunSpec) -> str | None:
    require(not spec.workload.options, "option of memory", dict(spec.workload.options), "none")
    return check_training(spec)


def check_training(spec: RunSpec) -> str | None:
    if spec.training.precision.is_8bit:
        precision = spec.training.precision.compute
        return f"memory by component is not predicted for precision {precision}; pretrain measures its peak"
    if spec.tuning is not None:
        return finetune.check(replace(spec, workload=Choice("finetune")))
    return pretrain.check(replace(spec, workload=Choice("pretrain")))


def run(spec: RunSpec, seat: Seat, recorder: Recorder) -> None:
    with Prediction.requested(spec, seat, recorder) as prediction:
        observe(spec, seat, recorder, prediction)


def observe(spec: RunSpec, seat: Seat, recorder: Recorder, prediction: Prediction) -> None:
    """Train a few steps and record the memory at every moment of the last one."""
    from paceline.models.arithmetic import load as load_shape
    from paceline.training.data.corpus import Partition, facts_of, open_data
    from paceline.workloads._loop import Loop
    from paceline.workloads.memory.memory_trace import TracedTrainer

    assert spec.strategy is not None
    steps = max(spec.steps, FEWEST_STEPS)
    corpus = open_data(spec, load_shape(spec.model).vocab)
    recorder.progress(0, "setup")
    with instruments.attention_backends(seat.device), memory_meter(seat) as meter:
        trainer: Trainer = load("strategies", spec.strategy.name).wrap(spec, seat)
        start = pretrain.digest_weights(spec, trainer)
        instruments.release_unused(seat.device)
        recorder.add(meter.read("setup"))
        traced = TracedTrainer(trainer, steps - 1, lambda moment: recorder.add(meter.read(moment)), meter.start)
        loop = Loop(
            traced, corpus, Partition.of(spec, seat.rank), seat, instruments.clock_for(seat.device), recorder, steps
        )
        wall_s = loop.window(range(steps))
        recorder.add(meter.read("steps", peak=True))
        assert traced.held is not None
        micro_batch = spec.training.micro_batch
        for name, size in asdict(traced.held).items():
            recorder.add(
                ComponentSample(rank=seat.rank, component=name, source="held", bytes=size, micro_batch=micro_batch)
            )
        observed = pretrain.evidence(spec, seat, trainer, start, loop, wall_s, facts_of(corpus))
        recorder.conclude(replace(observed, settings={**observed.settings, "prediction": prediction.state()}))


@dataclass
class Meter:
    """Reads a rank's memory: the CUDA allocator's counters, or on a CPU a ledger of live tensors."""

    seat: Seat
    ledger: Ledger | None = None

    def start(self) -> None:
        instruments.reset_peak(self.seat.device)
        if self.ledger is not None:
            self.ledger.reset_peak()

    def read(self, moment: str, *, peak: bool = False) -> MemorySample:
        sample = instruments.read_memory(self.seat.rank, moment, self.seat.device, peak=peak)
        if self.ledger is None:
            return sample
        return replace(sample, allocated_bytes=self.ledger.peak_bytes if peak else self.ledger.settled_bytes())


@contextlib.contextmanager
def memory_meter(seat: Seat) -> Iterator[Meter]:
    """A meter for this rank. The ledger slows every operator down, which is fine: memory runs are not timed."""
    if seat.device == "cuda":
        yield Meter(seat)
        return
    from paceline.workloads.memory.ledger import Ledger

    with Ledger(yield_s=YIELD_S).counting() as ledger:
        yield Meter(seat, ledger)


@dataclass
class Prediction:
    """A rehearsal in a separate process, so that its memory and the run's do not mix. Only rank 0 requests one.

    The prediction is recorded even if the run fails. If the rehearsal fails, the evidence has the reason.
    """

    spec: RunSpec
    future: Future[Answer] | None = None
    reason: str = "made by rank 0 only"
    _pool: Any = field(default=None, repr=False)

    @classmethod
    @contextlib.contextmanager
    def requested(
        cls, spec: RunSpec, seat: Seat, recorder: Recorder, capacity_bytes: int | None = None, most: int = 1
    ) -> Iterator[Prediction]:
        if seat.rank != 0 or spec.training.compile:
            yield cls(spec, reason="compiled code cannot be predicted" if spec.training.compile else cls.reason)
            return
        import multiprocessing
        from concurrent.futures import ProcessPoolExecutor

        from paceline.workloads.memory.rehearsal import Question, rehearse

        question = Question(spec, workspace_bytes(seat), capacity_bytes, most)
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, mp_context=context, initializer=begin_rehearsals) as pool:
            prediction = cls(spec, pool.submit(rehearse, question))
            try:
                yield prediction
            finally:
                for sample in prediction.samples(seat.rank):
                    recorder.add(sample)

    def state(self) -> str:
        """`made`, or `none` and the reason; waits for the rehearsal."""
        if self.future is None:
            return f"none: {self.reason}"
        error = self.future.exception()
        return "made" if error is None else f"none: {type(error).__name__}: {str(error).strip()}".split("\n")[0]

    def samples(self, rank: int) -> Iterator[ComponentSample]:
        if self.future is None or self.future.exception() is not None:
            return
        answer, own = self.future.result(), self.spec.training.micro_batch
        predicted = [(name, size, own) for name, size in answer.components.items() if size is not None]
        predicted += [("peak", size, micro_batch) for micro_batch, size in answer.peaks.items() if micro_batch != own]
        for component, size, micro_batch in predicted:
            yield ComponentSample(
                rank=rank, component=component, source="predicted", bytes=size, micro_batch=micro_batch
            )


def begin_rehearsals() -> None:
    """Prepare a process for rehearsals: import what they need, and exclude it from garbage collection."""
    end_with_parent()
    with collection_paused():
        for name in REHEARSAL:
            importlib.import_module(name)
    gc.freeze()


def workspace_bytes(seat: Seat) -> int:
    """Memory of cuBLAS workspaces on this rank's device; 0 on a CPU."""
    if seat.device != "cuda":
        return 0
    import torch

    major, _ = torch.cuda.get_device_capability()
    return gpu_workspace_bytes(major)


def gpu_workspace_bytes(major: int) -> int:
    """Allocator memory that cuBLAS keeps: one workspace for the forward thread, one for autograd's.

    32 MiB each on Hopper and later, 8.125 MiB before: torch's defaults (CUBLAS_WORKSPACE_CONFIG, torch's CUDA notes).
    major is the first number of the GPU's compute capability.
    """
    return 2 * (4096 * 8 * 1024 if major >= HOPPER else 4096 * 1024 * 2 + 16 * 1024 * 8)
