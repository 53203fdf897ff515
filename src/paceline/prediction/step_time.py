"""Where the time of a training step goes, by physics with a few fitted parameters.

    step = (products + attention + memory-bound + tensor parallel + expert parallel + launch + bubble)
           * (1 + jitter * log2 nodes) + exposed data-parallel traffic + optimizer + offload + a constant

Everything is arrays over setups, so that a fit over thousands of rows and one prediction share the code. A parameter is
positive and given as its logarithm, or a share between 0 and 1 and given as its logit (`values`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from paceline.models import arithmetic
from paceline.prediction import hardware
from paceline.prediction.setup import Setup

Array = NDArray[np.float64]
Columns = Mapping[str, Array]
# Of the parameters: one number each, or an array that is broadcast over the setups.
Values = Mapping[str, float | Array]

PARTS = (
    "products",
    "attention",
    "memory-bound",
    "tensor parallel",
    "expert parallel",
    "launch",
    "pipeline bubble",
    "data parallel (exposed)",
    "optimizer",
    "offload",
    "other",
)
# Families of programs whose kernels are as a rule faster or slower than plain PyTorch.
FAMILIES = ("megatron", "nemo", "peft")
# Offload, which no published row measures, so nothing here is fitted: the share of PCIe that pinned copies reach, the
# share of the host's memory bandwidth that CPU-Adam reaches when it moves 30 bytes per parameter (an assumption, about
# what the authors of ZeRO-Offload report; we have not measured it), and that half of what could hide does not.
OFFLOAD_PCIE, OFFLOAD_HOST, OFFLOAD_ADAM_BYTES, OFFLOAD_EXPOSED = 0.8, 0.45, 30.0, 0.5
# Time of expanding 4-bit weights in compiled blocks, relative to the least traffic: 5.3 ms for Mistral-7B on one H200
# (docs/measured/h200-finetune). No published row does it.
COMPILED_EXPANSION = 1.5
# Of a mixture of experts, in both passes: times that the rows of the experts and those of the tokens go through memory,
# and bytes per token and expert of the routing, for all and for each chosen one. Counted operation by operation in our
# own layer without its products (docs/prediction.md); nothing of it is fitted.
MIXTURE_ROWS, MIXTURE_TOKENS, MIXTURE_ROUTING, MIXTURE_CHOICE = 17.0, 9.0, 120.0, 80.0
# Cluster offsets: what differs between two installations of equal hardware, in units of the parameters. `link` is
# inside a node, `network` between nodes.
OFFSETS = ("level", "attention", "memory", "eight_bit", "launch", "link", "network", "dp_overlap", "fsdp_overlap")


def columns(setups: Sequence[Setup]) -> dict[str, Array]:
    """The numbers of each setup that the model needs, as arrays."""
    rows = [_numbers(setup) for setup in setups]
    return {name: np.array([row[name] for row in rows], dtype=float) for name in (rows[0] if rows else ())}


def _numbers(one: Setup) -> dict[str, float]:
    shape, gpu, software = one.shape, one.gpu, one.software
    blocks = shape.layers * arithmetic.block_parameters(shape)
    adapted = one.has_adapters
    return {
        "hidden": shape.hidden,
        "layers": shape.layers,
        "attention_width": shape.heads * shape.head_dim,
        "kv_width": shape.kv_heads * shape.head_dim,
        "heads": shape.heads,
        "ffn": shape.ffn * (shape.experts_per_token or 1),
        "gated": 1 + shape.gated,
        "vocab": shape.vocab,
        "parameters": one.held,
        "block_parameters": blocks,
        "trained": one.trained if adapted and one.trained else one.held,
        "adapted": adapted,
        "quantised": one.quantised,
        "sequence": one.sequence_length,
        "seen": one.document_length or one.sequence_length,
        "micro_batch": one.micro_batch,
        "micro_batches": one.micro_batches,
        "gpus": one.gpus,
        "per_node": min(one.per_node, one.gpus),
        "dp": one.dp,
        "tp": one.tp,
        "pp": one.pp,
        "cp": one.cp,
        "ep": one.ep,
        "stages": one.stages,
        "zero1": one.shard in ("zero1", "zero2"),
        "zero3": one.shard == "zero3",
        "hybrid": one.shard == "hybrid",
        "fp8": one.fp8 and gpu.fp8_flops > gpu.flops,
        "fp8_rowwise": one.fp8_rowwise,
        "full": one.checkpointing == "full",
        "selective": one.checkpointing == "selective",
        "scored_twice": one.checkpointing == "attention",
        "rescored": one.checkpointing in ("attention", "selective"),
        "flops": gpu.flops,
        "matmul_ratio": gpu.matmul_ratio,
        "hopper": gpu.generation == "hopper",
        "volta": gpu.generation == "volta",
        "amd": gpu.generation == "cdna3",
        "offload": one.offload,
        "mixture": bool(shape.experts),
        "experts": shape.experts or 0,
        "chosen": shape.experts_per_token or 1,
        "tensors": len(arithmetic.tensor_sizes(shape)),
        "pcie": hardware.host_rates(gpu)[0],
        "host": hardware.host_rates(gpu)[1],
        "cpu": gpu.generation == "cpu",
        "other_gpu": gpu.generation not in ("ampere", "hopper", "volta", "cdna3"),
        "hbm": gpu.memory_bytes_per_s,
        "link": one.link,
        "node_network": one.node_network,
        **{name: software.family == name for name in FAMILIES},
        "fused": software.fused_attention,
        "engine": software.engine or (software.cudnn_attention and gpu.generation == "hopper"),
        "compiled": software.compiled,
        "plain": not software.fused_elementwise and not software.compiled,
        "queued": software.queued,
        "sequence_parallel": software.sequence_parallel,
        "late": software.late_reduce,
        "async_tp": software.async_tp,
        "fp8_gather": software.fp8_gather,
        "reduce_bytes": software.reduce_bytes,
        "stops_early": software.stops_early,
        "weight_bytes": 0.0 if adapted else software.weight_bytes,
        "bucket_bytes": software.bucket_bytes,
        "update_bytes": software.update_bytes or 0.0,
        "host_update": software.host_update_s,
        "host_pass": software.host_pass_s,
    }


def _sigmoid(x: Array | float) -> Array:
    return np.asarray(1 / (1 + np.exp(-np.asarray(x, dtype=float))))


def parts(c: Columns, p: Values, offsets: Mapping[str, Array | float] | None = None) -> dict[str, Array]:
    """Seconds of each of `PARTS` for each setup; their sum is the step time."""
    shift = {name: np.asarray(0.0) for name in OFFSETS} | {k: np.asarray(v) for k, v in (offsets or {}).items()}
    slower = np.exp(shift["level"] + sum(c[name] * p[name] for name in FAMILIES))
    layer = {name: value * slower for name, value in _layer(c, p, shift).items()}
    layers = c["layers"] / c["pp"]
    tensor, expert = _tensor_parallel(c, p, shift), _expert_parallel(c, p, shift)
    head_products, head_memory = (value * slower for value in _head(c, p, shift))
    gpu_s = sum(layer.values()) + tensor + expert
    passes = 2 + c["full"]
    launch_s = (
        np.exp(p["launch"] + c["peft"] * p["peft_launch"] + shift["launch"])
        * passes
        * (1 - c["compiled"] * _sigmoid(p["compiled_launch"]))
    )
    power = 1 + np.exp(p["launch_power"])
    one_layer = (gpu_s**power + launch_s**power) ** (1 / power)
    stage = layers * one_layer
    batches, boundary = c["micro_batches"], _boundary(c, p, shift)
    bubble = (c["pp"] - 1) / c["stages"] * stage + batches * boundary
    jitter = 1 + np.exp(p["jitter"]) * np.log2(np.maximum(c["gpus"] / c["per_node"], 1))
    backward = stage * (passes - 1) / passes
    exposed, gathered = _data_parallel(c, p, shift, stage + head_products + head_memory, backward)
    own = c["trained"] / (c["tp"] * c["pp"])
    # Zero stages split the update over the data-parallel ranks; a hybrid over one node.
    ranks = c["dp"] * c["cp"]
    split = np.where(c["zero1"] + c["zero3"] > 0, ranks, np.where(c["hybrid"] > 0, np.minimum(ranks, c["per_node"]), 1))
    update_bytes = np.where(c["update_bytes"] > 0, c["update_bytes"], np.exp(p["optimizer_bytes"]))
    optimizer = np.where(c["offload"] > 0, 0.0, update_bytes * own / split / c["hbm"])
    scale = batches * layers * jitter
    return {
        "products": scale * layer["products"] + batches * head_products * jitter,
        "attention": scale * layer["attention"],
        "memory-bound": scale * layer["memory-bound"] + batches * head_memory * jitter,
        "tensor parallel": scale * tensor,
        "expert parallel": scale * expert,
        "launch": scale * (one_layer - gpu_s),
        "pipeline bubble": bubble * jitter,
        "data parallel (exposed)": exposed + gathered,
        "optimizer": optimizer,
        "offload": _offload(c, stage + head_products + head_memory),
        "other": np.exp(p["constant"]) * (1 - c["queued"]) + _host(c, batches, stage + head_products + head_memory),
    }


def step_time(c: Columns, p: Values, offsets: Mapping[str, Array | float] | None = None) -> Array:
    """Seconds of one optimizer step for each setup."""
    return np.asarray(sum(parts(c, p, offsets).values()))


# --- compute ---


def _efficiency(c: Columns, p: Values) -> Array:
    """Share of the vendor's 16-bit peak that large products reach."""
    generation = (
        np.log(c["matmul_ratio"])
        + c["hopper"] * p["hopper"]
        + c["volta"] * p["volta"]
        + c["amd"] * p["amd"]
        + c["other_gpu"] * p["other_gpu"]
    )
    return np.asarray(np.exp(p["efficiency"] + generation))


