"""Training tokens by global sequence index: every world size and micro batch sees the same global batch at step k."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from paceline.errors import RequestError, Scalar, UnsupportedError, require
from paceline.experiment.choices import Choice
from paceline.experiment.spec import RunSpec
from paceline.training.data.digests import add_digests, digest_tokens
from paceline.training.data.jsonl_instructions import check_dialogues, open_dialogues
from paceline.training.data.packing import Amounts, Row, RowCorpus, Tokens, whole
from paceline.training.data.synthetic_instructions import counting_runs, open_instructions

Indices = np.ndarray[Any, Any]
TOKEN_BYTES = 8
# Data made of documents, each with its opener: rows for fine-tuning only.
DOCUMENTS: dict[str, Callable[[Choice, int, int, int], RowCorpus]] = {
    "instructions": open_instructions,
    "jsonl": open_dialogues,
}


class Corpus(Protocol):
    """Sequences of sequence_length + 1 tokens; `pad` marks tokens that are neither learned nor counted."""

    @property
    def pad(self) -> int | None: ...

    def sequence(self, index: int) -> Tokens: ...


@dataclass(frozen=True)
class Synthetic:
    """Endless `counting_runs`, each sequence a function of the seed and its index."""

    vocab: int
    length: int
    seed: int
    pad: int | None = None

    def sequence(self, index: int) -> Tokens:
        random = np.random.Generator(np.random.Philox(key=[self.seed, index]))
        return counting_runs(random, self.vocab, self.length + 1)


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


@dataclass(frozen=True)
class Plain:
    """A corpus of plain text as rows of one document each, in which every token is learned."""

    corpus: Corpus

    def row(self, index: int) -> Row:
        return whole(self.corpus.sequence(index), self.corpus.pad)

    def label_tokens(self, index: int) -> int:
        return _count(self.corpus.sequence(index)[1:], self.corpus.pad)

    @property
    def facts(self) -> dict[str, Scalar]:
        return {}


PLAIN = "synthetic or file:path=FILE[,dtype=uint16|uint32|int32][,pad=ID]"
ROWS = "instructions[:length=...,packed=true], jsonl:path=FILE[,tokenizer=DIR][,packed=true]"


def open_data(spec: RunSpec, vocab: int) -> Corpus | RowCorpus:
    """What a run reads: rows of documents where it fine-tunes, plain sequences where it trains from scratch."""
    training = spec.training
    opener = open_rows if spec.tuning else open_corpus
    return opener(training.data, vocab, training.sequence_length, spec.seed)


def open_corpus(data: Choice, vocab: int, length: int, seed: int) -> Corpus:
    """`synthetic`, or `file:path=tokens.bin,dtype=uint16,pad=0` (.npy carries its own dtype)."""
    if data.name == "synthetic":
        require(not data.options, "data", str(data), "synthetic without options")
        return Synthetic(vocab, length, seed)
    documents = f"; {data.name} is for fine-tuning" if data.name in DOCUMENTS else ""
    require(data.name == "file", "data", str(data), PLAIN + documents)
    return _open_file(data, vocab, length)


def open_rows(data: Choice, vocab: int, length: int, seed: int) -> RowCorpus:
    """`instructions:...`, `jsonl:...`, or what `open_corpus` opens, as rows for fine-tuning."""
    if data.name in DOCUMENTS:
        return DOCUMENTS[data.name](data, vocab, length, seed)
    require(data.name in ("synthetic", "file"), "data", str(data), f"{PLAIN}, {ROWS}")
    return Plain(open_corpus(data, vocab, length, seed))


def facts_of(corpus: Corpus | RowCorpus) -> dict[str, Scalar]:
    """What the record should say about the data that the spec does not: of a user's file, how it was read."""
    return corpus.facts if isinstance(corpus, RowCorpus) else {}


def is_packed(data: Choice) -> bool:
    """Whether several documents may share a row, so that attention must stop where they meet."""
    return data.name in DOCUMENTS and data.options.get("packed") is True


def row_bytes(spec: RunSpec) -> int:
    """Bytes of one sequence as it is copied to the device."""
    length = spec.training.sequence_length
    return TOKEN_BYTES * (3 * length if spec.tuning else length + 1)


