"""Rows for fine-tuning (token ids, positions and labels of one sequence), and packing of documents into rows.

A row is an int64 array (3, length). Positions restart at 0 with each document, which marks the boundaries. Padding is
on the right, has the id 0, continues the positions and is never learned. Labels are already shifted: each label is the
next token of the same document, or IGNORED_LABEL if that belongs to the prompt or does not exist.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

Tokens = np.ndarray[Any, np.dtype[np.int64]]
IGNORED_LABEL = -100
PADDING_ID = 0
# Waiting documents considered for a row: more packs tighter and changes the order more.
LOOK_AHEAD = 32


@dataclass(frozen=True, slots=True, eq=False)
class Document:
    """Token ids, and for each whether it is learned (response) or only read (prompt)."""

    tokens: Tokens
    learned: np.ndarray[Any, np.dtype[np.bool_]]

    def cut(self, length: int) -> Document:
        return self if len(self.tokens) <= length else Document(self.tokens[:length], self.learned[:length])

    @property
    def label_tokens(self) -> int:
        """Learned tokens. The first token has no predecessor, so it is never learned."""
        return int(self.learned[1:].sum())


@dataclass(frozen=True, slots=True)
class Amounts:
    """Counts of a row or a batch. attended_keys: keys that each token sees, summed over tokens without padding."""

    tokens: int
    positions: int
    label_tokens: int
    attended_keys: int
    documents: int

    @classmethod
    def total(cls, parts: Iterable[Amounts]) -> Amounts:
        rows = [(a.tokens, a.positions, a.label_tokens, a.attended_keys, a.documents) for a in parts]
        return cls(*(sum(column) for column in zip(*rows, strict=True)))


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """The array (3, length) of one sequence, and its counts."""

    array: Tokens
    amounts: Amounts


@runtime_checkable
class RowCorpus(Protocol):
    """Rows by global index: the same index gives the same row on every rank, whatever the world size."""

    def row(self, index: int) -> Row: ...

    def label_tokens(self, index: int) -> int:
        """Learned tokens of that row. Must be cheap: every rank calls it for the whole global batch."""

    @property
    def facts(self) -> dict[str, str | int | float | bool | None]:
        """Facts about the data for the record that are not in the spec."""


def lay_out(documents: Sequence[Document], length: int) -> Row:
    """One row with these documents, which must fit."""
    array = np.zeros((3, length), dtype=np.int64)
    array[0], array[2] = PADDING_ID, IGNORED_LABEL
    start = attended = 0
    for document in documents:
        size = len(document.tokens)
        end = start + size
        array[0, start:end] = document.tokens
        # Up to the end of the row, for padding; the next document overwrites it.
        array[1, start:] = np.arange(length - start)
        array[2, start : end - 1] = np.where(document.learned[1:], document.tokens[1:], IGNORED_LABEL)
        start, attended = end, attended + size * (size + 1) // 2
    learned = sum(document.label_tokens for document in documents)
    return Row(array, Amounts(start, length, learned, attended, len(documents)))


def whole(sequence: Tokens, pad: int | None = None) -> Row:
    """A row of one document from length + 1 tokens of plain text; all tokens but padding are learned."""
    tokens, following = sequence[:-1], sequence[1:]
    length = len(tokens)
    counted = np.ones(length, dtype=bool) if pad is None else tokens != pad
    labels = following if pad is None else np.where(following == pad, IGNORED_LABEL, following)
    positions = np.arange(length)
    learned = int((labels != IGNORED_LABEL).sum())
    attended = int((positions + 1)[counted].sum())
    return Row(np.stack([tokens, positions, labels]), Amounts(int(counted.sum()), length, learned, attended, 1))


def pack(sizes: Iterable[int], length: int, look_ahead: int = LOOK_AHEAD) -> Iterator[tuple[int, ...]]:
    """Rows of documents, by their index in `sizes`; every size must be at most `length`.

    A row begins with the document that has waited longest. Each of the next `look_ahead` documents joins if it fits.
    No document waits forever, and a row depends only on the ones before it.

    >>> list(pack([3, 3, 2, 1], length=5))
    [(0, 2), (1, 3)]
    """
    arriving = enumerate(sizes)
    waiting: deque[tuple[int, int]] = deque()
    while True:
        waiting.extend(itertools.islice(arriving, look_ahead - len(waiting)))
        if not waiting:
            return
        row, room, passed = [], length, []
        while waiting:
            number, size = waiting.popleft()
            if size > room:
                passed.append((number, size))
                continue
            row.append(number)
            room -= size
            waiting.extend(itertools.islice(arriving, 1))
        waiting.extend(passed)
        yield tuple(row)
