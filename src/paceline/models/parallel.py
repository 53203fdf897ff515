"""What each rank of a parallel layout holds and sends, by formulas (docs/layouts.md derives them).

Letters: A bytes of the activations between layers for all tokens of a rank's step; L layers of the rank; E weights that
it holds before sharding; G micro batches; n size of the dimension; r and b bytes of a reduced gradient and of a weight
or activation in the compute dtype.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from paceline.experiment.choices import Choice
from paceline.experiment.layout import Layout
from paceline.experiment.spec import Training
from paceline.models import arithmetic
from paceline.models.adapters import DTYPE_BYTES
from paceline.models.shape import Shape

# Of the number of tokens for an expert.
COUNT_BYTES = 8
# A rank of a pipeline keeps the gathered weights of so many stages (torch's `_add_unshard_reshard`).
MOST_GATHERED_STAGES = 3


@dataclass(frozen=True, slots=True)
class Held:
    """Weights of one rank before sharding over data parallel ranks: of its blocks, and of embedding, head and last
    norm. norms, routers: those that every tensor parallel rank has whole and whose gradients it sums. experts: with
    expert parallelism, this rank's, which are not part of blocks."""

    blocks: int
    root: int
    norms: int
    routers: int = 0
    experts: int = 0

    @property
    def total(self) -> int:
        return self.blocks + self.root + self.experts


