"""DDP that starts from the weights of another seed."""

from __future__ import annotations

from dataclasses import replace

from paceline.contract import Seat, Trainer
from paceline.experiment.choices import Choice
from paceline.experiment.spec import RunSpec
from paceline.training.strategies.ddp import wrap as wrap_ddp


def check(spec: RunSpec) -> str | None:
    return None


def wrap(spec: RunSpec, seat: Seat) -> Trainer:
    return wrap_ddp(replace(spec, seed=spec.seed + 1, strategy=Choice("ddp")), seat)
