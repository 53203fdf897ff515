"""The table of collectives: what each sends and receives, how torch launches it, and what must have arrived.

torch is imported when an operation is bound to its buffers, so that `check` reads the names without it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

Launch = Callable[[], Any]
ROOT = 0
# Shares of more than this are cut to a multiple of it, as nccl-tests does: an unaligned share is another, slower path.
ALIGNMENT_BYTES = 16


@dataclass(frozen=True, slots=True)
class Place:
    """One rank among those that take part."""

    rank: int
    ranks: int


@dataclass(frozen=True, slots=True)
class Buffers:
    """What a rank sends and where it receives; in place, one is the other or a part of it."""

    send: Tensor
    receive: Tensor


@dataclass(frozen=True, slots=True)
class Segment:
    """Elements begin..end of the receive buffer hold `source`'s payload from `offset` on; None is the sum of all."""

    begin: int
    end: int
    source: int | None
    offset: int = 0


Bind = Callable[[Buffers, Place, Any, bool], Launch]
Expect = Callable[[Place, int], tuple[Segment, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One collective. `count` is always the elements of nccl-tests' S, of which a `share` is one rank's part.

    sends_share, receives_share: that buffer holds a share of S instead of all of it.
    in_place: the ways torch offers, out of place first; torch reduces and broadcasts in place only.
    expect: what the receive buffer of a place holds afterwards; empty where a rank receives nothing.
    most_ranks: only the first so many take part; the others record nothing. None: all do.
    """

    name: str
    bind: Bind
    expect: Expect
    in_place: tuple[bool, ...] = (False,)
    is_sum: bool = False
    is_divided: bool = False
    sends_share: bool = False
    receives_share: bool = False
    least_ranks: int = 1
    most_ranks: int | None = None
    has_payload: bool = True
    can_be_captured: bool = True

    def members(self, ranks: int) -> int:
        return ranks if self.most_ranks is None else min(ranks, self.most_ranks)

    def count(self, size_bytes: int, element_bytes: int, ranks: int) -> int:
        """Elements that fit into `size_bytes`, rounded down to equal shares; 0 when there is not one for each rank."""
        if not self.is_divided:
            return size_bytes // element_bytes
        share, aligned = size_bytes // element_bytes // ranks, ALIGNMENT_BYTES // element_bytes
        return ranks * (share - share % aligned if share > aligned else share)

    def buffers(self, place: Place, count: int, in_place: bool, empty: Callable[[int], Tensor]) -> Buffers:
        share = count // place.ranks
        if not in_place:
            return Buffers(empty(share if self.sends_share else count), empty(share if self.receives_share else count))
        whole = empty(count)
        own = whole[place.rank * share : (place.rank + 1) * share]
        return Buffers(own if self.sends_share else whole, own if self.receives_share else whole)


# --- launching -----------------------------------------------------------------------------------------------------


def _all_reduce(buffers: Buffers, place: Place, group: Any, async_op: bool) -> Launch:
    import torch.distributed as dist

    return functools.partial(dist.all_reduce, buffers.receive, group=group, async_op=async_op)


def _all_gather(buffers: Buffers, place: Place, group: Any, async_op: bool) -> Launch:
    import torch.distributed as dist

    # torch 2.13 renamed it and warns at every call of the older name.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return functools.partial(gather, buffers.receive, buffers.send, group=group, async_op=async_op)


def _reduce_scatter(buffers: Buffers, place: Place, group: Any, async_op: bool) -> Launch:
    import torch.distributed as dist

    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return functools.partial(scatter, buffers.receive, buffers.send, group=group, async_op=async_op)


def _all_to_all(buffers: Buffers, place: Place, group: Any, async_op: bool) -> Launch:
    import torch.distributed as dist

    return functools.partial(dist.all_to_all_single, buffers.receive, buffers.send, group=group, async_op=async_op)


def _broadcast(buffers: Buffers, place: Place, group: Any, async_op: bool) -> Launch:
    import torch.distributed as dist

    return functools.partial(dist.broadcast, buffers.receive, ROOT, group=group, async_op=async_op)


def _reduce(buffers: Buffers, place: Place, group: Any, async_op: bool) -> Launch:
    import torch.distributed as dist

    return functools.partial(dist.reduce, buffers.receive, ROOT, group=group, async_op=async_op)


def _barrier(buffers: Buffers, place: Place, group: Any, async_op: bool) -> Launch:
    import torch.distributed as dist

    return functools.partial(dist.barrier, group=group, async_op=async_op)


def exchange(buffers: Buffers, to: int | None, source: int | None, group: Any) -> Launch:
    """Send to one rank while receiving from another, either of them None; nothing at all is a launch of nothing."""
    import torch.distributed as dist

    parts = [] if to is None else [dist.P2POp(dist.isend, buffers.send, to, group=group)]
    parts += [] if source is None else [dist.P2POp(dist.irecv, buffers.receive, source, group=group)]

    def launch() -> None:
        for work in dist.batch_isend_irecv(parts):
            work.wait()

    return launch if parts else lambda: None


def _send_recv(buffers: Buffers, place: Place, group: Any, async_op: bool) -> Launch:
    return exchange(buffers, 1 if place.rank == 0 else None, 0 if place.rank == 1 else None, group)


def _ring(buffers: Buffers, place: Place, group: Any, async_op: bool) -> Launch:
    return exchange(buffers, (place.rank + 1) % place.ranks, (place.rank - 1) % place.ranks, group)


# --- what must have arrived ----------------------------------------------------------------------------------------


def _sum_of_all(place: Place, count: int) -> tuple[Segment, ...]:
    return (Segment(0, count, None),)


def _sum_at_root(place: Place, count: int) -> tuple[Segment, ...]:
    """Elsewhere the buffer is scratch, whose content no backend promises."""
    return _sum_of_all(place, count) if place.rank == ROOT else ()


def _own_share_of_sum(place: Place, count: int) -> tuple[Segment, ...]:
    share = count // place.ranks
    return (Segment(0, share, None, offset=place.rank * share),)


def _everyones_share(place: Place, count: int) -> tuple[Segment, ...]:
    share = count // place.ranks
    return tuple(Segment(r * share, (r + 1) * share, r) for r in range(place.ranks))


def _share_from_everyone(place: Place, count: int) -> tuple[Segment, ...]:
    share = count // place.ranks
    return tuple(Segment(r * share, (r + 1) * share, r, offset=place.rank * share) for r in range(place.ranks))


def _from_root(place: Place, count: int) -> tuple[Segment, ...]:
    return (Segment(0, count, ROOT),)


def _at_second(place: Place, count: int) -> tuple[Segment, ...]:
    return (Segment(0, count, 0),) if place.rank == 1 else ()


def _from_previous(place: Place, count: int) -> tuple[Segment, ...]:
    return (Segment(0, count, (place.rank - 1) % place.ranks),)


def _nothing(place: Place, count: int) -> tuple[Segment, ...]:
    return ()


OPERATIONS = {
    operation.name: operation
    for operation in (
        Operation(name="all_reduce", bind=_all_reduce, expect=_sum_of_all, in_place=(True,), is_sum=True),
        Operation(
            name="all_gather",
            bind=_all_gather,
            expect=_everyones_share,
            in_place=(False, True),
            is_divided=True,
            sends_share=True,
        ),
        Operation(
            name="reduce_scatter",
            bind=_reduce_scatter,
            expect=_own_share_of_sum,
            in_place=(False, True),
            is_sum=True,
            is_divided=True,
            receives_share=True,
        ),
        Operation(name="all_to_all", bind=_all_to_all, expect=_share_from_everyone, is_divided=True),
        Operation(name="broadcast", bind=_broadcast, expect=_from_root, in_place=(True,)),
        Operation(name="reduce", bind=_reduce, expect=_sum_at_root, in_place=(True,), is_sum=True),
        Operation(name="send_recv", bind=_send_recv, expect=_at_second, least_ranks=2, most_ranks=2),
        Operation(name="ring", bind=_ring, expect=_from_previous, least_ranks=2),
        # torch's NCCL barrier makes the host wait, which no graph can hold.
        Operation(name="barrier", bind=_barrier, expect=_nothing, has_payload=False, can_be_captured=False),
    )
}
