"""The strategy mesh with one mistake that an author of a layout might make: `split:mistake=tied_weights_apart`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from paceline.contract import Seat, Trainer
from paceline.experiment.choices import Choice
from paceline.experiment.layout import Layout
from paceline.experiment.plugins import parse_options
from paceline.experiment.spec import RunSpec
from paceline.training.strategies import mesh
from paceline.training.strategies._mesh.context import part_of_sequence


@dataclass(frozen=True)
class Options:
    mistake: str = ""


def norms_not_summed(trainer: Any) -> None:
    """Under sequence parallelism, every rank updates its norms by its own part of the sequence."""
    from torch.distributed.tensor import DTensor

    update = trainer.update

    def own_part_only() -> Any:
        for parameter in trainer.module.parameters():
            gradient = parameter.grad
            if gradient.placements != parameter.placements:
                parts = gradient.to_local(), parameter.device_mesh, parameter.placements
                parameter.grad = DTensor.from_local(*parts, run_check=False)
        return update()

    trainer.update = own_part_only


def norm_of_own_stage(trainer: Any) -> None:
    trainer.clip = lambda: torch.nn.utils.clip_grad_norm_(trainer.stepped, trainer.training.clip_norm)


def tied_weights_apart(trainer: Any) -> None:
    trainer._add_tied = lambda: None


def mean_over_parts_of_a_sequence(trainer: Any) -> None:
    trainer._scaled = lambda loss: loss / trainer.training.accumulation


def other_samples_on_one_rank(trainer: Any) -> None:
    forward = trainer.forward
    if trainer.rank == 1:
        trainer.forward = lambda tokens, *rest: forward(tokens.roll(1, 0), *rest)


def last_micro_batch_dropped(trainer: Any) -> None:
    """The pipeline computes another micro batch twice instead."""
    run = trainer._run_pipeline

    def dropped() -> Any:
        trainer.waiting[-1] = trainer.waiting[0]
        return run()

    trainer._run_pipeline = dropped


def positions_of_the_first_rank(trainer: Any) -> None:
    """Every rank of a sequence counts positions from its beginning."""
    stage = trainer.stages[0][1]
    places = part_of_sequence(trainer.spec.training.sequence_length, 0, 2, ring=True)
    stage.places_of = lambda device: places.to(device)


MISTAKES: dict[str, tuple[Callable[[Any], None], dict[str, int]]] = {
    "norms_not_summed": (norms_not_summed, {"tp": 2}),
    "other_samples_on_one_rank": (other_samples_on_one_rank, {"tp": 2}),
    "norm_of_own_stage": (norm_of_own_stage, {"pp": 2}),
    "tied_weights_apart": (tied_weights_apart, {"pp": 2}),
    "last_micro_batch_dropped": (last_micro_batch_dropped, {"pp": 2}),
    "positions_of_the_first_rank": (positions_of_the_first_rank, {"cp": 2}),
    "mean_over_parts_of_a_sequence": (mean_over_parts_of_a_sequence, {"cp": 2}),
}


def _degrees(options: Mapping[str, Any]) -> dict[str, int]:
    return MISTAKES[options["mistake"]][1]


def check(spec: RunSpec) -> str | None:
    return None


def layout(options: Mapping[str, Any], world_size: int) -> Layout:
    return mesh.layout(_degrees(options), world_size)


def wrap(spec: RunSpec, seat: Seat) -> Trainer:
    assert spec.strategy is not None
    chosen = parse_options(Options, spec.strategy)
    plant, degrees = MISTAKES[chosen.mistake]
    trainer: Any = mesh.wrap(dataclasses.replace(spec, strategy=Choice("mesh", degrees)), seat)
    plant(trainer)
    return trainer  # type: ignore[no-any-return]
