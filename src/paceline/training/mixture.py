"""Mixture of experts: a router chooses for each token the `experts_per_token` experts that compute it.

As in Mixtral, the softmax over all experts is in fp32 and the weights of the chosen ones are scaled to sum to 1. There
is no capacity: an expert computes every token that chose it. The balance term is a mean over sequences, because that is
the same sum however sequences are spread over ranks and micro batches (docs/moe.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.models.shape import Shape

# Rows of a tally after the counts of each choice; see `Mixture.observe`.
POSITIONS, COMPUTED, WEIGHT, BALANCE = range(4)
TALLY_ROWS = 4
# Bytes to which the grouped kernel of CUDA needs rows aligned, and the first GPU generation that has it.
ALIGNMENT_BYTES = 16
GROUPED_CAPABILITY = (9, 0)


class Experts(nn.Module):
    """The feed-forward layers of `count` experts, as one weight of all of them for each projection.

    tally: where the rows that each expert computes are added, or None.
    """

    def __init__(self, shape: Shape, count: int) -> None:
        super().__init__()
        self.gated, self.count = shape.gated, count
        self.inputs = nn.Parameter(torch.empty(count, shape.ffn * (2 if shape.gated else 1), shape.hidden))
        self.output = nn.Parameter(torch.empty(count, shape.hidden, shape.ffn))
        self.tally: Tensor | None = None

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """rows: sorted by expert, of which `counts` has the numbers."""
        if self.tally is not None and not recomputes():
            self.tally += counts
        inner = self.product(self.inputs, rows, counts)
        if self.gated:
            gate, up = inner.chunk(2, dim=-1)
            inner = F.silu(gate) * up
        else:
            inner = F.gelu(inner, approximate="tanh")
        return self.product(self.output, inner, counts)

    @staticmethod
    def product(weights: Any, rows: Tensor, counts: Tensor) -> Tensor:
        """The rows of each expert times its weight; a module in the place of the weights computes it itself."""
        if isinstance(weights, nn.Module):
            return weights(rows, counts)  # type: ignore[no-any-return]
        return grouped_product(rows, local(weights).to(rows.dtype), counts)


class Router(nn.Linear):
    """The score of every expert for each row, in the dtype of the rows."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, local(self.weight, sums_gradient=True).to(x.dtype))


def local(parameter: Any, *, sums_gradient: bool = False) -> Tensor:
    """This rank's part of a parameter; a plain one itself. sums_gradient: the gradient is the sum over ranks of what
    each of them computes."""
    from torch.distributed.tensor import DTensor, Partial

    # Not `hasattr`, which torch's compiler answers for plain tensors.
    if not isinstance(parameter, DTensor):
        return parameter  # type: ignore[no-any-return]
    return parameter.to_local(grad_placements=[Partial()] if sums_gradient else None)


