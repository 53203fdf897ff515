"""Sizes of a sweep, elements of a size, and the rounds of the pair tournament."""

from __future__ import annotations

import itertools

import pytest

from paceline.workloads.collectives.operations import OPERATIONS
from paceline.workloads.collectives.sweep import sizes
from paceline.workloads.collectives.tournament import rounds


def test_sizes_go_up_by_the_factor_and_stop_at_the_limit() -> None:
    assert sizes(8, 64, 2) == (8, 16, 32, 64)
    assert sizes(8, 63, 2) == (8, 16, 32)
    assert sizes(1024, 1 << 30, 1024) == (1 << 10, 1 << 20, 1 << 30)
    assert sizes(8, 4, 2) == (), "a limit by memory may lie below the smallest size"


@pytest.mark.parametrize(
    ("operation", "size", "element", "ranks", "count"),
    [
        ("all_reduce", 1024, 4, 3, 256),
        ("all_reduce", 1023, 4, 3, 255),
        ("all_gather", 8, 4, 2, 2),
        ("all_gather", 8, 4, 3, 0),
        ("all_gather", 1024, 4, 3, 252),  # 85 a rank, cut to 84: a multiple of 16 bytes
        ("reduce_scatter", 32, 2, 3, 15),  # 5 a rank are fewer than 16 bytes and stay
        ("all_to_all", 1 << 20, 1, 8, 1 << 20),
        ("ring", 100, 4, 3, 25),
    ],
)
def test_counts_are_rounded_down_to_equal_aligned_shares(
    operation: str, size: int, element: int, ranks: int, count: int
) -> None:
    assert OPERATIONS[operation].count(size, element, ranks) == count


@pytest.mark.parametrize("turn", [0, 1])
@pytest.mark.parametrize("ranks", range(2, 10))
def test_every_pair_meets_once_and_nobody_twice_in_a_round(ranks: int, turn: int) -> None:
    played = rounds(ranks, turn)
    assert sorted(itertools.chain(*played)) == list(itertools.combinations(range(ranks), 2))
    for pairs in played:
        members = list(itertools.chain(*pairs))
        assert len(members) == len(set(members))


@pytest.mark.parametrize("ranks", range(2, 10))
def test_as_many_pairs_at_once_as_there_can_be(ranks: int) -> None:
    assert {len(pairs) for pairs in rounds(ranks, 0)} == {ranks // 2}


def companions(ranks: int, turn: int) -> dict[tuple[int, int], set[tuple[int, int]]]:
    return {pair: set(pairs) - {pair} for pairs in rounds(ranks, turn) for pair in pairs}


@pytest.mark.parametrize("ranks", [*range(4, 10), 16, 31, 64])
def test_the_second_turn_has_other_neighbours(ranks: int) -> None:
    """Whatever was slow only because of who ran beside it is not slow again."""
    before, after = companions(ranks, 0), companions(ranks, 1)
    assert not [pair for pair in before if before[pair] == after[pair]]
