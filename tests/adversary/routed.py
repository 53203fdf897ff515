"""Expert parallelism with one mistake in its routing: `adversary.routed:mistake=capacity`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.contract import Seat, Trainer
from paceline.experiment.choices import Choice
from paceline.experiment.layout import Layout
from paceline.experiment.plugins import parse_options
from paceline.experiment.spec import RunSpec
from paceline.training.mixture import Mixture, mixtures_of
from paceline.training.strategies import mesh

DEGREES = {"ep": 2}


@dataclass(frozen=True)
class Options:
    mistake: str = ""


def capacity(mixture: Mixture) -> None:
    """Tokens beyond the mean of an expert are dropped before they are sent."""
    compute = mixture.compute

    def changed(rows: Tensor, counts: Tensor) -> Tensor:
        kept = counts.clamp(max=int(counts.sum()) // len(counts))
        starts = counts.cumsum(0) - counts
        own = torch.cat([torch.arange(int(s), int(s + n)) for s, n in zip(starts, kept, strict=True)]).to(rows.device)
        return torch.zeros_like(rows).index_copy(0, own, compute(rows[own], kept))

    mixture.compute = changed


def fewer_choices(mixture: Mixture) -> None:
    mixture.chosen = 1


def third_instead_of_second(mixture: Mixture) -> None:
    def choose(scores: Tensor) -> tuple[Tensor, Tensor]:
        experts = scores.detach().sort(dim=-1, descending=True, stable=True).indices[:, 0:3:2]
        weights = scores.gather(-1, experts)
        return experts, weights / weights.sum(-1, keepdim=True)

    mixture.choose = choose  # type: ignore[method-assign]


def weights_not_scaled(mixture: Mixture) -> None:
    choose = mixture.choose

    def changed(scores: Tensor) -> tuple[Tensor, Tensor]:
        experts, _ = choose(scores)
        return experts, scores.gather(-1, experts)

    mixture.choose = changed  # type: ignore[method-assign]


def neighbours_of_the_chosen(mixture: Mixture) -> None:
    """Each token is sent to the experts beside those that it chose."""
    choose = mixture.choose

    def changed(scores: Tensor) -> tuple[Tensor, Tensor]:
        experts, weights = choose(scores)
        return experts ^ 1, weights

    mixture.choose = changed  # type: ignore[method-assign]


def noisy_scores(mixture: Mixture) -> None:
    scores = mixture.scores
    generator = torch.Generator().manual_seed(1)

    def changed(flat: Tensor) -> Tensor:
        noise = torch.rand(len(flat), mixture.count, generator=generator).to(flat.device)
        return scores(flat) * (1 + 0.05 * noise)

    mixture.scores = changed  # type: ignore[method-assign]


def no_auxiliary_loss(trainer: Any) -> None:
    trainer.shape = dataclasses.replace(trainer.shape, aux_loss=0.0)


def gradients_of_experts_summed(trainer: Any) -> None:
    """Not divided by the ranks whose tokens an expert computed."""
    update = trainer.update

    def changed() -> Any:
        for parameter in trainer._experts():
            parameter.grad.mul_(DEGREES["ep"])
        return update()

    trainer.update = changed


IN_LAYERS: tuple[Callable[[Mixture], None], ...] = (
    capacity,
    fewer_choices,
    third_instead_of_second,
    weights_not_scaled,
    neighbours_of_the_chosen,
    noisy_scores,
)
IN_TRAINER: tuple[Callable[[Any], None], ...] = (no_auxiliary_loss, gradients_of_experts_summed)
MISTAKES = {plant.__name__: plant for plant in (*IN_LAYERS, *IN_TRAINER)}


def check(spec: RunSpec) -> str | None:
    return None


def layout(options: Mapping[str, Any], world_size: int) -> Layout:
    return mesh.layout(DEGREES, world_size)


def wrap(spec: RunSpec, seat: Seat) -> Trainer:
    assert spec.strategy is not None
    plant = MISTAKES[parse_options(Options, spec.strategy).mistake]
    trainer: Any = mesh.wrap(dataclasses.replace(spec, strategy=Choice("mesh", DEGREES)), seat)
    for subject in (trainer,) if plant in IN_TRAINER else mixtures_of(trainer.module):
        plant(subject)
    return trainer  # type: ignore[no-any-return]
