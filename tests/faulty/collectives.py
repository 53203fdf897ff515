"""Collectives in which one element arrives wrong on the last rank, or in which that rank dies, as FAULTY_HOW says.

Takes the place of the plugin `collectives` by the entry point of an installed package: see end_to_end/test_fabric.py.
"""

from __future__ import annotations

import dataclasses
import os
import signal
from typing import Any

from paceline.contract import Recorder, Seat
from paceline.experiment.spec import RunSpec
from paceline.workloads import collectives
from paceline.workloads.collectives.operations import OPERATIONS

FAULTY = "reduce_scatter"
TRAITS = collectives.TRAITS
check = collectives.check


def run(spec: RunSpec, seat: Seat, recorder: Recorder) -> None:
    sound = OPERATIONS[FAULTY]
    trouble = {"corrupt": corrupt, "kill": kill}[os.environ["FAULTY_HOW"]]

    def bind(buffers: Any, place: Any, group: Any, async_op: bool) -> Any:
        launch, launches = sound.bind(buffers, place, group, async_op), []

        def troubled() -> Any:
            work = launch()
            launches.append(True)
            if place.rank == place.ranks - 1:
                trouble(buffers, len(launches))
            return work

        return troubled

    OPERATIONS[FAULTY] = dataclasses.replace(sound, bind=bind)
    collectives.run(spec, seat, recorder)


def corrupt(buffers: Any, launches: int) -> None:
    buffers.receive[-1] += 1


def kill(buffers: Any, launches: int) -> None:
    """In the middle of the timed launches of a row: the sweep's own warm-up never launches this often."""
    if launches == 12:
        os.kill(os.getpid(), signal.SIGKILL)
