from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.errors import RequestError, UnsupportedError
from paceline.experiment.choices import Choice
from paceline.experiment.spec import RunSpec
from paceline.training.data.corpus import Partition, Synthetic, TokenFile, open_corpus, prefetch
from paceline.training.data.digests import add_digests, digest_tokens

GLOBAL_BATCH = 8
# world size, micro batch, accumulation: eight sequences a step in all of them
PARTITIONS = [(1, 1, 8), (1, 8, 1), (1, 4, 2), (2, 1, 4), (2, 4, 1), (2, 2, 2), (4, 1, 2), (4, 2, 1), (8, 1, 1)]


def ranks(world_size: int, micro_batch: int, accumulation: int, shuffle: int = 0) -> list[Partition]:
    return [Partition(rank, world_size, micro_batch, accumulation, shuffle) for rank in range(world_size)]


@pytest.fixture
def synthetic() -> Synthetic:
    return Synthetic(vocab=256, length=32, seed=42)


@pytest.mark.parametrize("shuffle", [0, 1, 2])
@pytest.mark.parametrize("partition", PARTITIONS, ids=str)
def test_every_partition_sees_the_same_global_batch(
    synthetic: Synthetic, partition: tuple[int, int, int], shuffle: int
) -> None:
    for step in (0, 3):
        wanted = range(step * GLOBAL_BATCH, (step + 1) * GLOBAL_BATCH)
        expected = add_digests(digest_tokens(i, synthetic.sequence(i)) for i in wanted)
        parts = ranks(*partition, shuffle)
        assert sorted(int(i) for p in parts for i in p.indices(step).flat) == list(wanted)
        batches = [p.step_batch(synthetic, step) for p in parts]
        assert add_digests(b.digest for b in batches) == expected
        rows = sorted(row.tobytes() for b in batches for micro in b.micro_batches for row in micro)
        assert rows == sorted(synthetic.sequence(i).tobytes() for i in wanted)
        assert sum(b.tokens for b in batches) == GLOBAL_BATCH * 32
        assert sum(b.samples for b in batches) == GLOBAL_BATCH
        assert {m.shape for b in batches for m in b.micro_batches} == {(partition[1], 33)}
        assert {len(b.micro_batches) for b in batches} == {partition[2]}


def test_steps_do_not_overlap(synthetic: Synthetic) -> None:
    one = Partition(0, 2, 2, 2)
    assert len({int(i) for step in range(10) for i in one.indices(step).flat}) == 10 * 4


def test_a_shuffled_batch_has_another_order(synthetic: Synthetic) -> None:
    orders = [Partition(0, 1, 8, 1, shuffle).indices(0).tolist() for shuffle in (0, 1, 2)]
    assert len({str(order) for order in orders}) == 3


def test_another_sequence_another_digest(synthetic: Synthetic) -> None:
    tokens = synthetic.sequence(3)
    changed = tokens.copy()
    changed[-1] += 1
    assert digest_tokens(3, tokens) != digest_tokens(3, changed)
    assert digest_tokens(3, tokens) != digest_tokens(4, tokens), "the same tokens at another place are other data"


def test_synthetic_tokens_are_a_function_of_seed_and_index() -> None:
    first = Synthetic(256, 32, 42)
    assert first.sequence(5).tolist() == Synthetic(256, 32, 42).sequence(5).tolist()
    assert first.sequence(5).tolist() != first.sequence(6).tolist()
    assert first.sequence(5).tolist() != Synthetic(256, 32, 43).sequence(5).tolist()


@pytest.mark.parametrize("vocab", [16, 256, 50257])
def test_synthetic_tokens_fit_the_vocabulary(vocab: int) -> None:
    tokens = np.concatenate([Synthetic(vocab, 128, 0).sequence(i) for i in range(20)])
    assert tokens.min() >= 0
    assert tokens.max() < vocab


def test_synthetic_tokens_can_be_learned() -> None:
    """Both facts a model may learn: few tokens occur, and most are their predecessor plus one."""
    tokens = np.stack([Synthetic(50257, 512, 1).sequence(i) for i in range(50)])
    counts = np.bincount(tokens.ravel(), minlength=50257)
    share = counts[counts > 0] / counts.sum()
    assert -(share * np.log(share)).sum() < 0.65 * np.log(50257)
    follows = (tokens[:, 1:] == (tokens[:, :-1] + 1) % 512).mean()
    assert 0.9 < follows < 0.99, "predictable, but not wholly"


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    tokens = np.arange(100, dtype=np.uint16)
    tokens.tofile(tmp_path / "short.bin")
    tokens.astype(np.uint32).tofile(tmp_path / "wide.bin")
    np.save(tmp_path / "array.npy", tokens.astype(np.int64))
    np.save(tmp_path / "square.npy", tokens.reshape(10, 10))
    return {path.name: path for path in tmp_path.iterdir()}


