"""Payloads that show what went wrong: small integers that depend on rank and position, whose sums are exact.

A missing or doubled contribution, another rank's, or one that is shifted changes elements. Values repeat after PERIOD
elements, a prime, so no shift by a power of two or by a share of one goes unseen.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.workloads.collectives.operations import Buffers, Place, Segment

PERIOD = 65_521
# Compared at once: bounds the memory of a comparison.
ROWS_AT_ONCE = 64
TORCH_DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
    "none": torch.int8,
}
# Up to here every whole number is exact in the dtype.
EXACT = {"fp32": 1 << 24, "bf16": 1 << 8, "fp16": 1 << 11, "int8": 127, "fp8": 16}
# Ranks that may contribute to one element of a sum, so that each has some values to differ in and the sum is exact.
VALUES_EACH = 7
# Fills what must be overwritten; no payload is negative.
UNTOUCHED = -1


@functools.lru_cache(maxsize=128)
def pattern(rank: int, ranks: int, dtype: str, is_sum: bool, device: str = "cpu") -> Tensor:
    """One period of a rank's payload, as whole numbers.

    In a sum of more ranks than the dtype has room for, each contributes to every k-th element and 0 elsewhere; then a
    buffer of fewer than k elements does not hold every rank's contribution (bf16 beyond 36 ranks, int8 beyond 18).
    """
    position = torch.arange(PERIOD, dtype=torch.int64, device=device)
    most = max(1, EXACT[dtype] // VALUES_EACH)
    summands = min(ranks, most) if is_sum else 1
    value = 1 + _scattered(position, rank) % (EXACT[dtype] // summands)
    every = -(-ranks // most) if is_sum else 1
    return torch.where((position + rank) % every == 0, value, 0)


def _scattered(position: Tensor, rank: int) -> Tensor:
    """32 bits that differ from one position or rank to the next as if drawn: an integer hash."""
    mixed = position * 0x9E3779B1 + (rank + 1) * 0x85EBCA6B & 0xFFFFFFFF
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        mixed = (mixed ^ mixed >> shift) * factor & 0xFFFFFFFF
    return mixed ^ mixed >> 16


class Payload:
    """Writes and checks the payloads of one kind of operation and dtype on one rank."""

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
        """The rank's own payload to send, and nothing of a payload anywhere else."""
        buffers.receive.fill_(UNTOUCHED)
        if self.dtype != "none":
            self.write(buffers.send, self.place.rank)

    def write(self, buffer: Tensor, source: int | None, offset: int = 0) -> None:
        tile = self._tile(source, offset)
        rows, rest = divmod(len(buffer), PERIOD)
        buffer[: rows * PERIOD].view(rows, PERIOD).copy_(tile.expand(rows, PERIOD))
        buffer[rows * PERIOD :].copy_(tile[:rest])

    def count_wrong(self, receive: Tensor, segments: Sequence[Segment]) -> int:
        """Elements that differ from what the segments say; a NaN differs from everything."""
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
        # By way of fp32, which holds them all: not every device turns whole numbers into fp8.
        return self.pattern_of(source).roll(-offset).float().to(TORCH_DTYPES[self.dtype])


def differing(actual: Tensor, expected: Tensor) -> Tensor:
    if actual.dtype is torch.float8_e4m3fn:
        # Not every device compares fp8; equal small integers have equal bits.
        actual, expected = actual.view(torch.uint8), expected.view(torch.uint8)
    return (actual != expected).sum()
