"""A workload that reads the data of another seed, with the weights of the right one."""

from __future__ import annotations

import paceline.training.data.corpus
from paceline.contract import Recorder, Seat
from paceline.experiment.choices import Choice
from paceline.experiment.spec import RunSpec
from paceline.workloads import pretrain

TRAITS = pretrain.TRAITS


def check(spec: RunSpec) -> str | None:
    return None


def run(spec: RunSpec, seat: Seat, recorder: Recorder) -> None:
    open_corpus = paceline.training.data.corpus.open_corpus

    def open_other(data: Choice, vocab: int, length: int, seed: int) -> paceline.training.data.corpus.Corpus:
        return open_corpus(data, vocab, length, seed + 1)

    paceline.training.data.corpus.open_corpus = open_other
    pretrain.run(spec, seat, recorder)
