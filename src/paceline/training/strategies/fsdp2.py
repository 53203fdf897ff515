"""FSDP2 (`fully_shard` per block): shards weights, gradients and optimizer state over all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, cast

from paceline.contract import Seat, Trainer
from paceline.experiment import compilation
from paceline.experiment.plugins import parse_options
from paceline.experiment.spec import RunSpec
from paceline.models.arithmetic import Traffic

if TYPE_CHECKING:
    from torch import Tensor, nn

    from paceline.training.decoder import Decoder
    from paceline.training.strategies._torch import Subject

PADS_SHARDS = True
EIGHT_BIT = True


@dataclass(frozen=True)
class Options:
    """sync_every_micro_batch reduces (and shards) gradients after each micro batch: less memory, more traffic.

    reshard_after_forward=false keeps gathered weights until backward: more memory, less traffic. float8_all_gather
    rounds the weights of linear layers before they are gathered, with precision float8: half of the traffic.
    """

    sync_every_micro_batch: bool = False
    reshard_after_forward: bool = True
    float8_all_gather: bool = False


def check(spec: RunSpec) -> str | None:
    assert spec.strategy is not None
    chosen, precision = parse_options(Options, spec.strategy), spec.training.precision.compute
    if chosen.float8_all_gather and precision != "float8":
        return f"float8_all_gather needs one scale per tensor, which is precision float8; got {precision}"
    tuning = spec.tuning
    if tuning is not None and tuning.optimizer != "adamw" and spec.training.precision.compute == "fp16":
        return f"the optimizer {tuning.optimizer} sees one shard only, and would miss an fp16 overflow in another shard"
    return compilation.refusal(spec.training.compilation, "fsdp2", spec.topology.device, per_block=True, graphs=False)


def sharded_parts(options: Mapping[str, Any]) -> int:
    return 3


def reductions_per_step(options: Mapping[str, Any], accumulation: int) -> int:
    return accumulation if options.get("sync_every_micro_batch", False) is True else 1


def wire_bytes(traffic: Traffic) -> float:
    """2G*Pp + Pr: weights gathered for forward and backward of every micro batch, gradients reduce-scattered once.

    reshard_after_forward=false keeps the weights for the backward: G*Pp. The root unit (embeddings, last norm, head)
    is always kept. sync_every_micro_batch=true: G*Pr. float8_all_gather=true: 1 byte per weight of linear layers in
    blocks. Shards are padded to equal rows, and the padding is sent too.
    """
    blocks = traffic.weight_bytes - traffic.root_weight_bytes + traffic.padding_weight_bytes
    if traffic.options.get("float8_all_gather", False):
        blocks -= traffic.block_matrices * (traffic.weight_bytes // traffic.parameters - 1)
    gathers = 2 if traffic.options.get("reshard_after_forward", True) else 1
    reductions = traffic.accumulation if traffic.options.get("sync_every_micro_batch", False) else 1
    reduced = traffic.gradient_bytes + traffic.padding_gradient_bytes
    return traffic.accumulation * (traffic.root_weight_bytes + gathers * blocks) + reductions * reduced


def wrap(spec: RunSpec, seat: Seat) -> Trainer:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from paceline.training.finetuned import Tuned
    from paceline.training.precision import convert, rescale
    from paceline.training.strategies._torch import TorchTrainer, compile_subject, whole_subject

    assert spec.strategy is not None
    chosen = parse_options(Options, spec.strategy)
    subject = whole_subject(spec, seat, "fp32") if spec.tuning else empty_decoder(spec)
    codes = subject.hold_codes_as_floats() if isinstance(subject, Tuned) else frozenset[str]()
    if not isinstance(subject, Tuned):
        convert(subject.blocks, spec.training.precision, seat.device, float8_all_gather=chosen.float8_all_gather)
    compile_subject(subject, spec.training.compilation, per_block=True)
    policy, mesh = mixed_precision(spec), init_device_mesh(seat.device, (seat.world_size,))
    units = block_units(subject, spec.training.bucket_mb)
    for unit in units:
        fully_shard(unit, mesh=mesh, mp_policy=policy, reshard_after_forward=chosen.reshard_after_forward)
    root: Any = fully_shard(subject, mesh=mesh, mp_policy=policy)
    if spec.tuning is None:
        place_shards(cast("Decoder", subject), spec, seat)

    def sync(last: bool) -> None:
        root.set_is_last_backward(last)
        if not chosen.sync_every_micro_batch:
            root.set_requires_gradient_sync(last)

    gathered = "as held" if spec.tuning else spec.training.precision.base
    settings = {**asdict(chosen), "units": len(units) + 1, "gathered_dtype": gathered}
    return TorchTrainer(
        subject,
        spec,
        seat,
        full_parameters=lambda: full_parameters(subject, codes),
        sync=sync,
        after_update=(lambda: rescale(subject)) if chosen.float8_all_gather else None,
        settings=settings,
    )


def empty_decoder(spec: RunSpec) -> Decoder:
    """The decoder on the meta device, so that no rank needs memory for all of it."""
    from paceline.training.strategies._torch import build_decoder

    return build_decoder(spec, "meta")


def mixed_precision(spec: RunSpec) -> Any:
    """fp32 shards, gathered in the compute dtype and reduced in the reduction dtype. The decoder casts its inputs.

    A fine-tuned model is gathered as stored: 4-bit codes must not be cast, and adapters are cast where they are used.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy

    from paceline.training.decoder import DTYPES

    precision = spec.training.precision
    gathered = DTYPES[precision.base] if spec.tuning is None else None
    return MixedPrecisionPolicy(param_dtype=gathered, reduce_dtype=DTYPES[precision.reduce], cast_forward_inputs=False)


def block_units(subject: Subject, bucket_mb: float | None) -> list[Any]:
    """One unit per block, or consecutive blocks joined into units of at least bucket_mb."""
    if bucket_mb is None:
        return list(subject.blocks)
    units: list[list[nn.Module]] = [[]]
    size_mb = 0.0
    for block in subject.blocks:
        if size_mb >= bucket_mb:
            units.append([])
            size_mb = 0.0
        units[-1].append(block)
        size_mb += sum(p.nbytes for p in block.parameters()) / 2**20
    return units


def place_shards(decoder: Decoder, spec: RunSpec, seat: Seat) -> None:
    """Give each rank its shard of the initial weights, with one whole parameter in memory at a time."""
    from torch.distributed.tensor import distribute_tensor

    from paceline.training.decoder import fill

    decoder.to_empty(device=seat.torch_device)

    def place(parameter: Any, value: Tensor) -> None:
        shard = distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
        parameter.to_local().copy_(shard.to_local())

    fill(decoder, decoder.shape.layers, spec.seed, spec.training.precision.base, place)


def full_parameters(subject: Subject, codes: frozenset[str]) -> Iterator[tuple[str, Tensor]]:
    """Whole weights by name. `codes` names the 4-bit weights, which are returned as bitsandbytes packs them."""
    from paceline.training.frozen_4bit import codes_of
    from paceline.training.strategies._torch import scales_of

    for name, parameter in subject.named_parameters():
        whole = cast(Any, parameter).full_tensor()
        yield name, codes_of(whole) if name in codes else whole
    yield from scales_of(subject)
