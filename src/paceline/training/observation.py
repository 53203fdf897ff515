"""What a rank really does, seen from outside the strategy: a strategy's own declaration is only a claim.

During the timed window, `WindowWatch` sees each optimizer step and torch's precision switches. After it, `Audit` looks
at every operator of single steps: collectives with their bytes, and products, attention and casts with their dtypes.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from paceline.results.records import OperationSample, RoutingSample
from paceline.training.instruments import SHORT_NAMES, WireCounter, wrappers

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.errors import Scalar

# Hyper-parameters that say how a step is computed, not what it computes.
IMPLEMENTATION = ("fused", "foreach", "capturable", "differentiable", "decoupled_weight_decay", "params")
# How often the switches of precision change is stored at most: enough to see that they do.
MOST_CHANGES = 4


class WindowWatch:
    """Sees every step of every torch optimizer in this process while `watching()`; the loop sets `step`.

    The hook reads Python attributes only, so it neither waits for the device nor launches anything.
    """

    def __init__(self) -> None:
        self.step = 0
        self._groups: dict[tuple[tuple[str, Scalar], ...], dict[int, int]] = {}
        self._sizes: dict[tuple[int, int, int], int] = {}
        self._flags: dict[str, list[tuple[int, str]]] = {}

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        handle = register_optimizer_step_pre_hook(self._before_step)
        try:
            yield
        finally:
            handle.remove()
            self.read_flags()

    def _before_step(self, optimizer: Any, *_: object) -> None:
        for group in optimizer.param_groups:
            parameters = group["params"]
            key = (id(optimizer), len(parameters), id(parameters[0]) if parameters else 0)
            if key not in self._sizes:
                self._sizes[key] = sum(p.numel() for p in parameters if p.requires_grad or p.grad is not None)
            steps = self._groups.setdefault(hyper_parameters(group), {})
            steps[self.step] = steps.get(self.step, 0) + self._sizes[key]
        self.read_flags()

    def read_flags(self) -> None:
        """Read torch's switches of precision; a value is stored when it differs from the last."""
        for name, value in precision_flags().items():
            values = self._flags.setdefault(name, [])
            if (not values or values[-1][1] != value) and len(values) < MOST_CHANGES:
                values.append((self.step, value))

    @property
    def flags(self) -> dict[str, str]:
        """The value of each switch, or all values with the step from which they applied."""
        return {
            name: values[0][1] if len(values) == 1 else ", ".join(f"{value} from step {step}" for step, value in values)
            for name, values in self._flags.items()
        }

    @property
    def groups(self) -> list[dict[str, Scalar]]:
        """Each set of hyper-parameters, with its elements, the first step and the number of steps."""
        return [
            {**dict(key), "elements": max(steps.values()), "first_step": min(steps), "steps": len(steps)}
            for key, steps in self._groups.items()
        ]


def hyper_parameters(group: Mapping[str, Any]) -> tuple[tuple[str, Scalar], ...]:
    """The hyper-parameters of a parameter group, as values that can be compared and stored."""
    found: list[tuple[str, Scalar]] = []
    for name, value in group.items():
        if name in IMPLEMENTATION:
            continue
        if isinstance(value, tuple | list):
            found += [(f"{name}[{i}]", float(item)) for i, item in enumerate(value) if isinstance(item, int | float)]
        elif value is None or isinstance(value, bool | int | float | str):
            found.append((name, value))
        elif getattr(value, "numel", lambda: 0)() == 1 and value.device.type == "cpu":
            found.append((name, float(value)))
    return tuple(sorted(found))


def precision_flags() -> dict[str, str]:
    """torch's switches that change the arithmetic of products, and whether autocast is on."""
    import torch

    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    flags: dict[str, object] = {
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "allow_bf16_reduced_precision_reduction": matmul.allow_bf16_reduced_precision_reduction,
        "allow_fp16_reduced_precision_reduction": matmul.allow_fp16_reduced_precision_reduction,
        "allow_fp16_accumulation": matmul.allow_fp16_accumulation,
        "cudnn.allow_tf32": cudnn.allow_tf32,
        "autocast": torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu"),
        "default_dtype": torch.get_default_dtype(),
    }
    mkldnn = getattr(torch.backends.mkldnn, "matmul", None)
    if mkldnn is not None:
        flags["mkldnn.matmul.fp32_precision"] = mkldnn.fp32_precision
    return {name: str(value) for name, value in flags.items()}