def check_data(data: Choice, length: int, *, rows: bool = False) -> None:
    """Refuse data that cannot be opened, before anything starts and without reading the tokens."""
    if data.name == "file":
        _file_tokens(data, length)
    elif rows and data.name == "jsonl":
        check_dialogues(data)
    elif rows:
        open_rows(data, 2, length, 0)
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
    """One rank's share of one global batch: micro batches of (micro_batch, length + 1) token ids, or of rows
    (micro_batch, 3, length). label_tokens and attended_keys are None where every token is learned in plain text."""

    micro_batches: tuple[Tokens, ...]
    tokens: int
    samples: int
    digest: int
    normaliser: float
    positions: int
    label_tokens: int | None = None
    attended_keys: int | None = None

    @property
    def learned(self) -> int:
        return self.tokens if self.label_tokens is None else self.label_tokens


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

    def indices(self, step: int) -> Indices:
        """Global sequence indices as (accumulation, micro_batch)."""
        share = self.micro_batch * self.accumulation
        batch = np.arange(share * self.world_size)
        if self.shuffle:
            batch = np.random.Generator(np.random.Philox(key=[self.shuffle, step])).permutation(batch)
        mine = batch[self.rank * share : (self.rank + 1) * share]
        return (step * len(batch) + mine).reshape(self.accumulation, self.micro_batch)

    def step_batch(self, corpus: Corpus | RowCorpus, step: int) -> StepBatch:
        indices = self.indices(step)
        if isinstance(corpus, RowCorpus):
            return self._row_batch(corpus, step, indices)
        micro = tuple(np.stack([corpus.sequence(int(i)) for i in row]) for row in indices)
        labels = [batch[:, 1:] for batch in micro]
        counted, places = sum(_count(part, corpus.pad) for part in labels), sum(part.size for part in labels)
        normaliser = self._normaliser(corpus, step, counted)
        return StepBatch(micro, counted, indices.size, _digest(indices, micro), normaliser, places)

    def _row_batch(self, corpus: RowCorpus, step: int, indices: Indices) -> StepBatch:
        rows = [[corpus.row(int(i)) for i in line] for line in indices]
        micro = tuple(np.stack([row.places for row in line]) for line in rows)
        held = Amounts.total(row.amounts for line in rows for row in line)
        return StepBatch(
            micro_batches=micro,
            tokens=held.tokens,
            samples=held.documents,
            digest=_digest(indices, micro),
            normaliser=self._learned(corpus, step, held.label_tokens),
            positions=held.positions,
            label_tokens=held.label_tokens,
            attended_keys=held.attended_keys,
        )

    def _normaliser(self, corpus: Corpus, step: int, counted: int) -> float:
        """Tokens of the global batch per micro batch: with padding, every rank must divide by the same number."""
        if corpus.pad is None or self.world_size == 1:
            return counted / self.accumulation
        total = sum(_count(corpus.sequence(i)[1:], corpus.pad) for i in self._global(step))
        return total / (self.accumulation * self.world_size)

    def _learned(self, corpus: RowCorpus, step: int, own: int) -> float:
        """Learned tokens of the global batch per micro batch; ranks hold different numbers of them."""
        total = own if self.world_size == 1 else sum(corpus.label_tokens(i) for i in self._global(step))
        return total / (self.accumulation * self.world_size)

    def _global(self, step: int) -> range:
        share = self.micro_batch * self.accumulation * self.world_size
        return range(step * share, (step + 1) * share)


def _digest(indices: Indices, micro: Sequence[Tokens]) -> int:
    """Over everything a sequence holds: of rows, positions and labels too."""
    return add_digests(
        digest_tokens(int(i), s)
        for line, batch in zip(indices, micro, strict=True)
        for i, s in zip(line, batch, strict=True)
    )


def _count(labels: Tokens, pad: int | None) -> int:
    return labels.size if pad is None else int((labels != pad).sum())


def prefetch(corpus: Corpus | RowCorpus, partition: Partition, steps: range, depth: int = 2) -> Iterator[StepBatch]:
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
