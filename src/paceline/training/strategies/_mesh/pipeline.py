"""Pipeline parallelism: layers split into stages, with the schedules of `torch.distributed.pipelining`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from statistics import median
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
    examples: Callable[[Stage], tuple[Any, Any]],
    loss: Callable[[Any, Tensor], Tensor],
) -> Any:
    """torch's schedule over this rank's stages. examples(stage): tensors like its input and output, on the meta device.

    Losses are already divided, so torch must not scale the gradients again.
    """
    from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class

    from paceline.training.strategies._mesh.pipeline_stage import LeanStage

    parts = []
    for index, stage in stages:
        given, made = examples(stage)
        parts.append(
            LeanStage(
                stage, index, layout.stages, torch.device(device), input_args=given, output_args=made, group=group
            )
        )
    kind: Any = get_schedule_class(SCHEDULES[layout.schedule][0])
    several = issubclass(kind, PipelineScheduleMulti)
    return kind(parts if several else parts[0], n_microbatches=micro_batches, loss_fn=loss, scale_grads=False)


class Times:
    """Seconds in which this rank's stages compute, and those of the whole schedule: the rest is the bubble, with what
    is sent without overlap."""

    def __init__(self, device: str) -> None:
        self.device, self.busy_s, self.wall_s = device, 0.0, 0.0
        self.parts: dict[str, list[float]] = {"embedding": [], "block": [], "head": []}

    @contextmanager
    def of(self, schedule: Any) -> Iterator[None]:
        """Time the schedule and every piece of its work."""
        names = ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk")
        with _replaced(schedule, names, self._timed), self._timed_parts(schedule):
            began = self._now()
            yield
            self.wall_s += self._now() - began

    def part_s(self, name: str) -> float | None:
        """The median forward time of the embedding, of a block or of the head; None if this rank has none."""
        return median(self.parts[name]) if self.parts[name] else None

    @contextmanager
    def _timed_parts(self, schedule: Any) -> Iterator[None]:
        """Time every forward pass of embedding, blocks and head."""
        with ExitStack() as stack:
            for part in parts_of(schedule):
                stage: Stage = part.submod
                timed = [("block", block) for block in stage.blocks.values()]
                timed += [("embedding", stage.embedding)] if stage.first else []
                timed += [("head", stage.head)] if stage.last else []
                for name, module in timed:
                    began: list[float] = []
                    before = module.register_forward_pre_hook(lambda *_, began=began: began.append(self._now()))
                    after = module.register_forward_hook(
                        lambda *_, began=began, name=name: self.parts[name].append(self._now() - began.pop())
                    )
                    stack.callback(before.remove)
                    stack.callback(after.remove)
            yield

    def _timed(self, work: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = self._now()
            result = work(*args, **kwargs)
            self.busy_s += self._now() - began
            return result

        return timed

    def _now(self) -> float:
        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


@contextmanager
def before_first_backward(schedule: Any, read: Callable[[], None]) -> Iterator[None]:
    """Call `read` before the first backward pass of each run of the schedule."""
    left = [read]

    def reading(work: Callable[..., Any]) -> Callable[..., Any]:
        def first_read(*args: Any, **kwargs: Any) -> Any:
            if left:
                left.pop()()
            return work(*args, **kwargs)

        return first_read

    with _replaced(schedule, ("backward_one_chunk",), reading):
        yield


def parts_of(schedule: Any) -> list[Any]:
    """torch's stages of this rank."""
    return list(schedule._stages) if hasattr(schedule, "_stages") else [schedule._stage]


@contextmanager
def _replaced(
    schedule: Any, names: Sequence[str], replacement: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Iterator[None]:
    """Replace methods of all stages of a schedule."""
    replaced = [(part, name) for part in parts_of(schedule) for name in names]
    try:
        for part, name in replaced:
            setattr(part, name, replacement(getattr(part, name)))
        yield
    finally:
        for part, name in replaced:
            part.__dict__.pop(name, None)
