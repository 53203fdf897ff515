"""Any mix of data, tensor, pipeline, context and expert parallelism with FSDP2 sharding, on torch's own parts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from paceline.contract import Seat, Trainer
from paceline.errors import require
from paceline.experiment import compilation
from paceline.experiment.choices import Choice
from paceline.experiment.layout import SCHEDULES, SPLIT_BACKWARD, Layout
from paceline.experiment.plugins import parse_options
from paceline.experiment.spec import RunSpec
from paceline.models.arithmetic import load
from paceline.models.shape import Shape

if TYPE_CHECKING:
    from paceline.training.strategies._mesh.stage import Stage

PADS_SHARDS = True
EIGHT_BIT = True
SHORT_NAMES = {
    "hsdp": "replicas of groups that shard weights, gradients and optimizer state: mesh:shard=N.",
    "tp": "every layer split over the processes of a node: mesh:tp=N.",
    "pp": "consecutive layers on each process: mesh:pp=N.",
    "cp": "sequences split over all processes: mesh:cp=N.",
    "ep": "experts spread over all processes: mesh:ep=N.",
    "3d": "pipelines of 2, layers split in 2, data parallel over the rest: mesh:tp=2,pp=2,shard=N.",
}


@dataclass(frozen=True)
class Options:
    """dp x cp x tp x pp is the number of processes; dp=0 takes what remains. shard: how many of the dp x cp ranks share
    one copy of the weights. ep: how many of them share the experts of every layer.

    Tensor: sequence splits activations between layers too; loss_parallel computes the loss on parts of the vocabulary;
    async_tp overlaps the exchanges with products. Pipeline: schedule, virtual stages per rank and micro_batches per
    step (0: the schedule's number, and the accumulation), layers of each stage as in 5+3 (default: equal shares).
    Context: attention is ring or ulysses. FSDP2: prefetch blocks, reshard_after_forward, reshard_to a smaller group,
    gather_once per step, offload to the CPU, sync_every_micro_batch.
    """

    dp: int = 0
    cp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1
    shard: int = 1
    sequence: bool = True
    loss_parallel: bool = True
    async_tp: bool = False
    schedule: str = "1f1b"
    virtual: int = 0
    micro_batches: int = 0
    layers: str = ""
    attention: str = "ring"
    prefetch: int = 1
    reshard_after_forward: bool = True
    reshard_to: int = 0
    gather_once: bool = False
    offload: bool = False
    sync_every_micro_batch: bool = False

    def __post_init__(self) -> None:
        for name in ("cp", "tp", "pp", "ep", "shard", "prefetch"):
            require(getattr(self, name) >= 1, f"mesh.{name}", getattr(self, name), "a whole number from 1")
        for name in ("dp", "virtual", "micro_batches", "reshard_to"):
            require(getattr(self, name) >= 0, f"mesh.{name}", getattr(self, name), "a whole number from 0")
        require(self.schedule in SCHEDULES, "mesh.schedule", self.schedule, ", ".join(SCHEDULES))
        whole = all(part.isdecimal() and int(part) for part in self.layers.split("+")) if self.layers else True
        require(whole, "mesh.layers", self.layers, "the layers of each stage, such as 5+3")
        require(self.attention in ("ring", "ulysses"), "mesh.attention", self.attention, "ring or ulysses")


def expand(name: str, options: Mapping[str, Any], nodes: int, processes_per_node: int) -> dict[str, Any]:
    """The options that a short name means on so many processes; given options win."""
    world_size = nodes * processes_per_node
    usual: dict[str, dict[str, int]] = {
        # Shards inside a node and replicas across nodes; two replicas on one node.
        "hsdp": {"shard": processes_per_node if nodes > 1 else max(1, world_size // 2)},
        "tp": {"tp": processes_per_node},
        "pp": {"pp": world_size},
        "cp": {"cp": world_size},
        "ep": {"ep": world_size},
        "3d": {"tp": 2, "pp": 2},
    }
    found = {**usual[name], **options}
    if name == "3d":
        degrees = [degree for degree in (found["tp"], found["pp"]) if isinstance(degree, int) and degree >= 1]
        found = {"tp": found["tp"], "pp": found["pp"], "shard": max(1, world_size // math.prod(degrees))} | found
    return found


def layout(options: Mapping[str, Any], world_size: int) -> Layout:
    """The degrees. A product that is not the number of processes is left for `check` to report."""
    chosen = parse_options(Options, Choice("mesh", options))
    _, virtual, v_shaped = SCHEDULES[chosen.schedule]
    pipelined = chosen.pp > 1
    return Layout(
        dp=chosen.dp or max(1, world_size // (chosen.cp * chosen.tp * chosen.pp)),
        cp=chosen.cp,
        tp=chosen.tp,
        pp=chosen.pp,
        ep=chosen.ep,
        shard=chosen.shard,
        virtual=(chosen.virtual or virtual) if pipelined else 1,
        v_shaped=v_shaped and pipelined,
        sequence_parallel=chosen.sequence and chosen.tp > 1,
        loss_parallel=chosen.loss_parallel and chosen.tp > 1,
        ring=chosen.attention == "ring",
        schedule=chosen.schedule if pipelined else "",
        micro_batches=chosen.micro_batches or None,
        split=tuple(map(int, chosen.layers.split("+"))) if chosen.layers and pipelined else (),
        reshard_after_forward=chosen.reshard_after_forward,
        reshard_to=chosen.reshard_to,
        sync_every_micro_batch=chosen.sync_every_micro_batch,
        # torch's schedules keep the weights of a stage from its first forward to its last backward pass.
        gather_once=chosen.gather_once or pipelined,
    )


def check(spec: RunSpec) -> str | None:
    assert spec.strategy is not None
    chosen = parse_options(Options, spec.strategy)
    degrees, shape = layout(spec.strategy.options, spec.topology.world_size), load(spec.model)
    if degrees.world_size != spec.topology.world_size:
        return f"the layout needs {degrees.factors()} processes, got {spec.topology.world_size}"
    reasons = (
        _without_effect(degrees, chosen),
        _unsupported_training(spec, chosen),
        _unsharded(degrees, chosen),
        _indivisible_experts(shape, degrees),
        _indivisible_heads(shape, degrees),
        _indivisible_sequence(spec, degrees),
        _unscheduled(spec, shape, degrees),
        _odd_rows(spec, degrees),
    )
    return next((reason for reason in reasons if reason), None)


# Options that do nothing unless a degree is above 1: they would make another cell of the same work.
_NEEDS = {
    "pp": ("schedule", "virtual", "micro_batches", "layers"),
    "cp": ("attention",),
    "tp": ("sequence", "loss_parallel"),
    "shard": ("prefetch", "reshard_after_forward", "reshard_to"),
}


def _without_effect(degrees: Layout, chosen: Options) -> str | None:
    if degrees.world_size == 1:
        # The baseline of a scaling experiment, whose other cells have more processes.
        return None
    for degree, names in _NEEDS.items():
        given = [name for name in names if getattr(chosen, name) != getattr(Options, name)]
        if given and getattr(degrees, degree) == 1:
            value = str(getattr(chosen, given[0])).lower()
            return f"{given[0]}={value} has no effect with {degree} 1; leave it out, or set {degree} above 1"
    return None


def _unsupported_training(spec: RunSpec, chosen: Options) -> str | None:
    if spec.tuning is not None:
        return "the strategy mesh trains the reference decoder only, and not fine-tuned models"
    if spec.training.precision.is_8bit and chosen.tp > 1:
        return f"tp {chosen.tp} splits the matrices that an 8-bit scale belongs to; use precision bf16, or tp=1"
    if chosen.async_tp and spec.topology.device == "cpu":
        return "async_tp needs CUDA's symmetric memory, which a CPU does not have"
    if chosen.async_tp and not (spec.training.compile and chosen.tp > 1 and chosen.sequence):
        return (
            "async_tp is a pass of torch.compile over sequence parallel layers: it needs tp > 1, sequence and compile"
        )
    if chosen.pp > 1 and chosen.schedule in SPLIT_BACKWARD:
        splits = f"the schedule {chosen.schedule} splits the backward pass"
        if spec.training.compile:
            return f"{splits}, which torch.compile does not support"
        if spec.training.checkpointing != "none":
            # `full` recomputes a block up to three times, `selective` fails.
            return f"{splits}, which activation checkpointing does not support; use checkpointing none or schedule=1f1b"
    wanted = spec.training.compilation
    if wanted is not None and wanted.scope == ("block" if chosen.tp > 1 else "model"):
        unit = "stage by stage (its hooks belong in one graph)" if chosen.tp > 1 else "block by block"
        return f"this layout is compiled {unit}; got compile {spec.training.compile}"
    if reason := compilation.refusal(wanted, "mesh", spec.topology.device, per_block=False, graphs=False):
        return reason
    return None


def _unsharded(degrees: Layout, chosen: Options) -> str | None:
    if degrees.data_ranks % degrees.shard:
        return f"shard {degrees.shard} does not divide dp {degrees.dp} x cp {degrees.cp} = {degrees.data_ranks}"
    if chosen.reshard_to and (degrees.shard % chosen.reshard_to or degrees.pp > 1):
        return f"reshard_to {chosen.reshard_to} needs to divide shard {degrees.shard}, without a pipeline"
    if chosen.reshard_to == degrees.shard > 1:
        return f"reshard_to {chosen.reshard_to} is shard itself, so it has no effect; leave it out"
    if not chosen.reshard_after_forward and (chosen.reshard_to or chosen.gather_once or degrees.pp > 1):
        why = "reshard_to" if chosen.reshard_to else "gather_once" if chosen.gather_once else "a pipeline"
        return f"reshard_after_forward=false has no effect with {why}; leave it out"
    if chosen.sync_every_micro_batch and degrees.data_ranks == 1 < degrees.world_size:
        return "sync_every_micro_batch reduces over dp x cp ranks, of which there is 1; leave it out"
    if chosen.gather_once and (degrees.shard == 1 or chosen.reshard_to):
        got = f"shard={degrees.shard}, reshard_to={chosen.reshard_to}"
        return f"gather_once keeps gathered weights for a whole step: it needs shard > 1 without reshard_to, got {got}"
    if degrees.pp > 1 and (chosen.gather_once or chosen.sync_every_micro_batch):
        name = "gather_once" if chosen.gather_once else "sync_every_micro_batch"
        return f"a pipeline gathers weights and reduces gradients once per step; leave out {name}, or set pp=1"
    if chosen.offload and degrees.data_ranks == 1:
        return "offload is an option of FSDP2, which needs dp x cp > 1"
    return None


def _indivisible_experts(shape: Shape, degrees: Layout) -> str | None:
    ep, shard, ranks = degrees.ep, degrees.shard, degrees.data_ranks
    if ep == 1:
        return None
    if not shape.experts:
        return f"ep {ep} needs a mixture of experts, which {shape.name} is not"
    if shape.experts % ep:
        return f"ep {ep} does not divide the {shape.experts} experts of {shape.name}"
    if ranks % ep:
        return f"ep {ep} does not divide dp {degrees.dp} x cp {degrees.cp} = {ranks}"
    if shard % ep and ep % shard:
        return f"ep {ep} and shard {shard} take the same ranks, so one of them must divide the other"
    return None


def _indivisible_heads(shape: Shape, degrees: Layout) -> str | None:
    tp, cp = degrees.tp, degrees.cp
    for name, count in (("query heads", shape.heads), ("KV heads", shape.kv_heads), ("MLP columns", shape.ffn)):
        if count % tp:
            return f"tp {tp} does not divide the {count} {name} of {shape.name}"
    if cp > 1 and not degrees.ring and shape.kv_heads // tp % cp:
        own = f"{shape.kv_heads // tp} KV heads of each rank" if tp > 1 else f"{shape.kv_heads} KV heads"
        return f"ulysses exchanges whole heads, and cp {cp} does not divide the {own} of {shape.name}; use ring"
    return None


def _indivisible_sequence(spec: RunSpec, degrees: Layout) -> str | None:
    length, parts = spec.training.sequence_length, degrees.cp * (2 if degrees.ring and degrees.cp > 1 else 1)
    if length % parts:
        how = "ring" if degrees.ring else "ulysses"
        return f"attention={how} with cp {degrees.cp} needs a sequence length that {parts} divides, got {length}"
    if degrees.sequence_parallel and length // degrees.cp % degrees.tp:
        parts = degrees.tp * degrees.cp
        return f"sequence parallelism with tp {degrees.tp} x cp {degrees.cp} = {parts} does not divide length {length}"
    return None


def _unscheduled(spec: RunSpec, shape: Shape, degrees: Layout) -> str | None:
    if degrees.pp == 1:
        return None
    name, training = degrees.schedule, spec.training
    _, usual, v_shaped = SCHEDULES[name]
    if (degrees.virtual != usual) if usual == 1 or v_shaped else degrees.virtual < 2:
        expected = "1 stage" if usual == 1 else f"{usual} stages" if v_shaped else f"at least {usual} stages"
        return f"the schedule {name} needs {expected} per rank, got virtual={degrees.virtual}; leave out virtual"
    if degrees.stages > shape.layers:
        stages = f"pp {degrees.pp} x virtual {degrees.virtual} = {degrees.stages} stages"
        return f"{stages} exceed the {shape.layers} layers of {shape.name}"
    if degrees.split and (len(degrees.split) != degrees.stages or sum(degrees.split) != shape.layers):
        given = "+".join(map(str, degrees.split))
        got = f"{sum(degrees.split)} layers in {len(degrees.split)} stage{'s' if degrees.split[1:] else ''}"
        return f"layers={given} is {got}; {shape.name} has {shape.layers} layers, for {degrees.stages} stages"
    batch = training.micro_batch * training.accumulation
    count = degrees.micro_batches or training.accumulation
    if batch % count:
        return f"micro_batches={count} does not divide the {batch} sequences of a replica's step"
    least = {"1f1b": degrees.stages, "zbv": degrees.stages, "dualpipev": degrees.stages}.get(name, 1)
    rounds = max(1, count // degrees.pp)
    if count < least:
        return f"the schedule {name} with {degrees.stages} stages needs at least {least} micro batches, got {count}"
    if degrees.virtual > 1 and not v_shaped and count % rounds:
        return f"the schedule {name} needs micro batches in {rounds} equal rounds of about pp {degrees.pp}, got {count}"
    return None


def _odd_rows(spec: RunSpec, degrees: Layout) -> str | None:
    """Matrices of 8 bit have one row for each token that a rank computes at once."""
    training = spec.training
    if not training.precision.is_8bit:
        return None
    sequences = training.micro_batch
    if degrees.pp > 1 and degrees.micro_batches:
        sequences = training.micro_batch * training.accumulation // degrees.micro_batches
    rows, multiple = sequences * training.sequence_length // degrees.cp, training.precision.side_multiple
    if rows % multiple:
        what = f"{sequences} sequences of {training.sequence_length} tokens over cp {degrees.cp}"
        return f"precision {training.precision.compute} needs multiples of {multiple} tokens, got {rows:,} ({what})"
    return None


def sharded_parts(options: Mapping[str, Any]) -> int | None:
    return None


def offloads(options: Mapping[str, Any]) -> bool:
    return bool(options.get("offload"))


def reductions_per_step(options: Mapping[str, Any], accumulation: int) -> int:
    return accumulation if options.get("sync_every_micro_batch", False) is True else 1


def wrap(spec: RunSpec, seat: Seat) -> Trainer:
    """The recipe: split the model into stages, then each stage by tensors, sequences and shards."""
    from paceline.training.decoder import DTYPES
    from paceline.training.precision import convert
    from paceline.training.strategies._mesh import stage as stages_of
    from paceline.training.strategies._mesh.tensor import row_order
    from paceline.training.strategies._mesh.trainer import MeshTrainer

    assert spec.strategy is not None
    chosen = parse_options(Options, spec.strategy)
    degrees, shape = layout(spec.strategy.options, seat.world_size), load(spec.model)
    mesh, context_mesh = meshes(degrees, seat)
    expert_mesh = mesh_of_experts(degrees, seat)
    stages = pipeline(spec, shape, degrees, seat)
    for _, stage in stages:
        convert(stage.blocks, spec.training.precision, seat.device)
        expert(stage, degrees, expert_mesh)
        tensor(stage, degrees, mesh, expert_mesh)
        context(stage, degrees, context_mesh, spec)
        stages_of.fill(
            stage,
            spec.seed,
            spec.training.precision.base,
            seat.torch_device,
            lambda name, _: row_order(name, shape, degrees.tp),
        )
        if degrees.data_ranks == 1:
            stage.to(DTYPES[spec.training.precision.reduce])
        checkpointing(stage, spec)
        compile_stage(stage, degrees, mesh, chosen, spec)
        shard(stage, degrees, mesh, expert_mesh, chosen, spec)
    settings = settings_of(chosen, degrees)
    return MeshTrainer(stages, spec, seat, degrees, mesh, context_mesh, expert_mesh, settings)


def settings_of(chosen: Options, degrees: Layout) -> dict[str, Any]:
    """All options and the degrees that they became, for the record."""
    return {**asdict(chosen), "dp": degrees.dp, "virtual": degrees.virtual, "replicate": degrees.replicate}


def meshes(degrees: Layout, seat: Seat) -> tuple[Any, Any]:
    """The mesh of weights (pp, replicate, shard, tp) and, with context parallelism, that of data (..., dp, cp, ...).

    Both number the ranks alike; sharding may cross replicas and parts of a sequence.
    """
    weights = {"pp": degrees.pp, "replicate": degrees.replicate, "shard": degrees.shard, "tp": degrees.tp}
    mesh = _mesh(weights, seat)
    if degrees.cp == 1:
        return mesh, None
    data = {"stages": degrees.pp, "dp": degrees.dp, "cp": degrees.cp, "parts": degrees.tp}
    return mesh, _mesh(data, seat)["cp"]


def mesh_of_experts(degrees: Layout, seat: Seat) -> Any:
    """The mesh of the weights of experts (pp, replicate, shard, ep, tp); None without expert parallelism."""
    if degrees.ep == 1:
        return None
    copies = {"replicate": degrees.expert_replicate, "shard": degrees.expert_shard}
    return _mesh({"pp": degrees.pp, **copies, "ep": degrees.ep, "tp": degrees.tp}, seat)


def _mesh(sizes: Mapping[str, int], seat: Seat) -> Any:
    """A mesh whose dimensions all have groups of their own, so that their traffic can be separated: torch would use
    the group of all processes for a dimension of that size."""
    import torch.distributed as dist
    from torch.distributed import device_mesh

    own: dict[Any, Any] = {name: str(dist.get_backend()) for name, size in sizes.items() if size == seat.world_size > 1}
    return device_mesh.init_device_mesh(
        seat.device, tuple(sizes.values()), mesh_dim_names=tuple(sizes), backend_override=own
    )


def pipeline(spec: RunSpec, shape: Shape, degrees: Layout, seat: Seat) -> list[tuple[int, Stage]]:
    """This rank's stages with their numbers, on the meta device; one without a pipeline."""
    import torch

    from paceline.training.strategies._mesh.stage import Stage

    compute, last = spec.training.precision.base, degrees.stages - 1
    with torch.device("meta"):
        return [
            (i, Stage(shape, compute, degrees.layers_of(i, shape.layers), first=i == 0, last=i == last))
            for i in degrees.stages_of(seat.rank)
        ]


def expert(stage: Stage, degrees: Layout, mesh: Any) -> None:
    from paceline.training.strategies._mesh import expert as parallel

    if degrees.ep > 1:
        parallel.apply(stage, mesh["ep"])


def tensor(stage: Stage, degrees: Layout, mesh: Any, experts: Any) -> None:
    from paceline.training.strategies._mesh import tensor as parallel

    if degrees.tp > 1:
        of_experts = (mesh if experts is None else experts)["tp"]
        parallel.apply(stage, mesh["tp"], of_experts, sequence_parallel=degrees.sequence_parallel)


def context(stage: Stage, degrees: Layout, mesh: Any, spec: RunSpec) -> None:
    from paceline.training.strategies._mesh import context as parallel

    if degrees.cp > 1:
        parallel.apply(stage, mesh, spec.training.sequence_length, ring=degrees.ring)


def checkpointing(stage: Stage, spec: RunSpec) -> None:
    from paceline.training.decoder import block_runner

    stage.run_block = block_runner(spec.training.checkpointing)


def compile_stage(stage: Stage, degrees: Layout, mesh: Any, chosen: Options, spec: RunSpec) -> None:
    """Compile each block, or the whole stage under tensor parallelism, whose hooks belong in one graph."""
    from paceline.training.mixture import prepare_compiler
    from paceline.training.precision import round_as_plain_code
    from paceline.training.strategies._torch import require_compiler

    wanted = spec.training.compilation
    if wanted is None:
        return
    require_compiler()
    prepare_compiler(stage)
    round_as_plain_code()
    if chosen.async_tp:
        import torch._inductor.config as inductor
        from torch.distributed._symmetric_memory import enable_symm_mem_for_group

        inductor._micro_pipeline_tp = True
        enable_symm_mem_for_group(mesh["tp"].get_group().group_name)
    if degrees.tp > 1:
        stage.compile(mode=wanted.mode)
        return
    for block in stage.blocks.values():
        block.compile(mode=wanted.mode)


def shard(stage: Stage, degrees: Layout, mesh: Any, experts: Any, chosen: Options, spec: RunSpec) -> None:
    """Average gradients over the data parallel ranks, and shard over them as far as `shard` says."""
    from paceline.training.strategies._mesh import shard as parallel

    if degrees.data_ranks == 1:
        return
    parallel.apply(stage, mesh, experts, degrees, spec, offload=chosen.offload, reshard_to=chosen.reshard_to)
    if chosen.prefetch > 1:
        parallel.prefetch(stage, chosen.prefetch)
