"""Predictions with intervals: the entry point of the package.

`setup_of` makes a setup from the words of the command line, `predict` gives the step time of many setups at once, and
`next_measurement` says which small run would narrow the interval most.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from paceline.errors import RequestError, require
from paceline.experiment.choices import Choice
from paceline.models import arithmetic
from paceline.models.adapters import adapter_parameters
from paceline.models.shape import Shape
from paceline.prediction import hardware, memory, published
from paceline.prediction.hardware import Accelerator
from paceline.prediction.offsets import (
    NORMAL_90,
    Anchor,
    Observation,
    anchor_columns,
    posterior,
    predict_columns,
    scale_for,
)
from paceline.prediction.parameters import Fitted, load
from paceline.prediction.setup import SHARDS, Setup
from paceline.prediction.step_time import PARTS, columns, parts, step_time

METHODS = ("full", "lora", "qlora")
# More GPUs, tokens or sequences than anyone has.
MOST_COUNTED = 10**9
DEFAULT_SEQUENCE, DEFAULT_BATCH = 4096, 256
# Micro batches and start-up of a run that is only made to measure: seconds.
MEASURING_S = 90.0
ADAPTER_RANK = 16


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """One setup with its predicted step time. low and high: the 90 % interval. parts: seconds of the step by cause.

    measured_by: the run whose step time this is, where it was measured.
    """

    setup: Setup
    step_s: float
    low_s: float
    high_s: float
    parts: Mapping[str, float]
    anchors: int
    model: str
    measured_by: str | None = None

    @property
    def tokens_per_s(self) -> float:
        return self.setup.tokens_per_step / self.step_s

    @property
    def tokens_per_s_per_gpu(self) -> float:
        return self.tokens_per_s / self.setup.gpus

    @property
    def half_width(self) -> float:
        """Half of the interval as a ratio of the step time: 0.2 is plus or minus about 20 %."""
        return math.sqrt(self.high_s / self.low_s) - 1

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilisation against the dense peak, causal attention; None for adapters."""
        one = self.setup
        if one.has_adapters:
            return None
        flops = arithmetic.flops_per_token(one.shape, one.sequence_length)
        peak = one.gpu.fp8_flops if one.fp8 else one.gpu.flops
        return flops * self.tokens_per_s_per_gpu / peak

    @property
    def interval(self) -> tuple[float, float]:
        return self.low_s, self.high_s

    def seconds_for(self, tokens: float) -> float:
        return tokens / self.tokens_per_s

    def usd_for(self, tokens: float, usd_per_gpu_hour: float) -> float:
        return self.seconds_for(tokens) / 3600 * self.setup.gpus * usd_per_gpu_hour

    @property
    def joules_per_token(self) -> float | None:
        """Energy of the GPUs: 90 % of the board power while computing, 40 % while waiting; None if it is not known."""
        if not self.setup.gpu.power_w:
            return None
        waiting = sum(self.parts[name] for name in WAITING)
        busy = (self.step_s - waiting) / self.step_s
        return self.setup.gpu.power_w * (0.9 * busy + 0.4 * (1 - busy)) / self.tokens_per_s_per_gpu


# Parts of a step in which the tensor cores wait.
WAITING = ("tensor parallel", "expert parallel", "launch", "pipeline bubble", "data parallel (exposed)", "other")


def predict(
    setups: Sequence[Setup],
    anchors: Sequence[Anchor] = (),
    observations: Sequence[Observation] = (),
    fitted: Fitted | None = None,
) -> list[Prediction]:
    """The step time of each setup, given what was measured on the same cluster."""
    if not setups:
        return []
    fit, c = fitted or load(), columns(setups)
    anchored, log_step, sd = anchor_columns(anchors)
    mean, spread = predict_columns(fit, c, anchored, log_step, sd, observations=observations)
    known = posterior(fit, anchored, log_step, sd, observations)
    found = parts(c, known.values, known.shift)
    whole = np.asarray(sum(found.values()))
    version = str(fit.provenance.get("version", "unknown"))
    return [
        Prediction(
            setup=one,
            step_s=math.exp(mean[i]),
            low_s=math.exp(mean[i] - NORMAL_90 * spread[i]),
            high_s=math.exp(mean[i] + NORMAL_90 * spread[i]),
            # The residuals of similar anchors scale all parts alike.
            parts={name: float(found[name][i] / whole[i] * math.exp(mean[i])) for name in PARTS},
            anchors=len(anchors) + len(observations),
            model=version,
        )
        for i, one in enumerate(setups)
    ]


