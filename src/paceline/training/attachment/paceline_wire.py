"""Bytes of collectives, by the operators that torch dispatches."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any, cast

# c10d operator -> (operation, the argument with the payload that nccl-tests calls S)
_OPERATIONS = {
    "allreduce_": ("all_reduce", 0),
    "allreduce_coalesced_": ("all_reduce", 0),
    "all_reduce": ("all_reduce", 0),
    "all_reduce_": ("all_reduce", 0),
    "all_reduce_coalesced": ("all_reduce", 0),
    "all_reduce_coalesced_": ("all_reduce", 0),
    "_allgather_base_": ("all_gather", 0),
    "allgather_": ("all_gather", 0),
    "allgather_coalesced_": ("all_gather", 0),
    "allgather_into_tensor_coalesced_": ("all_gather", 0),
    "all_gather_into_tensor": ("all_gather", "result"),
    "all_gather_into_tensor_coalesced": ("all_gather", "result"),
    "all_gather_into_tensor_out": ("all_gather", "result"),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "reduce_scatter_": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
    "reduce_scatter_tensor": ("reduce_scatter", 0),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", 0),
    "reduce_scatter_tensor_out": ("reduce_scatter", 0),
    "alltoall_base_": ("all_to_all", 1),
    "alltoall_": ("all_to_all", 1),
    "all_to_all_single": ("all_to_all", 0),
    "broadcast_": ("broadcast", 0),
    "broadcast": ("broadcast", 0),
    "reduce_": ("reduce", 0),
    "gather_": ("gather", 1),
    "scatter_": ("scatter", 0),
    "send": ("send", 0),
    "isend": ("send", 0),
}
# Their argument is one rank's part; S is that of the whole group, which only the root has.
_PARTS = ("gather_", "scatter_")
SHORT_NAMES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
# Operators that send nothing: the sender counts what is received.
_SILENT = (
    *("barrier", "monitored_barrier_", "wait_tensor", "_wrap_tensor_autograd", "check_for_nan"),
    *("recv_", "recv_any_source_", "irecv"),
)


class WireBytes:
    """Counts payload bytes of every collective in this process, whoever starts it (DDP, DeepSpeed, ...).

    Unknown operators are counted under their own name, so that the total is not mistaken for complete.
    """

    def __init__(self) -> None:
        # By operation, dtype, group size and mesh dimension ("" if none).
        self.bytes: Counter[tuple[str, str, int, str]] = Counter()
        self.calls: Counter[tuple[str, str, int, str]] = Counter()

    def add(self, operator: str, args: Any, result: Any) -> None:
        if operator in _SILENT:
            return
        operation, position = _OPERATIONS.get(operator, (operator, "all"))
        payload = {"result": result, "all": args}[position] if isinstance(position, str) else args[position]
        size, dimension = group_of(args)
        parts = size if operator in _PARTS else 1
        moved: Counter[tuple[str, str, int, str]] = Counter()
        for tensor in _tensors(payload):
            dtype = str(tensor.dtype).removeprefix("torch.")
            key = operation, SHORT_NAMES.get(dtype, dtype), size, dimension
            moved[key] += parts * tensor.numel() * tensor.element_size()
        if not moved and operator not in _OPERATIONS:
            moved[operation, "unknown", size, dimension] = 0
        for key, moved_bytes in moved.items():
            self.bytes[key] += moved_bytes
            self.calls[key] += 1


def _tensors(value: Any) -> Iterator[Any]:
    import torch

    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


# How `torch.distributed.device_mesh` describes the groups of a dimension.
_MESH = "mesh_"


def group_of(args: Any) -> tuple[int, str]:
    """Size and mesh dimension of an operator's process group, passed as an object (c10d) or by name
    (_c10d_functional)."""
    import torch
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    for argument in args:
        group: Any = None
        if isinstance(argument, torch.ScriptObject):
            with contextlib.suppress(RuntimeError, TypeError, AttributeError):
                group = dist.ProcessGroup.unbox(argument)
        if isinstance(argument, str):
            with contextlib.suppress(KeyError, RuntimeError, ValueError):
                group = cast(Any, distributed_c10d)._resolve_process_group(argument)
        if group is not None:
            return int(group.size()), dimension_of(group)
    return dist.get_world_size(), ""


def dimension_of(group: Any) -> str:
    """The mesh dimension of a process group; "" if it belongs to none."""
    text = str(group.group_desc)
    return text.removeprefix(_MESH) if text.startswith(_MESH) else ""
