"""Tensor parallelism: every layer split over the ranks of one mesh dimension, with torch's DTensor.

The decoder joins q, k, v and gate, up in one weight each. A rank takes consecutive rows, so the rows of joined weights
are stored in another order: first those of the first rank (its q heads, k heads, v heads), then those of the next.

Of a mixture, every rank has its columns of all experts and the whole router: all ranks make the same decisions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from paceline.models.shape import Shape
from paceline.training.decoder import Block
from paceline.training.mixture import Mixture
from paceline.training.strategies._mesh.stage import Stage, row_dimension


def apply(stage: Stage, mesh: Any, experts: Any, *, sequence_parallel: bool) -> None:
    """Split the layers of a stage on the meta device over `mesh`.

    With sequence parallelism, the activations between layers are split along the sequence and the all-reduces become
    reduce-scatters and all-gathers. The head returns this rank's part of the vocabulary. experts: a mesh of the same
    ranks for the weights of experts, which expert parallelism may shard over others.
    """
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    size = mesh.size()
    between = Shard(1) if sequence_parallel else Replicate()
    norm = SequenceParallel(use_local_output=True)
    for block in cast(Iterable[Block], stage.blocks.values()):
        plan: dict[str, Any] = {
            "attention.inputs": ColwiseParallel(input_layouts=between),
            "attention.output": RowwiseParallel(output_layouts=between),
        }
        if isinstance(block.mlp, Mixture):
            _split_experts(block.mlp, mesh, experts, between)
        else:
            plan["mlp.inputs"] = ColwiseParallel(input_layouts=between)
            plan["mlp.output"] = RowwiseParallel(output_layouts=between)
        if sequence_parallel:
            plan |= {"attention_norm": norm, "mlp_norm": norm}
        else:
            _replicate(block.attention_norm, mesh)
            _replicate(block.mlp_norm, mesh)
        parallelize_module(block, mesh, plan)
        attention: Any = block.attention
        attention.heads, attention.kv_heads = attention.heads // size, attention.kv_heads // size
    plan = {}
    if stage.first:
        # Learned positions are added to whole sequences, which are split afterwards.
        whole = stage.positions is not None
        plan["embedding"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate() if whole else between)
        if stage.positions is not None:
            _replicate(stage.positions, mesh)
        if whole and sequence_parallel:
            stage.enter = lambda x: DTensor.from_local(x, mesh, [Replicate()]).redistribute(mesh, [Shard(1)]).to_local()
    if stage.last:
        if sequence_parallel:
            plan["norm"] = norm
        else:
            _replicate(stage.norm, mesh)
        plan["head"] = ColwiseParallel(input_layouts=between, output_layouts=Shard(-1))
        stage.head.pads = False
    parallelize_module(stage, mesh, plan)
    if sequence_parallel:
        stage.whole_length = lambda length: length * size


def _split_experts(mixture: Mixture, mesh: Any, experts: Any, between: Any) -> None:
    """Let every rank compute its columns of all experts for all tokens of the group.

    Each makes all decisions, from the same numbers. What it computes from the tokens is a part of a sum over ranks, and
    so are the gradients of the tokens and of the router. All ranks have the same balance term: each adds its share.
    """
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    size = mesh.size()
    _distribute(mixture.experts, experts, {"inputs": Shard(1), "output": Shard(2)})
    _distribute(mixture.router, mesh, {"weight": Replicate()})

    def gathered(_: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
        whole = DTensor.from_local(inputs[0], mesh, [between]).redistribute(placements=[Replicate()])
        return (whole.to_local(grad_placements=[Partial()]),)

    def summed(_: nn.Module, inputs: Any, made: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        tokens, balance = made
        total = DTensor.from_local(tokens, mesh, [Partial()]).redistribute(placements=[between])
        return total.to_local(), balance.detach() + (balance - balance.detach()) / size

    mixture.register_forward_pre_hook(gathered)
    mixture.register_forward_hook(summed)


def _distribute(module: nn.Module, mesh: Any, placements: Mapping[str, Any]) -> None:
    """Make parameters DTensors, each with one placement."""
    from torch.distributed.tensor import distribute_tensor

    for name, placement in placements.items():
        whole = distribute_tensor(getattr(module, name), mesh, [placement], src_data_rank=None)
        module.register_parameter(name, nn.Parameter(whole))


def _replicate(module: nn.Module, mesh: Any) -> None:
    """Make the module compute the same on every rank, with parameters that are DTensors like all others."""
    from torch.distributed.tensor import DTensor, Replicate

    _distribute(module, mesh, {name: Replicate() for name, _ in module.named_parameters(recurse=False)})
    module.register_forward_pre_hook(lambda _, inputs: (DTensor.from_local(inputs[0], mesh, [Replicate()]),))
    module.register_forward_hook(lambda _, inputs, output: output.to_local())


def row_order(name: str, shape: Shape, parts: int) -> Tensor | None:
    """The rows of a joined weight or bias in the order in which `parts` ranks take them; None for other parameters."""
    if parts == 1:
        return None
    if ".attention.inputs." in name:
        groups = (shape.heads, shape.kv_heads, shape.kv_heads)
        sizes = [heads * shape.head_dim for heads in groups]
    elif (".mlp.inputs." in name or name.endswith(".experts.inputs")) and shape.gated:
        sizes = [shape.ffn, shape.ffn]
    else:
        return None
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return torch.cat(
        [
            torch.arange(start + part * size // parts, start + (part + 1) * size // parts)
            for part in range(parts)
            for start, size in zip(starts, sizes, strict=True)
        ]
    )


def in_decoder_order(value: Tensor, rows: Tensor | None) -> Tensor:
    """Undo `row_order`."""
    if rows is None:
        return value
    return torch.empty_like(value).index_copy_(row_dimension(value), rows.to(value.device), value)
