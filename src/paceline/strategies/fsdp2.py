"""FSDP2 (`fully_shard` per block): weights, gradients and optimizer state sharded over all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, cast

from paceline.plugins import Seat, Trainer, options
from paceline.spec import RunSpec

if TYPE_CHECKING:
    from torch import Tensor, nn

    from paceline.decoder import Decoder


@dataclass(frozen=True)
class Options:
    """sync_every_micro_batch reduces (and shards) gradients after each micro batch: less memory, more traffic.

    reshard_after_forward=false keeps gathered weights until backward: more memory, less traffic.
    """

    sync_every_micro_batch: bool = False
    reshard_after_forward: bool = True


def check(spec: RunSpec) -> str | None:
    assert spec.strategy is not None
    options(Options, spec.strategy)
    return None


def wrap(spec: RunSpec, seat: Seat) -> Trainer:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from paceline.strategies._torch import TorchTrainer, build_decoder, compile_parts

    assert spec.strategy is not None
    chosen = options(Options, spec.strategy)
    decoder = build_decoder(spec, "meta")
    if spec.training.compile:
        compile_parts(decoder)
    policy, mesh = mixed_precision(spec), init_device_mesh(seat.device, (seat.world_size,))
    units = block_units(decoder, spec.training.bucket_mb)
    for unit in units:
        fully_shard(unit, mesh=mesh, mp_policy=policy, reshard_after_forward=chosen.reshard_after_forward)
    root: Any = fully_shard(decoder, mesh=mesh, mp_policy=policy)
    place_shards(decoder, spec, seat)

    def sync(last: bool) -> None:
        root.set_is_last_backward(last)
        if not chosen.sync_every_micro_batch:
            root.set_requires_gradient_sync(last)

    settings = {**asdict(chosen), "units": len(units) + 1, "gathered_dtype": spec.training.precision.compute}
    return TorchTrainer(
        decoder, spec, seat, full_parameters=lambda: full_parameters(decoder), sync=sync, settings=settings
    )


def mixed_precision(spec: RunSpec) -> Any:
    """fp32 shards; gathered in the compute dtype, reduced in the reduction dtype. The decoder casts its own inputs."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    from paceline.decoder import DTYPES

    precision = spec.training.precision
    return MixedPrecisionPolicy(
        param_dtype=DTYPES[precision.compute], reduce_dtype=DTYPES[precision.reduce], cast_forward_inputs=False
    )


def block_units(decoder: Decoder, bucket_mb: float | None) -> list[Any]:
    """One unit per block, or consecutive blocks joined until a unit holds at least bucket_mb of fp32 weights."""
    if bucket_mb is None:
        return list(decoder.blocks)
    units: list[list[nn.Module]] = [[]]
    size_mb = 0.0
    for block in decoder.blocks:
        if size_mb >= bucket_mb:
            units.append([])
            size_mb = 0.0
        units[-1].append(block)
        size_mb += sum(p.numel() * 4 for p in block.parameters()) / 2**20
    return units


def place_shards(decoder: Decoder, spec: RunSpec, seat: Seat) -> None:
    """Give each rank its shard of the common initial weights, one whole parameter in memory at a time."""
    from torch.distributed.tensor import distribute_tensor

    from paceline.decoder import fill

    decoder.to_empty(device=seat.torch_device)

    def place(parameter: Any, value: Tensor) -> None:
        shard = distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
        parameter.to_local().copy_(shard.to_local())

    fill(decoder, decoder.shape.layers, spec.seed, spec.training.precision.compute, place)


def full_parameters(decoder: Decoder) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in decoder.named_parameters():
        yield name, cast(Any, parameter).full_tensor()
