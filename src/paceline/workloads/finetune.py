"""Fine-tuning a causal language model: full, LoRA or 4-bit QLoRA, under one strategy."""

from __future__ import annotations

from paceline.contract import Recorder, Seat
from paceline.errors import RequestError, require
from paceline.experiment.plugins import Traits, parse_options
from paceline.experiment.spec import RunSpec, Tuning
from paceline.models.arithmetic import load as load_shape
from paceline.models.shape import Shape
from paceline.training.data.corpus import check_data
from paceline.workloads import pretrain

TRAITS = Traits(trains=True, certified=True, fine_tunes=True)


def check(spec: RunSpec) -> str | None:
    parse_options(pretrain.Options, spec.workload)
    require(spec.strategy is not None, "strategy", None, "a strategy; `paceline list strategies` shows them")
    if spec.tuning is None:
        raise RequestError("tuning: None was given; accepted is a method, which an experiment's fields always name")
    check_data(spec.training.data, spec.training.sequence_length, rows=True)
    return _shape_reason(spec, load_shape(spec.model)) or _precision_reason(spec, spec.tuning)


def _shape_reason(spec: RunSpec, shape: Shape) -> str | None:
    """The module calls the layers of Llama and Mistral itself; others are built differently."""
    if shape.experts:
        return f"fine-tuning knows no mixture of experts, which {spec.model} needs"
    if shape.positions != "rope" or shape.norm != "rmsnorm" or not shape.gated:
        return f"fine-tuning knows models of the llama family only, and {spec.model} is of the family {shape.family}"
    return None


def _precision_reason(spec: RunSpec, tuning: Tuning) -> str | None:
    precision = spec.training.precision
    if tuning.has_adapters and precision.reduce != "fp32":
        return f"adapters are fp32 and so are their gradients: reduce_dtype is fp32 with {tuning.method}"
    if not tuning.has_adapters and precision.reduce != precision.compute:
        wanted = precision.compute
        return f"weights that all learn are held in {wanted} and so are their gradients: reduce_dtype is {wanted} too"
    return None


def run(spec: RunSpec, seat: Seat, recorder: Recorder) -> None:
    pretrain.run(spec, seat, recorder)
