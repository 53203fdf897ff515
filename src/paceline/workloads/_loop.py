"""The timed training loop: steps of a fixed global batch, recorded without stalling the device."""

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
from paceline.training.observation import RoutingWatch, WindowWatch

if TYPE_CHECKING:
    from paceline.workloads._checkpoints import Checkpointer

# Steps the host may queue before it waits: enough that the device never idles, few enough that a crash loses little.
STEPS_AHEAD = 8


@dataclass(frozen=True)
class QueuedStep:
    """A step that the host has queued and the device may not have finished."""

    step: int
    batch: StepBatch
    stopwatch: Stopwatch
    data_wait_s: float
    updates: int
    h2d_bytes: int | None


class Loop:
    """Trains on one rank and records each step as soon as the device has finished it."""

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
        self.pending: deque[QueuedStep] = deque()
        # Loss and gradient norm of every step, filled by asynchronous copies so that no step waits for a read.
        self.scalars = torch.full((steps, 2), math.nan, pin_memory=seat.device == "cuda")
        self.normaliser: tuple[float, Tensor] | None = None
        self.window_began_at_s: float | None = None
        self.watch = WindowWatch()
        module = getattr(trainer, "module", None) or getattr(trainer, "subject", None)
        self.routing = RoutingWatch(module, seat.torch_device, steps)

    def window(self, steps: range, reset_at: int | None = None, checkpoints: Checkpointer | None = None) -> float:
        """Run and record `steps` between two barriers; returns the wall time of the window in seconds.

        reset_at: the step before which the peak memory counter is reset. checkpoints: writes between steps; that time
        belongs to no step.
        """
        batches = prefetch(self.corpus, self.partition, steps)
        dist.barrier()
        self.clock.drain()
        begin, self.window_began_at_s = time.perf_counter(), time.time()
        if checkpoints:
            checkpoints.begin(steps.start)
        with self.watch.watching():
            for step in steps:
                if step == reset_at:
                    reset_peak(self.seat.device)
                self.watch.step = step
                self._step(step, batches)
                if checkpoints and checkpoints.is_due(step + 1):
                    checkpoints.save(step + 1, self._finish())
                self._record_finished()
            wall_s = self._finish() - begin
        dist.barrier()
        return wall_s

    def unrecorded(self, steps: range) -> None:
        """Run steps that are profiled or counted, and not timed."""
        batches = prefetch(self.corpus, self.partition, steps)
        for step in steps:
            self._step(step, batches)
        self.pending.clear()

    def _step(self, step: int, batches: Iterator[StepBatch]) -> None:
        """Forward and backward for each micro batch, then one optimizer update."""
        stopwatch = Stopwatch(self.clock)
        self.recorder.progress(step, "data")
        began = time.perf_counter()
        batch = next(batches)
        data_wait_s = time.perf_counter() - began
        if batch.normaliser == 0:
            raise RequestError(
                f"data: the global batch of step {step} is all padding, expected at least one token to learn per "
                "step. Remove the padding, or raise micro_batch or accumulation."
            )
        # Filled on the device, and only when it changes: a copy from the host would wait for the queue.
        if self.normaliser is None or self.normaliser[0] != batch.normaliser:
            on_device = torch.full((), batch.normaliser, dtype=torch.float32, device=self.seat.torch_device)
            self.normaliser = batch.normaliser, on_device
        updates_before, on_gpu = self.trainer.updates, self.seat.device == "cuda"
        total: Tensor | None = None
        for number, micro_batch in enumerate(batch.micro_batches):
            last = number + 1 == len(batch.micro_batches)
            tokens = torch.from_numpy(micro_batch)
            if on_gpu:
                pinned = tokens.pin_memory()
                with stopwatch.phase("h2d"):
                    tokens = pinned.to(self.seat.torch_device, non_blocking=True)
            inputs, labels = self._inputs_and_labels(tokens)
            self.recorder.progress(step, "forward")
            with stopwatch.phase("forward"):
                loss = self.trainer.forward(inputs, labels, self.normaliser[1], last)
            self.recorder.progress(step, "backward")
            with stopwatch.phase("backward"):
                self.trainer.backward(loss, last)
            total = loss.detach() if total is None else total + loss.detach()
        self.recorder.progress(step, "optimizer")
        with stopwatch.phase("optimizer"):
            norm = self.trainer.update()
        self.routing.end_step(step)
        assert total is not None
        if step < len(self.scalars):
            # A rank whose share is all padding has a loss of 0, and weight 0 in the loss of the step.
            mean = total * (batch.normaliser / max(batch.learned, 1))
            self.scalars[step, 0].copy_(mean, non_blocking=True)
            if isinstance(norm, Tensor):
                self.scalars[step, 1].copy_(norm, non_blocking=True)
            elif norm is not None:
                self.scalars[step, 1] = norm
        copied = sum(micro_batch.nbytes for micro_batch in batch.micro_batches) if on_gpu else None
        updates = self.trainer.updates - updates_before
        self.pending.append(QueuedStep(step, batch, stopwatch, data_wait_s, updates, copied))

    def _inputs_and_labels(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Token ids and the ids that follow them. Rows for fine-tuning carry positions and labels themselves."""
        if isinstance(self.corpus, RowCorpus):
            return tokens[:, :2], tokens[:, 2]
        labels = tokens[:, 1:]
        if self.corpus.pad is not None:
            labels = labels.masked_fill(labels == self.corpus.pad, IGNORED_LABEL)
        return tokens[:, :-1], labels

    def _finish(self) -> float:
        """Wait for the device, record all pending steps, and return the time at which the device was done."""
        last = self.clock.mark()
        self.clock.drain()
        ended_s = time.perf_counter()
        self._record_finished(last)
        return ended_s

    def _record_finished(self, last: Any = None) -> None:
        """Record every step whose successor has begun; all of them when `last` marks the end of the window."""
        while len(self.pending) > (0 if last is not None else 1):
            end = self.pending[1].stopwatch.start if len(self.pending) > 1 else last
            if not self.clock.passed(end):
                if len(self.pending) <= STEPS_AHEAD:
                    return
                end.synchronize()
            queued = self.pending.popleft()
            watch, batch = queued.stopwatch, queued.batch
            loss, norm = (float(value) for value in self.scalars[queued.step])
            # Ranks that share their samples: one of them counts them.
            leader, counts = self.partition.leader, self.partition.leader is None
            interleaves = getattr(self.trainer, "interleaves", False)
            self.recorder.add(
                StepSample(
                    rank=self.seat.rank,
                    step=queued.step,
                    duration_s=self.clock.elapsed_s(watch.start, end),
                    data_wait_s=queued.data_wait_s,
                    h2d_s=watch.seconds("h2d"),
                    h2d_bytes=queued.h2d_bytes,
                    # A pipeline runs both of all micro batches in one schedule.
                    forward_s=None if interleaves else watch.seconds("forward"),
                    backward_s=None if interleaves else watch.seconds("backward"),
                    optimizer_s=watch.seconds("optimizer"),
                    tokens=batch.tokens if counts else 0,
                    samples=batch.samples if counts else 0,
                    micro_batches=len(batch.micro_batches),
                    # A loss scaler skips the update when gradients are not finite.
                    updates=queued.updates if math.isfinite(norm) else 0,
                    loss=loss,
                    grad_norm=norm if math.isfinite(norm) else None,
                    data_digest=batch.digest,
                    variant=self.variant,
                    positions=batch.positions if counts else 0,
                    label_tokens=batch.label_tokens if counts or batch.label_tokens is None else 0,
                    attended_keys=batch.attended_keys if counts or batch.attended_keys is None else 0,
                    leader=leader,
                )
            )
            for routing in self.routing.samples(self.seat.rank, queued.step, len(batch.micro_batches), self.variant):
                self.recorder.add(routing)
            if not math.isfinite(loss):
                raise InvalidRunError(f"the loss is {loss} at step {queued.step}")
