"""Sharding over data parallel ranks with FSDP2: all of them, groups of them with replicas (HSDP), or none."""

from __future__ import annotations

from typing import Any

from paceline.experiment.layout import Layout
from paceline.experiment.spec import RunSpec
from paceline.training.strategies._mesh.stage import Stage


def apply(
    stage: Stage, mesh: Any, experts: Any, layout: Layout, spec: RunSpec, *, offload: bool, reshard_to: int
) -> None:
    """Shard every block and then the rest over the dimensions `replicate` and `shard` of the mesh.

    With shard=1 every rank keeps a whole copy, and the all-reduce of gradients overlaps with the backward pass. The
    experts that a rank has alone, by expert parallelism, are sharded over the ranks that have them too.
    """
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

    from paceline.training.strategies.fsdp2 import mixed_precision

    ranks = mesh["shard"] if layout.replicate == 1 else mesh["replicate", "shard"]
    keeps = layout.gather_once or layout.shard == 1 or not layout.reshard_after_forward
    reshard: bool | int = reshard_to or not keeps
    # Pinned memory needs a GPU.
    policy = CPUOffloadPolicy(pin_memory=spec.topology.device == "cuda") if offload else OffloadPolicy()
    common: dict[str, Any] = {"mesh": ranks, "mp_policy": mixed_precision(spec), "offload_policy": policy}
    for block in stage.blocks.values():
        if layout.ep > 1:
            mixture: Any = block.mlp
            others = {**common, "mesh": ranks_of(experts, layout)}
            fully_shard(mixture.experts, reshard_after_forward=not keeps, **others)
        fully_shard(block, reshard_after_forward=reshard, **common)
        if 1 < reshard_to < layout.shard:
            _name_smaller_group(block)
    fully_shard(stage, reshard_after_forward=False, **common)


def _name_smaller_group(block: Any) -> None:
    """Count what FSDP2 gathers again for the backward pass as sharding: torch names that group after no dimension."""
    state = block._get_fsdp_state()
    # Before torch 2.12 a block had one group of parameters.
    for parameters in getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]:
        parameters.post_forward_mesh_info.shard_process_group._set_group_desc("mesh_shard")


def ranks_of(experts: Any, layout: Layout) -> Any:
    """The mesh of the ranks that have the same experts."""
    return experts["shard"] if layout.expert_replicate == 1 else experts["replicate", "shard"]


def prefetch(stage: Stage, depth: int) -> None:
    """Gather the weights of the next `depth` blocks while one computes; torch's own depth is 1."""
    blocks: list[Any] = list(stage.blocks.values())
    for number, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[number + 1 : number + 1 + depth])
        block.set_modules_to_backward_prefetch(blocks[max(number - depth, 0) : number][::-1])