def _product(c: Columns, p: Values, shift: Mapping[str, Array], tokens: Array, weights: Array, moved: Array) -> Array:
    """Seconds of one product with this many weights: arithmetic, and operands through memory."""
    fp8 = 1 + c["fp8"] * np.exp(p["fp8_gain"] + c["fp8_rowwise"] * p["fp8_rowwise"] - shift["eight_bit"])
    return np.asarray(
        2 * tokens * weights / (_efficiency(c, p) * c["flops"] * fp8) + np.exp(p["kappa"]) * 2 * moved / c["hbm"]
    )


def _layer(c: Columns, p: Values, shift: Mapping[str, Array]) -> dict[str, Array]:
    """Seconds of one layer and one micro batch, forward, backward and recomputation together."""
    tokens, tp, h = c["micro_batch"] * c["sequence"] / c["cp"], c["tp"], c["hidden"]
    joined = c["attention_width"] + 2 * c["kv_width"]
    wide = c["gated"] * c["ffn"]
    weights = (h * joined + c["attention_width"] * h + h * wide + c["ffn"] * h) / tp
    # A token meets the chosen experts only, but every micro batch reads all that the rank has.
    idle = np.maximum(c["experts"] / c["ep"] / c["chosen"] - 1, 0) * (wide + c["ffn"]) * h / tp
    moved = weights + idle + tokens * (4 * h + (joined + c["attention_width"] + wide + c["ffn"]) / tp)
    # Frozen weights need no gradient: two passes instead of three.
    backward = 2 - c["adapted"]
    # The last product of a layer, from the wide state of the MLP, where recomputation stops before it.
    last = c["stops_early"] * c["ffn"] * h / tp / weights
    repeated = c["full"] * (1 - last) + c["selective"] * _sigmoid(p["selective"])
    products = _product(c, p, shift, tokens, weights, moved) * (1 + backward + repeated)
    scores = 4 * tokens * c["seen"] * c["attention_width"] / tp
    # Longer sequences and wider heads keep the tensor cores busier.
    length, width = np.log(np.minimum(c["seen"], 32768) / 4096), np.log(c["attention_width"] / c["heads"] / 128)
    shape = p["flash_length"] * length + p["flash_width"] * width
    rate = np.exp(p["flash"] + c["hopper"] * p["flash_hopper"] + c["engine"] * p["flash_engine"] + shape) * c["flops"]
    # A causal mask halves the fused work; its backward has five products where the forward has two.
    fused = scores / 2 / rate * (3.5 + c["full"] + c["scored_twice"])
    maps = 2 * np.exp(p["maps"]) * tokens * c["sequence"] * c["heads"] / tp / c["hbm"]
    unfused = scores / (_efficiency(c, p) * c["flops"]) * (3 + c["full"]) + maps * (3 + c["full"] + c["rescored"])
    split = np.where(c["sequence_parallel"] > 0, tp, 1)
    # Norms read and write the hidden state twice, residuals read it four times and write it twice.
    elementwise = 2 * tokens * (10 * h / split + (2 * wide + 2 * joined) / tp) * np.exp(p["elementwise"]) / c["hbm"]
    elementwise = elementwise * (2.5 + c["full"]) + np.exp(p["elementwise"]) * _mixture(c, tokens) / c["hbm"]
    elementwise = elementwise * _fusion(c, p, shift)
    elementwise = elementwise * (1 + c["fp8"] * np.exp(p["fp8_casts"]))
    # Paceline's compiled blocks have a kernel of their own, and what they expand serves recomputation and gradients.
    expansions = np.where(c["compiled"] > 0, 2 * COMPILED_EXPANSION, np.exp(p["expand"]) * (2 + c["full"]))
    expanded = c["quantised"] * expansions * 2.5 * weights / c["hbm"]
    return {
        "products": products,
        "attention": np.where(c["fused"] > 0, fused, unfused) * np.exp(shift["attention"]),
        "memory-bound": elementwise + expanded + _updates(c, p, weights + idle),
    }


