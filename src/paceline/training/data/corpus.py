"""Training tokens by global sequence index: step k has the same global batch for every world size and micro batch."""

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
from paceline.experiment.layout import layout_of
from paceline.experiment.spec import RunSpec
from paceline.training.data.digests import add_digests, digest_tokens
from paceline.training.data.jsonl_instructions import check_dialogues, open_dialogues
from paceline.training.data.packing import Amounts, Row, RowCorpus, Tokens, whole
from paceline.training.data.synthetic_instructions import counting_runs, open_instructions

Indices = np.ndarray[Any, Any]
TOKEN_BYTES = 8
# Data made of documents, for fine-tuning only, and how to open it.
DOCUMENTS: dict[str, Callable[[Choice, int, int, int], RowCorpus]] = {
    "instructions": open_instructions,
    "jsonl": open_dialogues,
}


class Corpus(Protocol):
    """Sequences of sequence_length + 1 tokens; tokens equal to `pad` are neither learned nor counted."""

    @property
    def pad(self) -> int | None: ...

    def sequence(self, index: int) -> Tokens: ...


@dataclass(frozen=True)
class Synthetic:
    """Endless `counting_runs`; each sequence depends on the seed and its index only."""

    vocab: int
    length: int
    seed: int
    pad: int | None = None

    def sequence(self, index: int) -> Tokens:
        random = np.random.Generator(np.random.Philox(key=[self.seed, index]))
        return counting_runs(random, self.vocab, self.length + 1)


@dataclass(frozen=True)
class TokenFile:
    """Consecutive windows of the user's token file, which starts again when it ends."""

    tokens: np.ndarray[Any, Any]
    length: int
    pad: int | None = None

    def sequence(self, index: int) -> Tokens:
        windows = (len(self.tokens) - 1) // self.length
        start = (index % windows) * self.length
        return np.asarray(self.tokens[start : start + self.length + 1], dtype=np.int64)


@dataclass(frozen=True)
class Plain:
    """A corpus of plain text as rows for fine-tuning: one document each, every token learned."""

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
    """The data of a run: rows of documents for fine-tuning, plain sequences for pretraining."""
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
    tokens, pad = _file_tokens(data, length)
    low, top = int(tokens.min()), int(tokens.max())
    if low < 0 or top >= vocab:
        raise UnsupportedError(f"{data} has token ids {low} to {top}, but the model's vocabulary has {vocab}")
    return TokenFile(tokens, length, pad)


def open_rows(data: Choice, vocab: int, length: int, seed: int) -> RowCorpus:
    """`instructions:...`, `jsonl:...`, or the data of `open_corpus`, as rows for fine-tuning."""
    if data.name in DOCUMENTS:
        return DOCUMENTS[data.name](data, vocab, length, seed)
    require(data.name in ("synthetic", "file"), "data", str(data), f"{PLAIN}, {ROWS}")
    return Plain(open_corpus(data, vocab, length, seed))


def facts_of(corpus: Corpus | RowCorpus) -> dict[str, Scalar]:
    """Facts about the data for the record that are not in the spec, such as how a user's file was read."""
    return corpus.facts if isinstance(corpus, RowCorpus) else {}


def is_packed(data: Choice) -> bool:
    """Whether several documents may share a row, so that attention must not cross their boundaries."""
    return data.name in DOCUMENTS and data.options.get("packed") is True


def row_bytes(spec: RunSpec) -> int:
    """Bytes of one sequence when copied to the device."""
    length = spec.training.sequence_length
    return TOKEN_BYTES * (3 * length if spec.tuning else length + 1)


def check_data(data: Choice, length: int, *, rows: bool = False) -> None:
    """Reject data that cannot be opened, before anything starts and without reading all tokens."""
    if data.name == "file":
        _file_tokens(data, length)
    elif rows and data.name == "jsonl":
        check_dialogues(data)
    elif rows:
        open_rows(data, 2, length, 0)
    else:
        open_corpus(data, 2, length, 0)


