"""Serving before anything runs: TTFT, TPOT and tokens/s of a model on GPUs, from memory and compute limits.

Prefill computes: FLOPs at a share of the peak. A decode step reads: weights and the cache of every sequence at a share
of the memory bandwidth, plus tensor-parallel reductions and a fixed cost of the engine. The largest batch is what the
cache leaves room for. Four parameters are fitted to published rows (`benchmarks/fit_serving.py`); anchors scale the
result.
"""

from __future__ import annotations

import functools
import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from paceline.errors import require
from paceline.models import arithmetic
from paceline.models.shape import Shape
from paceline.prediction.hardware import Accelerator
from paceline.prediction.step_time import Array

PATH = Path(__file__).parent / "serving.toml"
WEIGHT_BYTES: Mapping[str, float] = {"bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "int8": 1.0, "int4": 0.56, "fp4": 0.56}
# name: (starting value, sd of its logarithm, meaning)
PRIORS: Mapping[str, tuple[float, float, str]] = {
    "bandwidth": (0.7, 0.25, "share of the memory bandwidth that a decode step reaches"),
    "prefill": (0.5, 0.3, "share of the peak that prefill and large batches reach"),
    "step_s": (2e-3, 0.6, "fixed seconds of one decode step"),
    "layer_s": (15e-6, 0.6, "seconds per layer and step of tensor-parallel reductions, with 2 or more GPUs"),
}
# Weights, cache and activations may use this much of the memory.
USABLE_RATIO = 0.88
MOST_SEQUENCES = 1024
NORMAL_90 = 1.645
# Spread between two measurements of one setup; per doubling of batch or weights; for another GPU or precision.
ANCHOR_SD, DOUBLING_SD, UNLIKE_SD = 0.11, 0.08, 0.2


@dataclass(frozen=True, kw_only=True)
class Served:
    """A model on replicas of `tp` GPUs each. batch: sequences at once on one replica; None is as many as fit."""

    shape: Shape
    gpu: Accelerator
    input_tokens: int
    output_tokens: int
    tp: int = 1
    replicas: int = 1
    precision: str = "bf16"
    batch: int | None = None

    @property
    def gpus(self) -> int:
        return self.tp * self.replicas

    @property
    def weight_bytes(self) -> float:
        return WEIGHT_BYTES[self.precision] * arithmetic.parameters(self.shape)

    @property
    def cache_bytes_per_token(self) -> float:
        """Keys and values of one token over all layers; 8 bits where the weights have 8 or fewer."""
        size = 1 if self.precision == "fp8" else 2
        return 2.0 * size * self.shape.layers * self.shape.kv_heads * self.shape.head_dim

    def most_sequences(self) -> int:
        """Sequences whose cache fits beside the weights of one replica; 0 if the weights do not fit."""
        room = USABLE_RATIO * (self.gpu.memory_bytes or 0) * self.tp - self.weight_bytes
        return max(
            min(int(room / (self.cache_bytes_per_token * (self.input_tokens + self.output_tokens))), MOST_SEQUENCES), 0
        )


@dataclass(frozen=True, kw_only=True)
class ServedPrediction:
    """What one setup is expected to do, with the factor by which the 90 % interval reaches up and down."""

    served: Served
    batch: int
    ttft_s: float
    tpot_s: float
    tokens_per_s: float
    factor: float

    def interval(self, value: float) -> tuple[float, float]:
        return value / self.factor, value * self.factor


@dataclass(frozen=True)
class ServingFit:
    """Logarithms of the parameters, and the sd of the logarithm of a throughput that stays unexplained."""

    values: Mapping[str, float]
    sd: float
    rows: int


@functools.cache
def load() -> ServingFit:
    raw = tomllib.loads(PATH.read_text(encoding="utf-8"))
    return ServingFit(
        {name: math.log(raw["parameters"][name]) for name in PRIORS}, raw["fit"]["sd"], raw["fit"]["rows"]
    )


def starting_values() -> dict[str, float]:
    return {name: math.log(value) for name, (value, _, _) in PRIORS.items()}


def times(one: Served, batch: int, p: Mapping[str, float]) -> tuple[float, float]:
    """(seconds to prefill one prompt, seconds of one decode step of the batch) on one replica."""
    flops = one.gpu.fp8_flops if one.precision == "fp8" else one.gpu.flops
    reached = math.exp(p["prefill"]) * flops * one.tp
    products = 2 * arithmetic.matmul_parameters(one.shape)
    attention = arithmetic.attention_flops_per_token(one.shape, one.input_tokens)
    reductions = one.shape.layers * math.exp(p["layer_s"]) if one.tp > 1 else 0.0
    prefill = one.input_tokens * (products + attention) / reached + reductions
    seen = one.input_tokens + one.output_tokens / 2
    read = (one.weight_bytes + batch * seen * one.cache_bytes_per_token) / one.tp
    memory = read / (math.exp(p["bandwidth"]) * one.gpu.memory_bytes_per_s)
    compute = batch * products / reached
    return prefill, max(memory, compute) + math.exp(p["step_s"]) + reductions


def throughput(one: Served, batch: int, p: Mapping[str, float]) -> float:
    """Output tokens per second of all replicas at a steady batch: decode steps, interrupted by prefills."""
    prefill, step = times(one, batch, p)
    seconds = batch * prefill + one.output_tokens * step
    return one.replicas * batch * one.output_tokens / seconds


def predict(
    one: Served, anchors: Sequence[tuple[Served, float]] = (), fit: ServingFit | None = None
) -> ServedPrediction:
    """TTFT, TPOT and tokens/s. anchors: setups of the same cluster and engine with their measured output tokens/s."""
    fitted = fit or load()
    most = one.most_sequences()
    require(most > 0, "--gpus", one.gpus, f"at least {needed_gpus(one)} GPUs for the weights of {one.shape.name}")
    batch = min(one.batch or most, most)
    scale, spread = _level(one, batch, anchors, fitted)
    prefill, _ = times(one, batch, fitted.values)
    rate = throughput(one, batch, fitted.values) * scale
    return ServedPrediction(
        served=one,
        batch=batch,
        ttft_s=prefill / scale,
        tpot_s=batch * one.replicas / rate,
        tokens_per_s=rate,
        factor=math.exp(NORMAL_90 * spread),
    )


def _level(one: Served, batch: int, anchors: Sequence[tuple[Served, float]], fitted: ServingFit) -> tuple[float, float]:
    """(factor of the engine on the predicted rate, sd of its logarithm).

    The prior is the spread of the fit. An anchor pulls the more, the more similar it is: an engine that is good at
    large batches need not be at single streams.
    """
    level, precision = 0.0, 1 / fitted.sd**2
    for setup, measured in anchors:
        other = min(setup.batch or setup.most_sequences(), max(setup.most_sequences(), 1))
        noise = _difference(one, batch, setup, other)
        level += math.log(measured / throughput(setup, other, fitted.values)) / noise**2
        precision += 1 / noise**2
    # The setup itself scatters as one measurement does, however well the level is known.
    variance = 1 / precision + (ANCHOR_SD**2 if anchors else 0.0)
    return math.exp(level / precision), math.sqrt(min(variance, fitted.sd**2))


def _difference(one: Served, batch: int, other: Served, other_batch: int) -> float:
    """Assumed sd of the logarithm of the ratio of two setups' engine factors."""
    apart = (
        ANCHOR_SD,
        DOUBLING_SD * math.log2(batch / other_batch),
        DOUBLING_SD * math.log2(one.weight_bytes / one.tp / (other.weight_bytes / other.tp)),
        DOUBLING_SD
        * math.log2((one.input_tokens / one.output_tokens) / (other.input_tokens / other.output_tokens))
        / 2,
        UNLIKE_SD * (one.gpu != other.gpu),
        UNLIKE_SD * (one.precision != other.precision),
    )
    return math.hypot(*apart)


@dataclass(frozen=True, kw_only=True)
class ServedWorth:
    """Half-width of the interval of tokens/s without one anchor, and with all of them."""

    name: str
    without: float
    with_it: float


def worth(one: Served, anchors: Sequence[tuple[str, Served, float]]) -> list[ServedWorth]:
    """How much each anchor narrows the interval, given the others."""

    def half_width(known: Sequence[tuple[str, Served, float]]) -> float:
        return predict(one, [(setup, rate) for _, setup, rate in known]).factor - 1

    with_all = half_width(anchors)
    return [
        ServedWorth(name=name, without=half_width([*anchors[:i], *anchors[i + 1 :]]), with_it=with_all)
        for i, (name, _, _) in enumerate(anchors)
    ]


def to_dict(one: ServedPrediction, anchors: int = 0) -> dict[str, object]:
    """A prediction as JSON, each number with its 90 % interval."""
    numbers = {"ttft_s": one.ttft_s, "tpot_s": one.tpot_s, "output_tokens_per_s": one.tokens_per_s}
    return {
        "model": one.served.shape.name,
        "gpu": one.served.gpu.name,
        "tp": one.served.tp,
        "replicas": one.served.replicas,
        "precision": one.served.precision,
        "batch": one.batch,
        "anchors": anchors,
        **{
            name: dict(zip(("value", "low", "high"), (value, *one.interval(value)), strict=True))
            for name, value in numbers.items()
        },
    }


def needed_gpus(one: Served) -> int:
    size = USABLE_RATIO * (one.gpu.memory_bytes or math.inf)
    return max(math.ceil(one.weight_bytes / size), 1)


def fit_rows(rows: Sequence[tuple[Served, float]]) -> ServingFit:
    """Parameters that explain measured output tokens/s, by penalised least squares on the logarithm."""
    start = starting_values()
    names, state = list(start), np.array(list(start.values()))
    centre, precision = state.copy(), np.array([1 / prior[1] ** 2 for prior in PRIORS.values()])
    target, noise, step = np.log([value for _, value in rows]), 0.2, 1e-4

    def predicted(values: Array) -> Array:
        p = dict(zip(names, values, strict=True))
        return np.asarray(np.log([throughput(one, one.batch or max(one.most_sequences(), 1), p) for one, _ in rows]))

    for _ in range(15):
        base = predicted(state)
        jacobian = np.stack([(predicted(state + step * unit) - base) / step for unit in np.eye(len(names))], axis=1)
        curvature = jacobian.T @ jacobian / noise**2 + np.diag(precision)
        gradient = jacobian.T @ (base - target) / noise**2 + precision * (state - centre)
        state = state - np.clip(np.linalg.solve(curvature, gradient), -0.5, 0.5)
    sd = float(np.sqrt(np.mean((predicted(state) - target) ** 2)))
    return ServingFit(dict(zip(names, map(float, state), strict=True)), sd, len(rows))


def partitions(
    one: Served,
    gpus: int,
    ttft_s: float | None = None,
    tpot_s: float | None = None,
    anchors: Sequence[tuple[Served, float]] = (),
) -> list[ServedPrediction]:
    """Replicas against tensor parallelism on this many GPUs: every split that fits and meets the limits, fastest first.

    With a limit on TPOT the batch of a replica is the largest that meets it.
    """
    found = []
    for tp in (n for n in (1, 2, 4, 8) if gpus % n == 0 and one.shape.heads % n == 0 and n <= one.gpu.gpus_per_node):
        option = replace(one, tp=tp, replicas=gpus // tp)
        most = option.most_sequences()
        limited = ttft_s is not None or tpot_s is not None
        tried = range(most, 0, -1) if limited else (most,) if most else ()
        for each in (predict(replace(option, batch=batch), anchors) for batch in tried):
            if (ttft_s is None or each.ttft_s <= ttft_s) and (tpot_s is None or each.tpot_s <= tpot_s):
                found.append(each)
                break
    return sorted(found, key=lambda each: -each.tokens_per_s)
