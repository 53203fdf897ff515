"""Training tokens by global sequence index: every world size and micro batch sees the same global batch at step k."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from paceline.errors import RequestError, UnsupportedError
from paceline.measure import add_digests, digest_tokens
from paceline.spec import Choice, RunSpec, require

Tokens = np.ndarray[Any, np.dtype[np.int64]]
# Segments of the synthetic text: mean length, and how many different tokens may start one.
SEGMENT_TOKENS = 32
ACTIVE_TOKENS = 512


class Corpus(Protocol):
    """Sequences of sequence_length + 1 tokens; `pad` marks tokens that are neither learned nor counted."""

    @property
    def pad(self) -> int | None: ...

    def sequence(self, index: int) -> Tokens: ...


@dataclass(frozen=True)
class Synthetic:
    """Counting runs of random start and length over a few hundred tokens: seeded, endless, and learnable.

    A model first learns which tokens occur, then that most tokens are the previous one plus one, so the loss falls.
    """

    vocab: int
    length: int
    seed: int
    pad: int | None = None

    def sequence(self, index: int) -> Tokens:
        random = np.random.Generator(np.random.Philox(key=[self.seed, index]))
        active = min(self.vocab, ACTIVE_TOKENS)
        starts = random.integers(0, active, self.length + 1)
        cuts = random.random(self.length + 1) < 1 / SEGMENT_TOKENS
        cuts[0] = True
        position = np.arange(self.length + 1)
        began = np.maximum.accumulate(np.where(cuts, position, 0))
        return (starts[began] + position - began) % active


@dataclass(frozen=True)
class TokenFile:
    """Consecutive windows of a token file the user brings; the file is read again from its start when it ends."""

    tokens: np.ndarray[Any, Any]
    length: int
    pad: int | None = None

    def sequence(self, index: int) -> Tokens:
        windows = (len(self.tokens) - 1) // self.length
        start = (index % windows) * self.length
        return np.asarray(self.tokens[start : start + self.length + 1], dtype=np.int64)


def open_corpus(data: Choice, vocab: int, length: int, seed: int) -> Corpus:
    """`synthetic`, or `file:path=tokens.bin,dtype=uint16,pad=0` (.npy carries its own dtype)."""
    if data.name == "synthetic":
        require(not data.options, "data", str(data), "synthetic without options")
        return Synthetic(vocab, length, seed)
    require(data.name == "file", "data", str(data), "synthetic or file:path=FILE[,dtype=uint16|uint32|int32][,pad=ID]")
    return _open_file(data, vocab, length)


def check_data(data: Choice, length: int) -> None:
    """Refuse data that cannot be opened, before anything starts and without reading the tokens."""
    if data.name == "file":
        _file_tokens(data, length)
    else:
        open_corpus(data, 2, length, 0)


def _open_file(data: Choice, vocab: int, length: int) -> TokenFile:
    tokens, pad = _file_tokens(data, length)
    low, top = int(tokens.min()), int(tokens.max())
    if low < 0 or top >= vocab:
        raise UnsupportedError(f"{data} holds token ids {low} to {top}, but the model's vocabulary has {vocab}")
    return TokenFile(tokens, length, pad)


def _file_tokens(data: Choice, length: int) -> tuple[np.ndarray[Any, Any], int | None]:
    options = dict(data.options)
    path = Path(str(options.pop("path", "")))
    dtype, pad = str(options.pop("dtype", "uint16")), options.pop("pad", None)
    require(not options, "data", str(data), "the options path, dtype and pad")
    require(dtype in ("uint16", "uint32", "int32"), "data dtype", dtype, "uint16, uint32 or int32")
    require(pad is None or isinstance(pad, int), "data pad", pad, "a token id")
    if not path.is_file():
        raise RequestError(f"data: the token file {str(path)!r} does not exist; accepted is a .bin or .npy file")
    tokens = np.load(path, mmap_mode="r", allow_pickle=False) if path.suffix == ".npy" else np.memmap(path, dtype, "r")
    if tokens.ndim != 1 or len(tokens) <= length or not np.issubdtype(tokens.dtype, np.integer):
        given = f"{tokens.dtype} tokens of shape {tokens.shape}"
        raise RequestError(f"data: {path} holds {given}; accepted is one row of more than {length} integers")
    return tokens, pad if isinstance(pad, int) else None


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One rank's share of one global batch: micro batches of (micro_batch, length + 1) token ids."""

    micro_batches: tuple[Tokens, ...]
    tokens: int
    samples: int
    digest: int
    normaliser: float


@dataclass(frozen=True)
class Partition:
    """Which sequences of each global batch a rank takes; `shuffle` re-orders them inside the batch."""

    rank: int
    world_size: int
    micro_batch: int
    accumulation: int
    shuffle: int = 0

    @classmethod
    def of(cls, spec: RunSpec, rank: int, shuffle: int = 0) -> Partition:
        t = spec.training
        return cls(rank, spec.topology.world_size, t.micro_batch, t.accumulation, shuffle)

    def indices(self, step: int) -> np.ndarray[Any, Any]:
        """Global sequence indices as (accumulation, micro_batch)."""
        share = self.micro_batch * self.accumulation
        batch = np.arange(share * self.world_size)
        if self.shuffle:
            batch = np.random.Generator(np.random.Philox(key=[self.shuffle, step])).permutation(batch)
        mine = batch[self.rank * share : (self.rank + 1) * share]
        return (step * len(batch) + mine).reshape(self.accumulation, self.micro_batch)

    def step_batch(self, corpus: Corpus, step: int) -> StepBatch:
        indices = self.indices(step)
        micro = tuple(np.stack([corpus.sequence(int(i)) for i in row]) for row in indices)
        digest = add_digests(
            digest_tokens(int(i), s)
            for row, batch in zip(indices, micro, strict=True)
            for i, s in zip(row, batch, strict=True)
        )
        labels = [batch[:, 1:] for batch in micro]
        counted = sum(_count(part, corpus.pad) for part in labels)
        return StepBatch(micro, counted, indices.size, digest, self._normaliser(corpus, step, counted))

    def _normaliser(self, corpus: Corpus, step: int, counted: int) -> float:
        """Tokens of the global batch per micro batch: with padding, every rank must divide by the same number."""
        if corpus.pad is None or self.world_size == 1:
            return counted / self.accumulation
        share = self.micro_batch * self.accumulation * self.world_size
        total = sum(_count(corpus.sequence(step * share + i)[1:], corpus.pad) for i in range(share))
        return total / (self.accumulation * self.world_size)


def _count(labels: Tokens, pad: int | None) -> int:
    return labels.size if pad is None else int((labels != pad).sum())


def prefetch(corpus: Corpus, partition: Partition, steps: range, depth: int = 2) -> Iterator[StepBatch]:
    """Batches made in a thread ahead of their use; whatever wait is left, the caller's clock sees."""
    ready: queue.Queue[StepBatch | BaseException] = queue.Queue(depth)

    def fill() -> None:
        try:
            for step in steps:
                ready.put(partition.step_batch(corpus, step))
        except Exception as error:  # handed to the consumer, which raises it
            ready.put(error)

    threading.Thread(target=fill, daemon=True, name="paceline-data").start()
    for _ in steps:
        item = ready.get()
        if isinstance(item, BaseException):
            raise item
        yield item
