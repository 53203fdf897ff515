"""The stages of the node test on one process: health, verification, interleaved windows, and pairs."""

from __future__ import annotations

import dataclasses

import torch
import torch.distributed as dist

from paceline.contract import Recorder, Seat
from paceline.experiment.plugins import load, parse_options
from paceline.experiment.spec import RunSpec
from paceline.host import health
from paceline.models.arithmetic import load as load_shape
from paceline.results.machine_samples import HealthSample, TrajectorySample
from paceline.training.data.corpus import Partition, open_data
from paceline.training.instruments import attention_backends, clock_for, digest_parameters, read_memory, release_unused
from paceline.workloads._loop import Loop
from paceline.workloads.collectives.ensemble import Ensemble
from paceline.workloads.collectives.options import Options as CollectivesOptions
from paceline.workloads.collectives.tournament import Tournament
from paceline.workloads.compute.kernels import Bench
from paceline.workloads.compute.options import Options as ComputeOptions
from paceline.workloads.compute.options import Row
from paceline.workloads.nodes.plan import SIDES, Options, alone, plan
from paceline.workloads.nodes.proof import deterministic, lacks_kernel, prepare_products, prove_product

# Products queued while the health is read: at least a tenth of a second of work.
QUEUED = 100


class Acceptance:
    """The node test of one rank; all ranks do the same in the same order."""

    def __init__(self, spec: RunSpec, seat: Seat, recorder: Recorder) -> None:
        prepare_products()
        self.spec, self.seat, self.recorder = spec, seat, recorder
        self.chosen = parse_options(Options, spec.workload)
        self.side = self.chosen.side or SIDES[seat.device]
        requested = ComputeOptions(iters=self.chosen.iters, warmup=5, budget_s=self.chosen.budget_s)
        processes = spec.topology.processes_per_node
        self.bench = Bench(seat, load_shape(spec.model), requested, processes, spec.seed)
        self.trains = self.chosen.training != "none"
        self.number = 0

    def run(self) -> None:
        self._read_health("before")
        training = self._proved_training(turn=0)
        for repeat in range(self.chosen.repeats):
            # One window of each measure, in alternating order, so that the order does not affect a number.
            windows: list[Row | OwnTraining] = [*plan(self.spec), *([] if training is None else [training])]
            for window in windows[:: -1 if repeat % 2 else 1]:
                self._synchronise()
                if isinstance(window, OwnTraining):
                    window.window(repeat)
                else:
                    self.recorder.add(dataclasses.replace(self.bench.measure(window), repeat=repeat))
            self._synchronise("verify")
            for dtype in dict.fromkeys((self.spec.training.precision.compute, "fp32")):
                self.recorder.add(prove_product(self.seat, repeat, self.side, dtype, self.spec.seed))
        # Free the memory of the training before the next one.
        del training, windows, window
        self._proved_training(turn=1)
        release_unused(self.seat.device)
        self._synchronise()
        if self.seat.device == "cuda":
            # Read the health while products are queued: an idle GPU lowers its clocks and PCIe speed, which look like
            # defects.
            kind = torch.bfloat16 if self.spec.training.precision.compute == "bf16" else torch.float16
            a = torch.ones((self.side, self.side), dtype=kind, device=self.seat.torch_device)
            for _ in range(QUEUED):
                torch.mm(a, a)
        self._read_health("loaded")
        self.bench.clock.drain()
        self._synchronise()
        if self.chosen.tournament and self.seat.world_size > 1:
            requested = CollectivesOptions(pair_bytes=self.chosen.pair_bytes, budget_s=self.chosen.budget_s)
            Tournament(Ensemble(self.seat, self.recorder), requested, self.number).run()

    def _synchronise(self, phase: str = "timing") -> None:
        """Wait for all ranks, while nothing is measured."""
        self.number += 1
        self.recorder.progress(self.number, phase)
        dist.barrier()

    def _proved_training(self, turn: int) -> OwnTraining | None:
        """A training whose first steps are verified; None if none is requested. Uses deterministic kernels if all
        exist: equal ranks lack the same ones, so that they stay together."""
        if not self.trains:
            return None
        self._synchronise("setup")
        try:
            return self._new_training(turn, strict=True)
        except RuntimeError as error:
            if not lacks_kernel(error):
                raise
        return self._new_training(turn, strict=False)

    def _new_training(self, turn: int, strict: bool) -> OwnTraining:
        training = OwnTraining(self.spec, self.seat, self.recorder, self.chosen)
        training.prove(turn, strict)
        return training

    def _read_health(self, moment: str) -> None:
        facts = health.read(self.seat.local_rank if self.seat.device == "cuda" else None)
        self.recorder.add(HealthSample(rank=self.seat.rank, moment=moment, facts=facts))


class OwnTraining:
    """The training of one process without peers: verified steps, then warm-up, then timed windows."""

    def __init__(self, spec: RunSpec, seat: Seat, recorder: Recorder, chosen: Options) -> None:
        own = alone(spec)
        self.seat, self.recorder, self.chosen, self.spec = seat, recorder, chosen, spec
        self.trainer = load("strategies", "single").wrap(own, seat)
        corpus = open_data(own, load_shape(spec.model).vocab)
        self.begin = chosen.proof_steps + spec.warmup.minimum
        steps = self.begin + chosen.repeats * spec.steps
        clock = clock_for(seat.device)
        self.loop = Loop(self.trainer, corpus, Partition.of(own, 0), seat, clock, recorder, steps)
        self.is_warm = False

    def prove(self, turn: int, strict: bool) -> None:
        steps = self.chosen.proof_steps
        with attention_backends(self.seat.device), deterministic(strict):
            self.loop.unrecorded(range(steps))
            self.loop.clock.drain()
            weights = digest_parameters(self.trainer.full_parameters())
        losses = tuple(self.loop.scalars[:steps, 0].tolist())
        self.recorder.add(TrajectorySample(rank=self.seat.rank, turn=turn, losses=losses, weights=weights.digest))

    def window(self, repeat: int) -> None:
        """One timed window. Steps have the repeat as `variant`; the peak is that of this window."""
        with attention_backends(self.seat.device):
            if not self.is_warm:
                self.loop.unrecorded(range(self.chosen.proof_steps, self.begin))
                self.is_warm = True
            first, self.loop.variant = self.begin + repeat * self.spec.steps, repeat
            self.loop.window(range(first, first + self.spec.steps), reset_at=first)
        self.recorder.add(read_memory(self.seat.rank, "steps", self.seat.device, peak=True))
