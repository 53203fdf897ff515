"""A running run as text: which one, its position, and the remaining time."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.analysis.findings.cell_axes import describe, distinguishing_axes
from paceline.experiment.recipe import setting
from paceline.experiment.spec import RunSpec
from paceline.results.campaign_file import Pulse
from paceline.wording import format_duration

GIB = 2**30


def title(spec: RunSpec) -> str:
    """A short name of a run, from the settings that usually vary."""
    if spec.serving:
        return f"{spec.workload.name} {spec.serving.scenario} x{spec.topology.world_size} repeat {spec.repeat + 1}"
    if spec.script:
        values = [f"{name} {value}" for name, value in spec.script.parameters.items()]
        ranks = f"x{spec.topology.world_size} repeat {spec.repeat + 1}"
        return " ".join([", ".join([spec.script.title, *values]), ranks])
    if not spec.is_trained:
        return f"{spec.workload.name} x{spec.topology.world_size} repeat {spec.repeat + 1}"
    if spec.traits.measures_memory:
        batch = f"micro batch {spec.training.micro_batch} x {spec.training.sequence_length}"
        return f"{spec.workload.name} of {spec.strategy} {spec.model_text} x{spec.topology.world_size}, {batch}"
    if spec.traits.tests_nodes:
        return f"{spec.workload.name} x{spec.topology.world_size} repeat {spec.repeat + 1}"
    point = ""
    if spec.design:
        # What this point changes, such as "rank 8".
        baseline = spec.design.baseline
        levels = {name: setting(spec, name) for name in baseline}
        changed = [f"{name.replace('_', ' ')} {level}" for name, level in levels.items() if level != baseline[name]]
        point = f", {' and '.join(changed) or 'baseline'}"
    turn = f"{',' if point else ''} repeat {spec.repeat + 1}"
    if spec.strategy is None:
        kind = "more re-seeded references" if spec.workload.options.get("first") else "reference"
        proof = f" on {spec.reduction.text}" if spec.reduction else ""
        return f"{kind}{proof} of {spec.model_text} (global batch {spec.global_batch}{point})"
    if spec.reduction:
        return f"proof of {spec.strategy} {spec.model_text} x{spec.topology.world_size} on {spec.reduction.text}"
    return f"{spec.strategy} {spec.model_text} x{spec.topology.world_size}{point}{turn}"


class Titles:
    """Names of the runs of one campaign, by the axes in which its cells differ.

    Runs of a design and of a script name their factors. If nothing differs, a run has the name of `title`.
    """

    def __init__(self, specs: Sequence[RunSpec]) -> None:
        cells = {spec.cell: spec.axes() for spec in specs if not _is_reference(spec) and not spec.reduction}
        axes = list(cells.values())
        named = distinguishing_axes(axes) if len(axes) > 1 else ()
        self.varying = [name for name in named if len({repr(each.get(name)) for each in axes}) > 1]
        self.differ = len(axes) > 1
        self.repeats = max((spec.repeat for spec in specs), default=0) + 1

    def __call__(self, spec: RunSpec) -> str:
        if not self.differ or _is_reference(spec) or spec.design or spec.script or spec.reduction:
            return title(spec)
        turn = f", repeat {spec.repeat + 1} of {max(self.repeats, spec.repeat + 1)}" if self.repeats > 1 else ""
        return f"{describe(spec.axes(), self.varying)}{turn}"


def _is_reference(spec: RunSpec) -> bool:
    return spec.is_trained and spec.strategy is None and spec.script is None


def pulse_text(pulse: Pulse) -> str:
    """`step 12 of 40, backward, 12,345 tokens/s, peak 1.20 GiB, loss 5.123, trust green`, or a note of the workload
    (`412 of 662 needed, 1 late`); unknown values are left out."""
    step = f"step {min(pulse.step + 1, pulse.steps)} of {pulse.steps}" if pulse.steps else None
    step = f"step {pulse.step + 1}" if pulse.spec.script and not pulse.steps else step
    rate = pulse.tokens_per_s
    parts = (
        step,
        pulse.note or pulse.phase,
        None if rate is None else f"{rate:,.0f} tokens/s",
        None if pulse.peak_bytes is None else f"peak {pulse.peak_bytes / GIB:.2f} GiB",
        None if pulse.loss is None else f"loss {pulse.loss:.3f}",
        None if pulse.trust is None else pulse.trust.brief,
    )
    return ", ".join(filter(None, parts))


def left_text(left_s: float | None) -> str:
    """The remaining time, rounded: the forecast is not accurate to the second."""
    if left_s is None:
        return "time left unknown"
    if left_s < 1:
        return "less than 1 s left"
    grain = next((grain for grain, limit in ((1.0, 20.0), (5.0, 120.0), (60.0, 7200.0)) if left_s < limit), 600.0)
    return f"about {format_duration(round(left_s / grain) * grain).removesuffix(' 00 s')} left"


def spent_text(usd: float | None) -> str:
    """`, 1.24 USD so far`; empty without a price."""
    return "" if usd is None else f", {usd:.2f} USD so far"
