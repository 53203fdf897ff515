"""The training step of the strategies that use torch's own wrappers: accumulate, clip, update, clear."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from paceline.contract import Seat
from paceline.errors import UnsupportedError
from paceline.experiment.compilation import Compilation
from paceline.experiment.spec import RunSpec
from paceline.models.arithmetic import load
from paceline.training import finetuned
from paceline.training.decoder import DTYPES, Decoder, change_rounding, fill
from paceline.training.mixture import prepare_compiler
from paceline.training.precision import compute_name, convert, round_as_plain_code
from paceline.training.strategies._optimizers import (
    Joined,
    LocalShards,
    Masters,
    is_8bit,
    load_tensors,
    optimizer_facts,
    optimizer_of,
    save_tensors,
    save_tensors_later,
    state_dtypes,
    with_state,
)

INITIAL_LOSS_SCALE = 2.0**16
# The module that a strategy wraps.
Subject: TypeAlias = Decoder | finetuned.Tuned


def whole_subject(
    spec: RunSpec, seat: Seat, dtype: str, reseed: int = 0, *, rounds_often: bool = False, head_parts: int = 1
) -> Subject:
    """The whole initialised module on this rank's device: the decoder in `dtype`, or the fine-tuned model, which has
    its own dtypes (see `decoder.fill` for `reseed`). rounds_often: a reseed changes the outputs of layers, too.
    head_parts: the output layer is computed in so many parts of the vocabulary."""
    if spec.tuning is not None:
        return finetuned.build(spec, seat.torch_device, reseed)
    decoder = build_decoder(spec, seat.torch_device)

    def copy(parameter: Tensor, value: Tensor) -> None:
        parameter.data.copy_(value)

    convert(decoder.blocks, spec.training.precision, seat.device)
    fill(decoder, decoder.shape.layers, spec.seed, spec.training.precision.base, copy, reseed)
    if reseed and rounds_often:
        change_rounding(decoder.blocks, reseed)
    decoder.head_parts = head_parts
    return decoder.to(DTYPES[dtype])


def build_decoder(spec: RunSpec, device: str) -> Decoder:
    """The decoder on `device` ("meta" allocates nothing), without initial values."""
    training = spec.training
    with torch.device(device):
        return Decoder(load(spec.model), training.precision.base, training.checkpointing)


def compile_subject(subject: Subject, wanted: Compilation | None, *, per_block: bool = False) -> None:
    """Compile the decoder as one graph, or each block and the loss: if that is requested, for strategies with hooks
    between the blocks, for a mixture, whose graph breaks in every block, and for a fine-tuned model, since its outer
    code is not ours."""
    if wanted is None:
        return
    require_compiler()
    prepare_compiler(subject)
    round_as_plain_code()
    if isinstance(subject, finetuned.Tuned):
        subject.compile_loss(wanted.mode)
        if not per_block and not wanted.records_graphs and subject.compile_layers(wanted.mode):
            finetuned.prepare_compiler("none")
            return
        finetuned.prepare_compiler(subject.checkpointing)
    elif not per_block and wanted.scope != "block" and not subject.shape.experts:
        subject.compile(mode=wanted.mode)
        return
    for block in subject.blocks:
        block.compile(mode=wanted.mode)
    if not isinstance(subject, finetuned.Tuned):
        subject._loss = torch.compile(subject._loss, mode=wanted.mode)  # type: ignore[method-assign]


def require_compiler() -> None:
    """UnsupportedError without a C compiler: Triton builds its launchers, and torch its kernels for CPUs, with one."""
    if not any(map(shutil.which, filter(None, (os.environ.get("CC"), "gcc", "clang", "cc")))):
        raise UnsupportedError(
            "torch.compile needs a C compiler (gcc or clang), and this host has none. Install one, or use "
            "--set compile=false"
        )


def require_graphs() -> None:
    """UnsupportedError if torch compiled code without recording CUDA graphs for it, which it does silently."""
    from torch._dynamo.utils import counters

    skipped = counters["inductor"]["cudagraph_skips"]
    if skipped:
        raise UnsupportedError(
            f"compile reduce-overhead: torch recorded no CUDA graph for {skipped} compiled functions"
        )


def learning(module: nn.Module) -> list[nn.Parameter]:
    """The trainable parameters, in order."""
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def whole_weights(subject: Subject) -> Iterator[tuple[str, Tensor]]:
    """All weights of an unsharded module, with the scales of 4-bit ones."""
    yield from subject.named_parameters()
    yield from scales_of(subject)


def scales_of(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return module.scales() if isinstance(module, finetuned.Tuned) else iter(())


def tuning_facts(module: nn.Module) -> tuple[dict[str, str], dict[str, Any]]:
    """dtypes and settings that only a fine-tuned model has, however it is wrapped."""
    tuned = next((part for part in module.modules() if isinstance(part, finetuned.Tuned)), None)
    return (tuned.dtypes, tuned.facts) if tuned else ({}, {})


class TorchTrainer:
    """Implements `contract.Trainer`; strategies pass their differences as functions.

    sync(last) is called before each micro batch, to switch the reduction of its gradients on or off; after_update after
    each optimizer step. prefix: of the
    names in a checkpoint, for ranks that hold other weights than their neighbours.
    """

    def __init__(
        self,
        module: nn.Module,
        spec: RunSpec,
        seat: Seat,
        *,
        full_parameters: Callable[[], Iterator[tuple[str, Tensor]]],
        sync: Callable[[bool], None] = lambda last: None,
        after_update: Callable[[], None] | None = None,
        settings: Mapping[str, Any] | None = None,
        prefix: str = "",
    ) -> None:
        training = spec.training
        self.module, self.training, self.sync, self.rank = module, training, sync, seat.rank
        self.full_parameters, self.settings, self.prefix = full_parameters, dict(settings or {}), prefix
        self.after_update = after_update
        self.graphs = training.compilation is not None and training.compilation.records_graphs
        self.begins = True
        parameters = learning(module)
        self.masters = Masters(parameters) if parameters[0].dtype != torch.float32 else None
        self.stepped: list[Any] = [*(self.masters.copies if self.masters else parameters)]
        sharded = hasattr(self.stepped[0], "to_local")
        self.shards = LocalShards(self.stepped) if sharded and is_8bit(spec) else None
        self.joined = Joined(parameters) if Joined.suits(spec, parameters) else None
        if self.joined:
            self.stepped = [self.joined.whole]
        if self.shards:
            self.optimizer = optimizer_of(spec, self.shards.parts, self.shards.whole_sizes)
        else:
            self.optimizer = optimizer_of(spec, self.stepped)
        self.scaler: Any = torch.amp.GradScaler(
            seat.device, init_scale=INITIAL_LOSS_SCALE, enabled=training.precision.compute == "fp16"
        )
        self.updates = 0

        def count_update(*_: object) -> None:
            self.updates += 1

        self.optimizer.register_step_post_hook(count_update)

    def forward(self, tokens: Tensor, labels: Tensor, normaliser: Tensor, last: bool) -> Tensor:
        self.sync(last)
        if not self.graphs:
            return self.module(tokens, labels, normaliser)  # type: ignore[no-any-return]
        if self.begins:
            # Until the next mark, graphs keep what they returned: gradients are added up over micro batches.
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        self.begins = False
        return self.module(tokens, labels, normaliser).clone()  # type: ignore[no-any-return]

    def backward(self, loss: Tensor, last: bool) -> None:
        self.scaler.scale(loss / self.training.accumulation).backward()

    def update(self) -> Tensor:
        if self.masters:
            self.masters.take_gradients()
        if self.shards:
            self.shards.take_gradients()
        if self.joined:
            self.joined.take_gradients()
        self.scaler.unscale_(self.optimizer)
        norm: Any = self.clip()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        self.begins = True
        if self.shards:
            self.shards.clear_gradients()
        if self.masters:
            self.masters.give_weights()
        if self.after_update:
            self.after_update()
        whole: Tensor = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        return whole

    def clip(self) -> Any:
        """Clip the gradients of the whole model; returns their norm before."""
        return nn.utils.clip_grad_norm_(self.stepped, self.training.clip_norm)

    def save(self, folder: Path) -> None:
        save_tensors(self._state(), folder)

    def save_later(self, folder: Path, group: Any) -> Callable[[], None]:
        return save_tensors_later(self._state(), folder, group)

    def load(self, folder: Path) -> None:
        with_state(self.optimizer, self.shards.parts if self.shards else self.stepped)
        state = self._state()
        load_tensors(state, folder)
        # Plain numbers cannot be filled in place.
        for i, parameter in enumerate(self.optimizer.param_groups[0]["params"]):
            own = self._own(i)
            kept = self.optimizer.state[parameter]
            numbers = {key: type(v) for key, v in kept.items() if isinstance(v, int | float)}
            kept |= {key: kind(state[f"{own}optimizer.{i}.{key}"].item()) for key, kind in numbers.items()}
        updates, scale, growth = state["numbers"].tolist()
        self.updates = int(updates)
        if self.scaler.is_enabled():
            known = self.scaler.state_dict()
            self.scaler.load_state_dict(known | {"scale": scale, "_growth_tracker": int(growth)})
        if self.masters:
            self.masters.give_weights()

    def _own(self, number: int) -> str:
        """Shards of 8-bit moments are plain tensors that differ between ranks, so each rank uses its own names."""
        return f"rank.{self.rank}." if self.shards else self.prefix_of(number)

    def prefix_of(self, number: int) -> str:
        """The prefix of the names of one trained weight and its state in a checkpoint."""
        return self.prefix

    def _state(self) -> dict[str, Tensor]:
        """Trained weights and optimizer state, as tensors that loading fills in place; numbers become tensors."""
        state = {f"{self.prefix_of(i)}weights.{i}": tensor.detach() for i, tensor in enumerate(self.stepped)}
        for i, parameter in enumerate(self.optimizer.param_groups[0]["params"]):
            own = self._own(i)
            for key, value in self.optimizer.state[parameter].items():
                state[f"{own}optimizer.{i}.{key}"] = value if isinstance(value, Tensor) else torch.tensor(value)
        scale = self.scaler.state_dict()
        numbers = [self.updates, scale.get("scale", 0.0), scale.get("_growth_tracker", 0)]
        return state | {"numbers": torch.tensor(numbers, dtype=torch.float64)}

    def declare(self) -> tuple[dict[str, str], dict[str, Any], dict[str, Any]]:
        precision = self.training.precision
        if self.graphs:
            require_graphs()
        dtypes = {
            "parameters": precision.base,
            "compute": compute_name(self.module, precision.base),
            "gradient": precision.reduce,
            "gradient_reduction": precision.reduce,
            **state_dtypes(self.optimizer),
        }
        special, facts = tuning_facts(self.module)
        return dtypes | special, optimizer_facts(self.optimizer, self.training.clip_norm), self.settings | facts
