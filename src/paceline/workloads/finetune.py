"""Fine-tuning of a causal language model, full, LoRA or 4-bit QLoRA, under one strategy."""

from __future__ import annotations

from paceline.contract import Recorder, Seat
from paceline.errors import RequestError, require
from paceline.experiment.plugins import Traits, parse_options
from paceline.experiment.spec import RunSpec, Tuning
from paceline.models.arithmetic import load as load_shape
from paceline.training.data.corpus import check_data
from paceline.workloads import pretrain

TRAITS = Traits(trains=True, certified=True, fine_tunes=True)


def check(spec: RunSpec) -> str | None:
    parse_options(pretrain.Options, spec.workload)
    require(spec.strategy is not None, "strategy", None, "a strategy; `paceline list strategies` shows them")
    tuning, precision, shape = spec.tuning, spec.training.precision, load_shape(spec.model)
    if tuning is None:
        raise RequestError("tuning: got None, expected a method. An experiment file always sets one.")
    check_data(spec.training.data, spec.training.sequence_length, rows=True)
    # The module calls the layers of Llama and Mistral itself; other families have different layers.
    if shape.experts and (reason := _unsupported_mixture(spec, tuning)):
        return reason
    if shape.positions != "rope" or shape.norm != "rmsnorm" or not shape.gated:
        return f"fine-tuning supports the llama family only, and {spec.model} belongs to the family {shape.family}"
    if tuning.has_adapters and precision.reduce != "fp32":
        return f"adapters and their gradients are fp32: reduce_dtype must be fp32 with {tuning.method}"
    if not tuning.has_adapters and precision.reduce != precision.base:
        dtype = precision.base
        return f"full fine-tuning keeps weights and gradients in {dtype}: reduce_dtype must be {dtype} too"
    wanted = spec.training.compilation
    if wanted is not None and wanted.scope == "model":
        return "fine-tuning compiles each layer of the model; compile with scope=model is not supported"
    return pretrain.why_no_precision(spec)


def _unsupported_mixture(spec: RunSpec, tuning: Tuning) -> str | None:
    inside = [target for target in tuning.targets.split("+") if target in ("gate", "up", "down")]
    if tuning.has_adapters and inside:
        return f"experts have no adapters: got the targets {tuning.targets}, expected some of q+k+v+o for {spec.model}"
    if spec.training.compile:
        return (
            f"fine-tuning of mixtures is not compiled, for torch would not recompute their experts: {spec.model} is one"
        )
    return None


def run(spec: RunSpec, seat: Seat, recorder: Recorder) -> None:
    pretrain.run(spec, seat, recorder)
