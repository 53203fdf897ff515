"""The workload nodes in which rank 1 flips one bit of a product and rank 2 dawdles over everything.

Takes the place of the plugin `nodes` by the entry point of an installed package: see end_to_end/test_node_runs.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any
from unittest import mock

from paceline.contract import Recorder, Seat
from paceline.experiment.spec import RunSpec
from paceline.workloads import nodes

CORRUPT, SLOW = 1, 2
ROW, COLUMN, BIT = 3, 5, 20
# Far longer than any kernel of the test takes, so that no load of the machine hides it.
DAWDLE_S = 0.02
TRAITS = nodes.TRAITS
check = nodes.check


def run(spec: RunSpec, seat: Seat, recorder: Recorder) -> None:
    import torch

    from paceline.workloads.compute import kernels
    from paceline.workloads.nodes import proof, stages

    multiply, timed, steps = proof.multiply, kernels.timed, stages.Loop._step

    def corrupted(a: Any, b: Any) -> Any:
        found = multiply(a, b)
        found.view(torch.int32)[ROW, COLUMN] ^= 1 << BIT
        return found

    def dawdling(call: Callable[[], object], *arguments: Any) -> Any:
        return timed(lambda: (call(), time.sleep(DAWDLE_S)), *arguments)

    def late(loop: Any, *arguments: Any) -> None:
        steps(loop, *arguments)
        time.sleep(40 * DAWDLE_S)

    if seat.rank == CORRUPT:
        mock.patch.object(proof, "multiply", corrupted).start()
    if seat.rank == SLOW:
        mock.patch.object(kernels, "timed", dawdling).start()
        mock.patch.object(stages.Loop, "_step", late).start()
    nodes.run(spec, seat, recorder)
