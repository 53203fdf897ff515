"""The timed loop: optimizer steps of a fixed global token count, recorded step by step without stopping the device."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.contract import Recorder, Seat, Trainer
from paceline.errors import InvalidRunError, RequestError
from paceline.results.records import StepSample
from paceline.training.data.corpus import Corpus, Partition, StepBatch, prefetch
from paceline.training.data.packing import IGNORED_LABEL, RowCorpus
from paceline.training.instruments import Clock, Stopwatch, reset_peak

if TYPE_CHECKING:
    from paceline.workloads._checkpoints import Keeper

# The host may queue this many steps before it waits: enough to never starve the device, little enough to lose little.
STEPS_AHEAD = 8


@dataclass(frozen=True)
class Pending:
    """A step whose marks the device may not have passed yet."""

    step: int
    batch: StepBatch
    stopwatch: Stopwatch
    data_wait_s: float
    updates: int
    h2d_bytes: int | None


class Loop:
    """Runs steps of one trainer on one rank; samples are handed over as soon as the device has passed them."""

    def __init__(
        self,
        trainer: Trainer,
        corpus: Corpus | RowCorpus,
        partition: Partition,
        seat: Seat,
        clock: Clock,
        recorder: Recorder,
        steps: int,
        variant: int = 0,
    ) -> None:
        self.trainer, self.corpus, self.partition, self.seat = trainer, corpus, partition, seat
        self.clock, self.recorder, self.variant = clock, recorder, variant
        self.pending: deque[Pending] = deque()
        # Loss and gradient norm of every step land here by asynchronous copies, so that no step waits for a read.
        self.scalars = torch.full((steps, 2), math.nan, pin_memory=seat.device == "cuda")
        self.normaliser: tuple[float, Tensor] | None = None
        self.window_began_at_s: float | None = None

    def window(self, steps: range, reset_at: int | None = None, keeper: Keeper | None = None) -> float:
        """Run and record `steps`, fenced by barriers; returns the host's wall time of the whole window.

        keeper: told where the window begins, and asked for checkpoints between steps, whose time is in no step.
        """
        batches = prefetch(self.corpus, self.partition, steps)
        dist.barrier()
        self.clock.drain()
        begin, self.window_began_at_s = time.perf_counter(), time.time()
        if keeper:
            keeper.begin(steps.start)
        for step in steps:
            if step == reset_at:
                reset_peak(self.seat.device)
            self._step(step, batches)
            if keeper and keeper.is_due(step + 1):
                keeper.save(step + 1, self._close())
            self._hand_over(self.clock)
        wall_s = self._close() - begin
        dist.barrier()
        return wall_s

    def _close(self) -> float:
        """Let the device end the steps under way and record them all; when that was."""
        last = self.clock.mark()
        self.clock.drain()
        ended_s = time.perf_counter()
        self._hand_over(self.clock, last)
        return ended_s

    def unrecorded(self, steps: range) -> None:
        """Run steps that are watched by other means (bytes, profile) and never timed."""
        batches = prefetch(self.corpus, self.partition, steps)
        for step in steps:
            self._step(step, batches)
        self.pending.clear()

    def _step(self, step: int, batches: Iterator[StepBatch]) -> None:
        stopwatch = Stopwatch(self.clock)
        self.recorder.progress(step, "data")
        began = time.perf_counter()
        batch = next(batches)
        data_wait_s = time.perf_counter() - began
        if batch.normaliser == 0:
            raise RequestError(
                f"data: the global batch of step {step} is all padding, so nothing is learned from it; accepted is "
                "data of which every step learns a token: remove the padding, or raise micro_batch or accumulation"
            )
        updates = self.trainer.updates
        normaliser = self._normaliser(batch.normaliser)
        total: Tensor | None = None
        for number, micro in enumerate(batch.micro_batches):
            loss = self._micro_batch(step, micro, normaliser, number + 1 == len(batch.micro_batches), stopwatch)
            total = loss if total is None else total + loss
        self.recorder.progress(step, "optimizer")
        with stopwatch.phase("optimizer"):
            norm = self.trainer.update()
        assert total is not None
        # A rank whose share is all padding has no mean: its sum is 0, and so is its weight in the loss of the step.
        self._keep(step, total * (batch.normaliser / max(batch.learned, 1)), norm)
        copied = sum(micro.nbytes for micro in batch.micro_batches) if self.seat.device == "cuda" else None
        counted = self.trainer.updates - updates
        self.pending.append(Pending(step, batch, stopwatch, data_wait_s, counted, copied))

    def _micro_batch(self, step: int, micro: Any, normaliser: Tensor, last: bool, stopwatch: Stopwatch) -> Tensor:
        inputs, labels = self._split(self._to_device(micro, stopwatch))
        self.recorder.progress(step, "forward")
        with stopwatch.phase("forward"):
            loss = self.trainer.forward(inputs, labels, normaliser, last)
        self.recorder.progress(step, "backward")
        with stopwatch.phase("backward"):
            self.trainer.backward(loss, last)
        return loss.detach()

    def _split(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Token ids and the next ones; of rows, ids with their positions and the labels they carry."""
        if isinstance(self.corpus, RowCorpus):
            return tokens[:, :2], tokens[:, 2]
        labels = tokens[:, 1:]
        if self.corpus.pad is not None:
            labels = labels.masked_fill(labels == self.corpus.pad, IGNORED_LABEL)
        return tokens[:, :-1], labels

    def _to_device(self, micro: Any, stopwatch: Stopwatch) -> Tensor:
        tokens = torch.from_numpy(micro)
        if self.seat.device != "cuda":
            return tokens
        pinned = tokens.pin_memory()
        with stopwatch.phase("h2d"):
            return pinned.to(self.seat.torch_device, non_blocking=True)

    def _normaliser(self, value: float) -> Tensor:
        """Made anew only where it changes, and filled on the device: a copy from the host would wait for the queue."""
        if self.normaliser is None or self.normaliser[0] != value:
            filled = torch.full((), value, dtype=torch.float32, device=self.seat.torch_device)
            self.normaliser = value, filled
        return self.normaliser[1]

    def _keep(self, step: int, loss: Tensor, norm: Tensor | float) -> None:
        if step >= len(self.scalars):
            return
        self.scalars[step, 0].copy_(loss, non_blocking=True)
        if isinstance(norm, Tensor):
            self.scalars[step, 1].copy_(norm, non_blocking=True)
        elif norm is not None:
            self.scalars[step, 1] = norm

    def _hand_over(self, clock: Clock, last: Any = None) -> None:
        """Record every step that has ended, i.e. whose successor has begun (or all, when `last` closes the window)."""
        while len(self.pending) > (0 if last is not None else 1):
            end = self.pending[1].stopwatch.start if len(self.pending) > 1 else last
            if not clock.passed(end):
                if len(self.pending) <= STEPS_AHEAD:
                    return
                end.synchronize()
            self._record(self.pending.popleft(), end)

    def _record(self, ended: Pending, end: Any) -> None:
        loss, norm = (float(value) for value in self.scalars[ended.step])
        # Only a loss scaler survives gradients that are not finite: it leaves the weights as they were.
        updates = ended.updates if math.isfinite(norm) else 0
        watch, batch = ended.stopwatch, ended.batch
        self.recorder.add(
            StepSample(
                rank=self.seat.rank,
                step=ended.step,
                duration_s=self.clock.elapsed_s(watch.start, end),
                data_wait_s=ended.data_wait_s,
                h2d_s=watch.seconds("h2d"),
                h2d_bytes=ended.h2d_bytes,
                forward_s=watch.seconds("forward"),
                backward_s=watch.seconds("backward"),
                optimizer_s=watch.seconds("optimizer"),
                tokens=batch.tokens,
                samples=batch.samples,
                micro_batches=len(batch.micro_batches),
                updates=updates,
                loss=loss,
                grad_norm=norm if math.isfinite(norm) else None,
                data_digest=batch.digest,
                variant=self.variant,
                positions=batch.positions,
                label_tokens=batch.label_tokens,
                attended_keys=batch.attended_keys,
            )
        )
        if not math.isfinite(loss):
            raise InvalidRunError(f"the loss is {loss} at step {ended.step}")