class RoutingWatch:
    """Keeps what the routers of a mixture of experts decide in every step; reads nothing from the device before the
    step is done."""

    def __init__(self, module: Any, device: str, steps: int) -> None:
        import torch

        from paceline.training.mixture import mixtures_of

        self.mixtures = list(mixtures_of(module)) if module is not None else []
        self._tallies = [mixture.start_tally(device) for mixture in self.mixtures]
        size = (steps, len(self._tallies), *(self._tallies[0].shape if self._tallies else (0, 0)))
        self._host = torch.zeros(size, dtype=torch.float64, pin_memory=device.startswith("cuda"))

    def end_step(self, step: int) -> None:
        """Copy the tallies of a recorded step, without waiting for the device, and clear them."""
        for number, tally in enumerate(self._tallies):
            if step < len(self._host):
                self._host[step, number].copy_(tally, non_blocking=True)
            tally.zero_()

    def samples(self, rank: int, step: int, micro_batches: int, variant: int) -> list[RoutingSample]:
        """The decisions of a finished step; empty for a dense model."""
        from paceline.training import mixture

        if not self.mixtures:
            return []
        choices, tally = self.mixtures[0].chosen, self._host[step]
        rest = tally[:, choices:]
        return [
            RoutingSample(
                rank=rank,
                step=step,
                layers=tuple(each.layer for each in self.mixtures),
                assigned=tuple(tally[:, :choices].flatten().long().tolist()),
                positions=tuple(rest[:, mixture.POSITIONS].flatten().long().tolist()),
                computed=tuple(rest[:, mixture.COMPUTED].flatten().long().tolist()),
                weights=tuple(rest[:, mixture.WEIGHT].flatten().tolist()),
                balances=tuple((rest[:, mixture.BALANCE, 0] / micro_batches).tolist()),
                variant=variant,
            )
        ]

    def products(self, compute: str) -> dict[str, str]:
        """How the products of experts are computed; empty for a dense model."""
        from paceline.training.decoder import DTYPES
        from paceline.training.mixture import local, product_kind

        experts = [each.experts for each in self.mixtures]
        weights = [local(weight) for each in experts for weight in (each.inputs, each.output)]
        kinds = {product_kind(weight.device, DTYPES[compute], weight.shape[1:]) for weight in weights}
        return {"expert_products": "+".join(sorted(kinds))} if kinds else {}


# --- single steps, operator by operator ---

# Operator -> position of the left and the right factor.
_PRODUCTS = {
    **dict.fromkeys(("mm", "bmm", "_scaled_mm", "mv", "dot", "_int_mm", "_scaled_grouped_mm", "_grouped_mm"), (0, 1)),
    **dict.fromkeys(("addmm", "baddbmm", "addbmm", "addmv", "_addmm_activation"), (1, 2)),
    **dict.fromkeys(("linear", "matmul", "mkldnn_linear", "_mkl_linear"), (0, 1)),
}
_ACTIVATIONS = ("gelu", "silu", "relu", "gelu_", "silu_", "relu_")


_CASTS = ("_to_copy", "copy_")
_ATTENTION = "_scaled_dot_product"


def is_counted(operator: str) -> bool:
    """Whether `Audit.add` counts this operator of aten, with some arguments."""
    return operator in (*_PRODUCTS, *_ACTIVATIONS, *_CASTS, "embedding") or operator.startswith(_ATTENTION)


def _copies(gradient: Any) -> int:
    """How many ranks of a DTensor's mesh hold the same part; 1 for a plain tensor. Their sums over ranks then count
    each part once."""
    copies = 1
    for dimension, placement in enumerate(getattr(gradient, "placements", ())):
        copies *= gradient.device_mesh.size(dimension) if placement.is_replicate() else 1
    return copies


def is_8bit_float(dtype: Any) -> bool:
    return bool(dtype.is_floating_point and dtype.itemsize == 1)


