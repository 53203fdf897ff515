"""Synthetic instructions: documents of a stated length distribution, a prompt that is read and a response to learn.

`instructions:length=lognormal,mean=180,spread=0.6,prompt_share=0.4,packed=true`. Document j is a function of the seed
and j alone. Unpacked, row i holds document i. Packed, rows come in blocks of BLOCK_ROWS: block b is filled by
`rows.pack` from documents of its own, b * BLOCK_DOCUMENTS onwards, and what is still waiting when the block is full is
left out. Row i is then a function of i, whatever the world size and micro batch, and no rank packs more than a block.
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from paceline.errors import Scalar, require
from paceline.experiment.choices import Choice
from paceline.training.data.packing import Document, Row, Tokens, lay_out, pack

BLOCK_ROWS = 256
# More than a block can hold: a document has two tokens or more.
BLOCK_DOCUMENTS = 1 << 24
SHORTEST = 2
# Lengths are drawn so many at once: a generator costs more than what is drawn from it.
DRAWN_LENGTHS = 256
# Segments of the synthetic text: mean length, and how many different tokens may start one.
SEGMENT_TOKENS = 32
ACTIVE_TOKENS = 512
ACCEPTED = "length (lognormal or fixed), mean, spread, prompt_share and packed"


def counting_runs(random: np.random.Generator, vocab: int, count: int) -> Tokens:
    """Counting runs of random start and length over a few hundred tokens: seeded, endless, and learnable.

    A model first learns which tokens occur, then that most tokens are the previous one plus one, so the loss falls.
    """
    active = min(vocab, ACTIVE_TOKENS)
    starts = random.integers(0, active, count)
    cuts = random.random(count) < 1 / SEGMENT_TOKENS
    cuts[0] = True
    position = np.arange(count)
    began = np.maximum.accumulate(np.where(cuts, position, 0))
    return (starts[began] + position - began) % active


@dataclass(frozen=True, slots=True)
class Lengths:
    """How long documents are, before a row cuts them: `mean` tokens, of which prompt_share are the prompt.

    lognormal has the stated mean, and `spread` is the standard deviation of the logarithm. fixed fills every row.
    """

    length: str = "lognormal"
    mean: float = 180.0
    spread: float = 0.6
    prompt_share: float = 0.4
    packed: bool = False

    def __post_init__(self) -> None:
        require(self.length in ("lognormal", "fixed"), "data length", self.length, "lognormal or fixed")
        require(_is_number(self.mean) and self.mean >= SHORTEST, "data mean", self.mean, f"a number from {SHORTEST}")
        require(_is_number(self.spread) and 0 <= self.spread <= 3, "data spread", self.spread, "a number from 0 to 3")
        share = self.prompt_share
        require(_is_number(share) and 0 <= share < 1, "data prompt_share", share, "a number from 0, below 1")
        require(isinstance(self.packed, bool), "data packed", self.packed, "true or false")

    @classmethod
    def read(cls, data: Choice) -> Lengths:
        options: dict[str, Any] = dict(data.options)
        require(set(options) <= set(cls.__slots__), "data", str(data), f"the options {ACCEPTED}")
        if options.get("length") == "fixed":
            given = sorted(set(options) & {"mean", "spread"})
            require(not given, f"data {' and '.join(given)} with length=fixed", str(data), "none: rows are full")
        return cls(**options)

    def draw(self, random: np.random.Generator, longest: int, count: int) -> list[int]:
        """Tokens of so many documents, each at least SHORTEST and at most a row."""
        if self.length == "fixed":
            return [longest] * count
        drawn = random.lognormal(math.log(self.mean) - self.spread**2 / 2, self.spread, count)
        sizes: list[int] = np.clip(np.rint(drawn), SHORTEST, longest).astype(int).tolist()
        return sizes

    def prompt(self, size: int) -> int:
        """At least one token, because the first has no predecessor, and never the whole document."""
        return min(max(round(self.prompt_share * size), 1), size - 1)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


@dataclass(frozen=True)
class Instructions:
    """Endless rows of synthetic documents."""

    lengths: Lengths
    vocab: int
    length: int
    seed: int

    def row(self, index: int) -> Row:
        return lay_out([self.document(number) for number in self._numbers(index)], self.length)

    def label_tokens(self, index: int) -> int:
        sizes = [self.size(number) for number in self._numbers(index)]
        return sum(size - self.lengths.prompt(size) for size in sizes)

    @property
    def facts(self) -> dict[str, Scalar]:
        return {}

    def size(self, number: int) -> int:
        draw, place = divmod(number, DRAWN_LENGTHS)
        return _drawn_lengths(self, draw)[place]

    def document(self, number: int) -> Document:
        size = self.size(number)
        learned = np.arange(size) >= self.lengths.prompt(size)
        return Document(counting_runs(self.random(number, stream=0), self.vocab, size), learned)

    def random(self, number: int, stream: int) -> np.random.Generator:
        """Streams are far apart in the generator's period: a length says nothing about the tokens."""
        return np.random.Generator(np.random.Philox(key=[self.seed, number], counter=[0, 0, 0, stream]))

    def _numbers(self, index: int) -> tuple[int, ...]:
        if not self.lengths.packed:
            return (index,)
        block, place = divmod(index, BLOCK_ROWS)
        return _packed_block(self, block)[place]


@functools.lru_cache(maxsize=256)
def _drawn_lengths(corpus: Instructions, draw: int) -> tuple[int, ...]:
    return tuple(corpus.lengths.draw(corpus.random(draw, stream=1), corpus.length, DRAWN_LENGTHS))


@functools.lru_cache(maxsize=64)
def _packed_block(corpus: Instructions, block: int) -> tuple[tuple[int, ...], ...]:
    first = block * BLOCK_DOCUMENTS
    sizes = (corpus.size(first + number) for number in itertools.count())
    packed = itertools.islice(pack(sizes, corpus.length), BLOCK_ROWS)
    return tuple(tuple(first + number for number in row) for row in packed)


def open_instructions(data: Choice, vocab: int, length: int, seed: int) -> Instructions:
    require(length >= SHORTEST, "sequence_length", length, f"at least {SHORTEST} with instructions")
    return Instructions(Lengths.read(data), vocab, length, seed)
