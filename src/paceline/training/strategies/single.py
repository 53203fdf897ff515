"""One process without a wrapper: the plain training step that other strategies are compared with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.contract import Seat, Trainer
from paceline.experiment import compilation
from paceline.experiment.plugins import parse_options
from paceline.experiment.spec import RunSpec
from paceline.models.arithmetic import Traffic

EIGHT_BIT = True


@dataclass(frozen=True)
class Options:
    """None."""


def check(spec: RunSpec) -> str | None:
    assert spec.strategy is not None
    parse_options(Options, spec.strategy)
    if spec.topology.world_size != 1:
        return f"the strategy single needs one process, got {spec.topology.world_size}"
    return compilation.refusal(spec.training.compilation, "single", spec.topology.device, per_block=False, graphs=True)


def sharded_parts(options: Mapping[str, Any]) -> int:
    return 0


def wire_bytes(traffic: Traffic) -> float:
    return 0.0


def wrap(spec: RunSpec, seat: Seat, reseed: int = 0, *, rounds_often: bool = False, head_parts: int = 1) -> Trainer:
    """For reference runs only: reseed is another rounding of the same initial weights and, with `rounds_often`, of the
    outputs of layers; the output layer is computed in `head_parts`."""
    from paceline.training.strategies._torch import TorchTrainer, compile_subject, whole_subject, whole_weights

    subject = whole_subject(
        spec, seat, spec.training.precision.reduce, reseed, rounds_often=rounds_often, head_parts=head_parts
    )
    compile_subject(subject, spec.training.compilation)
    return TorchTrainer(subject, spec, seat, full_parameters=lambda: whole_weights(subject))