def _updates(c: Columns, p: Values, weights: Array) -> Array:
    """Seconds in which weights are cast and gradients are added up or copied, for one micro batch."""
    return np.asarray(np.exp(p["weight_traffic"]) * c["weight_bytes"] * weights / c["hbm"])


def _head(c: Columns, p: Values, shift: Mapping[str, Array]) -> tuple[Array, Array]:
    """Seconds of the output head of one micro batch: products, and the softmax through memory."""
    tokens = c["micro_batch"] * c["sequence"] / c["cp"]
    weights = c["hidden"] * c["vocab"] / c["tp"]
    sixteen = {**c, "fp8": 0 * c["fp8"]}
    products = 3 * _product(sixteen, p, shift, tokens, weights, weights + tokens * (c["hidden"] + c["vocab"] / c["tp"]))
    logits = np.exp(p["logit_bytes"]) * _fusion(c, p, shift) * tokens * c["vocab"] / c["tp"] / c["hbm"]
    return products, logits + _updates(c, p, weights)


def _fusion(c: Columns, p: Values, shift: Mapping[str, Array]) -> Array:
    """Elementwise traffic relative to hand-written fused kernels: more in plain PyTorch, less after a compiler."""
    traits = np.exp(c["plain"] * p["unfused"]) * (1 - c["compiled"] * _sigmoid(p["compiled"]))
    return np.asarray(traits * np.exp(shift["memory"]))


