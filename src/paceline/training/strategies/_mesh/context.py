"""Context parallelism: sequences split over the ranks of one mesh dimension; only attention needs the other parts.

Ring (Liu et al., 2023): keys and values travel around the ranks, and partial results are joined by their log-sum-exp.
With P ranks the sequence has 2P chunks and rank r holds chunks r and 2P-1-r, so that a causal mask gives every rank the
same work. Ulysses (Jacobs et al., 2023): an all-to-all exchanges parts of the sequence for heads and back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.training.decoder import causal_attention
from paceline.training.mixture import mixtures_of
from paceline.training.strategies._mesh.stage import Stage


def apply(stage: Stage, mesh: Any, length: int, *, ring: bool) -> None:
    """Replace the attention of every block, and give the stage the positions of this rank's part of the sequence."""
    group, rank, size = mesh.get_group(), mesh.get_local_rank(), mesh.size()
    stage.total_length = length
    stage.places_of = lambda device: part_of_sequence(length, rank, size, ring=ring).to(device)
    attend: Callable[[Tensor, Tensor, Tensor], Tensor]
    if ring:

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return RingAttention.apply(q, k, v, group)  # type: ignore[no-any-return, no-untyped-call]
    else:

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return ulysses_attention(q, k, v, group)

    for block in stage.blocks.values():
        attention: Any = block.attention
        attention.attend = attend

    def sum_parts(counts: Tensor) -> Tensor:
        dist.all_reduce(counts, group=group)
        return counts

    for mixture in mixtures_of(stage):
        mixture.parts, mixture.sum_parts = size, sum_parts
        mixture.places = part_of_sequence(length, rank, size, ring=ring)


