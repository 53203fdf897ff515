"""One process, no wrapper: the plain loop that every other strategy is certified against."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.plugins import Seat, Trainer, options
from paceline.spec import RunSpec

if TYPE_CHECKING:
    from paceline.decoder import Decoder


@dataclass(frozen=True)
class Options:
    """None."""


def check(spec: RunSpec) -> str | None:
    assert spec.strategy is not None
    options(Options, spec.strategy)
    if spec.topology.world_size != 1:
        return f"the strategy single runs on one process, not on {spec.topology.world_size}"
    return None


def wrap(spec: RunSpec, seat: Seat, reseed: int = 0) -> Trainer:
    """reseed is the reference's alone: another rounding of the same initial weights."""
    from paceline.strategies._torch import TorchTrainer, compile_whole, whole_subject, whole_weights

    subject = whole_subject(spec, seat, spec.training.precision.reduce, reseed)
    if spec.training.compile:
        compile_whole(subject)
    return TorchTrainer(subject, spec, seat, full_parameters=lambda: whole_weights(subject))


def prepared_decoder(spec: RunSpec, seat: Seat, reseed: int = 0) -> Decoder:
    """Whole weights on this rank: fp32, or 16 bit where gradients shall be accumulated in 16 bit."""
    from paceline.decoder import DTYPES
    from paceline.strategies._torch import initialised_decoder

    return initialised_decoder(spec, seat, reseed).to(DTYPES[spec.training.precision.reduce])
