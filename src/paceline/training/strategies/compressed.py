"""DDP that sends less than whole gradients: 16 bit, PowerSGD, signs, or averaged weights every few steps (DiLoCo)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from paceline.contract import Seat, Trainer
from paceline.errors import RequestError, require
from paceline.experiment import compilation
from paceline.experiment.plugins import parse_options
from paceline.experiment.spec import RunSpec
from paceline.models.arithmetic import Traffic
from paceline.training.strategies.ddp import DEFAULT_BUCKET_MB, bucket_refusal

ALWAYS_NAMED = ("method",)
SHORT_NAMES = {
    "powersgd": "gradients as products of two thin matrices (Vogels et al., 2019)",
    "signsgd": "one bit per gradient, with error feedback (Seide et al., 2014; Karimireddy et al., 2019)",
    "localsgd": "no gradients; weights are averaged every few steps (Stich, 2018)",
    "diloco": "as localsgd, with an outer Nesterov optimizer (Douillard et al., 2023)",
}
METHODS = ("fp16", "bf16", *SHORT_NAMES)
# Ranks have different weights between two averages.
LOCAL = ("localsgd", "diloco")
# The methods that each option is for.
METHODS_OF = {
    "rank": ("powersgd",),
    "start": ("powersgd", "signsgd"),
    "every": LOCAL,
    "outer_rate": ("diloco",),
    "outer_momentum": ("diloco",),
}


@dataclass(frozen=True)
class Options:
    """method: what is sent. rank: columns of PowerSGD's matrices. start: steps with whole gradients before compression
    begins (powersgd, signsgd). every: steps between two averages of weights (localsgd, diloco). outer_rate and
    outer_momentum: of diloco's outer optimizer, with the values of its paper."""

    method: str = "bf16"
    rank: int = 4
    start: int = 0
    every: int = 8
    outer_rate: float = 0.7
    outer_momentum: float = 0.9

    def __post_init__(self) -> None:
        require(self.method in METHODS, "compressed.method", self.method, ", ".join(METHODS))
        for name, least in (("rank", 1), ("start", 0), ("every", 1)):
            value = getattr(self, name)
            require(value >= least, f"compressed.{name}", value, f"a whole number from {least}")
        require(self.outer_rate > 0, "compressed.outer_rate", self.outer_rate, "a positive number")
        valid = 0 <= self.outer_momentum < 1
        require(valid, "compressed.outer_momentum", self.outer_momentum, "a number from 0, below 1")


def expand(name: str, options: Mapping[str, Any], nodes: int, processes_per_node: int) -> dict[str, Any]:
    if "method" in options:
        raise RequestError(f"{name}.method: got {options['method']!r}, expected none: {name} is the method.")
    return {"method": name, **options}


def check(spec: RunSpec) -> str | None:
    assert spec.strategy is not None
    chosen = parse_options(Options, spec.strategy)
    for name, methods in METHODS_OF.items():
        if chosen.method not in methods and getattr(chosen, name) != getattr(Options, name):
            return (
                f"{name} is an option of {' and '.join(methods)} and has no effect with {chosen.method}; leave it out"
            )
    if spec.training.precision.reduce != "fp32":
        return f"{chosen.method} compresses fp32 gradients, got reduce_dtype {spec.training.precision.reduce}"
    if spec.training.precision.compute == "fp16":
        return f"{chosen.method} cannot be combined with the loss scale of fp16: use bf16 or fp32"
    if spec.tuning is not None:
        return f"{chosen.method} is for pretraining; adapters have too few gradients to compress"
    if spec.checkpoint_every is not None and chosen.method not in ("fp16", "bf16"):
        return f"{chosen.method} keeps state on each rank that checkpoints do not store: remove checkpoint_every"
    wanted, device = spec.training.compilation, spec.topology.device
    if reason := bucket_refusal(spec):
        return reason
    return compilation.refusal(wanted, chosen.method, device, per_block=False, graphs=False)


def approximation(options: Mapping[str, Any]) -> str:
    """What is done on purpose instead of the reference's arithmetic."""
    chosen = Options(**options)
    return {
        "fp16": "gradients rounded to fp16 before they are reduced",
        "bf16": "gradients rounded to bf16 before they are reduced",
        "powersgd": f"gradients of rank {chosen.rank}, with error feedback",
        "signsgd": "signs of gradients and one scale per tensor, with error feedback",
        "localsgd": f"weights averaged every {chosen.every} steps instead of gradients in every step",
        "diloco": f"weights averaged every {chosen.every} steps, with an outer Nesterov step",
    }[chosen.method]


def averages_every(options: Mapping[str, Any]) -> int:
    chosen = Options(**options)
    return chosen.every if chosen.method in LOCAL else 1


def sharded_parts(options: Mapping[str, Any]) -> int:
    return 0


def wire_bytes(traffic: Traffic) -> float | None:
    """2P at 2 bytes for 16 bit; 2P at 4 bytes every so many steps for averaged weights. PowerSGD depends on the shape
    of each matrix, and gathered signs on the number of ranks: these are only counted."""
    chosen = Options(**traffic.options)
    if chosen.method in ("fp16", "bf16"):
        return traffic.gradient_bytes
    return 2 * traffic.gradient_bytes / chosen.every if chosen.method in LOCAL else None


def wrap(spec: RunSpec, seat: Seat) -> Trainer:
    from paceline.training.strategies import _compression
    from paceline.training.strategies._torch import TorchTrainer, compile_subject, whole_subject, whole_weights

    assert spec.strategy is not None
    chosen = parse_options(Options, spec.strategy)
    subject = whole_subject(spec, seat, spec.training.precision.reduce)
    compile_subject(subject, spec.training.compilation)
    settings: dict[str, Any] = asdict(chosen)
    if chosen.method in LOCAL:
        outer = (chosen.outer_rate, chosen.outer_momentum) if chosen.method == "diloco" else (1.0, 0.0)
        return _compression.LocalTrainer(
            subject,
            spec,
            seat,
            every=chosen.every,
            outer=outer,
            full_parameters=lambda: whole_weights(subject),
            settings=settings,
        )
    from torch.nn.parallel import DistributedDataParallel

    bucket_mb = spec.training.bucket_mb or DEFAULT_BUCKET_MB
    ddp = DistributedDataParallel(
        subject,
        device_ids=[seat.local_rank] if seat.device == "cuda" else None,
        bucket_cap_mb=bucket_mb,
        gradient_as_bucket_view=True,
        broadcast_buffers=False,
    )

    def sync(last: bool) -> None:
        ddp.require_backward_grad_sync = last

    trainer = TorchTrainer(
        ddp,
        spec,
        seat,
        full_parameters=lambda: whole_weights(subject),
        sync=sync,
        settings={"bucket_mb": bucket_mb, **settings},
    )
    hook: Any = _compression.CastHook(chosen.method) if chosen.method in ("fp16", "bf16") else None
    if chosen.method == "powersgd":
        hook = _compression.PowerSGD(chosen.rank)
    elif chosen.method == "signsgd":
        hook = _compression.Signs()
    ddp.register_comm_hook(lambda: trainer.updates >= chosen.start, _compression.after_start(hook))
    return trainer
