"""A training script of the user, unchanged: its steps, data, losses and optimizer are observed from inside."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline import examples
from paceline.contract import Recorder, Seat
from paceline.experiment.plugins import Traits, parse_options
from paceline.experiment.spec import RunSpec
from paceline.workloads.script.options import Options

if TYPE_CHECKING:
    from paceline.experiment.script import Script

TRAITS = Traits(trains=True, certified=True, scripted=True)


def check(spec: RunSpec) -> str | None:
    chosen = parse_options(Options, spec.workload)
    if spec.script is None:
        return "the run has no command; a command of somebody else needs --allow-modules command"
    if spec.script.starts_ranks and spec.topology.nodes > 1:
        return (
            f"{spec.script.command[0]} would start its ranks on one node, not on {spec.topology.nodes}; begin the "
            "command with the script, so that the launcher starts its ranks"
        )
    if chosen.traced and chosen.traced[1] >= spec.warmup.minimum:
        return (
            f"traced steps must belong to the warm-up, of which the first {spec.warmup.minimum} steps are certain; "
            f"step {chosen.traced[1]} may be measured"
        )
    if spec.steps and spec.steps <= spec.warmup.minimum:
        return f"{spec.steps} steps leave none after a warm-up of at least {spec.warmup.minimum}"
    return None


def preflight(spec: RunSpec) -> None:
    """UnsupportedError if the command is one of our examples and could not train here."""
    assert spec.script is not None
    examples.require_runnable(command_of(spec.script, spec), spec.topology.device)


def outline(spec: RunSpec) -> str:
    """One line for `paceline plan`."""
    assert spec.script is not None
    ranks = spec.topology.world_size
    until = f"{spec.steps} steps" if spec.steps else "until it ends"
    return f"{spec.script.title}, {ranks} x {spec.topology.device}, {until}: {' '.join(command_of(spec.script, spec))}"


def command_of(script: Script, spec: RunSpec, directory: str = "files") -> tuple[str, ...]:
    """The words of the command of one run."""
    return script.rendered(run_fields(spec), directory)[0]


def run_fields(spec: RunSpec) -> dict[str, str | int | float | bool | None]:
    """The fields of a run that a command may name."""
    topology = spec.topology
    return {
        "device": topology.device,
        "nodes": topology.nodes,
        "processes": topology.processes_per_node,
        "repeat": spec.repeat,
        "seed": spec.seed,
        "steps": spec.steps,
    }


def run(spec: RunSpec, seat: Seat, recorder: Recorder) -> None:
    """Run the command, or wait for the rank of this node that does, and record what the script's rank left."""
    from paceline.workloads.script.process import observe

    preflight(spec)
    observe(spec, seat, recorder, parse_options(Options, spec.workload), run_fields(spec))
