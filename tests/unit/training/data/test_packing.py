"""Rows of documents: what is learned, where documents meet, and the rule that packs them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest

from paceline.errors import RequestError
from paceline.experiment.choices import Choice
from paceline.training.data.corpus import (
    DOCUMENTS,
    Partition,
    Plain,
    TokenFile,
    check_data,
    is_packed,
    open_corpus,
    open_rows,
)
from paceline.training.data.digests import add_digests
from paceline.training.data.packing import IGNORED_LABEL, Amounts, Document, lay_out, pack, whole
from paceline.training.data.synthetic_instructions import BLOCK_ROWS, Instructions, Lengths, open_instructions

_ = IGNORED_LABEL
PARTITIONS = [(1, 1, 8), (1, 8, 1), (1, 4, 2), (2, 1, 4), (2, 4, 1), (4, 1, 2), (8, 1, 1)]
PACKED = "instructions:mean=12,spread=0.5,packed=true"


def document(tokens: Sequence[int], prompt: int) -> Document:
    return Document(np.array(tokens), np.arange(len(tokens)) >= prompt)


def instructions(text: str = "instructions", length: int = 32, seed: int = 42) -> Instructions:
    return open_instructions(Choice.parse(text), 256, length, seed)


def test_a_row_of_two_documents_by_hand() -> None:
    row = lay_out([document([5, 6, 7, 8], 2), document([9, 10, 11], 1)], 10)
    assert row.array.tolist() == [
        [5, 6, 7, 8, 9, 10, 11, 0, 0, 0],
        [0, 1, 2, 3, 0, 1, 2, 3, 4, 5],
        [_, 7, 8, _, 10, 11, _, _, _, _],
    ]
    assert row.amounts == Amounts(tokens=7, positions=10, label_tokens=4, attended_keys=10 + 6, documents=2)


def test_a_full_row_has_no_padding_and_no_label_for_its_last_token() -> None:
    row = lay_out([document([1, 2, 3], 1)], 3)
    assert row.array.tolist() == [[1, 2, 3], [0, 1, 2], [2, 3, _]]
    assert row.amounts == Amounts(3, 3, 2, 6, 1)


def test_plain_text_learns_every_token_but_padding() -> None:
    row = whole(np.array([3, 4, 5, 0, 0]), pad=0)
    assert row.array.tolist() == [[3, 4, 5, 0], [0, 1, 2, 3], [4, 5, _, _]]
    assert row.amounts == Amounts(tokens=3, positions=4, label_tokens=2, attended_keys=6, documents=1)
    assert whole(np.array([3, 4, 5])).amounts == Amounts(2, 2, 2, 3, 1)


def test_packing_by_hand() -> None:
    """5 begins; 4 fits not into 3; 3 does. Then 4 has waited longest, and 2 is too wide for the one place left."""
    assert list(pack([5, 4, 3, 3, 2], 8, look_ahead=3)) == [(0, 2), (1, 3), (4,)]
    assert list(pack([5, 4, 3, 3, 2], 8, look_ahead=1)) == [(0,), (1, 2), (3, 4)]
    assert list(pack([], 8)) == []


def test_packing_keeps_every_document_once_and_every_row_within_its_length() -> None:
    sizes = np.random.default_rng(0).integers(1, 100, 500).tolist()
    rows = list(pack(sizes, 100))
    assert sorted(itertools.chain.from_iterable(rows)) == list(range(500))
    assert all(sum(sizes[i] for i in row) <= 100 for row in rows)
    assert sum(sizes) / (100 * len(rows)) > 0.9


@pytest.mark.parametrize("text", ["instructions", PACKED, "instructions:length=fixed", "synthetic"])
@pytest.mark.parametrize("partition", PARTITIONS, ids=str)
def test_every_partition_sees_the_same_rows_and_divides_by_the_same_number(
    text: str, partition: tuple[int, int, int]
) -> None:
    world_size, micro_batch, accumulation = partition
    corpus = open_rows(Choice.parse(text), 256, 32, 42)
    one = Partition(0, 1, 8, 1).step_batch(corpus, 3)
    batches = [Partition(r, world_size, micro_batch, accumulation).step_batch(corpus, 3) for r in range(world_size)]
    assert add_digests(b.digest for b in batches) == one.digest
    for amount in ("tokens", "positions", "samples", "label_tokens", "attended_keys"):
        assert sum(getattr(b, amount) for b in batches) == getattr(one, amount), amount
    assert {b.normaliser for b in batches} == {one.learned / (accumulation * world_size)}
    mean = sum(b.learned / b.normaliser for b in batches) / (accumulation * world_size)
    assert mean == pytest.approx(1.0)
    assert {m.shape for b in batches for m in b.micro_batches} == {(micro_batch, 3, 32)}


@pytest.mark.parametrize("part", [0, 1, 2])
def test_the_digest_covers_ids_positions_and_labels(part: int) -> None:
    class Changed(Plain):
        def row(self, index: int):  # type: ignore[no-untyped-def]
            row = super().row(index)
            row.array[part, 1] += 1
            return row

    plain = open_corpus(Choice("synthetic"), 256, 32, 1)
    digests = [Partition(0, 1, 2, 1).step_batch(kind(plain), 0).digest for kind in (Plain, Changed)]
    assert digests[0] != digests[1]


@pytest.mark.parametrize("text", ["instructions:mean=12", PACKED])
def test_label_tokens_are_counted_without_building_the_row(text: str) -> None:
    corpus = instructions(text)
    for index in range(0, 600, 7):
        row = corpus.row(index)
        assert corpus.label_tokens(index) == row.amounts.label_tokens == (row.array[2] != IGNORED_LABEL).sum() > 0


def test_a_row_is_a_function_of_seed_and_index() -> None:
    far = 3 * BLOCK_ROWS + 5
    first, again = instructions(PACKED), instructions(PACKED)
    again.row(0)
    assert (first.row(far).array == again.row(far).array).all()
    assert (first.row(far).array != instructions(PACKED, seed=43).row(far).array).any()
    assert (first.row(far).array != first.row(far + BLOCK_ROWS).array).any()


def test_packed_rows_hold_whole_documents() -> None:
    corpus = instructions(PACKED)
    for index in range(20):
        ids, positions, _labels = corpus.row(index).array
        numbers = corpus._numbers(index)
        starts = np.flatnonzero(positions == 0)
        assert len(starts) == len(numbers)
        for start, number in zip(starts, numbers, strict=True):
            tokens = corpus.document(number).tokens
            assert ids[start : start + len(tokens)].tolist() == tokens.tolist()
    assert max(len(corpus._numbers(index)) for index in range(20)) > 2


def test_lengths_are_distributed_as_stated() -> None:
    corpus = instructions("instructions:mean=180,spread=0.6,prompt_share=0.25", length=100_000)
    sizes = np.array([corpus.size(i) for i in range(4000)])
    assert sizes.mean() == pytest.approx(180, rel=0.04)
    assert np.log(sizes).std() == pytest.approx(0.6, rel=0.05)
    learned = sum(corpus.label_tokens(i) for i in range(4000))
    assert learned / sizes.sum() == pytest.approx(0.75, rel=0.01)


def test_packing_does_not_change_which_lengths_occur() -> None:
    """What a block leaves out is little and not only the long ones."""
    packed = instructions("instructions:packed=true", length=512)
    held = Amounts.total(packed.row(i).amounts for i in range(BLOCK_ROWS))
    plain = np.mean([packed.size(i) for i in range(4000)])
    assert held.tokens / held.documents == pytest.approx(plain, rel=0.06)
    assert held.tokens / held.positions > 0.94


def test_fixed_documents_fill_every_row() -> None:
    for share, learned in ((0, 31), (0.5, 16)):
        row = instructions(f"instructions:length=fixed,prompt_share={share}").row(7)
        assert row.amounts == Amounts(32, 32, learned, 32 * 33 // 2, 1)


def test_instructions_can_be_learned() -> None:
    rows = [instructions(length=128).row(i).array for i in range(50)]
    learned = [(ids[labels != _], labels[labels != _]) for ids, _positions, labels in rows]
    follows = np.concatenate([labels == (ids + 1) % 256 for ids, labels in learned])
    assert 0.9 < follows.mean() < 0.995


@pytest.mark.parametrize(
    "text",
    [
        "instructions:colour=1",
        "instructions:length=uniform",
        "instructions:mean=1",
        "instructions:mean=true",
        "instructions:spread=-1",
        "instructions:prompt_share=1",
        "instructions:packed=yes",
        "instructions:length=fixed,mean=100",
        "internet",
    ],
)
def test_wrong_options_are_one_sentence(text: str, golden: object) -> None:
    with pytest.raises(RequestError) as caught:
        check_data(Choice.parse(text), 32, rows=True)
    assert str(caught.value) == golden
    assert "\n" not in str(caught.value)


def test_training_from_scratch_takes_no_documents(golden: object) -> None:
    with pytest.raises(RequestError) as caught:
        check_data(Choice.parse("instructions"), 32)
    assert str(caught.value) == golden
    assert set(DOCUMENTS) == {"instructions", "jsonl"}


def test_only_documents_can_be_packed() -> None:
    assert is_packed(Choice.parse(PACKED))
    assert not is_packed(Choice.parse("instructions"))
    assert not is_packed(Choice("synthetic"))


def test_a_token_file_with_padding_counts_as_rows() -> None:
    corpus = Plain(TokenFile(np.array([1, 2, 3, 0, 0, 4, 5, 6, 7]), length=4, pad=0))
    assert corpus.label_tokens(0) == corpus.row(0).amounts.label_tokens == 2
    assert corpus.row(1).amounts.tokens == 3


def test_defaults_are_the_documented_ones() -> None:
    assert Lengths.read(Choice("instructions")) == Lengths("lognormal", 180, 0.6, 0.4, False)
