"""Expert parallelism: the experts of every layer spread over the ranks of one mesh dimension.

The ranks are data parallel ranks, so each has its own tokens. It sends every token to the ranks of its experts, which
compute it and send it back.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.training.mixture import Experts, Mixture, Permuted, inverse_of, mixtures_of, on_host
from paceline.training.strategies._mesh.stage import Stage


def apply(stage: Stage, mesh: Any) -> None:
    """Leave each rank of `mesh` its consecutive share of the experts of a stage on the meta device."""
    group, rank, size = mesh.get_group(), mesh.get_local_rank(), mesh.size()
    for mixture in mixtures_of(stage):
        own = mixture.count // size
        with torch.device("meta"):
            mixture.experts = Experts(stage.shape, own)
        mixture.first = rank * own
        mixture.compute = _exchanged(mixture, group, size)


def _exchanged(mixture: Mixture, group: Any, size: int) -> Any:
    def compute(rows: Tensor, counts: Tensor) -> Tensor:
        # First how many rows of each expert come from every rank, then the rows.
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts, group=group)
        own = arriving.view(size, -1)
        numbers = torch.stack((counts.view(size, -1).sum(1), own.sum(1))).flatten()
        sent, received = _halves(on_host(numbers, 2 * len(rows)))
        # Rows arrive sorted by rank and then by expert: sort them by expert.
        expert = torch.arange(own.shape[1], device=rows.device).repeat(size)
        order = expert.repeat_interleave(own.flatten(), output_size=sum(received)).argsort(stable=True)
        inputs = Permuted.apply(AllToAll.apply(rows, received, sent, group), order)  # type: ignore[no-untyped-call]
        outputs = Permuted.apply(mixture.experts(inputs, own.sum(0)), inverse_of(order))  # type: ignore[no-untyped-call]
        return AllToAll.apply(outputs, sent, received, group)  # type: ignore[no-any-return, no-untyped-call]

    return compute


def _halves(numbers: list[int]) -> tuple[list[int], list[int]]:
    half = len(numbers) // 2
    return numbers[:half], numbers[half:]


class AllToAll(torch.autograd.Function):
    """Exchanges rows: `sent` to each rank of the group, `received` from each. Gradients travel back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, received: list[int], sent: list[int], group: Any) -> Tensor:
        ctx.numbers, ctx.group = (received, sent), group
        return _send(rows, received, sent, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        received, sent = ctx.numbers
        return _send(gradients[0], sent, received, ctx.group), None, None, None


def _send(rows: Tensor, received: list[int], sent: list[int], group: Any) -> Tensor:
    arrived = rows.new_empty((sum(received), rows.shape[1]))
    dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=group)
    return arrived
