"""The training step shared by the strategies that use torch's own wrappers: accumulate, clip, AdamW, clear."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from paceline.contract import Seat
from paceline.experiment.spec import RunSpec
from paceline.models.arithmetic import load
from paceline.training import finetuned
from paceline.training.decoder import DTYPES, Decoder, fill
from paceline.training.strategies._optimizers import (
    LocalShards,
    Masters,
    is_8bit,
    load_tensors,
    optimizer_facts,
    optimizer_of,
    save_tensors,
    state_dtypes,
    with_state,
)

INITIAL_LOSS_SCALE = 2.0**16
# What a strategy wraps.
Subject: TypeAlias = Decoder | finetuned.Tuned


def whole_subject(spec: RunSpec, seat: Seat, dtype: str, reseed: int = 0) -> Subject:
    """What a spec trains, whole and initialised on this rank's device: the decoder with its weights in `dtype`, or the
    model that is fine-tuned, which holds each weight in a dtype of its own."""
    if spec.tuning is not None:
        return finetuned.build(spec, seat.torch_device, reseed)
    return initialised_decoder(spec, seat, reseed).to(DTYPES[dtype])


def build_decoder(spec: RunSpec, device: str) -> Decoder:
    """The decoder on `device` ("meta" allocates nothing), without its initial values."""
    training = spec.training
    with torch.device(device):
        return Decoder(load(spec.model), training.precision.compute, training.checkpointing)


def initialised_decoder(spec: RunSpec, seat: Seat, reseed: int = 0) -> Decoder:
    """A whole decoder on this rank's device, with fp32 initial weights (see `decoder.fill` for `reseed`)."""
    decoder = build_decoder(spec, seat.torch_device)
    fill(decoder, decoder.shape.layers, spec.seed, spec.training.precision.compute, _copy, reseed)
    return decoder


def _copy(parameter: Tensor, value: Tensor) -> None:
    parameter.data.copy_(value)


def compile_whole(subject: Subject) -> None:
    """One graph over the decoder. A fine-tuned model is compiled in parts: what joins its layers is not ours."""
    if isinstance(subject, Decoder):
        subject.compile()
    else:
        compile_parts(subject)


def compile_parts(subject: Subject) -> None:
    """Compile block by block and the loss: for strategies whose hooks sit between the blocks."""
    if isinstance(subject, finetuned.Tuned):
        finetuned.prepare_compiler(subject.checkpointing)
    for block in subject.blocks:
        block.compile()
    subject._loss = torch.compile(subject._loss)  # type: ignore[assignment, method-assign]


def learning(module: nn.Module) -> list[nn.Parameter]:
    """The parameters that learn, in order."""
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def whole_weights(subject: Subject) -> Iterator[tuple[str, Tensor]]:
    """The weights of a subject that no strategy has sharded, with the scales of those in 4 bit."""
    yield from subject.named_parameters()
    yield from scales_of(subject)


