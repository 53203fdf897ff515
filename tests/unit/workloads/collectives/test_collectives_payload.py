"""Payloads reveal every way a collective can go wrong, in every dtype, and are right where it went right."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from paceline.workloads.collectives.operations import OPERATIONS, Buffers, Operation, Place
from paceline.workloads.collectives.payload import EXACT, PERIOD, TORCH_DTYPES, Payload, pattern

DTYPES = ("fp32", "bf16", "fp16", "int8", "fp8")
SUMMABLE = ("fp32", "bf16", "fp16", "int8")
RANKS = 3
COUNT = 3 * 240


def payload_of(operation: Operation, rank: int, dtype: str, ranks: int = RANKS) -> Payload:
    return Payload(Place(rank, ranks), dtype, operation.is_sum, "cpu")


def sent(operation: Operation, dtype: str, ranks: int = RANKS, count: int = COUNT) -> list[Tensor]:
    """What every rank sends."""
    found = []
    for rank in range(ranks):
        empty = functools.partial(torch.empty, dtype=TORCH_DTYPES[dtype])
        buffers = operation.buffers(Place(rank, ranks), count, operation.in_place[0], empty)
        payload_of(operation, rank, dtype, ranks).fill(buffers)
        found.append(buffers.send.clone())
    return found


def total(parts: list[Tensor]) -> Tensor:
    """Added one after the other in the dtype itself, as a ring adds."""
    return functools.reduce(torch.add, parts)


def shares(buffer: Tensor, ranks: int = RANKS) -> list[Tensor]:
    return list(buffer.chunk(ranks))


# By hand, from all that was sent: what `rank` holds afterwards.
ARRIVES: dict[str, Callable[[list[Tensor], int], Tensor]] = {
    "all_reduce": lambda parts, rank: total(parts),
    "reduce": lambda parts, rank: total(parts),
    "reduce_scatter": lambda parts, rank: shares(total(parts), len(parts))[rank],
    "all_gather": lambda parts, rank: torch.cat(parts),
    "all_to_all": lambda parts, rank: torch.cat([shares(part, len(parts))[rank] for part in parts]),
    "broadcast": lambda parts, rank: parts[0],
    "send_recv": lambda parts, rank: parts[0],
    "ring": lambda parts, rank: parts[rank - 1],
}
CASES = [
    (name, dtype) for name in ARRIVES for dtype in (SUMMABLE if OPERATIONS[name].is_sum else DTYPES)
]  # fp8 is carried, never summed


def receiver(name: str) -> int:
    return {"reduce": 0, "send_recv": 1}.get(name, 1)


def wrong(name: str, dtype: str, arrived: Tensor, ranks: int = RANKS, count: int = COUNT) -> int:
    operation, place = OPERATIONS[name], Place(receiver(name), ranks)
    return payload_of(operation, place.rank, dtype, ranks).count_wrong(arrived, operation.expect(place, count))


def test_every_operation_is_worked_out_by_hand() -> None:
    assert set(ARRIVES) == {name for name, operation in OPERATIONS.items() if operation.has_payload}


@pytest.mark.parametrize(("ranks", "count"), [(2, 2), (3, 720), (2, 2 * (PERIOD + 100)), (5, 5 * 40_000)])
def test_what_arrives_right_is_right(ranks: int, count: int) -> None:
    for name, dtype in CASES:
        parts = sent(OPERATIONS[name], dtype, ranks, count)
        assert wrong(name, dtype, ARRIVES[name](parts, receiver(name)), ranks, count) == 0, (name, dtype)


@pytest.mark.parametrize("dtype", SUMMABLE)
@pytest.mark.parametrize("ranks", [2, 17, 130])
def test_sums_are_exact_in_any_order(dtype: str, ranks: int) -> None:
    parts = sent(OPERATIONS["all_reduce"], dtype, ranks, 4096)
    exact = sum(part.to(torch.int64) for part in parts)
    assert int(exact.max()) <= EXACT[dtype]  # type: ignore[union-attr]
    for order in (parts, parts[::-1]):
        assert torch.equal(total(order).to(torch.int64), exact)
    assert wrong("all_reduce", dtype, total(parts), ranks, 4096) == 0
    assert all(bool(part.any()) for part in parts), "every rank contributes somewhere"


@pytest.mark.parametrize(("name", "dtype"), [case for case in CASES if OPERATIONS[case[0]].is_sum])
class TestSums:
    def test_a_missing_contribution(self, name: str, dtype: str) -> None:
        parts = sent(OPERATIONS[name], dtype)
        for rank in range(RANKS):
            rest = [part if r != rank else torch.zeros_like(part) for r, part in enumerate(parts)]
            arrived = ARRIVES[name](rest, receiver(name))
            assert wrong(name, dtype, arrived) == len(arrived), "every element shows it"

    def test_a_doubled_contribution(self, name: str, dtype: str) -> None:
        parts = sent(OPERATIONS[name], dtype)
        for rank in range(RANKS):
            arrived = ARRIVES[name]([*parts[:rank], parts[rank] + parts[rank], *parts[rank + 1 :]], receiver(name))
            assert wrong(name, dtype, arrived) == len(arrived)

    def test_one_contribution_in_the_place_of_another(self, name: str, dtype: str) -> None:
        parts = sent(OPERATIONS[name], dtype)
        arrived = ARRIVES[name]([parts[0], parts[0], parts[2]], receiver(name))
        assert wrong(name, dtype, arrived) > len(arrived) / 2


@pytest.mark.parametrize(("name", "dtype"), CASES)
class TestArrivals:
    def arrived(self, name: str, dtype: str) -> Tensor:
        return ARRIVES[name](sent(OPERATIONS[name], dtype), receiver(name)).clone()

    def test_one_element(self, name: str, dtype: str) -> None:
        arrived = self.arrived(name, dtype)
        arrived.view(torch.uint8)[-1] ^= 1
        assert wrong(name, dtype, arrived) == 1

    @pytest.mark.parametrize("by", [1, 16, 256])
    def test_shifted(self, name: str, dtype: str, by: int) -> None:
        arrived = self.arrived(name, dtype)
        shifted = arrived.view(torch.uint8).roll(by * arrived.element_size()).view(arrived.dtype)
        assert wrong(name, dtype, shifted) > len(arrived) / 2

    def test_halves_swapped(self, name: str, dtype: str) -> None:
        arrived = self.arrived(name, dtype)
        half = len(arrived) // 2
        assert wrong(name, dtype, torch.cat([arrived[half:], arrived[:half]])) > len(arrived) / 2

    def test_nothing_arrived(self, name: str, dtype: str) -> None:
        empty = functools.partial(torch.empty, dtype=TORCH_DTYPES[dtype])
        operation = OPERATIONS[name]
        buffers = operation.buffers(Place(receiver(name), RANKS), COUNT, operation.in_place[0], empty)
        payload_of(operation, receiver(name), dtype).fill(buffers)
        assert wrong(name, dtype, buffers.receive) > len(buffers.receive) / 2


@pytest.mark.parametrize("name", ["all_gather", "all_to_all"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_two_ranks_shares_swapped(name: str, dtype: str) -> None:
    parts = shares(ARRIVES[name](sent(OPERATIONS[name], dtype), 1))
    swapped = torch.cat([parts[1], parts[0], parts[2]])
    assert wrong(name, dtype, swapped) > 0.8 * 2 * len(parts[0])


def test_not_a_number_is_wrong() -> None:
    parts = sent(OPERATIONS["all_reduce"], "fp32")
    assert wrong("all_reduce", "fp32", torch.full_like(parts[0], torch.nan)) == COUNT


@pytest.mark.parametrize("name", ["all_gather", "reduce_scatter"])
def test_in_place_buffers_are_parts_of_each_other(name: str) -> None:
    buffers = OPERATIONS[name].buffers(Place(2, 4), 64, True, torch.empty)
    small, large = sorted((buffers.send, buffers.receive), key=len)
    assert (len(small), len(large)) == (16, 64)
    assert small.data_ptr() == large[32:].data_ptr(), "the third of four shares"


def test_filling_in_place_keeps_what_is_sent() -> None:
    buffers = OPERATIONS["all_gather"].buffers(Place(1, 2), 8, True, torch.empty)
    Payload(Place(1, 2), "fp32", False, "cpu").fill(buffers)
    assert buffers.receive[:4].tolist() == [-1.0] * 4
    assert buffers.receive[4:].tolist() == pattern(1, 2, "fp32", False)[:4].tolist()
    assert isinstance(buffers, Buffers)
