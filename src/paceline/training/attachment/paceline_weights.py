"""Trainable weights of a model, whole or this rank's parts of them, whichever way they are sharded.

    whole         plain tensors, as under DDP and ZeRO-1 and 2
    DTensors      FSDP2: rows over one dimension of the mesh
    flattened     FSDP 1: each rank has a slice of all weights of a block, in which those of one may begin or end
    partitioned   ZeRO-3: each rank has an equal slice of every weight, and the last ones are padded

Other layouts (two dimensions of a mesh, several replicas of sharded weights, offloading to NVMe) are not read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import paceline_digests as digests
import torch
import torch.distributed as dist

_WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


@dataclass(frozen=True, slots=True)
class Weight:
    """One weight. shape: of the whole. local: what this rank has of it, None if that cannot be read.

    offset: the position of its first element in the whole. is_part: whether ranks have different parts.
    """

    name: str
    shape: tuple[int, ...]
    dtype: Any
    is_trained: bool
    local: Any
    offset: int = 0
    is_part: bool = False

    @property
    def elements(self) -> int:
        return int(torch.Size(self.shape).numel())


def digests_of(models: Sequence[Any], first: int = 0) -> dict[str, str] | None:
    """By name, `shape:digest` of every trainable weight, with `+` behind a digest of this rank's part only.

    Parts add up to the digest of the whole. None if a weight cannot be read here. Weights of other models than
    the first are named after its number: `1:layers.0.weight`.
    """
    found = {}
    for number, model in enumerate(models, first):
        for weight in weights_in(model):
            if not weight.is_trained:
                continue
            if weight.local is None:
                return None
            digest = digests.digest_values(weight.local, weight.offset)
            shape = "x".join(map(str, weight.shape))
            name = f"{number}:{weight.name}" if number else weight.name
            found[name] = f"{shape}:{digest:016x}{'+' if weight.is_part else ''}"
    return found or None


def weights_in(root: Any) -> Iterator[Weight]:
    """Every weight of a model, once."""
    flattened = set()
    for prefix, module in root.named_modules():
        handle = vars(module).get("_handle")
        if type(module).__name__ == "FullyShardedDataParallel" and handle is not None:
            flat = handle.flat_param
            flattened |= {id(flat), *map(id, flat._params or ())}
            yield from _flattened(plain_name(prefix), handle)
    for name, value in root.named_parameters():
        if id(value) in flattened:
            continue
        shape, dtype, plain = tuple(value.shape), value.dtype, plain_name(name)
        if hasattr(value, "ds_id"):
            yield _partition(plain, value)
        elif hasattr(value, "to_local"):
            yield Weight(plain, shape, dtype, value.requires_grad, *_local_part(value))
        else:
            yield Weight(plain, shape, dtype, value.requires_grad, None if value.is_meta else value)


def plain_name(name: str) -> str:
    """The name of a parameter without those of wrappers.

    >>> plain_name("module._orig_mod.layers.0.weight")
    'layers.0.weight'
    """
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


_positions: dict[int, tuple[int, int]] = {}


def _position(group: Any) -> tuple[int, int]:
    """This rank's number in a process group or mesh, or in the world, and how many it has.

    It is remembered: scripts destroy their process groups before they end, when weights are read again.
    """
    if id(group) not in _positions:
        is_mesh = hasattr(group, "get_local_rank")
        rank = group.get_local_rank() if is_mesh else dist.get_rank(group)
        _positions[id(group)] = rank, group.size() if is_mesh else dist.get_world_size(group)
    return _positions[id(group)]


def _local_part(value: Any) -> tuple[Any, int, bool]:
    """This rank's part of a DTensor, its position in the whole, and whether it is less than that.

    No part for layouts other than one replica or rows sharded over one mesh dimension.
    """
    placements = value.placements
    if all(p.is_replicate() for p in placements):
        return value.to_local(), 0, False
    if len(placements) != 1 or not placements[0].is_shard(0):
        return None, 0, True
    rank, size = _position(value.device_mesh)
    rows = value.shape[0]
    first = min(rank * -(-rows // size), rows)
    return value.to_local(), first * (value.numel() // max(rows, 1)), True


def _flattened(prefix: str, handle: Any) -> Iterator[Weight]:
    """The weights that FSDP 1 has flattened into one, by the positions that it keeps with that."""
    flat = handle.flat_param
    # With a shard for each rank; otherwise the parts of all ranks would add up to several models.
    is_sharded = handle.uses_sharded_strategy and _position(handle.process_group)[1] == _position(None)[1]
    single = flat._params or [flat] * len(flat._fqns)
    for name, shape, info, own in zip(flat._fqns, flat._shapes, flat._shard_param_infos, single, strict=True):
        local, offset = None, 0
        if is_sharded and info.in_shard:
            local = flat._local_shard[info.offset_in_shard : info.offset_in_shard + info.numel_in_shard]
            offset = info.intra_param_start_idx
        elif is_sharded:
            local = flat._local_shard[:0]
        whole = plain_name(f"{prefix}.{name}" if prefix else name)
        yield Weight(whole, tuple(shape), flat.dtype, own.requires_grad, local, offset, True)


def _partition(name: str, value: Any) -> Weight:
    """This rank's partition of a weight that DeepSpeed divides equally, without its padding."""
    part, group, total = value.ds_tensor, value.ds_process_group, int(value.ds_numel)
    local, start = None, 0
    is_here = part is not None and part.status.name == "AVAILABLE" and part.final_location is None
    rank, size = _position(group)
    if is_here and size == _position(None)[1]:
        start = min(rank * part.numel(), total)
        local = part[: total - start]
    return Weight(name, tuple(value.ds_shape), value.dtype, value.requires_grad, local, start, True)
