"""The arithmetic of fine-tuning: adapter parameters, FLOPs of frozen weights, state bytes and wire bytes.

Letters are those of `arithmetic`; N_frozen is N_mm, the weights each token is multiplied with; A the parameters of the
adapters. Adapters are fp32 whatever the compute dtype. Frozen weights have no gradient, no moment and no reduction.
"""

from __future__ import annotations

from collections.abc import Mapping

from paceline.experiment.spec import Tuning
from paceline.models import arithmetic
from paceline.models.arithmetic import Named
from paceline.models.shape import Shape, require_field

# NF4 with its scales quantised again: 4 bit, one 8-bit scale per 64 weights, one fp32 scale per 256 of those.
NF4_BLOCK, SCALES_BLOCK = 64, 256
NF4_CODE_BYTES = 4 / 8
NF4_SCALE_BYTES = (8 / NF4_BLOCK + 32 / (NF4_BLOCK * SCALES_BLOCK)) / 8
NF4_BYTES = NF4_CODE_BYTES + NF4_SCALE_BYTES
DTYPE_BYTES: Mapping[str, int] = {"fp32": 4, "bf16": 2, "fp16": 2}
ADAPTER_BYTES = 4
# Both moments of Adam, without the scales of 8-bit ones (one fp32 per 256).
MOMENT_BYTES: Mapping[str, int] = {"adamw": 8, "adamw_8bit": 2, "paged_adamw_8bit": 2}


def adapter_parameters(shape: Shape, rank: int, targets: str) -> int:
    """A: rank * (inputs + outputs) for each target of every layer, and for every expert of a mixture."""
    return shape.layers * sum(adapter_tensors(shape, rank, targets))


