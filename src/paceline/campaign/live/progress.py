"""A run under way in words: which one, where it is, and how long the rest may take."""

from __future__ import annotations

from paceline.experiment.factorial import Design
from paceline.experiment.recipe import setting
from paceline.experiment.spec import RunSpec
from paceline.results.campaign_file import Pulse
from paceline.wording import format_duration

GIB = 2**30


def title(spec: RunSpec) -> str:
    """One run in the words of its axes that vary."""
    if spec.serving:
        return f"{spec.workload.name} {spec.serving.scenario} x{spec.topology.world_size} repeat {spec.repeat + 1}"
    if not spec.is_trained:
        return f"{spec.workload.name} x{spec.topology.world_size} repeat {spec.repeat + 1}"
    if spec.traits.measures_memory:
        batch = f"micro batch {spec.training.micro_batch} x {spec.training.sequence_length}"
        return f"{spec.workload.name} of {spec.strategy} {spec.model_text} x{spec.topology.world_size}, {batch}"
    if spec.traits.tests_nodes:
        return f"{spec.workload.name} x{spec.topology.world_size} repeat {spec.repeat + 1}"
    point = f", {_point(spec, spec.design)}" if spec.design else ""
    turn = f"{',' if point else ''} repeat {spec.repeat + 1}"
    if spec.strategy is None:
        return f"reference of {spec.model_text} (global batch {spec.global_batch}{point})"
    return f"{spec.strategy} {spec.model_text} x{spec.topology.world_size}{point}{turn}"


def _point(spec: RunSpec, design: Design) -> str:
    """What a point of a design changes: "rank 8"; nothing is the baseline."""
    now = {name: setting(spec, name) for name in design.baseline}
    changed = [f"{name.replace('_', ' ')} {level}" for name, level in now.items() if level != design.baseline[name]]
    return " and ".join(changed) or "baseline"


def pulse_text(pulse: Pulse) -> str:
    """`step 12 of 40, backward, 12,345 tokens/s, peak 1.20 GiB, loss 5.123`, or what the workload says itself (`412 of
    662 needed, 1 late`); what is not known is not said."""
    step = f"step {min(pulse.step + 1, pulse.steps)} of {pulse.steps}" if pulse.steps else None
    rate = pulse.tokens_per_s
    found = (
        step,
        pulse.note or pulse.phase,
        None if rate is None else f"{rate:,.0f} tokens/s",
        None if pulse.peak_bytes is None else f"peak {pulse.peak_bytes / GIB:.2f} GiB",
        None if pulse.loss is None else f"loss {pulse.loss:.3f}",
    )
    return ", ".join(filter(None, found))


def left_text(left_s: float | None) -> str:
    """Two digits at most: what is expected is not known to the second."""
    return "time left not known yet" if left_s is None else f"about {format_duration(_coarse(left_s))} left"


def _coarse(seconds: float) -> float:
    for grain, limit in ((1.0, 20.0), (5.0, 120.0), (60.0, 7200.0)):
        if seconds < limit:
            return round(seconds / grain) * grain
    return round(seconds / 600) * 600