# --- what anchors are worth ---


@dataclass(frozen=True, kw_only=True)
class Worth:
    """What one measurement does, or would do, to the interval: half-width without and with it."""

    name: str
    without: float
    with_it: float
    gpu_minutes: float | None = None

    @property
    def gain_per_gpu_minute(self) -> float | None:
        return None if self.gpu_minutes is None else (self.without - self.with_it) / self.gpu_minutes


def worth(target: Setup, anchors: Sequence[Anchor], observations: Sequence[Observation] = ()) -> list[Worth]:
    """How much each measurement narrowed the interval of the target, given the others."""
    with_all = predict([target], anchors, observations)[0].half_width
    found = []
    for i, one in enumerate(anchors):
        rest = [*anchors[:i], *anchors[i + 1 :]]
        without = predict([target], rest, observations)[0].half_width
        found.append(Worth(name=one.name, without=without, with_it=with_all))
    for i, seen in enumerate(observations):
        others = [*observations[:i], *observations[i + 1 :]]
        without = predict([target], anchors, others)[0].half_width
        found.append(Worth(name=seen.source, without=without, with_it=with_all))
    return found


def next_measurement(
    target: Setup, anchors: Sequence[Anchor] = (), observations: Sequence[Observation] = ()
) -> list[Worth]:
    """Smaller runs that would narrow the interval of the target, best per GPU minute first.

    The interval after a measurement does not depend on its outcome, so each candidate is tried with the value that is
    predicted for it.
    """
    fit = load()
    scale = scale_for(fit, len(anchors) + len(observations))
    now = predict([target], anchors, observations)[0]
    candidates = list(smaller(target))
    expected = predict(candidates, anchors, observations)
    found = []
    for one in expected:
        fewer = f", {one.setup.shape.layers} layers" if one.setup.shape.layers < target.shape.layers else ""
        trial = Anchor(
            one.setup,
            one.step_s,
            f"{one.setup.gpus} GPU{'' if one.setup.gpus == 1 else 's'}, {one.setup.layout}{fewer}",
        )
        # The same factor before and after, so that only the measurement makes the difference.
        scaled = dataclasses.replace(fit, scale={0: scale})
        after = predict([target], [*anchors, trial], observations, scaled)[0]
        minutes = one.setup.gpus * (MEASURING_S + 10 * one.step_s) / 60
        found.append(Worth(name=trial.name, without=now.half_width, with_it=after.half_width, gpu_minutes=minutes))
    return sorted(found, key=lambda w: -(w.gain_per_gpu_minute or 0))