@pytest.mark.parametrize(("name", "options"), [("short.bin", {}), ("wide.bin", {"dtype": "uint32"}), ("array.npy", {})])
def test_a_token_file_is_read_in_windows_and_again(files: dict[str, Path], name: str, options: Any) -> None:
    corpus = open_corpus(Choice("file", {"path": str(files[name]), **options}), 256, 10, 0)
    assert corpus.sequence(0).tolist() == list(range(11))
    assert corpus.sequence(1).tolist() == list(range(10, 21)), (
        "the last label of a window is the next one's first token"
    )
    windows = 99 // 10
    assert corpus.sequence(windows - 1).tolist() == list(range(80, 91))
    assert corpus.sequence(windows).tolist() == corpus.sequence(0).tolist()
    assert corpus.sequence(0).dtype == np.int64


def test_wrong_token_files_are_one_sentence(files: dict[str, Path], tmp_path: Path, golden: object) -> None:
    def refuse(kind: type[Exception], words: str, name: str = "short.bin", length: int = 10, **options: Any) -> None:
        with pytest.raises(kind) as caught:
            open_corpus(Choice("file", {"path": str(tmp_path / name), **options}), options.pop("vocab", 256), length, 0)
        assert words in str(caught.value)
        assert "\n" not in str(caught.value)

    refuse(RequestError, "does not exist", "absent.bin")
    refuse(RequestError, "uint16, uint32 or int32", dtype="float32")
    refuse(RequestError, "the options path, dtype and pad", colour=1)
    refuse(RequestError, "a token id", pad="zero")
    refuse(RequestError, "one dimension of more than 100", length=100)
    refuse(RequestError, "one dimension", "square.npy")
    with pytest.raises(UnsupportedError) as caught:
        open_corpus(Choice("file", {"path": str(files["short.bin"])}), 50, 10, 0)
    assert str(caught.value) == golden
    assert "99" in str(caught.value)
    assert "50" in str(caught.value)
    with pytest.raises(RequestError) as caught:
        open_corpus(Choice("internet"), 256, 10, 0)
    assert str(caught.value) == golden
    with pytest.raises(RequestError) as caught:
        open_corpus(Choice("synthetic", {"seed": 1}), 256, 10, 0)
    assert str(caught.value) == golden


PAD = 0


def padded_corpus() -> TokenFile:
    """Windows of ten with more and more padding: window i counts 10 - i labels."""
    rows = [[1 + (j % 9) if j < 10 - i else PAD for j in range(10)] for i in range(8)]
    tokens = np.array([1, *(t for row in rows for t in row)])
    return TokenFile(tokens, length=10, pad=PAD)


@pytest.mark.parametrize("partition", PARTITIONS, ids=str)
def test_padding_is_not_counted_and_normalisers_add_up(partition: tuple[int, int, int]) -> None:
    """Every micro batch divides by the same number, so that the mean over ranks and micro batches is the token mean."""
    corpus = padded_corpus()
    batches = [p.step_batch(corpus, 0) for p in ranks(*partition)]
    counted = sum(10 - i for i in range(8))
    assert sum(b.tokens for b in batches) == counted
    world_size, _, accumulation = partition
    assert {b.normaliser for b in batches} == {counted / (accumulation * world_size)}
    # A loss of 1 per counted token: summed, divided by the normaliser, averaged over micro batches and ranks.
    mean = sum(b.tokens / b.normaliser for b in batches) / (accumulation * world_size)
    assert mean == pytest.approx(1.0)


def test_prefetch_gives_the_batches_in_order_and_hands_errors_over(make_spec: Callable[..., RunSpec]) -> None:
    partition = Partition.of(make_spec("ddp", 2), rank=1)
    corpus = Synthetic(256, 8, 1)
    got = [batch.digest for batch in prefetch(corpus, partition, range(2, 7))]
    assert got == [partition.step_batch(corpus, step).digest for step in range(2, 7)]

    class Broken:
        pad = None

        def sequence(self, index: int) -> Any:
            raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        list(prefetch(Broken(), partition, range(3)))