def scales_of(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return module.scales() if isinstance(module, finetuned.Tuned) else iter(())


def tuning_facts(module: nn.Module) -> tuple[dict[str, str], dict[str, Any]]:
    """dtypes and settings that only a fine-tuned model has, however it is wrapped."""
    found = next((part for part in module.modules() if isinstance(part, finetuned.Tuned)), None)
    return (found.dtypes, found.facts) if found else ({}, {})


class TorchTrainer:
    """Implements `plugins.Trainer`; what differs between strategies comes in as functions.

    sync(last) is called before each micro batch and says whether its gradients shall be reduced.
    """

    def __init__(
        self,
        module: nn.Module,
        spec: RunSpec,
        seat: Seat,
        *,
        full_parameters: Callable[[], Iterator[tuple[str, Tensor]]],
        sync: Callable[[bool], None] = lambda last: None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        training = spec.training
        self.module, self.training, self.sync, self.rank = module, training, sync, seat.rank
        self.full_parameters, self.settings = full_parameters, dict(settings or {})
        parameters = learning(module)
        self.masters = Masters(parameters) if parameters[0].dtype != torch.float32 else None
        self.stepped: list[Any] = [*(self.masters.copies if self.masters else parameters)]
        sharded = hasattr(self.stepped[0], "to_local")
        self.shards = LocalShards(self.stepped) if sharded and is_8bit(spec) else None
        if self.shards:
            self.optimizer = optimizer_of(spec, self.shards.parts, self.shards.whole_sizes)
        else:
            self.optimizer = optimizer_of(spec, self.stepped)
        self.scaler = torch.amp.GradScaler(
            seat.device, init_scale=INITIAL_LOSS_SCALE, enabled=training.precision.compute == "fp16"
        )
        self.updates = 0
        self.optimizer.register_step_post_hook(self._count_update)

    def _count_update(self, *_: object) -> None:
        self.updates += 1

    def forward(self, tokens: Tensor, labels: Tensor, normaliser: Tensor, last: bool) -> Tensor:
        self.sync(last)
        return self.module(tokens, labels, normaliser)  # type: ignore[no-any-return]

    def backward(self, loss: Tensor, last: bool) -> None:
        self.scaler.scale(loss / self.training.accumulation).backward()  # type: ignore[no-untyped-call]

    def update(self) -> Tensor:
        if self.masters:
            self.masters.take_gradients()
        if self.shards:
            self.shards.take_gradients()
        self.scaler.unscale_(self.optimizer)
        norm = nn.utils.clip_grad_norm_(self.stepped, self.training.clip_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        if self.shards:
            self.shards.clear_gradients()
        if self.masters:
            self.masters.give_weights()
        return norm.full_tensor() if hasattr(norm, "full_tensor") else norm

    def save(self, folder: Path) -> None:
        save_tensors(self._state(), folder)

    def load(self, folder: Path) -> None:
        with_state(self.optimizer, self.shards.parts if self.shards else self.stepped)
        state = self._state()
        load_tensors(state, folder)
        self._take(state)

    def _state(self) -> dict[str, Tensor]:
        """What has learned and what it will learn by: tensors that loading fills in place, numbers as tensors."""
        state = {f"weights.{i}": tensor.detach() for i, tensor in enumerate(self.stepped)}
        # Parts of 8-bit moments are plain tensors that differ between ranks, so each rank names its own.
        own = f"rank.{self.rank}." if self.shards else ""
        for i, parameter in enumerate(self.optimizer.param_groups[0]["params"]):
            for key, value in self.optimizer.state[parameter].items():
                held = value if isinstance(value, Tensor) else torch.tensor(value)
                state[f"{own}optimizer.{i}.{key}"] = held
        scale = self.scaler.state_dict()
        numbers = [self.updates, scale.get("scale", 0.0), scale.get("_growth_tracker", 0)]
        return state | {"numbers": torch.tensor(numbers, dtype=torch.float64)}

    def _take(self, state: Mapping[str, Tensor]) -> None:
        """What loading could not fill in place."""
        own = f"rank.{self.rank}." if self.shards else ""
        for i, parameter in enumerate(self.optimizer.param_groups[0]["params"]):
            held = self.optimizer.state[parameter]
            numbers = {key: type(v) for key, v in held.items() if isinstance(v, int | float)}
            held |= {key: kind(state[f"{own}optimizer.{i}.{key}"].item()) for key, kind in numbers.items()}
        updates, scale, growth = state["numbers"].tolist()
        self.updates = int(updates)
        if self.scaler.is_enabled():
            known = self.scaler.state_dict()
            self.scaler.load_state_dict(known | {"scale": scale, "_growth_tracker": int(growth)})
        if self.masters:
            self.masters.give_weights()

    def declare(self) -> tuple[dict[str, str], dict[str, Any], dict[str, Any]]:
        precision = self.training.precision
        dtypes = {
            "parameters": precision.compute,
            "compute": precision.compute,
            "gradient": precision.reduce,
            "gradient_reduction": precision.reduce,
            **state_dtypes(self.optimizer),
        }
        special, facts = tuning_facts(self.module)
        return dtypes | special, optimizer_facts(self.optimizer, self.training.clip_norm), self.settings | facts
