"""The table of collectives: what each sends and receives, how torch launches it, and the expected result.

torch is imported when an operation is bound to its buffers, so that `check` works without it.
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
# Larger shares are rounded down to a multiple of this, as in nccl-tests: unaligned shares take a slower path.
ALIGNMENT_BYTES = 16


@dataclass(frozen=True, slots=True)
class Place:
    """One rank of a group."""

    rank: int
    ranks: int


@dataclass(frozen=True, slots=True)
class Buffers:
    """The send and receive buffers of a rank; in place, one is the other or a part of it."""

    send: Tensor
    receive: Tensor


@dataclass(frozen=True, slots=True)
class Segment:
    """Elements begin..end of the receive buffer are the payload of `source` from `offset` on; None means the sum."""

    begin: int
    end: int
    source: int | None
    offset: int = 0


Bind = Callable[[Buffers, Place, Any, bool], Launch]
Expect = Callable[[Place, int], tuple[Segment, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One collective. `count` is the number of elements of nccl-tests' S; a `share` is one rank's part of it.

    sends_share, receives_share: that buffer has the size of a share instead of S.
    in_place: the modes that torch offers, out of place first; torch reduces and broadcasts in place only.
    expect: the expected content of a rank's receive buffer; empty if the rank receives nothing.
    most_ranks: only this many ranks take part and record; None means all.
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
        """Elements that fit into `size_bytes`, rounded down to equal shares; 0 if there is not one per rank."""
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


def _in_place(call: str, *arguments: Any) -> Bind:
    """Binds a torch collective that works on the receive buffer."""

    def bind(buffers: Buffers, place: Place, group: Any, async_op: bool) -> Launch:
        import torch.distributed as dist

        return functools.partial(getattr(dist, call), buffers.receive, *arguments, group=group, async_op=async_op)

    return bind


def _out_of_place(*calls: str) -> Bind:
    """Binds the first of the torch collectives that exists: torch 2.13 renamed some, and warns about the old names."""

    def bind(buffers: Buffers, place: Place, group: Any, async_op: bool) -> Launch:
        import torch.distributed as dist

        call = next(getattr(dist, name) for name in calls if hasattr(dist, name))
        return functools.partial(call, buffers.receive, buffers.send, group=group, async_op=async_op)

    return bind


def _barrier(buffers: Buffers, place: Place, group: Any, async_op: bool) -> Launch:
    import torch.distributed as dist

    return functools.partial(dist.barrier, group=group, async_op=async_op)


def exchange(buffers: Buffers, to: int | None, source: int | None, group: Any) -> Launch:
    """Send to one rank while receiving from another; either may be None."""
    import torch.distributed as dist

    parts = [] if to is None else [dist.P2POp(dist.isend, buffers.send, to, group=group)]
    parts += [] if source is None else [dist.P2POp(dist.irecv, buffers.receive, source, group=group)]

    def launch() -> None:
        for work in dist.batch_isend_irecv(parts):
            work.wait()

    return launch if parts else lambda: None


def _shares(place: Place, count: int, offset: int) -> tuple[Segment, ...]:
    """One share from every rank, from `offset` on in its payload."""
    share = count // place.ranks
    return tuple(Segment(r * share, (r + 1) * share, r, offset) for r in range(place.ranks))


OPERATIONS = {
    operation.name: operation
    for operation in (
        Operation(
            name="all_reduce",
            bind=_in_place("all_reduce"),
            expect=lambda place, count: (Segment(0, count, None),),
            in_place=(True,),
            is_sum=True,
        ),
        Operation(
            name="all_gather",
            bind=_out_of_place("all_gather_single", "all_gather_into_tensor"),
            expect=lambda place, count: _shares(place, count, 0),
            in_place=(False, True),
            is_divided=True,
            sends_share=True,
        ),
        Operation(
            name="reduce_scatter",
            bind=_out_of_place("reduce_scatter_single", "reduce_scatter_tensor"),
            expect=lambda place, count: (
                Segment(0, count // place.ranks, None, offset=place.rank * (count // place.ranks)),
            ),
            in_place=(False, True),
            is_sum=True,
            is_divided=True,
            receives_share=True,
        ),
        Operation(
            name="all_to_all",
            bind=_out_of_place("all_to_all_single"),
            expect=lambda place, count: _shares(place, count, place.rank * (count // place.ranks)),
            is_divided=True,
        ),
        Operation(
            name="broadcast",
            bind=_in_place("broadcast", ROOT),
            expect=lambda place, count: (Segment(0, count, ROOT),),
            in_place=(True,),
        ),
        # On other ranks the buffer is scratch with undefined content.
        Operation(
            name="reduce",
            bind=_in_place("reduce", ROOT),
            expect=lambda place, count: (Segment(0, count, None),) if place.rank == ROOT else (),
            in_place=(True,),
            is_sum=True,
        ),
        Operation(
            name="send_recv",
            bind=lambda buffers, place, group, _: exchange(
                buffers, 1 if place.rank == 0 else None, 0 if place.rank == 1 else None, group
            ),
            expect=lambda place, count: (Segment(0, count, 0),) if place.rank == 1 else (),
            least_ranks=2,
            most_ranks=2,
        ),
        Operation(
            name="ring",
            bind=lambda buffers, place, group, _: exchange(
                buffers, (place.rank + 1) % place.ranks, (place.rank - 1) % place.ranks, group
            ),
            expect=lambda place, count: (Segment(0, count, (place.rank - 1) % place.ranks),),
            least_ranks=2,
        ),
        # torch's NCCL barrier blocks the host, which a CUDA graph cannot capture.
        Operation(
            name="barrier", bind=_barrier, expect=lambda place, count: (), has_payload=False, can_be_captured=False
        ),
    )
}
