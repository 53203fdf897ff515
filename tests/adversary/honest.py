"""Honest variations of the strategies: other kernels and other orders of the same sums, which must stay certified."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from paceline.contract import Seat, Trainer
from paceline.experiment.choices import Choice
from paceline.experiment.plugins import parse_options
from paceline.experiment.spec import RunSpec
from paceline.training.strategies import ddp

VARIATIONS: dict[str, Callable[[Any, RunSpec], None]] = {}


@dataclass(frozen=True)
class Options:
    variation: str = ""


def check(spec: RunSpec) -> str | None:
    return None


def wrap(spec: RunSpec, seat: Seat) -> Trainer:
    assert spec.strategy is not None
    trainer: Any = ddp.wrap(dataclasses.replace(spec, strategy=Choice("ddp")), seat)
    VARIATIONS[parse_options(Options, spec.strategy).variation](trainer, spec)
    return trainer  # type: ignore[no-any-return]


def variation(function: Callable[[Any, RunSpec], None]) -> Callable[[Any, RunSpec], None]:
    VARIATIONS[function.__name__] = function
    return function


def use_optimizer(trainer: Any, spec: RunSpec, parameters: Any = None, **named: Any) -> None:
    training = spec.training
    named = {"lr": training.learning_rate, "weight_decay": training.weight_decay, **named}
    trainer.optimizer = torch.optim.AdamW(parameters or trainer.stepped, **named)
    trainer.optimizer.register_step_post_hook(lambda *_: setattr(trainer, "updates", trainer.updates + 1))


@variation
def foreach_optimizer(trainer: Any, spec: RunSpec) -> None:
    use_optimizer(trainer, spec, foreach=True)


@variation
def plain_optimizer(trainer: Any, spec: RunSpec) -> None:
    use_optimizer(trainer, spec, foreach=False)


@variation
def two_equal_groups(trainer: Any, spec: RunSpec) -> None:
    half = len(trainer.stepped) // 2
    use_optimizer(trainer, spec, [{"params": trainer.stepped[:half]}, {"params": trainer.stepped[half:]}], fused=True)


@variation
def tensors_in_another_order(trainer: Any, spec: RunSpec) -> None:
    use_optimizer(trainer, spec, trainer.stepped[::-1], fused=True)


@variation
def reduced_by_hand(trainer: Any, spec: RunSpec) -> None:
    """One all-reduce for each tensor after the last backward, instead of DDP's buckets."""
    trainer.sync = lambda last: setattr(trainer.module, "require_backward_grad_sync", False)
    update = trainer.update

    def changed() -> Any:
        for parameter in trainer.module.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad.div_(dist.get_world_size())
        return update()

    trainer.update = changed


@variation
def reduced_each_micro_batch(trainer: Any, spec: RunSpec) -> None:
    trainer.sync = lambda last: setattr(trainer.module, "require_backward_grad_sync", True)


@variation
def scattered_and_gathered(trainer: Any, spec: RunSpec) -> None:
    """A reduce-scatter and an all-gather instead of an all-reduce."""

    def hook(state, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations that are not its own
        size, whole = dist.get_world_size(), bucket.buffer()
        padded = torch.nn.functional.pad(whole, (0, -len(whole) % size))
        part = padded.new_empty(len(padded) // size)
        dist.reduce_scatter_tensor(part, padded)
        dist.all_gather_into_tensor(padded, part / size)
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(padded[: len(whole)])
        return future

    trainer.module.register_comm_hook(None, hook)


@variation
def plain_clipping(trainer: Any, spec: RunSpec) -> None:
    real = torch.nn.utils.clip_grad_norm_
    update = trainer.update

    def changed() -> Any:
        torch.nn.utils.clip_grad_norm_ = lambda parameters, norm: real(parameters, norm, foreach=False)
        try:
            return update()
        finally:
            torch.nn.utils.clip_grad_norm_ = real

    trainer.update = changed