def fills_range(matrix: Tensor, chunk: int = 1 << 24) -> bool:
    """Whether the largest value of an 8-bit matrix is at least half of the largest of its format, as a scale that was
    made for these values leaves it; true for zeros."""
    import torch

    # Without the sign, the bits of larger values are larger numbers; a copy of one byte per element in parts.
    rows = max(1, chunk // max(1, matrix.shape[-1]))
    parts: Any = torch.split(matrix.detach(), rows)
    largest = max(int(part.view(torch.uint8).bitwise_and(127).max()) for part in parts)
    half = torch.tensor(torch.finfo(matrix.dtype).max / 2).to(matrix.dtype).view(torch.uint8)
    return largest == 0 or largest >= int(half)


class Audit:
    """Counts the collectives and the operators of a step; see `OperationSample` for the kinds."""

    def __init__(self) -> None:
        self.wire = WireCounter()
        self.calls: Counter[tuple[str, str]] = Counter()
        self.work: Counter[tuple[str, str]] = Counter()
        self.squares: Counter[tuple[str, str]] = Counter()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        from torch.optim.optimizer import register_optimizer_step_pre_hook
        from torch.utils._python_dispatch import TorchDispatchMode

        inner, counts = wrappers(), self._counter()

        class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                # A wrapper's own dispatch comes first: it leads to the collectives, to the work on this rank's part
                # and to products in 8 bit.
                if types and any(issubclass(each, inner) for each in types):
                    return NotImplemented
                result = func(*args, **kwargs) if kwargs else func(*args)
                counts(func, args, result)
                return result

        handle = register_optimizer_step_pre_hook(self._before_step)
        try:
            with Watch():  # type: ignore[no-untyped-call]
                yield
        finally:
            handle.remove()

    def _counter(self) -> Callable[[Any, Any, Any], None]:
        """Counts one call. Most operators of a step are none that are counted, which is found out once for each."""
        known: dict[Any, tuple[Callable[[str, Any, Any], None], str] | None] = {}

        def count(func: Any, args: Any, result: Any) -> None:
            if func not in known:
                operator = func._schema.name.partition("::")[2]
                is_wire = func.namespace in ("c10d", "_c10d_functional")
                add = self.wire.add if is_wire else self.add if func.namespace == "aten" else None
                known[func] = add and (add, operator) if is_wire or is_counted(operator) else None
            if (chosen := known[func]) is not None:
                chosen[0](chosen[1], args, result)

        return count

    def _before_step(self, optimizer: Any, *_: object) -> None:
        """The gradients that the optimizer is given, after clipping."""
        from torch.utils._python_dispatch import _disable_current_modes

        with _disable_current_modes():
            for parameter in (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None):
                gradient = parameter.grad.to_local() if hasattr(parameter.grad, "to_local") else parameter.grad
                copies = _copies(parameter.grad)
                self._count("update", gradient.dtype, gradient.numel() // copies)
                name = str(gradient.dtype).removeprefix("torch.")
                squares = gradient.detach().double().square().sum().item() / copies
                self.squares["update", SHORT_NAMES.get(name, name)] += squares

    def add(self, operator: str, args: Any, result: Any) -> None:
        if operator in _PRODUCTS:
            left, right = (args[position] for position in _PRODUCTS[operator])
            # 2 * rows * columns * the length of each dot product, over all matrices of a batch.
            self._count("product", left.dtype, 2 * left.numel() * (right.shape[-1] if right.dim() > 1 else 1))
            if right.dtype != left.dtype:
                self._count("product", right.dtype, 0)
            for factor in (left, right):
                if is_8bit_float(factor.dtype) and not fills_range(factor):
                    self._count("narrow", factor.dtype, factor.numel())
        elif operator.startswith(_ATTENTION) and "backward" not in operator:
            self._count("attention", args[0].dtype, result[0].numel())
        elif operator in _ACTIVATIONS:
            self._count("activation", args[0].dtype, args[0].numel())
        elif operator == "embedding":
            self._count("embedding", args[0].dtype, args[1].numel())
        elif operator in _CASTS and result.is_floating_point():
            self._count("cast", result.dtype, result.numel())

    def _count(self, operation: str, dtype: Any, work: int) -> None:
        name = str(dtype).removeprefix("torch.")
        key = operation, SHORT_NAMES.get(name, name)
        self.calls[key] += 1
        self.work[key] += work

    def samples(self, rank: int, step: int) -> list[OperationSample]:
        return [
            OperationSample(
                rank=rank,
                step=step,
                operation=operation,
                dtype=dtype,
                calls=calls,
                work=self.work[operation, dtype],
                squares=self.squares.get((operation, dtype)),
            )
            for (operation, dtype), calls in sorted(self.calls.items())
        ]


# --- the weights ---


def movements(
    weights: Iterable[tuple[str, Tensor]],
    initial: Callable[[str, int, int, Tensor], Tensor | None],
    chunk: int = 1 << 22,
) -> dict[str, float]:
    """By tensor stored in fp32, the root mean square of its change; a 16-bit copy hides small changes.

    initial(name, start, stop, value): the elements from `start` to `stop` of the flattened tensor at the beginning, or
    None for a tensor to leave out.
    """
    found = {}
    for name, value in weights:
        if value.dtype.itemsize < 4:
            continue
        flat, squares = value.detach().reshape(-1), 0.0
        for start in range(0, flat.numel(), chunk):
            part = flat[start : start + chunk]
            before = initial(name, start, start + part.numel(), value)
            if before is None:
                break
            squares += (part.double() - before.double()).square().sum().item()
        else:
            found[name] = math.sqrt(squares / max(flat.numel(), 1))
    return found