def _mixture(c: Columns, tokens: Array) -> Array:
    """Bytes of one layer of a mixture of experts besides its products: rows copied in the order of their experts and
    back, weighted and added up, and the routing."""
    rows = 2 * c["hidden"] * (MIXTURE_ROWS * c["chosen"] + MIXTURE_TOKENS)
    routing = c["experts"] * (MIXTURE_ROUTING + MIXTURE_CHOICE * c["chosen"])
    return np.asarray(c["mixture"] * tokens * (rows + routing))


def _host(c: Columns, batches: Array, batch: Array) -> Array:
    """Seconds per step that the GPU waits for what the host does for each tensor. batch: the compute of a micro batch,
    of which the forward pass is a third, or a quarter with recomputation."""
    tensors, forward = c["tensors"] / c["pp"], batch / (3 + c["full"])
    late = np.maximum(c["host_pass"] * tensors - forward, 0)
    late = late + np.maximum((1 + c["full"]) * c["host_pass"] * tensors - (batch - forward), 0)
    return np.asarray(c["host_update"] * tensors + batches * late)


# --- offload ---


def _offload(c: Columns, batch: Array) -> Array:
    """Exposed seconds per step of state that the host keeps.

    Gradients go down during every micro batch, and at stage 3 the weights come up for each of its passes: both hide
    behind the compute as far as they fit. Adam on the CPU and the updated weights follow the last micro batch.
    """
    ranks = c["tp"] * c["pp"] * c["dp"] * c["cp"]
    share, shard, pcie = c["trained"] / ranks, c["parameters"] / ranks, OFFLOAD_PCIE * c["pcie"]
    # DeepSpeed adds the gradients of a micro batch to those on the host: both ways over the bus.
    moved = 2 * (2 * share + c["zero3"] * (2 + c["full"]) * shard) / pcie
    late = np.maximum(moved - batch, 0) + OFFLOAD_EXPOSED * np.minimum(moved, batch)
    update = OFFLOAD_ADAM_BYTES * share * np.minimum(c["per_node"], c["gpus"]) / (OFFLOAD_HOST * c["host"])
    return np.asarray(np.where(c["offload"] > 0, c["micro_batches"] * late + update + 2 * share / pcie, 0.0))


