"""Rows of documents: token ids, positions and labels of one fine-tuning sequence, and the rule that packs documents.

A row is an int64 array (3, length). Positions begin at 0 with each document, so they say where documents meet. Padding
is on the right, holds the id 0, goes on counting positions and is never learned. Labels are already shifted: the label
of a place is the next token of the same document, IGNORED_LABEL where that is the prompt's or does not exist.
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
# How many waiting documents may be looked at to fill a row: more packs tighter and mixes the order further.
LOOK_AHEAD = 32


@dataclass(frozen=True, slots=True, eq=False)
class Document:
    """Token ids, and for each whether it is learned (a response) or only read (a prompt)."""

    tokens: Tokens
    learned: np.ndarray[Any, np.dtype[np.bool_]]

    def cut(self, length: int) -> Document:
        return self if len(self.tokens) <= length else Document(self.tokens[:length], self.learned[:length])

    @property
    def label_tokens(self) -> int:
        """A document's first token has no predecessor that could predict it."""
        return int(self.learned[1:].sum())


@dataclass(frozen=True, slots=True)
class Amounts:
    """What a row or a batch holds. attended_keys sums, over tokens that are no padding, the keys each may see."""

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
    """The array of one sequence and what it holds."""

    places: Tokens
    amounts: Amounts


@runtime_checkable
class RowCorpus(Protocol):
    """Rows by global index: the same index gives the same row on every rank, whatever the world size."""

    def row(self, index: int) -> Row: ...

    def label_tokens(self, index: int) -> int:
        """Of that row, without making it where that can be avoided: every rank asks for the whole global batch."""

    @property
    def facts(self) -> dict[str, str | int | float | bool | None]:
        """What a reader of the record should know about the data beyond what the spec says."""


def lay_out(documents: Sequence[Document], length: int) -> Row:
    """One row; the documents must fit it."""
    places = np.zeros((3, length), dtype=np.int64)
    places[0], places[2] = PADDING_ID, IGNORED_LABEL
    start = attended = 0
    for document in documents:
        size = len(document.tokens)
        end = start + size
        places[0, start:end] = document.tokens
        # To the row's end, so that padding goes on counting; the next document writes over it.
        places[1, start:] = np.arange(length - start)
        places[2, start : end - 1] = np.where(document.learned[1:], document.tokens[1:], IGNORED_LABEL)
        start, attended = end, attended + size * (size + 1) // 2
    learned = sum(document.label_tokens for document in documents)
    return Row(places, Amounts(start, length, learned, attended, len(documents)))


def whole(sequence: Tokens, pad: int | None = None) -> Row:
    """Plain text of length + 1 tokens as one document in which every token but padding is learned."""
    tokens, following = sequence[:-1], sequence[1:]
    length = len(tokens)
    counted = np.ones(length, dtype=bool) if pad is None else tokens != pad
    labels = following if pad is None else np.where(following == pad, IGNORED_LABEL, following)
    positions = np.arange(length)
    learned = int((labels != IGNORED_LABEL).sum())
    attended = int((positions + 1)[counted].sum())
    return Row(np.stack([tokens, positions, labels]), Amounts(int(counted.sum()), length, learned, attended, 1))


def pack(sizes: Iterable[int], length: int, look_ahead: int = LOOK_AHEAD) -> Iterator[tuple[int, ...]]:
    """Which documents share a row, by their place in `sizes`; every size must be at most `length`.

    A row begins with the document that has waited longest. Then each of the next `look_ahead` waiting ones, in order,
    joins if it fits; a row is closed when none of them does. So no document waits for ever, and a row depends on those
    before it only.
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
