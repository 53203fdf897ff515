"""Node acceptance: every node measured by itself, k times, its results proved, then all pairs of them.

Each process measures its own device: products, copies, and a training of its own on the same seeded batches. Processes
meet at a barrier before every window, so that all are loaded alike, and never inside one: a slow node slows nobody
else's numbers. `_nodes_stages` does the work; here stands what is asked.
"""

from __future__ import annotations

from paceline.contract import Recorder, Seat
from paceline.experiment.plugins import Traits, load, parse_options
from paceline.experiment.spec import RunSpec
from paceline.models.arithmetic import load as load_shape
from paceline.workloads import compute
from paceline.workloads.nodes.plan import Options, alone

TRAITS = Traits(trains=True, tests_nodes=True)


def check(spec: RunSpec) -> str | None:
    chosen = parse_options(Options, spec.workload)
    if load_shape(spec.model).experts:
        return f"the reference decoder has no mixture of experts, which {spec.model} needs"
    if chosen.training == "none":
        return None
    reason: str | None = load("workloads", chosen.training).check(alone(spec))
    return reason


def run(spec: RunSpec, seat: Seat, recorder: Recorder) -> None:
    from paceline.workloads.nodes.stages import Acceptance

    recorder.progress(0, "setup")
    Acceptance(spec, seat, recorder).hold()
    recorder.conclude(compute.evidence(seat, load_shape(spec.model)))
