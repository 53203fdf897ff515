"""DDP whose gradients are larger by a factor: the gradient norm deviates by exactly that, the weights hardly."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from paceline.contract import Seat, Trainer
from paceline.experiment.choices import Choice
from paceline.experiment.plugins import parse_options
from paceline.experiment.spec import RunSpec
from paceline.training.strategies.ddp import wrap as wrap_ddp


@dataclass(frozen=True)
class Options:
    by: float = 1.0


def check(spec: RunSpec) -> str | None:
    return None


def wrap(spec: RunSpec, seat: Seat) -> Trainer:
    assert spec.strategy is not None
    by = parse_options(Options, spec.strategy).by
    trainer: Any = wrap_ddp(replace(spec, strategy=Choice("ddp")), seat)
    update = trainer.update

    def changed() -> Any:
        for parameter in trainer.module.parameters():
            parameter.grad.mul_(by)
        return update()

    trainer.update = changed
    return trainer  # type: ignore[no-any-return]
