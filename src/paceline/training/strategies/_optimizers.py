"""Optimizers of all strategies, their facts for the record, and master weights and shards they update."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import CheckpointError
from paceline.experiment.spec import RunSpec
from paceline.training.decoder import DTYPES
from paceline.training.frozen_4bit import package

DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()} | {torch.uint8: "8bit"}
BETAS = (0.9, 0.999)
# bitsandbytes keeps the moments of smaller tensors in fp32.
SMALLEST_8BIT = 4096
# Moments in 8 bit share a scale within such blocks.
BLOCK_8BIT = 256


def optimizer_of(
    spec: RunSpec, parameters: Iterable[Tensor], whole_sizes: Sequence[int] | None = None
) -> torch.optim.Optimizer:
    """torch's fused AdamW, or bitsandbytes' with 8-bit moments if fine-tuning requests it.

    whole_sizes: for shards, the elements of the whole parameters. They decide whether moments have 8 bit, so that
    sharding does not change the arithmetic.
    """
    training, name = spec.training, spec.tuning.optimizer if spec.tuning else "adamw"
    if name == "adamw":
        return torch.optim.AdamW(
            parameters, lr=training.learning_rate, weight_decay=training.weight_decay, betas=BETAS, fused=True
        )
    parts, bnb = list(parameters), package("bitsandbytes", f"the optimizer {name}")
    optimizer = bnb.optim.AdamW8bit(
        parts,
        lr=training.learning_rate,
        weight_decay=training.weight_decay,
        betas=BETAS,
        min_8bit_size=SMALLEST_8BIT,
        is_paged=name.startswith("paged"),
    )
    if whole_sizes is not None:
        optimizer.mng = _bits_by_whole(bnb, parts, whole_sizes)
    return optimizer  # type: ignore[no-any-return]


def _bits_by_whole(bnb: Any, parts: Sequence[Tensor], whole_sizes: Sequence[int]) -> Any:
    """bitsandbytes' table of exceptions, for this optimizer only: the global one finds tensors by `id`, which may be
    reused. Shards differ in size between ranks, so no single limit on shards is right for all ranks."""
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
    """Implementation and hyper-parameters, read from the optimizer itself."""
    group = optimizer.param_groups[0]
    facts: dict[str, Any] = {
        key: group[key] for key in ("lr", "weight_decay", "eps", "fused", "amsgrad") if key in group
    }
    if hasattr(optimizer, "is_paged"):
        facts["paged"] = bool(optimizer.is_paged)
    kind = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
    return {"implementation": kind, **facts, "betas": str(tuple(group["betas"])), "clip_norm": clip_norm}


def state_dtypes(optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Dtypes of master weights and moments, read from the optimizer's state, which exists after the first step."""
    masters = {parameter.dtype for parameter in optimizer.state}
    # torch calls moments exp_avg and exp_avg_sq, bitsandbytes state1 and state2.
    names = ("exp_avg", "exp_avg_sq", "state1", "state2")
    moments = {state[key].dtype for state in optimizer.state.values() for key in names if key in state}
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
        torch._foreach_copy_([local(p.detach()) for p in self.parameters], [local(c.detach()) for c in self.copies])


class Joined:
    """Parameters as parts of one tensor, for bitsandbytes, which updates each tensor with a launch of its own and waits
    for the device after it. Its blocks of 256 numbers do not reach across parts, so that the numbers are the same."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = parameters
        sizes = [parameter.numel() for parameter in parameters]
        whole = torch.cat([parameter.detach().flatten() for parameter in parameters])
        for parameter, part in zip(parameters, torch.split(whole, sizes), strict=True):
            parameter.data = part.view_as(parameter)
        self.whole = whole.requires_grad_()

    @staticmethod
    def suits(spec: RunSpec, parameters: Sequence[nn.Parameter]) -> bool:
        """Whether bitsandbytes treats the parts as it treats their join."""
        plain = all(p.dtype == torch.float32 and not hasattr(p, "to_local") for p in parameters)
        whole_blocks = all(p.numel() >= SMALLEST_8BIT and p.numel() % BLOCK_8BIT == 0 for p in parameters)
        return is_8bit(spec) and plain and whole_blocks

    def take_gradients(self) -> None:
        gradients = [parameter.grad.flatten() for parameter in self.parameters if parameter.grad is not None]
        assert len(gradients) == len(self.parameters)
        self.whole.grad = torch.cat(gradients)
        for parameter in self.parameters:
            parameter.grad = None


def local(tensor: Any) -> Tensor:
    """This rank's shard of a tensor, sharing its memory; a plain tensor itself."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor  # type: ignore[no-any-return]


class LocalShards:
    """This rank's shards as plain tensors with the same memory, for optimizers that do not support DTensor. Empty
    shards are left out."""

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
    """Make the optimizer create its state with one step on zero gradients; loading overwrites the result."""
    for tensor in stepped:
        tensor.grad = torch.zeros_like(tensor)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def save_tensors(state: Mapping[str, Tensor], folder: Path) -> None:
    """Write a checkpoint: every rank writes its shards, one rank what all share. Called on every rank."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    try:
        save(dict(state), storage_writer=FileSystemWriter(folder))
    except CheckpointException as error:
        raise CheckpointError(_first_failure(error)) from None


def save_tensors_later(state: Mapping[str, Tensor], folder: Path, group: Any) -> Callable[[], None]:
    """As `save_tensors`, in the background: the state is a copy when this returns. Returns a function that waits for
    the end. group: a process group on the CPU that nothing else uses meanwhile."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import async_save

    future: Any = async_save(dict(state), storage_writer=FileSystemWriter(folder), process_group=group)

    def wait() -> None:
        try:
            future.result()
        except CheckpointException as error:
            raise CheckpointError(_first_failure(error)) from None

    return wait


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
    """The message of the first failed rank; torch's own text is a page long."""
    rank, (cause, _) = min(error.failures.items(), key=lambda item: item[0])
    return f"rank {rank}: {type(cause).__name__}: {str(cause).partition(chr(10))[0]}"
