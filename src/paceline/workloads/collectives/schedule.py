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
    """Every pair exactly once, the pairs of a round disjoint; no pair has the same neighbours in the second turn.

    Ranks sit in another order then. A round that comes about again (four ranks split into two pairs in three ways only)
    is played pair by pair.
    """
    first = list(_circle(range(ranks)))
    if turn == 0:
        return first
    # Plain steps and reversals lead to the same rounds; squares do not.
    second = _circle(sorted(range(ranks), key=lambda rank: (rank * rank % ranks, rank)))
    known = set(first)
    return [part for pairs in second for part in ([(pair,) for pair in pairs] if pairs in known else [pairs])]


def _circle(order: Sequence[int]) -> Iterator[tuple[Pair, ...]]:
    """The circle method: one seat stays, the others move on by one; who faces the empty seat of an odd number rests."""
    seats: list[int | None] = [*order, None] if len(order) % 2 else [*order]
    for _ in range(len(seats) - 1):
        half = len(seats) // 2
        facing = zip(seats[:half], reversed(seats[half:]), strict=True)
        yield tuple(sorted((min(a, b), max(a, b)) for a, b in facing if a is not None and b is not None))
        seats = [seats[0], seats[-1], *seats[1:-1]]
