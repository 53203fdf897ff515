"""Pretraining with a mistake in the data that begins late: `other_data:mistake=another_seed`."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import adversary.planted
from paceline.contract import Recorder, Seat
from paceline.experiment.choices import Choice
from paceline.experiment.plugins import parse_options
from paceline.experiment.spec import RunSpec
from paceline.training.data import corpus
from paceline.workloads import pretrain

TRAITS = pretrain.TRAITS


@dataclass(frozen=True)
class Options:
    mistake: str = ""


def check(spec: RunSpec) -> str | None:
    return None


def run(spec: RunSpec, seat: Seat, recorder: Recorder) -> None:
    mistake = parse_options(Options, spec.workload).mistake
    plain = dataclasses.replace(spec, workload=Choice("pretrain"))
    with MISTAKES[mistake]():
        pretrain.run(plain, seat, recorder)


@contextlib.contextmanager
def _batches(change) -> Iterator[None]:  # type: ignore[no-untyped-def]
    real = corpus.Partition.step_batch

    def step_batch(self: corpus.Partition, source: corpus.Corpus, step: int) -> corpus.StepBatch:
        if step < adversary.planted.LATE:
            return real(self, source, step)
        return change(real, self, source, step)  # type: ignore[no-any-return]

    corpus.Partition.step_batch = step_batch  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        corpus.Partition.step_batch = real  # type: ignore[method-assign]


def another_seed():  # type: ignore[no-untyped-def]
    return _batches(lambda real, self, source, step: real(self, dataclasses.replace(source, seed=7), step))


def another_order():  # type: ignore[no-untyped-def]
    """The global batches in another order."""
    return _batches(lambda real, self, source, step: real(self, source, step + 1 if step % 2 else step - 1))


def one_share_for_all_ranks():  # type: ignore[no-untyped-def]
    return _batches(lambda real, self, source, step: real(dataclasses.replace(self, rank=0), source, step))


MISTAKES = {m.__name__: m for m in (another_seed, another_order, one_share_for_all_ranks)}
