"""The strategy compressed with one mistake that its declaration does not cover: `approximated:mistake=ranks_drift`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from paceline.contract import Seat, Trainer
from paceline.experiment.choices import Choice
from paceline.experiment.plugins import parse_options
from paceline.experiment.spec import RunSpec
from paceline.training.strategies import compressed

SIGNS, LOCAL = {"method": "signsgd"}, {"method": "localsgd", "every": 7}


@dataclass(frozen=True)
class Options:
    mistake: str = ""


def ranks_drift(trainer: Any) -> None:
    """Rank 1 takes longer steps than the mean that all ranks were sent."""
    update = trainer.update

    def longer() -> Any:
        if trainer.rank == 1:
            for parameter in trainer.module.parameters():
                parameter.grad.mul_(1.05)
        return update()

    trainer.update = longer


def one_tensor_averaged(trainer: Any) -> None:
    average = trainer._outer_step

    def first_only() -> None:
        whole, trainer.stepped = trainer.stepped, trainer.stepped[:1]
        average()
        trainer.stepped = whole

    trainer._outer_step = first_only


def never_averaged(trainer: Any) -> None:
    trainer._outer_step = lambda: None


def dropout_behind_signs(trainer: Any) -> None:
    for block in trainer.module.module.blocks:
        block.mlp.register_forward_hook(lambda module, args, out: torch.nn.functional.dropout(out, 0.1))


MISTAKES: dict[str, tuple[Callable[[Any], None], dict[str, Any]]] = {
    "ranks_drift": (ranks_drift, SIGNS),
    "one_tensor_averaged": (one_tensor_averaged, LOCAL),
    "never_averaged": (never_averaged, LOCAL),
    "dropout_behind_signs": (dropout_behind_signs, SIGNS),
}


def _real(options: Mapping[str, Any]) -> dict[str, Any]:
    return MISTAKES[options["mistake"]][1]


def check(spec: RunSpec) -> str | None:
    return None


def approximation(options: Mapping[str, Any]) -> str:
    return compressed.approximation(_real(options))


def averages_every(options: Mapping[str, Any]) -> int:
    return compressed.averages_every(_real(options))


def wire_bytes(traffic: Any) -> float | None:
    return compressed.wire_bytes(dataclasses.replace(traffic, options=_real(traffic.options)))


def wrap(spec: RunSpec, seat: Seat) -> Trainer:
    assert spec.strategy is not None
    plant, options = MISTAKES[parse_options(Options, spec.strategy).mistake]
    trainer: Any = compressed.wrap(dataclasses.replace(spec, strategy=Choice("compressed", options)), seat)
    plant(trainer)
    return trainer  # type: ignore[no-any-return]