def smaller(target: Setup) -> list[Setup]:
    """The same work per GPU on fewer GPUs, with fewer layers where a small cluster does not hold all of them."""
    least = target.tp * target.pp * math.lcm(target.cp, target.ep)
    node = target.per_node
    found: dict[int, Setup] = {}
    for gpus in (least, node, 2 * node, 4 * node, target.gpus // 4, target.gpus):
        if least <= gpus <= target.gpus and gpus % least == 0:
            shard = target.shard if gpus > least or target.cp > 1 or target.offload else "none"
            whole = target.replaced(gpus=gpus, micro_batches=min(target.micro_batches, 8.0), shard=shard)
            shallow = [whole.replaced(shape=_with_layers(whole.shape, n)) for n in _fewer(whole.shape.layers, whole.pp)]
            tried = [whole] if gpus == target.gpus else [one for one in (whole, *shallow) if memory.fits(one)]
            if tried:
                found[gpus] = tried[0]
    return list(found.values())


def _fewer(layers: int, pp: int) -> list[int]:
    """Numbers of layers to try, from many to few."""
    return [n for n in (layers // 2, layers // 4, layers // 8, layers // 16) if n >= 2 * pp and n % pp == 0]


def _with_layers(shape: Shape, layers: int) -> Shape:
    return dataclasses.replace(shape, layers=layers, published_parameters=None)


# --- setups from words ---


def parse_layout(text: str) -> dict[str, Any]:
    """`dp=32,tp=8,zero3` as degrees; the words are those of `Setup.layout`.

    >>> parse_layout("dp=32,tp=8,zero1")
    {'dp': 32, 'tp': 8, 'shard': 'zero1'}
    """
    found: dict[str, Any] = {}
    accepted = "dp=N,tp=N,pp=N,cp=N,ep=N,vp=N, one of ddp, zero1, zero2, zero3 (fsdp), hybrid, and offload"
    for piece in filter(None, (one.strip().casefold() for one in text.split(","))):
        name, equals, number = piece.partition("=")
        value: int | str | bool
        if equals and name in ("dp", "tp", "pp", "cp", "ep", "vp", "mb") and number.isdigit() and int(number) > 0:
            value = int(number)
        elif not equals and name in (*SHARDS, "ddp", "fsdp", "fsdp2"):
            name, value = "shard", {"ddp": "none", "fsdp": "zero3", "fsdp2": "zero3"}.get(name, name)
        elif piece == "offload":
            value = True
        else:
            raise RequestError(f"--layout: got {piece!r}, expected {accepted}.")
        once = "one kind of sharding" if name == "shard" else f"one value of {name}"
        require(found.setdefault(name, value) == value, "--layout", text, once)
    return found


def setup_of(
    model: str,
    gpu: str | Accelerator,
    gpus: int,
    *,
    sequence_length: int | None = None,
    global_batch: int | None = None,
    micro_batch: int | None = None,
    precision: str = "bf16",
    checkpointing: str | None = None,
    method: str = "full",
    software: str = "generic",
    interconnect: str = "",
    tp: int = 1,
    pp: int = 1,
    cp: int = 1,
    ep: int = 1,
    vp: int = 1,
    dp: int | None = None,
    shard: str | None = None,
    offload: bool = False,
    mb: int | None = None,
    memory_factor: float = 1.0,
) -> Setup:
    """A setup from what a user says; what is not said is the fastest that fits, or the smallest if none does.

    memory_factor: how much more memory than the arithmetic says a rehearsal needed.
    """
    shape = arithmetic.load(Choice.parse(model))
    device = hardware.accelerator(gpu) if isinstance(gpu, str) else gpu
    _require_counts(gpus=gpus, seq=sequence_length, global_batch=global_batch, micro_batch=micro_batch)
    _require_known(device, precision, checkpointing, method)
    require(ep == 1 or (method == "full" and not offload), "--layout", f"ep={ep}", "no ep with adapters or offload")
    ranks = _data_ranks(shape, gpus, dp=dp, tp=tp, pp=pp, cp=cp, ep=ep, vp=vp)
    length = sequence_length or min(shape.context, DEFAULT_SEQUENCE)
    is_long = shape.positions == "learned" and length > shape.context
    require(not is_long, "--seq", length, f"at most the {shape.context} learned positions of {shape.name}")
    require(cp == 1 or length % (2 * cp) == 0, "--layout", f"cp={cp}", f"a divisor of half of the sequence, {length}")
    # Adapters are trained by other programs than whole models.
    program, default_shard = published.software("peft" if software == "generic" and method != "full" else software)
    link, node = hardware.network(interconnect)
    known = f"{', '.join(hardware.interconnects())}, two joined by +, or a rate such as 8x400Gbps"
    require(not interconnect or (link or node) is not None, "--interconnect", interconnect, known)
    # What a user did not ask for must not be refused: the default is a multiple of the ranks.
    batch = global_batch or (ranks * max(math.ceil(DEFAULT_BATCH / ranks), 1) if method == "full" else 4 * ranks)
    require(batch % ranks == 0, "--global-batch", batch, f"a multiple of dp={ranks}")
    per_rank = batch // ranks
    base = Setup(
        shape=shape,
        gpu=device,
        software=program,
        gpus=gpus,
        sequence_length=length,
        micro_batch=1,
        micro_batches=float(per_rank),
        tp=tp,
        pp=pp,
        cp=cp,
        ep=ep,
        stages=vp,
        shard=shard or default_shard,
        fp8=precision == "fp8",
        checkpointing=checkpointing or "none",
        trained=adapters_of(shape, method),
        quantised=method == "qlora",
        link_bytes_per_s=link,
        node_bytes_per_s=node,
    )
    if offload:
        require(shard in (None, "zero1", "zero2", "zero3"), "--layout", f"{shard},offload", "zero1, zero2 or zero3")
        stages = (shard,) if shard else ("zero2", "zero3")
        base = base.replaced(offload=True)
        return _completed(base, stages, checkpointing, micro_batch or mb, per_rank, memory_factor)
    shards = (shard,) if shard else tuple(dict.fromkeys((default_shard, "none", "zero1", "zero3")))
    if ranks == 1 and cp == 1:
        shards = ("none",)
    return _completed(base, shards, checkpointing, micro_batch or mb, per_rank, memory_factor)


def _require_counts(**counts: int | None) -> None:
    for name, count in counts.items():
        accepted = f"a whole number from 1 to {MOST_COUNTED:,}"
        require(count is None or 1 <= count <= MOST_COUNTED, f"--{name.replace('_', '-')}", count, accepted)


def _require_known(device: Accelerator, precision: str, checkpointing: str | None, method: str) -> None:
    kinds = ("none", "selective", "full")
    require(checkpointing in (None, *kinds), "--checkpointing", checkpointing, ", ".join(kinds))
    require(precision in ("bf16", "fp16", "fp8"), "--precision", precision, "bf16, fp16 or fp8")
    has_fp8 = device.fp8_flops > device.flops
    require(precision != "fp8" or has_fp8, "--precision", "fp8", f"bf16 or fp16: {device.gpu} has no 8-bit products")
    require(method in METHODS, "--method", method, ", ".join(METHODS))


def _data_ranks(shape: Shape, gpus: int, *, dp: int | None, tp: int, pp: int, cp: int, ep: int, vp: int) -> int:
    """The data-parallel ranks of a layout that the model and the number of GPUs allow."""
    split = tp * pp * cp
    factors = " x ".join(f"{name}={n}" for name, n in (("dp", dp), ("tp", tp), ("pp", pp), ("cp", cp)) if n)
    right = f"a product of {gpus}, the number of GPUs" if dp else f"a product that divides {gpus} GPUs"
    require(gpus % split == 0 and dp in (None, gpus // split), "--layout", f"{factors} = {(dp or 1) * split}", right)
    require(shape.layers % (pp * vp) == 0, "--layout", f"pp={pp},vp={vp}", f"stages that divide {shape.layers} layers")
    require(vp == 1 or pp > 1, "--layout", f"vp={vp} without pp", "virtual stages of a pipeline: pp=2 or more")
    require(shape.heads % tp == 0, "--layout", f"tp={tp}", f"a divisor of the {shape.heads} heads")
    few = f"a divisor of the {shape.kv_heads} heads of keys and values"
    require(shape.kv_heads % tp == 0, "--layout", f"tp={tp}", few)
    ranks = gpus // split
    if ep > 1:
        require(bool(shape.experts), "--layout", f"ep={ep}", f"no ep: {shape.name} has no experts")
        require((shape.experts or 0) % ep == 0, "--layout", f"ep={ep}", f"a divisor of the {shape.experts} experts")
        require(ranks * cp % ep == 0, "--layout", f"ep={ep}", f"a divisor of dp={ranks} x cp={cp}")
    return ranks


def adapters_of(shape: Shape, method: str) -> int | None:
    """Trained parameters of LoRA and QLoRA: rank 16 on every projection; None where all are trained."""
    targets = "q+k+v+o+gate+up+down" if shape.gated else "q+k+v+o+up+down"
    return None if method == "full" else adapter_parameters(shape, ADAPTER_RANK, targets)


def _completed(
    base: Setup, shards: Sequence[str], checkpointing: str | None, micro: int | None, per_rank: int, factor: float
) -> Setup:
    """The fastest predicted setup that fits, of what was left open; the one that needs least memory if none fits."""
    sizes = [micro] if micro else [n for n in (1, 2, 4, 8, 16) if per_rank % n == 0]
    require(per_rank % sizes[0] == 0, "--micro-batch", micro, f"a divisor of {per_rank} sequences per rank")
    options = [
        base.replaced(
            shard=shard,
            software=published.sharded(base.software, shard),
            checkpointing=recompute,
            micro_batch=size,
            micro_batches=per_rank / size,
        )
        for recompute in ((checkpointing,) if checkpointing else ("none", "selective", "full"))
        for shard in shards
        for size in sizes
    ]
    fitting = [one for one in options if memory.fits(one, factor)]
    if not fitting:
        return min(options, key=memory.total)
    times = step_time(columns(fitting), load().values)
    return fitting[int(np.argmin(times))]
