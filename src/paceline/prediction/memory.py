"""Memory of one GPU by component, by arithmetic: what a layout needs before anything runs.

Weights, gradients and the state of Adam as `models.arithmetic` counts them; activations by what each layer keeps for
its backward pass (Korthikanti et al. 2022, without the attention scores that fused attention never writes). The dry run
of `paceline run memory` is more exact where it can run.
"""

from __future__ import annotations

from paceline.models import arithmetic
from paceline.models.adapters import ADAPTER_BYTES, NF4_BYTES
from paceline.prediction.hardware import CPU, host_memory_bytes
from paceline.prediction.setup import Setup

COMPONENTS = ("weights", "gradients", "optimizer", "gathered weights", "activations", "logits")
# Left for the CUDA context, NCCL buffers and fragmentation.
USABLE_RATIO = 0.9
# FSDP gathers one layer ahead.
_LIVE_BLOCKS = 2
# Per token and vocabulary entry: logits and their gradient, each in 16 bits and in fp32.
_LOGIT_BYTES = 12
# Elements of DeepSpeed's reduction bucket.
_OFFLOAD_BUCKET = 5e8
# On the host, per parameter: fp32 weights, moments and gradients; at stage 3 also the 16-bit weights.
_HOST_BYTES, _HOST_WEIGHT_BYTES = 16, 2
# Share of a layer's activations that selective checkpointing keeps.
_SELECTIVE = 0.6


def components(one: Setup) -> dict[str, float]:
    """Bytes of each component on the GPU that needs most.

    >>> from paceline.prediction.predict import setup_of
    >>> sizes = components(setup_of("llama-8b", "h100", 8, shard="zero3"))
    >>> round(sizes["optimizer"] / 2**30, 1)  # 12 bytes x 8.03e9 parameters / 8 GPUs
    11.2
    """
    shape, split = one.shape, one.tp * one.pp
    ranks = one.dp * one.cp
    inside = min(ranks, max(one.per_node // one.tp, 1))
    group = {"none": 1, "hybrid": inside}.get(one.shard, ranks)
    own = one.held / split
    trained = (one.trained if one.has_adapters and one.trained else one.held) / split
    frozen = (one.parameters / split) if one.has_adapters else 0.0
    shards_all, shards_gradients = one.shard in ("zero3", "hybrid"), one.shard in ("zero2", "zero3", "hybrid")
    weight_group = group if shards_all else 1
    if one.has_adapters:
        weights = (frozen * (NF4_BYTES if one.quantised else 2) + trained * ADAPTER_BYTES) / weight_group
        gradients, optimizer = 4 * trained / (group if shards_gradients else 1), 8 * trained / group
    else:
        weights, optimizer = 2 * own / weight_group, 12 * own / group
        # Whole gradients of several micro batches are added up in fp32, as in Megatron-LM: 6 + 12/group bytes in all.
        added_up = one.micro_batches > 1 and not shards_gradients
        gradients = (4 if added_up else 2) * own / (group if shards_gradients else 1)
    if one.offload:
        optimizer = 0.0
        # Gradients pass through a bucket to the host; stage 1 keeps them until the last micro batch.
        gradients = gradients if one.shard == "zero1" else 2 * min(trained, _OFFLOAD_BUCKET)
        weights = trained * ADAPTER_BYTES if shards_all and one.has_adapters else 0.0 if shards_all else weights
    root = arithmetic.root_parameters(shape) / one.tp
    block = (arithmetic.block_parameters(shape) - (one.parameters - one.held) / shape.layers) / one.tp
    live = (2 if one.has_adapters else 4) * (_LIVE_BLOCKS * block + root)
    live = live if shards_all and (group > 1 or one.offload) else 0.0
    if one.quantised:
        live = max(live, 2 * block)
    tokens = one.micro_batch * one.sequence_length / one.cp
    return {
        "weights": weights,
        "gradients": gradients,
        "optimizer": optimizer,
        "gathered weights": live,
        "activations": activations(one),
        "logits": _LOGIT_BYTES * tokens * shape.vocab / one.tp,
    }


def activations(one: Setup) -> float:
    """Bytes kept between forward and backward on the first pipeline stage, where most micro batches are in flight."""
    shape, tokens = one.shape, one.micro_batch * one.sequence_length / one.cp
    split = one.tp if one.software.sequence_parallel else 1
    joined = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    wide = (3 if shape.gated else 2) * shape.ffn * (shape.experts_per_token or 1)
    size = 4 if one.gpu.name == CPU else 2
    whole = size * tokens * (4 * shape.hidden / split + (joined + shape.heads * shape.head_dim + wide) / one.tp)
    if not one.software.fused_attention and one.checkpointing != "attention":
        whole += 5 * tokens * one.sequence_length * shape.heads / one.tp
    layers = shape.layers / (one.pp * one.stages) * _in_flight(one)
    if one.checkpointing == "full":
        return float(size * tokens * shape.hidden / split * layers + whole)
    return float(whole * layers * (_SELECTIVE if one.checkpointing == "selective" else 1))


def _in_flight(one: Setup) -> float:
    """Micro batches, one for each virtual stage they went through, that the first rank of a pipeline keeps at once.

    1F1B starts a backward pass after as many as it has stages. Interleaved, twice as many warm up the last virtual
    stage, and every other one has seen a full round.
    """
    if one.stages == 1:
        return min(one.pp, one.micro_batches)
    return min(2 * (one.pp - 1) + (one.stages - 1) * one.pp + 1, one.micro_batches * one.stages)


def host_bytes(one: Setup) -> float:
    """Memory of one node that offloading needs: the state of its GPUs, and their shards of the weights at stage 3."""
    if not one.offload:
        return 0.0
    trained = one.trained if one.has_adapters and one.trained else one.parameters
    kept = _HOST_BYTES * trained + (_HOST_WEIGHT_BYTES * one.parameters if one.shard == "zero3" else 0)
    return kept / one.gpus * min(one.per_node, one.gpus)


def total(one: Setup) -> float:
    return sum(components(one).values())


def usable_bytes(one: Setup) -> float | None:
    """What the GPU has for a training program; None if its memory is not in the table."""
    return None if one.gpu.memory_bytes is None else USABLE_RATIO * one.gpu.memory_bytes


def fits(one: Setup, factor: float = 1.0, peak_bytes: float | None = None) -> bool:
    """Whether there is room on the GPU (if its memory is known) and, with offload, on the host.

    factor: how much more than the arithmetic a rehearsal of a similar setup needed. peak_bytes: of a rehearsal of this
    one, which counts instead of the arithmetic.
    """
    usable, needed = usable_bytes(one), factor * total(one) if peak_bytes is None else peak_bytes
    on_host = not one.offload or host_bytes(one) <= USABLE_RATIO * host_memory_bytes(one.gpu)
    return on_host and (usable is None or needed <= usable)