def part_of_sequence(length: int, rank: int, size: int, *, ring: bool) -> Tensor:
    """Positions that a rank holds: chunks r and 2P-1-r for the ring, one chunk for Ulysses.

    >>> part_of_sequence(8, 0, 2, ring=True).tolist(), part_of_sequence(8, 1, 2, ring=False).tolist()
    ([0, 1, 6, 7], [4, 5, 6, 7])
    """
    if not ring:
        return torch.arange(rank * length // size, (rank + 1) * length // size)
    chunk = length // (2 * size)
    first, second = rank * chunk, (2 * size - 1 - rank) * chunk
    return torch.cat((torch.arange(first, first + chunk), torch.arange(second, second + chunk)))


# --- all-to-all ---


def ulysses_attention(q: Tensor, k: Tensor, v: Tensor, group: Any) -> Tensor:
    """Each rank attends with its share of the heads over the whole sequence."""
    size = dist.get_world_size(group)
    mixed = causal_attention(*(_to_heads(x, size, group) for x in (q, k, v)))
    return _to_sequence(mixed, size, group)


def _exchange(x: Tensor, group: Any) -> Tensor:
    """All-to-all over the first dimension, also in the backward pass."""
    from torch.distributed._functional_collectives import all_to_all_single_autograd

    return all_to_all_single_autograd(x.contiguous(), None, None, group)


def _to_heads(x: Tensor, size: int, group: Any) -> Tensor:
    """(batch, heads, part, d) of every rank's own part -> (batch, heads / size, length, d)."""
    batch, heads, part, width = x.shape
    parts = x.reshape(batch, size, heads // size, part, width).movedim(1, 0)
    parts = _exchange(parts, group).reshape(size, batch, heads // size, part, width)
    return parts.permute(1, 2, 0, 3, 4).reshape(batch, heads // size, size * part, width)


def _to_sequence(x: Tensor, size: int, group: Any) -> Tensor:
    """The inverse of `_to_heads`."""
    batch, share, length, width = x.shape
    parts = x.reshape(batch, share, size, length // size, width).permute(2, 0, 1, 3, 4)
    parts = _exchange(parts, group).reshape(size, batch, share, length // size, width)
    return parts.movedim(0, 1).reshape(batch, size * share, length // size, width)


# --- ring ---


class Kernel(NamedTuple):
    """A fused attention kernel that also returns the log-sum-exp of each row, and its backward pass."""

    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]


def kernel_for(q: Tensor) -> Kernel:
    """torch's flash kernel of the device; fp32 on a GPU has the memory-efficient one."""
    return gpu_kernel(q.dtype) if q.is_cuda else Kernel(_cpu_forward, _cpu_backward)


def gpu_kernel(dtype: torch.dtype) -> Kernel:
    if dtype == torch.float32:
        return Kernel(_efficient_forward, _efficient_backward)
    return Kernel(_flash_forward, _flash_backward)


aten: Any = torch.ops.aten


def _cpu_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
    return out, lse


def _cpu_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(grad, q, k, v, out, lse, 0.0, causal)
    return dq, dk, dv


def _flash_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    out, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False)
    return out, lse


def _flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    # Seed and offset are those of dropout, of which there is none.
    none = torch.zeros((), dtype=torch.uint64, device=q.device)
    lengths = None, None, q.shape[2], k.shape[2]
    dq, dk, dv = aten._scaled_dot_product_flash_attention_backward(
        grad, q, k, v, out, lse, *lengths, 0.0, causal, none, none
    )
    return dq, dk, dv


# The memory-efficient kernel pads the log-sum-exp to a multiple of this.
_PADDED = 32


def _efficient_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    out, lse, *_ = aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, causal)
    return out, lse[..., : q.shape[2]]


def _efficient_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    lse = torch.nn.functional.pad(lse, (0, -lse.shape[-1] % _PADDED), value=torch.inf)
    none = torch.zeros((), dtype=torch.int64, device=q.device)
    dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
        grad, q, k, v, None, out, lse, none, none, 0.0, [True, True, True, False], causal
    )
    return dq, dk, dv


def _rows(source: int, rank: int, length: int) -> tuple[slice, slice, bool]:
    """Which local queries see which keys of `source`, and whether the mask is causal there.

    Its own keys: all, causal, because both of its chunks are in order. An earlier rank's first chunk precedes both of
    ours and its second follows both. A later rank's chunks both lie between ours, so only our second chunk sees them.
    """
    whole, first, second = slice(None), slice(0, length // 2), slice(length // 2, length)
    if source == rank:
        return whole, whole, True
    return (whole, first, False) if source < rank else (second, whole, False)


def _pass_on(tensors: list[Tensor], group: Any) -> Callable[[], list[Tensor]]:
    """Send tensors to the next rank of the ring and receive those of the one before; call the result to wait."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    received = [torch.empty_like(tensor) for tensor in tensors]
    following = dist.get_global_rank(group, (rank + 1) % size)
    before = dist.get_global_rank(group, (rank - 1) % size)
    operations = [dist.P2POp(dist.isend, tensor, following, group) for tensor in tensors]
    operations += [dist.P2POp(dist.irecv, tensor, before, group) for tensor in received]
    works = dist.batch_isend_irecv(operations)

    def wait() -> list[Tensor]:
        for work in works:
            work.wait()
        return received

    return wait


class RingAttention(torch.autograd.Function):
    """Causal attention over a sequence of which every rank of the group holds chunks r and 2P-1-r."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, group: Any) -> Tensor:
        rank, size, kernel = dist.get_rank(group), dist.get_world_size(group), kernel_for(q)
        repeats, length = q.shape[1] // k.shape[1], q.shape[2]
        q = q.contiguous()
        held = [k.contiguous(), v.contiguous()]
        out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
        lse = torch.full(q.shape[:3], -torch.inf, dtype=torch.float32, device=q.device)
        for turn in range(size):
            arriving = _pass_on(held, group) if turn + 1 < size else None
            queries, keys, causal = _rows((rank - turn) % size, rank, length)
            parts = [_grouped(x[:, :, keys], repeats) for x in held]
            own, own_lse = kernel.forward(q[:, :, queries].contiguous(), *parts, causal)
            _join(out[:, :, queries], lse[:, :, queries], own.float(), own_lse.float())
            held = arriving() if arriving else held
        result = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, result, lse)
        ctx.group = group
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, out, lse = ctx.saved_tensors
        group, grad = ctx.group, gradients[0].contiguous()
        rank, size, kernel = dist.get_rank(group), dist.get_world_size(group), kernel_for(q)
        repeats, length = q.shape[1] // k.shape[1], q.shape[2]
        dq = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
        held = [k.contiguous(), v.contiguous()]
        # Gradients of keys and values travel behind them and are home after a whole turn.
        sums = [torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in held]
        for turn in range(size):
            arriving = _pass_on(held, group) if turn + 1 < size else None
            queries, keys, causal = _rows((rank - turn) % size, rank, length)
            rows = [x[:, :, queries].contiguous() for x in (grad, q, out, lse)]
            parts = [_grouped(x[:, :, keys], repeats) for x in held]
            own_q, *own = kernel.backward(rows[0], rows[1], *parts, rows[2], rows[3], causal)
            dq[:, :, queries] += own_q
            for total, part in zip(sums, own, strict=True):
                total[:, :, keys] += _shared(part.float(), repeats)
            sums = _pass_on(sums, group)()
            held = arriving() if arriving else held
        return dq.to(q.dtype), sums[0].to(k.dtype), sums[1].to(v.dtype), None


def _grouped(x: Tensor, repeats: int) -> Tensor:
    """Keys or values repeated for the query heads that share them."""
    return x.contiguous() if repeats == 1 else x.repeat_interleave(repeats, dim=1)


def _shared(gradient: Tensor, repeats: int) -> Tensor:
    """The gradient of keys or values from those of `_grouped`."""
    batch, heads, length, width = gradient.shape
    return gradient.view(batch, heads // repeats, repeats, length, width).sum(2)


def _join(out: Tensor, lse: Tensor, own: Tensor, own_lse: Tensor) -> None:
    """Add a partial result in place: weighted by its share of the sum of exponentials."""
    total = torch.logaddexp(lse, own_lse)
    out.mul_((lse - total).exp().unsqueeze(-1)).add_(own * (own_lse - total).exp().unsqueeze(-1))
    lse.copy_(total)