def sharded_adapter_parameters(shape: Shape, tuning: Tuning, parts: int) -> int:
    """A as FSDP2 sends it: the rows of each matrix are padded to a multiple of the parts, which matters because one of
    the two matrices of an adapter has only `rank` rows."""
    matrices = adapter_matrices(shape, tuning.rank, tuning.targets)
    return shape.layers * sum(-(-rows // parts) * parts * columns for rows, columns in matrices)


def adapter_tensors(shape: Shape, rank: int, targets: str) -> tuple[int, ...]:
    """Elements of the two matrices of each adapter of one layer."""
    return tuple(rows * columns for rows, columns in adapter_matrices(shape, rank, targets))


def adapter_matrices(shape: Shape, rank: int, targets: str) -> tuple[tuple[int, int], ...]:
    """Rows and columns of the two matrices of each adapter of one layer: (rank, inputs) and (outputs, rank)."""
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    ends = {
        "q": (shape.hidden, queries),
        "k": (shape.hidden, keys),
        "v": (shape.hidden, keys),
        "o": (queries, shape.hidden),
        "up": (shape.hidden, shape.ffn),
        "down": (shape.ffn, shape.hidden),
        **({"gate": (shape.hidden, shape.ffn)} if shape.gated else {}),
    }
    matrices: list[tuple[int, int]] = []
    for target in targets.split("+"):
        require_field(target in ends, shape.name, "targets", target, f"one of {', '.join(ends)}")
        experts = shape.experts or 1 if target in ("gate", "up", "down") else 1
        inputs, outputs = ends[target]
        matrices += [(rank, inputs), (outputs, rank)] * experts
    return tuple(matrices)


def trained_parameters(shape: Shape, tuning: Tuning) -> int:
    """Trained (and reduced) parameters: the adapters, or all."""
    if not tuning.has_adapters:
        return arithmetic.parameters(shape)
    return adapter_parameters(shape, tuning.rank, tuning.targets)


# --- FLOPs ---


def attention_flops_per_token(shape: Shape, mean_keys: float) -> float:
    """Forward FLOPs of all layers: 4*H*d per key. The mean is (s+1)/2 for a full causal row, less for packed rows."""
    return shape.layers * 4 * mean_keys * shape.heads * shape.head_dim


def flops_per_token(shape: Shape, tuning: Tuning, mean_keys: float) -> float:
    """Training FLOPs, the F of MFU: full 3*(2*N_mm + attention); adapters 4*N_frozen + 6*A + 3*attention.

    A frozen weight is used in the forward and for the gradient of its input, and has no gradient itself. As in full
    training, the input gradient of the lowest layer is counted although it is not needed.
    """
    products, attention = arithmetic.matmul_parameters(shape), attention_flops_per_token(shape, mean_keys)
    if not tuning.has_adapters:
        return 3 * (2 * products + attention)
    return 4 * products + 6 * _adapters_per_token(shape, tuning) + 3 * attention


def recomputed_flops_per_token(shape: Shape, tuning: Tuning, mean_keys: float, checkpointing: str) -> float:
    """FLOPs that HFU adds: with full checkpointing, one more forward of the blocks and their adapters."""
    if checkpointing in ("none", "selective"):
        return 0.0
    require_field(checkpointing == "full", shape.name, "checkpointing", checkpointing, "none, full or selective")
    blocks = arithmetic.matmul_parameters(shape) - shape.hidden * shape.vocab
    adapters = _adapters_per_token(shape, tuning) if tuning.has_adapters else 0
    return 2 * (blocks + adapters) + attention_flops_per_token(shape, mean_keys)


def _adapters_per_token(shape: Shape, tuning: Tuning) -> int:
    """Adapter parameters used per token: of a mixture, only those of the chosen experts."""
    if not shape.experts:
        return adapter_parameters(shape, tuning.rank, tuning.targets)
    used = 0
    for target in tuning.targets.split("+"):
        every, chosen = (shape.experts, shape.experts_per_token or 1) if target in ("gate", "up", "down") else (1, 1)
        used += adapter_parameters(shape, tuning.rank, target) // every * chosen
    return used


# --- state bytes ---


def quantised_parameters(shape: Shape) -> int:
    """Parameters that 4-bit training quantises: the matrices of the blocks, not embeddings, head, norms and biases."""
    whole_mlp = (shape.experts or 1) * (3 if shape.gated else 2) * shape.hidden * shape.ffn
    attention = 2 * shape.hidden * shape.head_dim * (shape.heads + shape.kv_heads)
    return shape.layers * (attention + whole_mlp)


def frozen_bytes(shape: Shape, tuning: Tuning, compute: str) -> float:
    """Bytes of all frozen weights: NF4_BYTES each if quantised, else the compute dtype's size."""
    if not tuning.has_adapters:
        return 0.0
    quantised = quantised_parameters(shape) if tuning.method == "qlora" else 0
    return quantised * NF4_BYTES + (arithmetic.parameters(shape) - quantised) * DTYPE_BYTES[compute]


def trained_bytes(tuning: Tuning, compute: str) -> tuple[float, float, float]:
    """Bytes per trained parameter: optimizer state (master weight, moments), gradient, weight. 16 with AdamW.

    Adapters need no master copy: 8 + 4 + 4, with 8-bit moments 2 + 4 + 4. Full training in half precision has an fp32
    master copy and 2-byte weights and gradients.
    """
    moments = MOMENT_BYTES[tuning.optimizer]
    if tuning.has_adapters or compute == "fp32":
        return moments, 4, 4
    return 4 + moments, 2, 2


def state_bytes(shape: Shape, tuning: Tuning, strategy: Named, group_size: int, compute: str) -> float | None:
    """Weights, gradients and optimizer state per rank, without live units, activations and buffers.

    Only strategies that shard weights (ZeRO-3, FSDP2) shard frozen ones, and only the codes of quantised ones: scales
    are not parameters and stay whole. None for an unknown strategy.
    """
    split = arithmetic.sharded_parts(strategy)
    if split is None:
        return None
    parts = trained_bytes(tuning, compute)
    trained = sum(parts[:split]) / group_size + sum(parts[split:])
    scales = quantised_parameters(shape) * NF4_SCALE_BYTES if tuning.method == "qlora" else 0.0
    frozen = (frozen_bytes(shape, tuning, compute) - scales) / (group_size if split == len(parts) else 1)
    return scales + frozen + trained * trained_parameters(shape, tuning)


# --- wire bytes ---


def wire_bytes(
    shape: Shape, tuning: Tuning, strategy: Named, group_size: int, accumulation: int, reduce: str, compute: str
) -> float | None:
    """Predicted bytes each rank sends per optimizer step; None where the strategy has no formula.

    DDP and ZeRO-1/2 reduce and gather trained parameters: P becomes A. FSDP2 and ZeRO-3 also gather frozen weights as
    stored (quantised ones as codes), but reduce only the adapters. Padding is counted for adapters only: frozen
    weights have so many rows that it does not matter.
    """
    trained, size = trained_parameters(shape, tuning), ADAPTER_BYTES if tuning.has_adapters else DTYPE_BYTES[compute]
    padding = sharded_adapter_parameters(shape, tuning, group_size) - trained if tuning.has_adapters else 0
    tensors = weight_tensors(shape, tuning, compute)
    traffic = arithmetic.Traffic(
        options=strategy.options,
        parameters=sum(elements for elements, _ in tensors),
        accumulation=accumulation,
        gradient_bytes=trained * DTYPE_BYTES[reduce],
        weight_bytes=sum(stored for _, stored in tensors),
        root_weight_bytes=arithmetic.root_parameters(shape) * DTYPE_BYTES[compute],
        updated_bytes=trained * size,
        tensors=tensors,
        padding_weight_bytes=padding * ADAPTER_BYTES,
        padding_gradient_bytes=padding * DTYPE_BYTES[reduce],
    )
    return arithmetic.sent_bytes(strategy, traffic, group_size)


def weight_tensors(shape: Shape, tuning: Tuning, compute: str) -> list[tuple[int, int]]:
    """Elements and bytes of every weight in transformers: q, k, v, gate and up separate, 4-bit codes in pairs."""
    h, size = shape.hidden, DTYPE_BYTES[compute]
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    mlp = [h * shape.ffn] * (3 if shape.gated else 2) * (shape.experts or 1)
    products = [h * queries, h * keys, h * keys, queries * h, *mlp]
    paired = tuning.method == "qlora"
    block = [(n // 2, n // 2) if paired else (n, n * size) for n in products]
    small = arithmetic.block_parameters(shape) - sum(products)
    norms = [(h, h * size)] * 2
    others = [(small - 2 * h, (small - 2 * h) * size)] if small > 2 * h else []
    adapters = adapter_tensors(shape, tuning.rank, tuning.targets) if tuning.has_adapters else ()
    block += [*norms, *others, *((n, n * ADAPTER_BYTES) for n in adapters)]
    ends = [shape.vocab * h] * (1 if shape.tied else 2)
    rest = arithmetic.root_parameters(shape) - sum(ends)
    return block * shape.layers + [(n, n * size) for n in (*ends, rest)]
