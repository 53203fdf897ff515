"""Which sizes a sweep visits, and which ranks meet in which round of a pair tournament: arithmetic alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

Pair = tuple[int, int]


def sizes(min_bytes: int, max_bytes: int, factor: int) -> tuple[int, ...]:
    """min, min x factor, ... up to max."""
    found = [min_bytes]
    while found[-1] * factor <= max_bytes:
        found.append(found[-1] * factor)
    return tuple(found) if min_bytes <= max_bytes else ()


def rounds(ranks: int, turn: int) -> list[tuple[Pair, ...]]:
    """Every pair exactly once, the pairs of a round disjoint; a pair meets beside other pairs in the second turn.

    Four ranks split into two pairs in one way only: there the second turn lets each pair run alone.
    """
    first = list(_circle(range(ranks)))
    if turn == 0:
        return first
    if ranks in (3, 4):
        return [(pair,) for pairs in first for pair in pairs]
    return list(_circle([*range(0, ranks, 2), *range(1, ranks, 2)]))


def _circle(order: Sequence[int]) -> Iterator[tuple[Pair, ...]]:
    """The circle method: one seat stays, the others move on by one; who faces the empty seat of an odd number rests."""
    seats: list[int | None] = [*order, None] if len(order) % 2 else [*order]
    for _ in range(len(seats) - 1):
        half = len(seats) // 2
        facing = zip(seats[:half], reversed(seats[half:]), strict=True)
        yield tuple(sorted((min(a, b), max(a, b)) for a, b in facing if a is not None and b is not None))
        seats = [seats[0], seats[-1], *seats[1:-1]]