# --- communication ---


def _ring(c: Columns, p: Values, shift: Mapping[str, Array], ranks: Array, inner: Array) -> tuple[Array, Array]:
    """(seconds per byte, seconds per message) of a ring over this many ranks, which are `inner` apart in a node."""
    local = np.clip(np.floor(c["per_node"] / inner), 1, ranks)
    nodes = np.ceil(ranks / local)
    link = np.exp(p["link"] - shift["link"]) * c["link"]
    # Rings of the other ranks of the node use the same adapters at the same time.
    share = np.exp(p["nic"] - shift["network"]) * c["node_network"] * local / c["per_node"]
    bandwidth = np.where(nodes > 1, np.minimum(link, share), link)
    hops = np.exp(p["alpha_link"]) * (local - 1) + np.exp(p["alpha_node"]) * np.where(nodes > 1, nodes, 0)
    return np.asarray(1 / bandwidth), np.asarray(hops)


def _tensor_parallel(c: Columns, p: Values, shift: Mapping[str, Array]) -> Array:
    """Exposed seconds per layer and micro batch of tensor and context parallelism."""
    tokens = c["micro_batch"] * c["sequence"] / c["cp"]
    per_byte, latency = _ring(c, p, shift, c["tp"], np.ones_like(c["tp"]))
    reductions = np.where(c["tp"] > 1, 2 * (2 + c["full"] * (1 - c["stops_early"] / 2)), 0)
    wire = 2 * (c["tp"] - 1) / c["tp"] * tokens * c["hidden"] * 2
    tensor = (
        reductions * (wire * per_byte + 2 * latency) * (1 - _sigmoid(p["tp_overlap"] + c["async_tp"] * p["async_tp"]))
    )
    per_byte, latency = _ring(c, p, shift, c["cp"], c["tp"])
    keys = (c["cp"] - 1) * tokens * 2 * c["kv_width"] / c["tp"] * 2
    context = np.where(c["cp"] > 1, (3 + c["full"]) * (keys * per_byte + latency), 0) * (1 - _sigmoid(p["cp_overlap"]))
    return np.asarray(tensor + context)


