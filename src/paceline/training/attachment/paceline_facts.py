"""What a script trains, read from the objects of torch and of known frameworks."""

from __future__ import annotations

import contextlib
import inspect
import math
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import paceline_digests as digests
import paceline_weights as weights
import paceline_wire
import torch

# Hyper-parameters that say how a step is computed, not what it computes.
IMPLEMENTATION = ("fused", "foreach", "capturable", "differentiable", "decoupled_weight_decay", "params", "param_names")
TOKEN_NAMES = ("input_ids", "tokens", "token_ids", "idx", "inputs")
# Functions around a forward pass that are looked into.
MOST_WRAPPERS = 20
LABEL_NAMES = ("labels", "targets", "target", "label")
NO_TOKEN_NAMES = (*LABEL_NAMES, "attention_mask", "position_ids")
_OUTPUT = "paceline_output"
INTEGRAL = (torch.int64, torch.int32, torch.int16)


# --- batches and losses ---


def is_transformed(module: Any) -> bool:
    """Whether a model is called inside `torch.func`, or with fake tensors to find its shapes: neither has values."""
    parameter = next(p for p in module.parameters() if p.requires_grad)
    return type(parameter).__name__ == "FakeTensor" or torch.func.debug_unwrap(parameter) is not parameter


def argument_names(module: Any) -> list[str]:
    """The names of the positional arguments of a model's forward pass, inside wrappers that pass on what they get; none
    if it does not say, as that of a traced model."""
    for _ in range(MOST_WRAPPERS):
        try:
            parameters = inspect.signature(module.forward).parameters.values()
        except (TypeError, ValueError):
            return []
        if any(p.kind is p.VAR_POSITIONAL for p in parameters):
            inner = getattr(module, "_orig_mod", getattr(module, "module", None))
            if isinstance(inner, torch.nn.Module):
                module = inner
                continue
        return [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return []


def token_ids(found: Mapping[str, Any]) -> Any:
    """The token ids among the tensors of a forward pass: by a usual name, else the first matrix of whole numbers."""
    for name in TOKEN_NAMES:
        if (named := found.get(name)) is not None and named.dtype in INTEGRAL and named.dim() > 1:
            return named
    for name, tensor in found.items():
        if tensor.dtype in INTEGRAL and tensor.dim() == 2 and name not in NO_TOKEN_NAMES:
            return tensor
    return None


def labels_in(found: Mapping[str, Any]) -> Any:
    """The labels of single tokens among the tensors of a forward pass, or None."""
    for name in LABEL_NAMES:
        if (named := found.get(name)) is not None and named.dtype in INTEGRAL:
            return named if named.dim() > 1 else None
    return None


def mask_in(found: Mapping[str, Any], ids: Any) -> Any:
    """The mask of the tokens that are no padding, or None."""
    mask = found.get("attention_mask")
    return None if mask is None or mask.shape != ids.shape or mask.is_floating_point() else mask


def counted_in(found: Mapping[str, Any], ids: Any) -> dict[str, Any]:
    """What is counted beside the token ids: `labels` and `mask`, if they are among the tensors."""
    named = ("labels", labels_in(found)), ("mask", mask_in(found, ids))
    return {name: tensor for name, tensor in named if tensor is not None}


def is_one_tensor(ids: Any, more: Collection[Any]) -> bool:
    """Whether token ids and what is counted beside them can be copied by one operation, into one tensor."""
    fits = bool(ids.dim() == 2 and ids.shape[1] <= digests.MOST_ELEMENTS)
    return fits and bool(more) and all(t.shape == ids.shape and t.dtype == ids.dtype for t in more)


def loss_in(output: Any) -> Any:
    """The loss that a model returned, or None: a scalar with a gradient."""
    if isinstance(output, torch.Tensor):
        return output if _is_loss(output) else None
    named = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if _is_loss(named):
        return named
    if isinstance(output, list | tuple):
        return next((value for value in output if _is_loss(value)), None)
    return None


def _is_loss(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad and value.numel() == 1


def mark_output(loss: Any) -> None:
    """Mark a loss that a model returned, in the graph: its backward pass may begin with what the script makes of it."""
    if loss.grad_fn is not None:
        loss.grad_fn.metadata[_OUTPUT] = loss.output_nr


def is_scaled_output(loss: Any) -> bool:
    """Whether a loss is one that a model returned, perhaps divided by the number of micro batches: on the way to it,
    every operation has one operand with a gradient.

    >>> import torch
    >>> returned = torch.ones(1, requires_grad=True).exp()
    >>> mark_output(returned)
    >>> is_scaled_output(returned / 4), is_scaled_output(returned + returned.exp())
    (True, False)
    """
    node, number = loss.grad_fn, loss.output_nr
    for _ in range(MOST_WRAPPERS):
        if node is None:
            return False
        if node.metadata.get(_OUTPUT) == number:
            return True
        operands = [each for each in node.next_functions if each[0] is not None]
        if len(operands) != 1:
            return False
        ((node, number),) = operands
    return False


def copy_loss(loss: Any) -> Any:
    """The value of a loss as it is now: a number, or a copy left on the device that computes it."""
    if hasattr(loss, "to_local"):
        loss = loss.detach().to_local()
    return loss.item() if loss.is_cpu else loss.detach().clone()


# --- model and optimizer ---


def owner_of(optimizer: Any) -> Any:
    """The smallest module with every weight of the optimizer, of equal ones the innermost; None if there is none."""
    import gc

    wanted = {id(weight) for group in optimizer.param_groups for weight in group["params"]}
    owners = {}
    # The type itself: a weak reference would look at what it refers to.
    for module in (each for each in gc.get_objects() if issubclass(type(each), torch.nn.Module)):
        weights = {id(weight) for weight in module.parameters()}
        if wanted <= weights:
            owners[module] = len(weights), sum(1 for _ in module.modules())
    return min(owners, key=owners.__getitem__, default=None)


def sizes_of(models: Sequence[Any]) -> dict[str, Any]:
    """Parameters and dtypes of some models together."""
    sizes: dict[str, int] = {}
    frozen = 0
    for weight in (weight for model in models for weight in weights.weights_in(model)):
        if weight.is_trained:
            sizes[_dtype(weight.dtype)] = sizes.get(_dtype(weight.dtype), 0) + weight.elements
        else:
            frozen += weight.elements
    return {
        "parameters": sum(sizes.values()),
        "frozen_parameters": frozen,
        "dtypes": {"parameters": max(sizes, key=lambda name: sizes[name])} if sizes else {},
    }


def about(root: Any, optimizer: Any) -> dict[str, Any]:
    """Optimizer and wrapper."""
    inner = optimizer
    while hasattr(inner, "optimizer") and inner.optimizer is not inner:
        inner = inner.optimizer
    return {
        "optimizer": "none" if inner is None else type(inner).__name__,
        "wrapper": wrapper_of(root),
        "compiled": _is_compiled(root),
    }


def trained_elements(module: Any) -> int:
    """How many elements of a module are trained, as far as this rank has them: DeepSpeed leaves none in the tensors of
    ZeRO-3."""
    return sum(int(getattr(p, "ds_numel", 0)) or p.numel() for p in module.parameters() if p.requires_grad)


def shares_weights(module: Any, models: Iterable[Any]) -> bool:
    known = {id(weight) for model in models for weight in model.parameters()}
    return any(id(weight) in known for weight in module.parameters())


def disjoint(models: Iterable[Any]) -> list[Any]:
    """Those that share no weight with one before them."""
    found: list[Any] = []
    for module in models:
        if not shares_weights(module, found):
            found.append(module)
    return found


def wrapper_of(root: Any) -> str:
    """DDP, FSDP, FSDP2, DeepSpeed ZeRO with its stage, or none."""
    # `replicate` of torch, as torchtitan uses it, gives the module a class of its own with DDP among its bases.
    kinds = {kind for module in root.modules() for kind in type(module).__mro__}
    names = {kind.__name__ for kind in kinds if kind.__module__.startswith("torch.")}
    if hasattr(root, "zero_optimization_stage"):
        stage = root.zero_optimization_stage()
        return f"DeepSpeed ZeRO-{stage}" if stage else "DeepSpeed"
    if "FullyShardedDataParallel" in names:
        return "FSDP"
    if any(hasattr(parameter, "placements") for parameter in root.parameters()):
        return "FSDP2 or other DTensors"
    return "DDP" if {"DistributedDataParallel", "DDP"} & names else "DP" if "DataParallel" in names else "none"


def _is_compiled(root: Any) -> bool:
    return any(hasattr(m, "_orig_mod") or getattr(m, "_compiled_call_impl", None) is not None for m in root.modules())


def group_of(kind: str, group: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter group with the class of its optimizer, hyper-parameters and number of elements on this rank."""
    values: dict[str, Any] = {"class": kind}
    for name, value in sorted(group.items()):
        if name in IMPLEMENTATION:
            continue
        value = number(value)
        if isinstance(value, list | tuple):
            values |= {f"{name}[{i}]": float(x) for i, x in enumerate(value) if isinstance(x, int | float)}
        elif value is None or isinstance(value, bool | int | float | str):
            values[name] = value
    values["elements"] = sum(p.numel() for p in group["params"] if p.requires_grad or p.grad is not None)
    return values


def number(value: Any) -> Any:
    """The number in a tensor, as a learning rate of compiled optimizers is, with as many digits as fp32 has; anything
    else itself."""
    return float(f"{value.item():.7g}") if isinstance(value, torch.Tensor) and value.numel() == 1 else value


def changed(before: Sequence[Mapping[str, Any]], now: Sequence[Mapping[str, Any]]) -> str:
    """Which hyper-parameters, or switches of precision, are others at the end than at the first step, but for learning
    rates, of which the whole sequence is recorded.

    >>> changed([{"lr": 1.0, "weight_decay": 0.1}], [{"lr": 0.5, "weight_decay": 0.0}])
    'weight_decay 0.1 to 0.0'
    """
    found = {
        f"{name} {own.get(name)} to {value}": None
        for own, group in zip(before, now, strict=True)
        for name, value in group.items()
        if name not in ("lr", "initial_lr", "elements") and own.get(name) != value
    }
    return ", ".join(found)


def clip_norm(limit: float) -> float | str:
    """The norm to which gradients are clipped; DeepSpeed's 0 and an infinite one are `none`.

    >>> clip_norm(1), clip_norm(0.0), clip_norm(float("inf"))
    (1.0, 'none', 'none')
    """
    return float(limit) if 0 < limit < math.inf else "none"


def whole_norm(norm: Any) -> Any:
    """A gradient norm: a number, or left on the device that computes it; None if it is a DTensor with this rank's part
    only."""
    if hasattr(norm, "placements"):
        if not all(each.is_replicate() for each in norm.placements):
            return None
        norm = norm.detach().to_local()
    if not isinstance(norm, torch.Tensor):
        return norm
    return norm.item() if norm.is_cpu else norm.detach()


def autocast(device: str) -> str | None:
    """The dtype of autocast, or None."""
    return _dtype(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else None


def hidden_autocast(root: Any) -> str | None:
    """The dtype of an autocast that begins inside the model, where no hook sees it: by DeepSpeed or accelerate."""
    if hasattr(root, "torch_autocast_enabled"):
        return _dtype(root.torch_autocast_dtype()) if root.torch_autocast_enabled() else None
    root = getattr(root, "_orig_mod", root)
    waiting = [vars(module).get("forward") for module in (root, getattr(root, "module", root))]
    seen: list[Any] = []
    while waiting and len(seen) < MOST_WRAPPERS:
        call = waiting.pop(0)
        if any(call is known for known in seen):
            continue
        seen.append(call)
        if isinstance(call, torch.autocast):
            return _dtype(call.fast_dtype)
        # accelerate replaces `forward` by a function that holds the autocast and the forward that it wraps.
        waiting += [cell.cell_contents for cell in getattr(call, "__closure__", None) or () if _is_set(cell)]
        waiting += [getattr(call, name) for name in ("__func__", "__wrapped__", "model_forward") if hasattr(call, name)]
    return None


def _is_set(cell: Any) -> bool:
    try:
        return callable(cell.cell_contents)
    except ValueError:
        return False


def precision_flags(device: str) -> dict[str, str]:
    """torch's switches that change the arithmetic of products. Those in fp32 are `ieee`, `tf32` or `bf16` here."""
    backend: Any = torch.backends.cudnn if device == "cuda" else torch.backends.mkldnn
    products: Any = torch.backends.cuda if device == "cuda" else torch.backends.mkldnn
    switches: dict[str, Callable[[], Any]] = {
        "float32_matmul_precision": torch.get_float32_matmul_precision,
        "cudnn.allow_tf32": lambda: torch.backends.cudnn.allow_tf32,
        "default_dtype": torch.get_default_dtype,
        "fp32 products": lambda: _fp32_precision(products.matmul),
        "fp32 convolutions": lambda: _fp32_precision(backend.conv),
    }
    return {name: _read_switch(read) for name, read in switches.items()}


def _fp32_precision(operation: Any) -> str:
    """`none` is what holds for all operations, which is `ieee` by default."""
    own, whole = operation.fp32_precision, torch.backends.fp32_precision  # type: ignore[attr-defined]
    return next((str(each) for each in (own, whole) if each != "none"), "ieee")


def _read_switch(read: Callable[[], Any]) -> str:
    try:
        return str(read())
    except (RuntimeError, AttributeError):
        # torch before 2.9 has no switch of one operation. Where its newer switches were set, as transformers does for
        # compiled models, the older ones cannot be read.
        return "unknown"


def _dtype(dtype: Any) -> str:
    name = str(dtype).removeprefix("torch.")
    return str(paceline_wire.SHORT_NAMES.get(name, name))


def world_size() -> int:
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return int(dist.get_world_size())
    return int(os.environ.get("WORLD_SIZE") or 1)


# --- memory, wire and traces ---


def memory_line(rank: int, device: Any) -> dict[str, Any]:
    """Peak memory of the process. The counters of torch are read, never reset: they belong to the script."""
    allocated = reserved = whole = None
    if device.type == "cuda":
        allocated, reserved = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
        free, total = torch.cuda.mem_get_info(device)
        whole = total - free
    resident = None
    with contextlib.suppress(OSError):
        lines = Path("/proc/self/status").read_text().splitlines()
        resident = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), None)
    return {
        "kind": "memory",
        "rank": rank,
        "moment": "steps",
        "allocated_bytes": allocated,
        "reserved_bytes": reserved,
        "device_bytes": whole,
        "resident_bytes": resident,
    }


class WireWatch:
    """Counts the collectives of one step by a dispatch mode that is on between two hooks."""

    def __init__(self) -> None:
        from torch.utils._python_dispatch import TorchDispatchMode

        counter = self.counter = paceline_wire.WireBytes()

        class Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                result = func(*args, **(kwargs or {}))
                if func.namespace in ("c10d", "_c10d_functional"):
                    counter.add(func._schema.name.partition("::")[2], args, result)
                return result

        self.mode: Any = Mode()  # type: ignore[no-untyped-call]

    def start(self) -> None:
        self.mode.__enter__()

    def stop(self) -> None:
        self.mode.__exit__(None, None, None)

    def lines(self, rank: int, step: int) -> list[dict[str, Any]]:
        return [
            {
                "kind": "wire",
                "rank": rank,
                "step": step,
                "operation": operation,
                "dtype": dtype,
                "group_size": size,
                "calls": self.counter.calls[operation, dtype, size, dimension],
                "payload_bytes": payload,
                "dimension": dimension or None,
            }
            for (operation, dtype, size, dimension), payload in sorted(self.counter.bytes.items())
        ]


def start_profiler(device: str) -> Any:
    """torch's profiler, started."""
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
    profiler = profile(activities=activities)
    profiler.start()
    return profiler
