"""DistributedDataParallel: every rank has the whole model; gradients are all-reduced once per step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from paceline.contract import Seat, Trainer
from paceline.experiment import compilation
from paceline.experiment.plugins import parse_options
from paceline.experiment.spec import RunSpec
from paceline.models.arithmetic import Traffic

DEFAULT_BUCKET_MB, FIRST_BUCKET_MB = 25.0, 1.0
EIGHT_BIT = True


@dataclass(frozen=True)
class Options:
    """static_graph lets DDP assume that every step uses the same parameters, find_unused_parameters makes it look for
    unused ones in every step. gradient_as_bucket_view keeps gradients in the buckets instead of a copy."""

    static_graph: bool = False
    find_unused_parameters: bool = False
    gradient_as_bucket_view: bool = True


def check(spec: RunSpec) -> str | None:
    assert spec.strategy is not None
    chosen = parse_options(Options, spec.strategy)
    if chosen.static_graph and chosen.find_unused_parameters:
        return "static_graph finds unused parameters by itself; leave out find_unused_parameters"
    if chosen.static_graph and spec.training.accumulation > 1:
        # Its reducer fails in the first step, and where that is avoided it reduces nothing from the second step on.
        return (
            "torch's static_graph cannot accumulate gradients without reducing them, got accumulation "
            f"{spec.training.accumulation}; use accumulation 1, or leave out static_graph"
        )
    if reason := bucket_refusal(spec):
        return reason
    return compilation.refusal(spec.training.compilation, "ddp", spec.topology.device, per_block=False, graphs=True)


def bucket_refusal(spec: RunSpec) -> str | None:
    """Why torch's compiler would fail at the size of the buckets."""
    bucket_mb, reduces = spec.training.bucket_mb, spec.topology.world_size > 1
    if bucket_mb is None or bucket_mb >= FIRST_BUCKET_MB or spec.training.compilation is None or not reduces:
        return None
    return (
        f"torch compiles DDP with buckets of {FIRST_BUCKET_MB:g} MB or more, the size of its first one, got "
        f"{bucket_mb:g} MB; raise bucket_mb, or use compile=false"
    )


def sharded_parts(options: Mapping[str, Any]) -> int:
    return 0


def wire_bytes(traffic: Traffic) -> float:
    """2Pr: one all-reduce after the last micro batch; the others run under no_sync."""
    return 2 * traffic.gradient_bytes


def wrap(spec: RunSpec, seat: Seat) -> Trainer:
    from torch.nn.parallel import DistributedDataParallel

    from paceline.training.strategies._torch import TorchTrainer, compile_subject, whole_subject, whole_weights

    assert spec.strategy is not None
    chosen = parse_options(Options, spec.strategy)
    bucket_mb = spec.training.bucket_mb or DEFAULT_BUCKET_MB
    subject = whole_subject(spec, seat, spec.training.precision.reduce)
    if spec.training.compilation is not None:
        compile_subject(subject, spec.training.compilation)
        import torch._dynamo

        # torch splits the graph so that gradients are reduced during the backward pass, and does not cache the parts.
        # One process has nothing to reduce, so its graph stays whole and is cached.
        torch._dynamo.config.optimize_ddp = seat.world_size > 1
    ddp = DistributedDataParallel(
        subject,
        device_ids=[seat.local_rank] if seat.device == "cuda" else None,
        bucket_cap_mb=bucket_mb,
        gradient_as_bucket_view=chosen.gradient_as_bucket_view,
        find_unused_parameters=chosen.find_unused_parameters,
        # Buffers (the rotary angles of a fine-tuned model) are equal on all ranks.
        broadcast_buffers=False,
        static_graph=chosen.static_graph,
    )

    def sync(last: bool) -> None:
        # The flag that no_sync() sets, without a context around forward and backward.
        ddp.require_backward_grad_sync = last

    settings: dict[str, Any] = {"bucket_mb": bucket_mb, **asdict(chosen)}
    return TorchTrainer(ddp, spec, seat, full_parameters=lambda: whole_weights(subject), sync=sync, settings=settings)