class Mixture(nn.Module):
    """Returns the tokens' outputs and the balance term of this layer.

    compute(rows, counts): the outputs of rows sorted by expert; expert parallelism replaces it. first: the first expert
    of this rank. Context parallelism sets parts and places, the number of parts of a sequence and the positions of this
    one, and sum_parts, the sum over the ranks that share a sequence. tally: see `observe`.
    """

    def __init__(self, shape: Shape, layer: int) -> None:
        super().__init__()
        assert shape.experts
        assert shape.experts_per_token
        self.count, self.chosen, self.layer, self.first = shape.experts, shape.experts_per_token, layer, 0
        self.router = Router(shape.hidden, shape.experts, bias=False)
        self.experts = Experts(shape, shape.experts)
        self.compute: Callable[[Tensor, Tensor], Tensor] = lambda rows, counts: self.experts(rows, counts)
        self.parts = 1
        self.places: Tensor | None = None
        self.sum_parts: Callable[[Tensor], Tensor] = lambda counts: counts
        self.tally: Tensor | None = None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        batch, length, hidden = x.shape
        flat = x.reshape(-1, hidden)
        scores = self.scores(flat)
        experts, weights = self.choose(scores)
        weights = weights.to(x.dtype)
        mask = F.one_hot(experts, self.count).view(batch, length, self.chosen, self.count)
        balance = self.balance(mask.sum((1, 2)), scores.view(batch, length, self.count).sum(1), length * self.parts)
        if self.tally is not None:
            self.observe(mask, weights, balance)
        order = experts.flatten().argsort(stable=True)
        rows = Permuted.apply(flat.repeat_interleave(self.chosen, 0), order)  # type: ignore[no-untyped-call]
        outputs = self.compute(rows, mask.sum((0, 1, 2)))
        outputs = Permuted.apply(outputs, inverse_of(order))  # type: ignore[no-untyped-call]
        joined = (outputs.view(-1, self.chosen, hidden) * weights.unsqueeze(-1)).sum(1)
        return joined.view_as(x), balance

    def scores(self, flat: Tensor) -> Tensor:
        """The probability of every expert for each token, in fp32."""
        return self.router(flat).float().softmax(-1)  # type: ignore[no-any-return]

    def choose(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """The experts of each token, the best first, and their weights. Of equal scores the lower expert is chosen,
        which a stable sort guarantees for any number of rows; they are frequent in 16 bit."""
        experts = scores.detach().sort(dim=-1, descending=True, stable=True).indices[:, : self.chosen]
        weights = scores.gather(-1, experts)
        return experts, weights / weights.sum(-1, keepdim=True)

    def balance(self, assigned: Tensor, scores: Tensor, length: int) -> Tensor:
        """The mean over sequences of E * sum over experts of (tokens that chose it / length) * (mean probability).

        `experts_per_token` if all experts are chosen equally often. assigned and scores are sums over each sequence;
        for a part of a sequence, the terms of all parts add up, because only the counts must be of the whole.
        """
        shares = self.sum_parts(assigned) / length
        return self.count * (shares * scores / length).sum(-1).mean()

    def observe(self, mask: Tensor, weights: Tensor, balance: Tensor) -> None:
        """Add to the tally, by expert: tokens that chose it first, second, ..., the sum of their positions, rows it
        computed (added by `Experts`), the sum of its weights, and the balance term."""
        assert self.tally is not None
        if recomputes():
            return
        with torch.no_grad():
            places = torch.arange(mask.shape[1], device=mask.device) if self.places is None else self.places
            self.tally[: self.chosen] += mask.sum((0, 1))
            rest = self.tally[self.chosen :]
            rest[POSITIONS] += (mask.sum((0, 2)) * places.to(mask.device).unsqueeze(-1)).sum(0)
            rest[WEIGHT] += (mask.flatten(0, 1) * weights.double().unsqueeze(-1)).sum((0, 1))
            rest[BALANCE] += balance

    def start_tally(self, device: str) -> Tensor:
        """Begin to observe; returns the tally."""
        self.tally = torch.zeros(self.chosen + TALLY_ROWS, self.count, dtype=torch.float64, device=device)
        own = slice(self.first, self.first + self.experts.count)
        self.experts.tally = self.tally[self.chosen + COMPUTED, own]
        return self.tally


class Permuted(torch.autograd.Function):
    """Rows in another order. The backward pass is the inverse, and adds nothing, unlike that of plain indexing."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (order,) = ctx.saved_tensors
        return gradients[0].index_select(0, inverse_of(order)), None


def inverse_of(order: Tensor) -> Tensor:
    """The order that undoes a permutation.

    >>> inverse_of(torch.tensor([2, 0, 1])).tolist()
    [1, 2, 0]
    """
    places = torch.arange(order.numel(), device=order.device)
    return torch.empty_like(order).scatter_(0, order, places)


def recomputes() -> bool:
    """Whether this is the forward pass that activation checkpointing repeats during the backward pass."""
    return bool(torch._C._current_graph_task_id() != -1)


# --- products ---


def grouped_product(rows: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """The rows of each expert times its weight (outputs, inputs): one kernel for all experts, or one product each."""
    if product_kind(rows.device, rows.dtype, weights.shape[1:]) == "grouped_mm":
        ends = counts.cumsum(0).to(torch.int32)
        grouped: Any = getattr(F, "grouped_mm", None) or torch._grouped_mm
        return grouped(rows, weights.transpose(-2, -1), offs=ends)  # type: ignore[no-any-return]
    parts: Any = torch.split(rows, on_host(counts, len(rows)))
    return torch.cat([F.linear(part, weight) for part, weight in zip(parts, weights.unbind(), strict=True)])


def product_kind(device: torch.device, dtype: torch.dtype, sizes: torch.Size) -> str:
    """`grouped_mm`, torch's kernel for 16-bit products on Hopper and later GPUs, or `loop`, one product per expert."""
    has_kernel = hasattr(F, "grouped_mm") or hasattr(torch, "_grouped_mm")
    aligned = all(size * dtype.itemsize % ALIGNMENT_BYTES == 0 for size in sizes)
    if device.type != "cuda" or dtype != torch.bfloat16 or not has_kernel or not aligned:
        return "loop"
    return "grouped_mm" if torch.cuda.get_device_capability(device) >= GROUPED_CAPABILITY else "loop"


def on_host(counts: Tensor, total: int) -> list[int]:
    """Counts as numbers, which waits for the device. Fake tensors have no values: they get a balanced routing."""
    from torch._subclasses.fake_tensor import FakeTensor

    if isinstance(counts, FakeTensor):
        size, more = divmod(total, counts.numel())
        return [size + (number < more) for number in range(counts.numel())]
    return counts.tolist()


def prepare_compiler(module: nn.Module) -> None:
    """Let a compiled module with mixtures run as plain code what depends on the number of tokens of each expert, which
    changes with every batch, and what is observed. Everything else of a mixture has fixed shapes and is compiled."""
    disable: Any = torch.compiler.disable
    for mixture in mixtures_of(module):
        for name in ("compute", "observe", *(("sum_parts",) if mixture.parts > 1 else ())):
            setattr(mixture, name, disable(getattr(mixture, name)))


def mixtures_of(module: nn.Module) -> Iterator[Mixture]:
    """The mixtures of a module, in the order of its layers."""
    return iter(sorted((m for m in module.modules() if isinstance(m, Mixture)), key=lambda m: m.layer))
