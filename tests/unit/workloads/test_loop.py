"""The timed loop with a device that lags behind its host: what is recorded is the device's time, whole and in order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402

from paceline.contract import Seat  # noqa: E402
from paceline.errors import InvalidRunError, RequestError  # noqa: E402
from paceline.experiment.choices import Choice  # noqa: E402
from paceline.results.records import StepSample  # noqa: E402
from paceline.training.data.corpus import Partition, Synthetic, TokenFile  # noqa: E402
from paceline.training.data.packing import IGNORED_LABEL, Amounts  # noqa: E402
from paceline.training.data.synthetic_instructions import open_instructions  # noqa: E402
from paceline.workloads import _loop  # noqa: E402
from paceline.workloads._loop import Loop  # noqa: E402

SEAT = Seat(rank=0, local_rank=0, world_size=1, device="cpu")


class Mark:
    """A point in the queue of a lagging device."""

    def __init__(self, device: Device, at_s: float) -> None:
        self.device, self.at_s = device, at_s

    def synchronize(self) -> None:
        self.device.waits += 1
        self.device.done_s = max(self.device.done_s, self.at_s)


class Device:
    """A clock and the device it belongs to: calls only queue work, which is done when somebody waits for it."""

    def __init__(self) -> None:
        self.queued_s = self.done_s = 0.0
        self.waits = self.drains = 0

    def mark(self) -> Mark:
        return Mark(self, self.queued_s)

    def elapsed_s(self, begin: Mark, end: Mark) -> float:
        assert self.passed(end), "a mark was read before the device had passed it"
        return end.at_s - begin.at_s

    def passed(self, mark: Mark) -> bool:
        return mark.at_s <= self.done_s

    def drain(self) -> None:
        self.drains += 1
        self.done_s = self.queued_s


SECONDS = {"forward": 1.0, "backward": 2.0, "update": 4.0}


class Queueing:
    """A trainer whose every call returns at once and leaves known seconds of work behind."""

    def __init__(self, device: Device, loss: float = 3.0) -> None:
        self.device, self.loss, self.updates, self.last = device, loss, 0, []

    def forward(self, tokens: Any, labels: Any, normaliser: Any, last: bool) -> Any:
        self.device.queued_s += SECONDS["forward"]
        self.last.append(last)
        return torch.tensor(self.loss)

    def backward(self, loss: Any, last: bool) -> None:
        self.device.queued_s += SECONDS["backward"]

    def update(self) -> Any:
        self.device.queued_s += SECONDS["update"]
        self.updates += 1
        return torch.tensor(0.5)


class Notes:
    """A recorder that remembers."""

    def __init__(self) -> None:
        self.samples: list[StepSample] = []
        self.marks: list[tuple[int, str]] = []

    def add(self, sample: Any) -> None:
        self.samples.append(sample)

    def progress(self, step: int, phase: str) -> None:
        self.marks.append((step, phase))

    def conclude(self, evidence: Any) -> None: ...


@pytest.fixture(scope="module", autouse=True)
def _group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store = tmp_path_factory.mktemp("group") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def loop_of(steps: int, accumulation: int = 2, loss: float = 3.0) -> tuple[Loop, Device, Notes]:
    device, notes = Device(), Notes()
    trainer: Any = Queueing(device, loss)
    corpus, partition = Synthetic(64, 8, 1), Partition(0, 1, 1, accumulation)
    return Loop(trainer, corpus, partition, SEAT, device, notes, steps), device, notes  # type: ignore[arg-type]


def test_work_queued_behind_the_host_is_inside_the_clock() -> None:
    """Method, section 6 (4): every call has returned long before its work is done, and all of it is counted."""
    loop, device, notes = loop_of(steps=5)
    loop.window(range(5))
    assert [s.step for s in notes.samples] == [0, 1, 2, 3, 4]
    for sample in notes.samples:
        assert sample.forward_s == 2 * 1.0
        assert sample.backward_s == 2 * 2.0
        assert sample.optimizer_s == 4.0, "the optimizer is inside the clock"
        assert sample.duration_s == 2 * 1.0 + 2 * 2.0 + 4.0
        assert sample.h2d_s is None
    assert sum(s.duration_s for s in notes.samples) == device.queued_s, "nothing falls between two steps"


def test_no_step_waits_for_the_device_inside_the_window() -> None:
    loop, device, notes = loop_of(steps=_loop.STEPS_AHEAD)
    loop.window(range(_loop.STEPS_AHEAD))
    assert device.waits == 0
    assert device.drains == 2, "once before the window, once after it"
    assert len(notes.samples) == _loop.STEPS_AHEAD


def test_the_host_runs_a_bounded_number_of_steps_ahead() -> None:
    loop, device, notes = loop_of(steps=3 * _loop.STEPS_AHEAD)
    longest = 0
    record_finished = loop._record_finished

    def watched(*arguments: Any) -> None:
        nonlocal longest
        record_finished(*arguments)
        longest = max(longest, len(loop.pending))

    loop._record_finished = watched  # type: ignore[method-assign]
    loop.window(range(3 * _loop.STEPS_AHEAD))
    assert longest <= _loop.STEPS_AHEAD
    assert device.waits > 0
    assert [s.step for s in notes.samples] == list(range(3 * _loop.STEPS_AHEAD))


@pytest.mark.parametrize("accumulation", [1, 4])
def test_samples_count_what_was_done(accumulation: int) -> None:
    loop, _, notes = loop_of(steps=3, accumulation=accumulation)
    loop.window(range(3))
    for sample in notes.samples:
        assert (sample.micro_batches, sample.samples, sample.updates) == (accumulation, accumulation, 1)
        assert sample.tokens == accumulation * 8
        assert sample.loss == pytest.approx(3.0), "the mean over micro batches of equal length"
        assert sample.grad_norm == 0.5
    assert loop.trainer.last == ([False] * (accumulation - 1) + [True]) * 3  # type: ignore[attr-defined]
    phases = [phase for step, phase in notes.marks if step == 1]
    assert phases == ["data", *["forward", "backward"] * accumulation, "optimizer"]


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_a_loss_that_is_no_number_ends_the_run_after_it_was_recorded(loss: float, golden: object) -> None:
    loop, _, notes = loop_of(steps=3, loss=loss)
    with pytest.raises(InvalidRunError) as caught:
        loop.window(range(3))
    assert str(caught.value) == golden
    assert len(notes.samples) == 1


def test_watched_steps_are_not_recorded() -> None:
    loop, _, notes = loop_of(steps=2)
    loop.window(range(2))
    loop.unrecorded(range(2, 4))
    assert len(notes.samples) == 2
    assert not loop.pending


class Learning(Queueing):
    """Its loss is 2 for every learned label, whatever the row holds beside them."""

    def __init__(self, device: Device) -> None:
        super().__init__(device)
        self.shapes: set[tuple[tuple[int, ...], tuple[int, ...]]] = set()

    def forward(self, tokens: Any, labels: Any, normaliser: Any, last: bool) -> Any:
        super().forward(tokens, labels, normaliser, last)
        self.shapes.add((tuple(tokens.shape), tuple(labels.shape)))
        return 2.0 * (labels != IGNORED_LABEL).sum() / normaliser


def test_rows_of_documents_are_handed_over_and_counted_by_what_they_hold() -> None:
    corpus = open_instructions(Choice.parse("instructions:mean=10,packed=true"), 64, 16, 1)
    device, notes = Device(), Notes()
    trainer: Any = Learning(device)
    loop = Loop(trainer, corpus, Partition(0, 1, 2, 3), SEAT, device, notes, 4)  # type: ignore[arg-type]
    loop.window(range(4))
    assert trainer.shapes == {((2, 2, 16), (2, 16))}
    assert len({s.label_tokens for s in notes.samples}) > 1, "steps learn different numbers of tokens"
    for sample in notes.samples:
        held = Amounts.total(corpus.row(6 * sample.step + i).amounts for i in range(6))
        assert sample.loss == pytest.approx(2.0), "the mean over learned tokens"
        assert (sample.tokens, sample.positions, sample.samples) == (held.tokens, 6 * 16, held.documents)
        assert (sample.label_tokens, sample.attended_keys) == (held.label_tokens, held.attended_keys)


def test_plain_text_counts_positions_but_no_labels() -> None:
    loop, _, notes = loop_of(steps=2)
    loop.window(range(2))
    assert {(s.positions, s.label_tokens, s.attended_keys) for s in notes.samples} == {(2 * 8, None, None)}


PADDED = TokenFile(np.array([1, 2, 3, 4, 0, 0, 0, 5, 6, 7, 0, 0, 0]), length=3, pad=0)


def test_a_share_of_padding_has_no_loss_and_no_weight() -> None:
    """Of every second window each token is padding, and the second of two ranks takes those."""
    losses, tokens = [], []
    for rank in (0, 1):
        device, notes = Device(), Notes()
        trainer: Any = Learning(device)
        loop = Loop(trainer, PADDED, Partition(rank, 2, 1, 1), SEAT, device, notes, 2)  # type: ignore[arg-type]
        loop.window(range(2))
        losses.append([s.loss for s in notes.samples])
        tokens.append([s.tokens for s in notes.samples])
    assert tokens == [[3, 3], [0, 0]]
    assert losses == [[2.0, 2.0], [0.0, 0.0]]
    # The mean over trained tokens.
    assert np.average(losses, axis=0, weights=tokens).tolist() == [2.0, 2.0]


def test_a_step_of_padding_alone_is_refused_in_one_sentence(golden: object) -> None:
    device, notes = Device(), Notes()
    trainer: Any = Learning(device)
    loop = Loop(trainer, PADDED, Partition(0, 1, 1, 1), SEAT, device, notes, 4)  # type: ignore[arg-type]
    with pytest.raises(RequestError) as caught:
        loop.window(range(4))
    assert str(caught.value) == golden
