"""DDP that steps the optimizer after every micro batch, as the original comparison did."""

from __future__ import annotations

from typing import Any

from paceline.contract import Seat, Trainer
from paceline.experiment.spec import RunSpec
from paceline.training.strategies.ddp import wrap as wrap_ddp


def check(spec: RunSpec) -> str | None:
    return None


def wrap(spec: RunSpec, seat: Seat) -> Trainer:
    trainer: Any = wrap_ddp(spec, seat)
    trainer.sync = lambda last: None
    backward, update, norms = trainer.backward, trainer.update, []

    def backward_and_step(loss: Any, last: bool) -> None:
        backward(loss, last)
        norms.append(update())

    trainer.backward = backward_and_step
    trainer.update = lambda: norms[-1]
    return trainer  # type: ignore[no-any-return]
