"""The parameters of the model: names, starting values with how sure they are, and the fitted values with provenance."""

from __future__ import annotations

import functools
import math
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from paceline.prediction.step_time import OFFSETS, Array

PATH = Path(__file__).parent / "parameters.toml"

# name: (starting value, standard deviation of its logarithm or logit, kind, meaning). Starting values are textbook
# constants or rates that were measured for single operations; a shift is added where its trait applies.
PRIORS: Mapping[str, tuple[float, float, str, str]] = {
    "efficiency": (0.78, 0.10, "log", "share of the 16-bit peak that large products reach"),
    "hopper": (1.0, 0.07, "log", "the same on Hopper, relative to its matmul_ratio"),
    "volta": (1.0, 0.15, "log", "the same on Volta, relative to its matmul_ratio"),
    "amd": (1.0, 0.15, "log", "the same on AMD Instinct, relative to its matmul_ratio"),
    "other_gpu": (1.0, 0.15, "log", "the same on GPUs without published training rows (A10, L4, L40S, GeForce, B200)"),
    "megatron": (0.0, 0.10, "shift", "logarithm of compute time added by Megatron-LM and its descendants"),
    "nemo": (0.0, 0.10, "shift", "the same for NeMo and Megatron Core"),
    "peft": (0.3, 0.2, "shift", "the same for plain fine-tuning programs (transformers, PEFT, bitsandbytes)"),
    "peft_launch": (2.0, 0.5, "log", "launch cost of such programs, relative"),
    # From products alone on an H200 (docs/measured/h200-speed): 638 TFLOP/s at a width of 768, 669 at 2048.
    "kappa": (0.35, 0.20, "log", "operand traffic of products through memory, relative"),
    "fp8_gain": (0.60, 0.30, "log", "speed gained by 8-bit products: 1 + gain"),
    "fp8_rowwise": (0.4, 0.5, "log", "the same with a scale per row, relative"),
    "fp8_casts": (0.20, 0.50, "log", "elementwise traffic added by 8-bit casts"),
    "flash": (0.30, 0.25, "log", "share of the peak that fused attention reaches"),
    "flash_hopper": (0.63, 0.25, "log", "the same on Hopper, relative"),
    "flash_engine": (1.85, 0.25, "log", "the same with Transformer Engine, relative"),
    "flash_length": (0.05, 0.08, "shift", "exponent of the sequence length, from 4096"),
    "flash_width": (0.3, 0.2, "shift", "exponent of the head dimension, from 128"),
    "weight_traffic": (1.2, 0.20, "log", "traffic of casting weights and adding up gradients, relative"),
    "maps": (9.0, 0.30, "log", "16-bit transfers per attention score where attention is not fused"),
    "elementwise": (1.0, 0.40, "log", "elementwise traffic, relative"),
    # Counted: one layer of the eager decoder moves twice the bytes, and a logit 36 instead of 16.
    "unfused": (1.8, 0.15, "log", "elementwise traffic of plain PyTorch, relative to fused kernels"),
    # In two compiled models on an H200 these kernels take 1.5 times the least (docs/measured/h200-speed); with fused
    # kernels the rows show 2.4 times.
    "compiled": (
        0.40,
        0.20,
        "logit",
        "share of elementwise traffic that a compiler removes, relative to fused kernels",
    ),
    "compiled_launch": (0.50, 0.50, "logit", "share of the launch cost that a compiler removes"),
    "logit_bytes": (16.0, 0.25, "log", "bytes per logit of softmax and loss"),
    "selective": (0.50, 0.50, "logit", "share of a forward that selective checkpointing repeats"),
    "expand": (1.0, 0.70, "log", "traffic of expanding 4-bit weights, relative"),
    "launch": (0.49e-3, 0.40, "log", "seconds to launch one layer, one pass"),
    "launch_power": (3.0, 0.40, "log", "1 + this: exponent of the norm that joins launch and GPU time"),
    "link": (0.65, 0.10, "log", "share of the links' datasheet bandwidth"),
    "nic": (0.80, 0.20, "log", "share of the network's datasheet bandwidth"),
    "alpha_link": (3.4e-6, 0.50, "log", "seconds per hop inside a node"),
    "alpha_node": (20e-6, 0.70, "log", "seconds per node of a ring"),
    "tp_overlap": (0.42, 0.60, "logit", "share of tensor-parallel traffic that is hidden"),
    "async_tp": (1.0, 0.50, "shift", "logit added by asynchronous tensor parallelism"),
    "cp_overlap": (0.60, 0.60, "logit", "share of context-parallel traffic that is hidden"),
    "pp_overlap": (0.50, 0.60, "logit", "share of pipeline transfers that is hidden"),
    "dp_overlap": (0.64, 0.60, "logit", "share of gradient traffic that is hidden"),
    "late_reduce": (-1.9, 0.70, "shift", "logit added where gradients are reduced after the backward pass"),
    "fsdp_overlap": (0.57, 0.60, "logit", "share of gathered weights that is hidden"),
    # AdamW on fp32 state 28, gradient norm 4, clipping 8, at 0.8 of the memory's bandwidth.
    "optimizer_bytes": (50.0, 0.30, "log", "bytes through memory per parameter and update"),
    "constant": (11e-3, 0.60, "log", "seconds per step that nothing else explains"),
    "jitter": (0.006, 0.60, "log", "slowdown per doubling of the nodes"),
}
# How much installations differ: standard deviation of each offset before anything is measured.
OFFSET_PRIORS: Mapping[str, float] = {
    "level": 0.15,
    "attention": 0.20,
    "memory": 0.20,
    "eight_bit": 0.20,
    "launch": 0.45,
    "link": 0.35,
    "network": 0.35,
    "dp_overlap": 0.9,
    "fsdp_overlap": 0.9,
}


