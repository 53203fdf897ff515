"""DDP that trains on other tokens than it is given: the loop's own digest cannot see it, the loss can."""

from __future__ import annotations

from typing import Any

from paceline.contract import Seat, Trainer
from paceline.experiment.spec import RunSpec
from paceline.training.strategies.ddp import wrap as wrap_ddp


def check(spec: RunSpec) -> str | None:
    return None


def wrap(spec: RunSpec, seat: Seat) -> Trainer:
    trainer: Any = wrap_ddp(spec, seat)
    forward = trainer.forward
    trainer.forward = lambda tokens, labels, normaliser, last: forward(tokens.roll(1, 1), labels, normaliser, last)
    return trainer  # type: ignore[no-any-return]