def _expert_parallel(c: Columns, p: Values, shift: Mapping[str, Array]) -> Array:
    """Seconds per layer and micro batch in which tokens travel to the ranks of their experts and back, in both passes.

    The experts wait for the tokens, so nothing hides it. Tokens for ranks of the same node and of others leave at once.
    No published row has experts on several ranks: with the links as fitted, this is arithmetic.
    """
    sent = 2 * c["micro_batch"] * c["sequence"] / c["cp"] * c["chosen"] * c["hidden"]
    local = np.clip(np.floor(c["per_node"] / c["tp"]), 1, c["ep"])
    link = np.exp(p["link"] - shift["link"]) * c["link"]
    nic = np.exp(p["nic"] - shift["network"]) * c["node_network"] / c["per_node"]
    travel = np.maximum((local - 1) / c["ep"] * sent / link, (c["ep"] - local) / c["ep"] * sent / nic)
    _, latency = _ring(c, p, shift, c["ep"], c["tp"])
    return np.asarray(np.where(c["ep"] > 1, 2 * (2 + c["full"]) * (travel + latency), 0))


def _boundary(c: Columns, p: Values, shift: Mapping[str, Array]) -> Array:
    """Exposed seconds of the transfers between pipeline stages, per micro batch."""
    tokens = c["micro_batch"] * c["sequence"] / c["cp"]
    size = 2 * tokens * c["hidden"] / np.where(c["sequence_parallel"] > 0, c["tp"], 1)
    inside = c["gpus"] <= c["per_node"]
    nic = np.exp(p["nic"] - shift["network"]) * c["node_network"] / c["per_node"]
    bandwidth = np.where(inside, np.exp(p["link"] - shift["link"]) * c["link"], nic)
    return np.asarray(np.where(c["pp"] > 1, 2 * c["stages"] * size / bandwidth, 0) * (1 - _sigmoid(p["pp_overlap"])))


def _data_parallel(
    c: Columns, p: Values, shift: Mapping[str, Array], batch: Array, backward: Array
) -> tuple[Array, Array]:
    """Exposed seconds per step: of gradients that are reduced once, and of weights gathered for every micro batch."""
    ranks = c["dp"] * c["cp"]
    many = ranks > 1
    per_byte, latency = _ring(c, p, shift, ranks, c["tp"])
    own = c["trained"] / (c["tp"] * c["pp"])
    reduced = c["reduce_bytes"] * own
    # Reduce-scatter and all-gather: of gradients alone, or of gradients and updated weights.
    returned = np.where(c["zero1"] > 0, 2 * own, reduced)
    messages = np.ceil(reduced / c["bucket_bytes"])
    once = (reduced + returned) * (ranks - 1) / ranks * per_byte + 2 * messages * latency
    overlap = _sigmoid(p["dp_overlap"] + c["late"] * p["late_reduce"] + shift["dp_overlap"])
    exposed = np.where(many, once - np.minimum(overlap * once, backward), 0)
    # Sharded weights: gathered for forward and backward, and gradients scattered, for every micro batch.
    inside = np.minimum(ranks, np.floor(c["per_node"] / c["tp"]))
    group = np.where(c["hybrid"] > 0, np.maximum(inside, 1), ranks)
    per_byte, latency = _ring(c, p, shift, group, c["tp"])
    weights = c["parameters"] / (c["tp"] * c["pp"])
    gathered = 2 - c["fp8_gather"] * c["fp8"] * (1 - c["fp8_rowwise"])
    volume = (2 * gathered * weights + reduced) * (group - 1) / group * per_byte + 3 * c["layers"] / c["pp"] * latency
    hidden = _sigmoid(p["fsdp_overlap"] + shift["fsdp_overlap"]) * np.minimum(volume, batch)
    # In a pipeline the gathered weights are kept until the last micro batch.
    sharded = np.where(c["pp"] > 1, 1, c["micro_batches"]) * (volume - hidden)
    between = np.maximum(ranks / np.maximum(group, 1), 1)
    per_byte, latency = _ring(c, p, shift, between, c["per_node"])
    copies = 2 * reduced / group * (between - 1) / between * per_byte + 2 * c["layers"] * latency
    copies = np.where(between > 1, copies, 0) * (1 - overlap)
    is_sharded = (c["zero3"] + c["hybrid"]) * many
    return np.where(is_sharded > 0, 0, exposed), np.where(is_sharded > 0, sharded + c["hybrid"] * copies, 0)