def held(shape: Shape, layout: Layout, rank: int) -> Held:
    """The weights of a rank. Products and tables are split over tensor parallel ranks; norms and routers are not."""
    tp, h = layout.tp, shape.hidden
    norm = h * (2 if shape.norm == "layernorm" else 1)
    joined, wide = (shape.heads + 2 * shape.kv_heads) * shape.head_dim, shape.ffn * (2 if shape.gated else 1)
    experts, router = (shape.experts or 1) * (wide * h + h * shape.ffn), h * (shape.experts or 0)
    split = joined * h + h * shape.heads * shape.head_dim + (0 if layout.ep > 1 else experts)
    biases = (joined + wide) // tp + 2 * h if shape.bias else 0
    layers = layout.layer_count(rank, shape.layers)
    first, last = layout.has_first(rank), layout.has_last(rank)
    part = -(-shape.vocab // tp)
    words = max(0, min(part, shape.vocab - layout.coordinates(rank)["tp"] * part))
    same_stage = layout.stages == 1 and shape.tied
    tables = (first + last - same_stage) * words * h
    positions = shape.context * h if first and shape.positions == "learned" else 0
    return Held(
        blocks=layers * (2 * norm + router + split // tp + biases),
        root=tables + positions + last * norm,
        norms=layers * 2 * norm + last * norm,
        routers=layers * router,
        experts=layers * experts // layout.ep // tp if layout.ep > 1 else 0,
    )


def state_bytes(shape: Shape, layout: Layout, compute: str) -> float:
    """Weights, gradients and Adam's state of the rank that keeps most, as `arithmetic.state_bytes` counts them.

    >>> from paceline.models.arithmetic import load, parameters
    >>> tiny = load(Choice("tiny-llama"))
    >>> state_bytes(tiny, Layout(dp=4, shard=4), "fp32") == 16 * parameters(tiny) / 4
    True
    """
    whole = arithmetic.state_bytes(Choice("ddp"), 1, 1, compute) or 0.0
    ranks = [held(shape, layout, rank) for rank in range(layout.world_size)]
    return whole * max((own.root + own.blocks) / layout.shard + own.experts / layout.expert_shard for own in ranks)


def optimised(shape: Shape, layout: Layout) -> int:
    """Weights over all ranks that optimizers step, if each counts its shards as whole: a multiple of the model's, and
    the experts once for each rank that has them."""
    if layout.ep == 1:
        return arithmetic.parameters(shape) + twice_held(shape, layout)
    # Parts of a tensor parallel group count as whole, too.
    whole = replace(layout, dp=layout.dp * layout.tp, tp=1)
    return sum(held(shape, whole, rank).total for rank in range(layout.world_size))


def repeated_flops(shape: Shape, layout: Layout, training: Training) -> int:
    """FLOPs of a step that tensor parallel ranks compute several times: the routers' forward and two backward products,
    and the forward ones again with full checkpointing."""
    tokens = training.micro_batch * training.accumulation * layout.dp * training.sequence_length
    passes = 4 if training.checkpointing == "full" else 3
    return 2 * passes * tokens * shape.layers * shape.hidden * (shape.experts or 0) * (layout.tp - 1)


def reduced(shape: Shape, layout: Layout, rank: int) -> int:
    """Weights of a rank whose gradients are reduced: not those of experts of which there is one copy."""
    own = held(shape, layout, rank)
    return own.total - (own.experts if layout.data_ranks == layout.ep else 0)


def twice_held(shape: Shape, layout: Layout) -> int:
    """Weights of a tied head that a pipeline holds in its first and in its last stage."""
    return shape.vocab * shape.hidden if shape.tied and layout.pp > 1 else 0


def attention_calls(layout: Layout, rank: int, layers: int, micro_batches: int) -> int:
    """Calls of the attention kernel in one forward pass of a step: a ring calls it once per rank of the ring."""
    times = layout.cp if layout.ring else 1
    return layout.layer_count(rank, layers) * micro_batches * times


def micro_batches(layout: Layout, training: Training) -> int:
    """Forward passes of a step through each stage."""
    return (layout.micro_batches or training.accumulation) if layout.pp > 1 else training.accumulation


def sent_bytes(shape: Shape, layout: Layout, training: Training, rank: int) -> Mapping[str, float] | None:
    """Predicted bytes that a rank sends per optimizer step, by mesh dimension; None where there is no formula.

    Activation checkpointing repeats the exchanges of the forward pass as far as torch recomputes them, which has no
    formula. Nor has `shard` where a rank has more stages than torch keeps gathered: how often it gathers the others
    again depends on the schedule. That dimension is left out.
    """
    if training.checkpointing != "none" and (layout.tp > 1 or layout.cp > 1 or layout.ep > 1):
        return None
    own = held(shape, layout, rank)
    found = {
        "tp": _tensor_bytes(shape, layout, training, rank, own),
        "pp": _pipeline_bytes(shape, layout, training, rank),
        "cp": _context_bytes(shape, layout, training, rank),
        "ep": _expert_bytes(shape, layout, training, rank),
        "shard": _shard_bytes(layout, training, own),
        "replicate": _replicate_bytes(layout, training, own),
    }
    if layout.pp > 1 and len(layout.stages_of(rank)) > MOST_GATHERED_STAGES:
        del found["shard"]
    return {name: found[name] for name in layout.sizes() if name in found}


FORMULAS: Mapping[str, str] = {
    "tp": "(n-1)/n * A * (8L + 2 with the embedding + 2 with the head), and the scalars of the loss",
    "pp": "A / tp (with sequence parallelism) to the next stage and back",
    "cp": "ring: L * K,V * (4(n-1)b + 2n*4); ulysses: (n-1)/n * L * (4H + 4K)d * b per token",
    "ep": "4(n-1)/n * L * A * k with k experts per token, if all ranks get as many tokens",
    "shard": "(n-1)/n * E * (G * b * (2 for blocks, 1 for the rest) + r); with reshard_to, "
    "that is the n of a block's second gather; in a pipeline and with gather_once, (n-1)/n * E * (b + r); without the "
    "padding of weights whose rows n does not divide",
    "replicate": "2(n-1)/n * E / shard * r",
}


def _tokens(layout: Layout, training: Training) -> int:
    """Tokens of a step on one rank."""
    return training.micro_batch * training.accumulation * training.sequence_length // layout.cp


def _tensor_bytes(shape: Shape, layout: Layout, training: Training, rank: int, own: Held) -> float:
    """Two exchanges per layer and direction. An all-reduce sends as much as the all-gather and the reduce-scatter that
    replace it with sequence parallelism."""
    b, tokens = DTYPE_BYTES[training.precision.base], _tokens(layout, training)
    activations, share = tokens * shape.hidden * b, (layout.tp - 1) / layout.tp
    first, last = layout.has_first(rank), layout.has_last(rank)
    # Learned positions are added before the sequence is split: an all-reduce and an all-gather, not one of each half.
    ends = (3 if layout.sequence_parallel and shape.positions == "learned" else 2) * first + 2 * last
    moved = share * activations * (8 * layout.layer_count(rank, shape.layers) + ends)
    if last and layout.loss_parallel:
        moved += 3 * 2 * share * tokens * 4
    elif last:
        moved += share * tokens * shape.vocab * b
    summed = own.routers + (own.norms if layout.sequence_parallel else 0)
    return moved + 2 * share * summed * DTYPE_BYTES[training.precision.reduce]


def _pipeline_bytes(shape: Shape, layout: Layout, training: Training, rank: int) -> float:
    b = DTYPE_BYTES[training.precision.base]
    split = layout.tp if layout.sequence_parallel else 1
    activations = _tokens(layout, training) * shape.hidden * b / split
    own, sends = layout.stages_of(rank), 0
    for stage in own:
        sends += stage + 1 < layout.stages and stage + 1 not in own
        sends += stage > 0 and stage - 1 not in own
    tied = 0.0
    if twice_held(shape, layout) and not layout.v_shaped and (layout.has_first(rank) or layout.has_last(rank)):
        parts = layout.tp * (layout.shard if layout.data_ranks > 1 else 1)
        tied = twice_held(shape, layout) / parts * 4
    return sends * activations + tied


def _context_bytes(shape: Shape, layout: Layout, training: Training, rank: int) -> float:
    n, b, tokens = layout.cp, DTYPE_BYTES[training.precision.base], _tokens(layout, training)
    layers = layout.layer_count(rank, shape.layers)
    # The balance term of a mixture needs the tokens of each expert over whole sequences.
    sequences = training.micro_batch * training.accumulation
    counts = 2 * (n - 1) / n * layers * sequences * (shape.experts or 0) * COUNT_BYTES
    if layout.ring:
        elements = tokens * shape.kv_heads // layout.tp * shape.head_dim
        return float(layers * elements * (4 * (n - 1) * b + 2 * n * 4)) + counts
    heads = (shape.heads + shape.kv_heads) / layout.tp
    return (n - 1) / n * layers * tokens * 4 * heads * shape.head_dim * b + counts


def _expert_bytes(shape: Shape, layout: Layout, training: Training, rank: int) -> float:
    """Each token goes to the ranks of its experts and back, forward and backward; first the number of tokens does."""
    n, b, layers = layout.ep, DTYPE_BYTES[training.precision.base], layout.layer_count(rank, shape.layers)
    rows = _tokens(layout, training) * (shape.experts_per_token or 0)
    counts = micro_batches(layout, training) * (shape.experts or 0) * COUNT_BYTES
    return (n - 1) / n * layers * (4 * rows * shape.hidden * b + counts)


def _shard_bytes(layout: Layout, training: Training, own: Held) -> float:
    b, r = DTYPE_BYTES[training.precision.base], DTYPE_BYTES[training.precision.reduce]
    reshards = layout.reshard_after_forward and not layout.gather_once
    gathers = 1 if layout.gather_once else training.accumulation
    reductions = training.accumulation if layout.sync_every_micro_batch else 1
    dense, again = own.root + own.blocks, layout.reshard_to or (layout.shard if reshards else 1)
    # Blocks are gathered again for the backward pass, from as many ranks as they were resharded to.
    moved = _share(layout.shard) * dense * (gathers * b + reductions * r) + _share(again) * own.blocks * gathers * b
    times = 2 if reshards else 1
    return moved + _share(layout.expert_shard) * own.experts * (gathers * b * times + reductions * r)


def _share(ranks: int) -> float:
    """The part of a whole that other ranks have."""
    return (ranks - 1) / ranks


def _replicate_bytes(layout: Layout, training: Training, own: Held) -> float:
    n, r = layout.replicate, DTYPE_BYTES[training.precision.reduce]
    reductions = training.accumulation if layout.sync_every_micro_batch else 1
    copies = layout.expert_replicate
    dense = (n - 1) / n * (own.root + own.blocks) / layout.shard
    return 2 * (dense + (copies - 1) / copies * own.experts / layout.expert_shard) * r * reductions


def predicted_total(shape: Shape, layout: Layout, training: Training) -> float | None:
    """Bytes that the busiest rank sends per step."""
    ranks = [sent_bytes(shape, layout, training, rank) for rank in range(layout.world_size)]
    known = [each for each in ranks if each is not None and set(each) == set(layout.sizes())]
    return max((sum(each.values()) for each in known), default=None)
