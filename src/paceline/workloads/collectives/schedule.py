"""The sizes of a sweep, and the rounds of a pair tournament."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

Pair = tuple[int, int]


def sizes(min_bytes: int, max_bytes: int, factor: int) -> tuple[int, ...]:
    """min, min x factor, ... up to max.

    >>> sizes(8, 100, 2)
    (8, 16, 32, 64)
    """
    steps = [min_bytes]
    while steps[-1] * factor <= max_bytes:
        steps.append(steps[-1] * factor)
    return tuple(steps) if min_bytes <= max_bytes else ()


def rounds(ranks: int, turn: int) -> list[tuple[Pair, ...]]:
    """Rounds of disjoint pairs that contain every pair once. The second turn combines pairs differently.

    It uses another order of ranks. A round that occurred in the first turn (four ranks have only three ways to form two
    pairs) is played pair by pair.
    """
    first = list(_circle(range(ranks)))
    if turn == 0:
        return first
    # Rotations and reversals give the same rounds; squares do not.
    second = _circle(sorted(range(ranks), key=lambda rank: (rank * rank % ranks, rank)))
    known = set(first)
    return [part for pairs in second for part in ([(pair,) for pair in pairs] if pairs in known else [pairs])]


def _circle(order: Sequence[int]) -> Iterator[tuple[Pair, ...]]:
    """The circle method: one position stays and the others rotate; with an odd number of ranks, one rests per round."""
    seats: list[int | None] = [*order, None] if len(order) % 2 else [*order]
    for _ in range(len(seats) - 1):
        half = len(seats) // 2
        facing = zip(seats[:half], reversed(seats[half:]), strict=True)
        yield tuple(sorted((min(a, b), max(a, b)) for a, b in facing if a is not None and b is not None))
        seats = [seats[0], seats[-1], *seats[1:-1]]