@dataclass(frozen=True)
class Shared:
    """What the model gets wrong in the same way for several setups, as standard deviations of the logarithm.

    setup: between setups that are alike in everything. kind: between all work of one kind. gpus: how many doublings of
    the GPUs make two setups unlike. Before they are fitted these are assumptions.
    """

    setup: float = 0.07
    kind: float = 0.04
    gpus: float = 4.0


@dataclass(frozen=True)
class Fitted:
    """A fit: parameter values as `step_time` takes them, the offsets' prior, the noise, and where it comes from.

    covariance: of the parameters, in the order of PRIORS. noise: sd of the logarithm of a step time that stays
    unexplained. scale: by which number of anchors, the factor that makes intervals cover (conformal). tuned_scale: a
    further factor for fine-tuning programs. shared: by likelihood, over sources that were left out of the fit.
    """

    values: Mapping[str, float]
    covariance: Array
    offset_sd: Mapping[str, float]
    noise: float
    scale: Mapping[int, float]
    tuned_scale: float
    provenance: Mapping[str, Any]
    shared: Shared = field(default_factory=Shared)


def internal(value: float, kind: str) -> float:
    """The value as the model takes it."""
    return math.log(value) if kind == "log" else math.log(value / (1 - value)) if kind == "logit" else value


def external(value: float, kind: str) -> float:
    """The value as people read it."""
    return math.exp(value) if kind == "log" else 1 / (1 + math.exp(-value)) if kind == "logit" else value


def starting_values() -> dict[str, float]:
    return {name: internal(value, kind) for name, (value, _, kind, _) in PRIORS.items()}


@functools.cache
def load() -> Fitted:
    """The fit that Paceline ships."""
    raw = tomllib.loads(PATH.read_text(encoding="utf-8"))
    values = {name: internal(raw["parameters"][name]["value"], PRIORS[name][2]) for name in PRIORS}
    return Fitted(
        values=values,
        covariance=np.array(raw["covariance"]["rows"], dtype=float),
        offset_sd={name: float(raw["offsets"].get(name, OFFSET_PRIORS[name])) for name in OFFSETS},
        noise=float(raw["noise"]["sd"]),
        scale={int(count): float(factor) for count, factor in raw["scale"].items()},
        tuned_scale=float(raw["tuned_scale"]["factor"]),
        provenance=raw["provenance"],
        shared=Shared(**raw["shared"]),
    )


def text(fitted: Fitted) -> str:
    """The fit as the text of parameters.toml."""
    lines = ["# Written by benchmarks/fit_prediction.py: do not edit by hand.", "", "[provenance]"]
    lines += [f"{key} = {_toml(value)}" for key, value in fitted.provenance.items()]
    for position, (name, (start, _, kind, meaning)) in enumerate(PRIORS.items()):
        sd = math.sqrt(float(fitted.covariance[position, position]))
        value = external(fitted.values[name], kind)
        lines += ["", f"[parameters.{name}]", f'meaning = "{meaning}"', f"value = {value:.6g}", f"start = {start:g}"]
        lines += [f"sd = {sd:.4g}  # of its {'value' if kind == 'shift' else kind}"]
    lines += ["", "[offsets]", *(f"{name} = {fitted.offset_sd[name]:.4g}" for name in OFFSETS)]
    lines += ["", "[shared]", *(f"{name} = {value:.4g}" for name, value in asdict(fitted.shared).items())]
    lines += ["", "[noise]", f"sd = {fitted.noise:.4g}"]
    lines += ["", "[scale]", *(f"{count} = {factor:.4g}" for count, factor in fitted.scale.items())]
    lines += ["", "[tuned_scale]", f"factor = {fitted.tuned_scale:.4g}"]
    rows = [", ".join(f"{value:.3e}" for value in row) for row in fitted.covariance]
    lines += ["", "[covariance]", "rows = [", *(f"  [{row}]," for row in rows), "]"]
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    return f'"{value}"' if isinstance(value, str) else f"{value}"
