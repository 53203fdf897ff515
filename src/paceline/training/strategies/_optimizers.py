"""The optimizers of all strategies, what they say about themselves, and what they step on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import CheckpointError
from paceline.experiment.spec import RunSpec
from paceline.training.decoder import DTYPES
from paceline.training.finetuned import package

DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()} | {torch.uint8: "8bit"}
BETAS = (0.9, 0.999)
# bitsandbytes keeps the moments of smaller tensors in fp32.
SMALLEST_8BIT = 4096


def optimizer_of(
    spec: RunSpec, parameters: Iterable[Tensor], whole_sizes: Sequence[int] | None = None
) -> torch.optim.Optimizer:
    """torch's fused AdamW, or bitsandbytes' with 8-bit moments where fine-tuning asks for it.

    whole_sizes has the elements of what each parameter is this rank's part of, where it is one: whether moments have
    8 bit is decided by the whole, so that sharding does not change the arithmetic.
    """
    training, name = spec.training, spec.tuning.optimizer if spec.tuning else "adamw"
    if name == "adamw":
        return torch.optim.AdamW(
            parameters, lr=training.learning_rate, weight_decay=training.weight_decay, betas=BETAS, fused=True
        )
    held, bnb = list(parameters), package("bitsandbytes", f"the optimizer {name}")
    optimizer = bnb.optim.AdamW8bit(
        held,
        lr=training.learning_rate,
        weight_decay=training.weight_decay,
        betas=BETAS,
        min_8bit_size=SMALLEST_8BIT,
        is_paged=name.startswith("paged"),
    )
    if whole_sizes is not None:
        optimizer.mng = _bits_by_whole(bnb, held, whole_sizes)
    return optimizer  # type: ignore[no-any-return]


def _bits_by_whole(bnb: Any, parts: Sequence[Tensor], whole_sizes: Sequence[int]) -> Any:
    """What bitsandbytes asks for exceptions, of this optimizer alone: its global one knows tensors by `id`, which
    another tensor may have later. Parts differ between ranks in size, so no one limit on parts is right on all."""
    exceptions = bnb.optim.GlobalOptimManager.__new__(bnb.optim.GlobalOptimManager)
    exceptions.initialize()
    for part, size in zip(parts, whole_sizes, strict=True):
        smallest = 0 if size >= SMALLEST_8BIT else part.numel() + 1
        exceptions.override_config(part, "min_8bit_size", smallest)
    exceptions.register_parameters(parts)
    return exceptions


def is_8bit(spec: RunSpec) -> bool:
    return spec.tuning is not None and spec.tuning.optimizer != "adamw"


def optimizer_facts(optimizer: torch.optim.Optimizer, clip_norm: float) -> dict[str, Any]:
    """Implementation and hyper-parameters as the optimizer itself holds them."""
    group = optimizer.param_groups[0]
    facts: dict[str, Any] = {
        key: group[key] for key in ("lr", "weight_decay", "eps", "fused", "amsgrad") if key in group
    }
    if hasattr(optimizer, "is_paged"):
        facts["paged"] = bool(optimizer.is_paged)
    kind = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
    return {"implementation": kind, **facts, "betas": str(tuple(group["betas"])), "clip_norm": clip_norm}


def state_dtypes(optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Dtypes of master weights and moments, read from the optimizer's state, which exists once it has stepped."""
    masters = {parameter.dtype for parameter in optimizer.state}
    moments = {t.dtype for state in optimizer.state.values() for key, t in state.items() if _is_moment(key)}
    return {"master_weights": _one_name(masters), "optimizer_state": _one_name(moments)}


def _is_moment(key: str) -> bool:
    """torch calls them exp_avg and exp_avg_sq, bitsandbytes state1 and state2."""
    return key.startswith("exp_avg") or key in ("state1", "state2")


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
        torch._foreach_copy_([local(p.detach()) for p in self.parameters], [local(c.detach()) for c in self.copies])


def local(tensor: Any) -> Tensor:
    """This rank's part of a sharded tensor, in its memory; a plain tensor itself."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor  # type: ignore[no-any-return]


class LocalShards:
    """This rank's parts of sharded parameters as plain tensors of the same memory, for an optimizer that knows only
    those. A part without elements is left out."""

    def __init__(self, sharded: Sequence[Any]) -> None:
        pairs = [(whole, local(whole.detach())) for whole in sharded]
        self.pairs = [(whole, part.requires_grad_()) for whole, part in pairs if part.numel()]

    @property
    def parts(self) -> list[Tensor]:
        return [part for _, part in self.pairs]

    @property
    def whole_sizes(self) -> list[int]:
        return [whole.numel() for whole, _ in self.pairs]

    def take_gradients(self) -> None:
        for whole, part in self.pairs:
            part.grad = local(whole.grad)

    def clear_gradients(self) -> None:
        for whole, part in self.pairs:
            whole.grad = part.grad = None


def with_state(optimizer: torch.optim.Optimizer, stepped: Iterable[Tensor]) -> None:
    """Have the optimizer make its state, which exists once it has stepped; whatever that did to weights and moments is
    overwritten by what is loaded."""
    for tensor in stepped:
        tensor.grad = torch.zeros_like(tensor)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def save_tensors(state: Mapping[str, Tensor], folder: Path) -> None:
    """Every rank writes its part, of what all hold one of them; called on every rank."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    try:
        save(dict(state), storage_writer=FileSystemWriter(folder))
    except CheckpointException as error:
        raise CheckpointError(_first_failure(error)) from None


def load_tensors(state: dict[str, Tensor], folder: Path) -> None:
    """Fill the tensors of `state` in place; called on every rank."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    try:
        load(state, storage_reader=FileSystemReader(folder))
    except CheckpointException as error:
        raise CheckpointError(_first_failure(error)) from None


def _first_failure(error: Any) -> str:
    """torch's own exception is no Exception, and its text a page: the first rank's sentence is enough."""
    rank, (cause, _) = min(error.failures.items(), key=lambda item: item[0])
    return f"rank {rank}: {type(cause).__name__}: {str(cause).partition(chr(10))[0]}"