def _file_tokens(data: Choice, length: int) -> tuple[np.ndarray[Any, Any], int | None]:
    options = dict(data.options)
    path = Path(str(options.pop("path", "")))
    dtype, pad = str(options.pop("dtype", "uint16")), options.pop("pad", None)
    require(not options, "data", str(data), "the options path, dtype and pad")
    require(dtype in ("uint16", "uint32", "int32"), "data dtype", dtype, "uint16, uint32 or int32")
    require(pad is None or isinstance(pad, int), "data pad", pad, "a token id")
    if not path.is_file():
        raise RequestError(
            f"data: got the token file {str(path)!r}, which does not exist, expected a .bin or .npy file."
        )
    tokens = np.load(path, mmap_mode="r", allow_pickle=False) if path.suffix == ".npy" else np.memmap(path, dtype, "r")
    if tokens.ndim != 1 or len(tokens) <= length or not np.issubdtype(tokens.dtype, np.integer):
        given = f"{tokens.dtype} tokens of shape {tokens.shape}"
        raise RequestError(f"data: {path} has {given}, expected one dimension of more than {length} integers.")
    return tokens, pad if isinstance(pad, int) else None


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One rank's share of one global batch: micro batches of shape (micro_batch, length + 1), or (micro_batch, 3,
    length) for rows. label_tokens and attended_keys are None for plain text, where every token is learned."""

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
    """Selects a rank's sequences of each global batch; `shuffle` seeds their order inside the batch.

    rank, world_size: of data parallel replicas. leader: the rank that counts these samples, if this one does not.
    """

    rank: int
    world_size: int
    micro_batch: int
    accumulation: int
    shuffle: int = 0
    leader: int | None = None

    @classmethod
    def of(cls, spec: RunSpec, rank: int, shuffle: int = 0) -> Partition:
        """The share of a rank: that of its replica, which all ranks of the replica work on."""
        t, layout = spec.training, layout_of(spec)
        leader, replica = layout.leader(rank), layout.coordinates(rank)["dp"]
        return cls(replica, layout.dp, t.micro_batch, t.accumulation, shuffle, None if leader == rank else leader)

    def indices(self, step: int) -> Indices:
        """Global sequence indices as (accumulation, micro_batch)."""
        share = self.micro_batch * self.accumulation
        batch = np.arange(share * self.world_size)
        if self.shuffle:
            batch = np.random.Generator(np.random.Philox(key=[self.shuffle, step])).permutation(batch)
        mine = batch[self.rank * share : (self.rank + 1) * share]
        return (step * len(batch) + mine).reshape(self.accumulation, self.micro_batch)

    def step_batch(self, corpus: Corpus | RowCorpus, step: int) -> StepBatch:
        """This rank's micro batches of one step.

        The normaliser is the number of learned tokens of the global batch per micro batch. Ranks may have different
        numbers of them, so all ranks divide by the same one.
        """
        indices = self.indices(step)
        share = self.micro_batch * self.accumulation * self.world_size
        global_batch = range(step * share, (step + 1) * share)
        if isinstance(corpus, RowCorpus):
            rows = [[corpus.row(int(i)) for i in line] for line in indices]
            micro = tuple(np.stack([row.array for row in line]) for line in rows)
            amounts = Amounts.total(row.amounts for line in rows for row in line)
            learned = amounts.label_tokens
            if self.world_size > 1:
                learned = sum(corpus.label_tokens(i) for i in global_batch)
            return StepBatch(
                micro_batches=micro,
                tokens=amounts.tokens,
                samples=amounts.documents,
                digest=_digest(indices, micro),
                normaliser=learned / (self.accumulation * self.world_size),
                positions=amounts.positions,
                label_tokens=amounts.label_tokens,
                attended_keys=amounts.attended_keys,
            )
        micro = tuple(np.stack([corpus.sequence(int(i)) for i in line]) for line in indices)
        labels = [batch[:, 1:] for batch in micro]
        counted, positions = sum(_count(part, corpus.pad) for part in labels), sum(part.size for part in labels)
        normaliser = counted / self.accumulation
        if corpus.pad is not None and self.world_size > 1:
            learned = sum(_count(corpus.sequence(i)[1:], corpus.pad) for i in global_batch)
            normaliser = learned / (self.accumulation * self.world_size)
        return StepBatch(micro, counted, indices.size, _digest(indices, micro), normaliser, positions)


def _digest(indices: Indices, micro: Sequence[Tokens]) -> int:
    """Digest of all sequences of a rank's share, including positions and labels of rows."""
    return add_digests(
        digest_tokens(int(i), s)
        for line, batch in zip(indices, micro, strict=True)
        for i, s in zip(line, batch, strict=True)
    )


def _count(labels: Tokens, pad: int | None) -> int:
    return labels.size if pad is None else int((labels != pad).sum())


def prefetch(corpus: Corpus | RowCorpus, partition: Partition, steps: range, depth: int = 2) -> Iterator[StepBatch]:
    """Batches prepared ahead in a thread; the caller times what it still waits for."""
    ready: queue.Queue[StepBatch | BaseException] = queue.Queue(depth)

    def fill() -> None:
        try:
            for step in steps:
                ready.put(partition.step_batch(corpus, step))
        except Exception as error:  # passed to the consumer, which raises it
            ready.put(error)

    threading.Thread(target=fill, daemon=True, name="paceline-data").start()
    for _ in steps:
        item = ready.get()
        if isinstance(item, BaseException):
            raise item
        yield item
