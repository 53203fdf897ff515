"""Digests of token ids whose sum does not depend on how sequences are split over ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np


_MASK64 = (1 << 64) - 1


def digest_tokens(index: int, tokens: np.ndarray[Any, Any]) -> int:
    """64-bit digest of one sequence at its global index. Sums of these modulo 2**64 do not depend on the partition."""
    head = hashlib.blake2b(index.to_bytes(8, "little"), digest_size=8)
    head.update(tokens.astype("<i4").tobytes())
    return int.from_bytes(head.digest(), "little")


def add_digests(digests: Iterable[int]) -> int:
    """The sum modulo 2**64."""
    return sum(digests) & _MASK64
