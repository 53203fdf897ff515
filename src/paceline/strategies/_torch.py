"""The training step shared by the strategies that use torch's own wrappers: accumulate, clip, AdamW, clear."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from paceline.decoder import DTYPES, Decoder, fill
from paceline.models import load
from paceline.plugins import Seat
from paceline.spec import RunSpec, Training

if TYPE_CHECKING:
    from collections.abc import Iterable

INITIAL_LOSS_SCALE = 2.0**16
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


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


def compile_parts(decoder: Decoder) -> None:
    """Compile block by block and the loss: for strategies whose hooks sit between the blocks."""
    for block in decoder.blocks:
        block.compile()
    decoder._loss = torch.compile(decoder._loss)  # type: ignore[method-assign]


def adamw(parameters: Iterable[Tensor], training: Training) -> torch.optim.AdamW:
    """The one optimizer of all strategies."""
    return torch.optim.AdamW(
        parameters, lr=training.learning_rate, weight_decay=training.weight_decay, betas=(0.9, 0.999), fused=True
    )


def optimizer_facts(optimizer: torch.optim.Optimizer, clip_norm: float) -> dict[str, Any]:
    """Implementation and hyper-parameters as the optimizer itself holds them."""
    group = optimizer.param_groups[0]
    facts = {key: group[key] for key in ("lr", "weight_decay", "eps", "fused", "amsgrad")}
    kind = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
    return {"implementation": kind, **facts, "betas": str(tuple(group["betas"])), "clip_norm": clip_norm}


def state_dtypes(optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Dtypes of master weights and moments, read from the optimizer's state, which exists once it has stepped."""
    masters = {parameter.dtype for parameter in optimizer.state}
    moments = {t.dtype for state in optimizer.state.values() for k, t in state.items() if k.startswith("exp_avg")}
    return {"master_weights": _one_name(masters), "optimizer_state": _one_name(moments)}


def _one_name(dtypes: set[torch.dtype]) -> str:
    return "+".join(sorted(DTYPE_NAMES.get(d, str(d)) for d in dtypes)) or "none"


class Masters:
    """fp32 copies of 16-bit parameters, for runs whose gradients are accumulated and reduced in 16 bit."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        self.copies = [p.detach().float().clone().requires_grad_() for p in parameters]

    def take_gradients(self) -> None:
        for copy, parameter in zip(self.copies, self.parameters, strict=True):
            assert parameter.grad is not None
            copy.grad, parameter.grad = parameter.grad.float(), None

    def give_weights(self) -> None:
        torch._foreach_copy_([p.data for p in self.parameters], [c.detach() for c in self.copies])


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
        self.module, self.training, self.sync = module, training, sync
        self.full_parameters, self.settings = full_parameters, dict(settings or {})
        parameters = list(module.parameters())
        self.masters = Masters(parameters) if parameters[0].dtype != torch.float32 else None
        self.stepped = self.masters.copies if self.masters else parameters
        self.optimizer = adamw(self.stepped, training)
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
        self.scaler.unscale_(self.optimizer)
        norm = nn.utils.clip_grad_norm_(self.stepped, self.training.clip_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        if self.masters:
            self.masters.give_weights()
        return norm.full_tensor() if hasattr(norm, "full_tensor") else norm

    def declare(self) -> tuple[dict[str, str], dict[str, Any], dict[str, Any]]:
        precision = self.training.precision
        dtypes = {
            "parameters": precision.compute,
            "compute": precision.compute,
            "gradient": precision.reduce,
            "gradient_reduction": precision.reduce,
            **state_dtypes(self.optimizer),
        }
        return dtypes, optimizer_facts(self.optimizer, self.training.clip_norm), self.settings
