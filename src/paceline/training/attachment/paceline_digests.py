"""Digests of weights and batches, computed on the device that has them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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


_WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


def plain_name(name: str) -> str:
    """The name of a parameter without those of wrappers.

    >>> plain_name("module._orig_mod.layers.0.weight")
    'layers.0.weight'
    """
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def weights_of(parameters: Iterable[tuple[str, Any]]) -> dict[str, str] | None:
    """By name, `shape:digest` of every trainable parameter, with `+` behind a digest of this rank's part only.

    None if a parameter cannot be read here: one that was flattened with others, or partitioned by DeepSpeed.
    """
    found = {}
    for name, value in parameters:
        if not value.requires_grad:
            continue
        if name.endswith("_flat_param") or hasattr(value, "ds_id") or value.is_meta:
            return None
        local, offset, is_part = value, 0, False
        if hasattr(value, "to_local"):
            part = _local_part(value)
            if part is None:
                return None
            local, offset, is_part = part
        shape = "x".join(map(str, value.shape))
        found[plain_name(name)] = f"{shape}:{digest_values(local, offset):016x}{'+' if is_part else ''}"
    return found or None


def _local_part(value: Any) -> tuple[Any, int, bool] | None:
    """This rank's part of a DTensor, its position in the whole, and whether it is less than that.

    None for layouts other than one replica or rows sharded over one mesh dimension.
    """
    placements = value.placements
    if all(p.is_replicate() for p in placements):
        return value.to_local(), 0, False
    if len(placements) != 1 or not placements[0].is_shard(0):
        return None
    mesh, rows = value.device_mesh, value.shape[0]
    per_rank = -(-rows // mesh.size())
    first = min(mesh.get_local_rank() * per_rank, rows)
    return value.to_local(), first * (value.numel() // max(rows, 1)), True


# --- batches ---


def tensors_in(args: Iterable[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The tensors among the arguments of a forward pass, by name or position, also in a mapping or list."""
    import torch

    found: dict[str, Any] = {}
    for name, value in (*enumerate(args), *kwargs.items()):
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
