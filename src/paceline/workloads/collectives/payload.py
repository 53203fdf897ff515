"""Payloads for verification: small integers that depend on rank and position, with exact sums.

A missing, doubled, swapped or shifted contribution changes elements. Values repeat after PERIOD elements, a prime, so
that shifts by a power of two or by a share are detected.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.workloads.collectives.operations import Buffers, Place, Segment

PERIOD = 65_521
# Rows compared at once, to limit the memory of a comparison.
ROWS_AT_ONCE = 64
TORCH_DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
    "none": torch.int8,
}
# All integers up to here are exact in the dtype.
EXACT = {"fp32": 1 << 24, "bf16": 1 << 8, "fp16": 1 << 11, "int8": 127, "fp8": 16}
# Different values per rank in a sum; it limits how many ranks contribute to one element, so that sums are exact.
VALUES_EACH = 7
# Initial value of receive buffers; payloads are never negative.
UNTOUCHED = -1


@functools.lru_cache(maxsize=128)
def pattern(rank: int, ranks: int, dtype: str, is_sum: bool, device: str = "cpu") -> Tensor:
    """One period of a rank's payload, as integers.

    In a sum over more ranks than the dtype can represent, each contributes to every k-th element and 0 elsewhere. A
    buffer of fewer than k elements then lacks some contributions (bf16 beyond 36 ranks, int8 beyond 18).
    """
    position = torch.arange(PERIOD, dtype=torch.int64, device=device)
    most = max(1, EXACT[dtype] // VALUES_EACH)
    summands = min(ranks, most) if is_sum else 1
    # An integer hash of position and rank.
    mixed = position * 0x9E3779B1 + (rank + 1) * 0x85EBCA6B & 0xFFFFFFFF
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        mixed = (mixed ^ mixed >> shift) * factor & 0xFFFFFFFF
    value = 1 + (mixed ^ mixed >> 16) % (EXACT[dtype] // summands)
    every = -(-ranks // most) if is_sum else 1
    return torch.where((position + rank) % every == 0, value, 0)


class Payload:
    """Writes and verifies the payloads of one operation and dtype on one rank."""

    def __init__(self, place: Place, dtype: str, is_sum: bool, device: str) -> None:
        self.place, self.dtype, self.is_sum, self.device = place, dtype, is_sum, device

    def pattern_of(self, source: int | None) -> Tensor:
        if source is None:
            return self._total
        return pattern(source, self.place.ranks, self.dtype, self.is_sum, self.device)

    @functools.cached_property
    def _total(self) -> Tensor:
        total = torch.zeros(PERIOD, dtype=torch.int64, device=self.device)
        for rank in range(self.place.ranks):
            total += self.pattern_of(rank)
        return total

    def fill(self, buffers: Buffers) -> None:
        """Write the rank's payload into the send buffer, and UNTOUCHED into the receive buffer."""
        buffers.receive.fill_(UNTOUCHED)
        if self.dtype != "none":
            self.write(buffers.send, self.place.rank)

    def write(self, buffer: Tensor, source: int | None, offset: int = 0) -> None:
        tile = self._tile(source, offset)
        rows, rest = divmod(len(buffer), PERIOD)
        buffer[: rows * PERIOD].view(rows, PERIOD).copy_(tile.expand(rows, PERIOD))
        buffer[rows * PERIOD :].copy_(tile[:rest])

    def count_wrong(self, receive: Tensor, segments: Sequence[Segment]) -> int:
        """Number of elements that differ from the segments; NaN always differs."""
        wrong = torch.zeros((), dtype=torch.int64, device=self.device)
        for segment in segments:
            tile = self._tile(segment.source, segment.offset)
            rows, rest = divmod(segment.end - segment.begin, PERIOD)
            part = receive[segment.begin : segment.end]
            for block in part[: rows * PERIOD].view(rows, PERIOD).split(ROWS_AT_ONCE):  # type: ignore[no-untyped-call]
                wrong += differing(block, tile)
            wrong += differing(part[rows * PERIOD :], tile[:rest])
        return int(wrong.item())

    def _tile(self, source: int | None, offset: int) -> Tensor:
        # Via fp32, which is exact: not every device converts integers to fp8.
        return self.pattern_of(source).roll(-offset).float().to(TORCH_DTYPES[self.dtype])


def differing(actual: Tensor, expected: Tensor) -> Tensor:
    if actual.dtype is torch.float8_e4m3fn:
        # Not every device can compare fp8; equal small integers have equal bits.
        actual, expected = actual.view(torch.uint8), expected.view(torch.uint8)
    return (actual != expected).sum()
