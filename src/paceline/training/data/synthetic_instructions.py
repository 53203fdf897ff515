"""Synthetic instructions: documents with a given length distribution, each a prompt and a response to learn.

`instructions:length=lognormal,mean=180,spread=0.6,prompt_share=0.4,packed=true`. Document j is a function of the seed
and j alone. Unpacked, row i holds document i. Packed, rows come in blocks of BLOCK_ROWS: block b is filled by
`packing.pack` from its own documents, b * BLOCK_DOCUMENTS onwards; documents left over when it is full are dropped. So
row i depends only on i, not on world size or micro batch, and no rank packs more than a block.
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
# More than fit into a block: a document has at least two tokens.
BLOCK_DOCUMENTS = 1 << 24
SHORTEST = 2
# Lengths are drawn in groups, because creating a generator is slow.
DRAWN_LENGTHS = 256
# Segments of the synthetic text: mean length, and how many different tokens may start one.
SEGMENT_TOKENS = 32
ACTIVE_TOKENS = 512
ACCEPTED = "length (lognormal or fixed), mean, spread, prompt_share and packed"


def counting_runs(random: np.random.Generator, vocab: int, count: int) -> Tokens:
    """Counting runs with random starts and lengths over a few hundred tokens.

    The loss falls: a model learns which tokens occur, then that most tokens are the previous one plus one.
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
    """Document lengths before truncation: `mean` tokens, prompt_share of them in the prompt.

    lognormal: `spread` is the standard deviation of the logarithm. fixed: every document fills a row.
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
        """Lengths of `count` documents, from SHORTEST to `longest` tokens."""
        if self.length == "fixed":
            return [longest] * count
        drawn = random.lognormal(math.log(self.mean) - self.spread**2 / 2, self.spread, count)
        sizes: list[int] = np.clip(np.rint(drawn), SHORTEST, longest).astype(int).tolist()
        return sizes

    def prompt(self, size: int) -> int:
        """Prompt tokens: at least one, because the first has no predecessor, and never the whole document."""
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
        draw, index = divmod(number, DRAWN_LENGTHS)
        return _drawn_lengths(self, draw)[index]

    def document(self, number: int) -> Document:
        size = self.size(number)
        learned = np.arange(size) >= self.lengths.prompt(size)
        return Document(counting_runs(self.random(number, stream=0), self.vocab, size), learned)

    def random(self, number: int, stream: int) -> np.random.Generator:
        """A generator for one document. Streams are independent, so that lengths and tokens are."""
        return np.random.Generator(np.random.Philox(key=[self.seed, number], counter=[0, 0, 0, stream]))

    def _numbers(self, index: int) -> tuple[int, ...]:
        if not self.lengths.packed:
            return (index,)
        block, row = divmod(index, BLOCK_ROWS)
        return _packed_block(self, block)[row]


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
