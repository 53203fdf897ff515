"""Digests of weights and batches, computed on the device that has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

MASK64 = (1 << 64) - 1
_ODD = 0x9E3779B97F4A7C1
# Rows of more elements, such as images, are sampled: a digest must not cost a noticeable part of a step.
MOST_ELEMENTS = 4096
# The label of tokens that are not learned.
IGNORED_LABEL = -100
_factors: dict[tuple[int, str], Any] = {}


# --- weights ---


def digest_values(value: Tensor, offset: int = 0, chunk: int = 1 << 22) -> int:
    """The sum over elements of their fp32 bits times an odd function of their position, modulo 2**64.

    offset: the position of the first element, if the value is a part of a tensor. Digests of parts add up to the whole.
    """
    import torch

    flat = value.detach().reshape(-1)
    total = 0
    for start in range(0, flat.numel(), chunk):
        bits = flat[start : start + chunk].float().contiguous().view(torch.int32).to(torch.int64)
        begin = offset + start
        position = torch.arange(begin, begin + bits.numel(), device=bits.device, dtype=torch.int64)
        total += int(((bits + 1) * (position * _ODD | 1)).sum().item())
    return total & MASK64


# --- batches ---


def tensors_in(args: Sequence[Any], kwargs: Mapping[str, Any], names: Sequence[str] = ()) -> dict[str, Any]:
    """The tensors among the arguments of a forward pass, by name or position, also in a mapping or list.

    names: those of positional arguments, as far as they are known.
    """
    import torch

    found: dict[str, Any] = {}
    known = (*names[: len(args)], *range(len(names), len(args)))
    for name, value in (*zip(known, args, strict=True), *kwargs.items()):
        if isinstance(value, torch.Tensor):
            found[str(name)] = value
        elif isinstance(value, Mapping):
            found |= {str(key): each for key, each in value.items() if isinstance(each, torch.Tensor)}
        elif isinstance(value, list | tuple):
            found |= {f"{name}.{n}": each for n, each in enumerate(value) if isinstance(each, torch.Tensor)}
    return found


def copy_rows(value: Tensor) -> Tensor:
    """The rows of a batch, of which long ones are sampled, as the script gives them to the model now."""
    if value.requires_grad:
        value = value.detach()
    rows = value if value.dim() == 2 else value.reshape((value.shape[0], -1) if value.dim() > 1 else (-1, 1))
    if rows.shape[1] > MOST_ELEMENTS:
        rows = rows[:, :: rows.shape[1] // MOST_ELEMENTS + 1]
    return rows.clone()


def digest_batches(batches: Sequence[Tensor] | Tensor) -> Tensor:
    """For each of several batches of one shape, a digest of its rows that does not depend on their order.

    It does not depend on how rows are split over ranks either. The result stays on the device: sums of it, modulo
    2**64, are digests of larger batches.
    """
    import torch

    rows = batches if isinstance(batches, torch.Tensor) else torch.stack(list(batches))
    numbers = rows.float().contiguous().view(torch.int32) if rows.is_floating_point() else rows
    key = rows.shape[2], str(rows.device)
    if key not in _factors:
        _factors[key] = torch.arange(rows.shape[2], device=rows.device, dtype=torch.int64) * _ODD | 1
    sums = ((numbers.to(torch.int64) + 1) * _factors[key]).sum(2)
    mixed: Tensor = (sums ^ (sums >> 29)) * _ODD
    return mixed.sum(1)
