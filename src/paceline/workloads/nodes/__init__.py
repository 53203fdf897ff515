"""Node acceptance test: measures every node alone, several times, verifies its results, then tests all pairs.

Each process measures its own device: matrix products, copies, and its own training on the same seeded batches. There is
a barrier before every window, so that all nodes are loaded alike, and none inside: a slow node does not affect the
numbers of others. `stages` does the work.
"""

from __future__ import annotations

from paceline.contract import Recorder, Seat
from paceline.errors import require
from paceline.experiment.plugins import Traits, load, parse_options
from paceline.experiment.spec import RunSpec
from paceline.models.arithmetic import load as load_shape
from paceline.workloads import compute
from paceline.workloads.nodes.plan import Options, alone

TRAITS = Traits(trains=True, tests_nodes=True)


def check(spec: RunSpec) -> str | None:
    chosen, precision = parse_options(Options, spec.workload), spec.training.precision
    require(precision.compute == precision.base, "precision", precision.compute, "fp32, bf16 or fp16 for nodes")
    if load_shape(spec.model).experts:
        return f"{spec.model} is a mixture of experts, whose matrix products have no fixed shape to compare nodes by"
    if chosen.training == "none":
        return None
    reason: str | None = load("workloads", chosen.training).check(alone(spec))
    return reason


def run(spec: RunSpec, seat: Seat, recorder: Recorder) -> None:
    from paceline.workloads.nodes.stages import Acceptance

    recorder.progress(0, "setup")
    Acceptance(spec, seat, recorder).run()
    recorder.conclude(compute.evidence(seat, load_shape(spec.model)))
