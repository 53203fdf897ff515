"""Pipeline parallelism: layers split into stages, with the schedules of `torch.distributed.pipelining`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from paceline.experiment.layout import SCHEDULES, Layout
from paceline.training.strategies._mesh.stage import Stage


def schedule_of(
    stages: Sequence[tuple[int, Stage]],
    layout: Layout,
    group: Any,
    device: str,
    micro_batches: int,
    examples: Callable[[Stage], tuple[Tensor, Tensor]],
    loss: Callable[[Tensor, Tensor], Tensor],
) -> Any:
    """torch's schedule over this rank's stages. examples(stage): tensors like its input and output, on the meta device.

    Losses are already divided, so torch must not scale the gradients again.
    """
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class

    parts = []
    for index, stage in stages:
        given, made = examples(stage)
        parts.append(
            PipelineStage(
                stage, index, layout.stages, torch.device(device), input_args=given, output_args=made, group=group
            )
        )
    kind: Any = get_schedule_class(SCHEDULES[layout.schedule][0])
    several = issubclass(kind, PipelineScheduleMulti)
    return kind(parts if several else parts[0], n_microbatches=micro_batches, loss_fn=loss, scale_grads=False)


class Stopwatch:
    """Seconds in which this rank's stages compute, for the bubble: the rest of a step is waiting and sending."""

    def __init__(self, device: str) -> None:
        self.device, self.busy_s = device, 0.0

    @contextmanager
    def running(self, schedule: Any) -> Iterator[None]:
        """Time every chunk of work of the schedule's stages. It waits for the device, so it is for extra steps only."""
        parts = schedule._stages if hasattr(schedule, "_stages") else [schedule._stage]
        names = ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk")
        try:
            for part in parts:
                for name in names:
                    setattr(part, name, self._timed(getattr(part, name)))
            yield
        finally:
            for part in parts:
                for name in names:
                    part.__dict__.pop(name, None)

    def _timed(self, work: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._drain()
            began = time.perf_counter()
            try:
                return work(*args, **kwargs)
            finally:
                self._drain()
                self.busy_s += time.perf_counter() - began

        return timed

    def _drain(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()
