"""Tensor parallelism over two ranks that scales the attention of all layers from `first` on by a factor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from paceline.contract import Seat, Trainer
from paceline.experiment.choices import Choice
from paceline.experiment.layout import Layout
from paceline.experiment.plugins import parse_options
from paceline.experiment.spec import RunSpec
from paceline.training.strategies import mesh

DEGREES = {"tp": 2}


@dataclass(frozen=True)
class Options:
    first: int = 0
    by: float = 1.1


def check(spec: RunSpec) -> str | None:
    return None


def layout(options: Mapping[str, Any], world_size: int) -> Layout:
    return mesh.layout(DEGREES, world_size)


def wrap(spec: RunSpec, seat: Seat) -> Trainer:
    assert spec.strategy is not None
    chosen = parse_options(Options, spec.strategy)
    trainer: Any = mesh.wrap(replace(spec, strategy=Choice("mesh", DEGREES)), seat)
    for number, block in trainer.stages[0][1].blocks.items():
        if int(number) >= chosen.first:
            block.attention.register_forward_hook(lambda _, inputs, output: output * chosen.by)
    return trainer  # type: ignore[no-any-return]
