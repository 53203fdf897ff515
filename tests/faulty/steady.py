"""The workload nodes on a steady clock: real processes, products and steps, but every time is a seeded one.

Processes that share busy cores are not equally fast, and a timing is no test's criterion: here only what is made of the
times is tested. Takes the place of the plugin `nodes` as faulty/nodes.py does.
"""

from __future__ import annotations

import dataclasses
import random
from typing import Any

from paceline.contract import Recorder, Seat
from paceline.experiment.spec import RunSpec
from paceline.results.machine_samples import KernelSample
from paceline.results.records import Sample, StepSample
from paceline.workloads import nodes

# Of any kernel and of any step, and how far each strays from it: as nodes of one kind do.
USUAL_S, NOISE = 1e-3, 0.01
TRAITS = nodes.TRAITS
check = nodes.check


class Steady:
    """A recorder in front of another."""

    def __init__(self, recorder: Recorder, rank: int) -> None:
        self.recorder, self.chance = recorder, random.Random(rank)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.recorder, name)

    def add(self, sample: Sample) -> None:
        if isinstance(sample, KernelSample):
            sample = dataclasses.replace(sample, durations_s=tuple(self._time() for _ in sample.durations_s))
        elif isinstance(sample, StepSample):
            sample = dataclasses.replace(sample, duration_s=self._time())
        self.recorder.add(sample)

    def _time(self) -> float:
        return USUAL_S * self.chance.gauss(1.0, NOISE)


def run(spec: RunSpec, seat: Seat, recorder: Recorder) -> None:
    nodes.run(spec, seat, Steady(recorder, seat.rank))
