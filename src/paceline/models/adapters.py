"""The arithmetic of fine-tuning: adapter parameters, FLOPs of frozen weights, state bytes and wire bytes.

Letters are those of `models`; N_frozen is every weight a token is multiplied with (N_mm), A the adapters' parameters.
Adapters are held in fp32 whatever the compute dtype; a frozen weight costs no gradient, no moment and no reduction.
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
# Both moments of Adam; of 8-bit ones the scales (one fp32 per 256) are not counted.
MOMENT_BYTES: Mapping[str, int] = {"adamw": 8, "adamw_8bit": 2, "paged_adamw_8bit": 2}


def adapter_parameters(shape: Shape, rank: int, targets: str) -> int:
    """A: rank * (inputs + outputs) for each target of every layer; of a mixture, for every expert."""
    return shape.layers * sum(adapter_tensors(shape, rank, targets))


def sharded_adapter_parameters(shape: Shape, tuning: Tuning, parts: int) -> int:
    """A as FSDP2 sends it: it pads the rows of each matrix to a multiple of the parts, and one of the two of every
    adapter has no more rows than its rank."""
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
    found: list[tuple[int, int]] = []
    for target in targets.split("+"):
        require_field(target in ends, shape.name, "targets", target, f"one of {', '.join(ends)}")
        experts = shape.experts or 1 if target in ("gate", "up", "down") else 1
        inputs, outputs = ends[target]
        found += [(rank, inputs), (outputs, rank)] * experts
    return tuple(found)


def trained_parameters(shape: Shape, tuning: Tuning) -> int:
    """What learns, and so what is reduced: the adapters, or everything."""
    if not tuning.has_adapters:
        return arithmetic.parameters(shape)
    return adapter_parameters(shape, tuning.rank, tuning.targets)


# --- FLOPs ---


def attention_flops_per_token(shape: Shape, mean_keys: float) -> float:
    """Forward, all layers: 4*H*d per key seen. Of a full causal row the mean is (s+1)/2; of packed documents less."""
    return shape.layers * 4 * mean_keys * shape.heads * shape.head_dim


def flops_per_token(shape: Shape, tuning: Tuning, mean_keys: float) -> float:
    """Training, the F of MFU: full 3*(2*N_mm + attention); adapters 4*N_frozen + 6*A + 3*attention.

    A frozen weight takes part in the forward and in the gradient of its input, but has no gradient of its own. That
    the lowest layer's input needs no gradient either is not counted, as in full training.
    """
    products, attention = arithmetic.matmul_parameters(shape), attention_flops_per_token(shape, mean_keys)
    if not tuning.has_adapters:
        return 3 * (2 * products + attention)
    return 4 * products + 6 * _adapters_per_token(shape, tuning) + 3 * attention


def recomputed_flops_per_token(shape: Shape, tuning: Tuning, mean_keys: float, checkpointing: str) -> float:
    """What HFU adds: with full checkpointing one more forward of the blocks, their adapters included."""
    if checkpointing in ("none", "selective"):
        return 0.0
    require_field(checkpointing == "full", shape.name, "checkpointing", checkpointing, "none, full or selective")
    blocks = arithmetic.matmul_parameters(shape) - shape.hidden * shape.vocab
    adapters = _adapters_per_token(shape, tuning) if tuning.has_adapters else 0
    return 2 * (blocks + adapters) + attention_flops_per_token(shape, mean_keys)


def _adapters_per_token(shape: Shape, tuning: Tuning) -> int:
    """Of a mixture only the experts a token visits."""
    if not shape.experts:
        return adapter_parameters(shape, tuning.rank, tuning.targets)
    return sum(
        adapter_parameters(shape, tuning.rank, target)
        // (shape.experts if target in ("gate", "up", "down") else 1)
        * ((shape.experts_per_token or 1) if target in ("gate", "up", "down") else 1)
        for target in tuning.targets.split("+")
    )


# --- state bytes ---


def quantised_parameters(shape: Shape) -> int:
    """What 4-bit training quantises: the products of the blocks. Embeddings, head, norms and biases are not."""
    whole_mlp = (shape.experts or 1) * (3 if shape.gated else 2) * shape.hidden * shape.ffn
    attention = 2 * shape.hidden * shape.head_dim * (shape.heads + shape.kv_heads)
    return shape.layers * (attention + whole_mlp)


def frozen_bytes(shape: Shape, tuning: Tuning, compute: str) -> float:
    """Storage of all weights that do not learn: NF4_BYTES each where quantised, else the compute dtype's."""
    if not tuning.has_adapters:
        return 0.0
    quantised = quantised_parameters(shape) if tuning.method == "qlora" else 0
    return quantised * NF4_BYTES + (arithmetic.parameters(shape) - quantised) * DTYPE_BYTES[compute]


def trained_bytes(tuning: Tuning, compute: str) -> tuple[float, float, float]:
    """Per parameter that learns: optimizer state (master weight, moments), gradient, weight. 16 B with AdamW.

    Adapters are their own master: 8 + 4 + 4, with 8-bit moments 2 + 4 + 4. Full training in half precision keeps an
    fp32 master beside 2-byte weights and gradients.
    """
    moments = MOMENT_BYTES[tuning.optimizer]
    if tuning.has_adapters or compute == "fp32":
        return moments, 4, 4
    return 4 + moments, 2, 2


def state_bytes(shape: Shape, tuning: Tuning, strategy: Named, group_size: int, compute: str) -> float | None:
    """Weights, gradients and optimizer state per rank, without live units, activations and buffers.

    Only strategies that shard weights (ZeRO-3, FSDP2) shard the frozen ones, and of quantised ones the codes: scales
    are no parameters and stay whole. None for an unknown strategy.
    """
    split = arithmetic.sharded_parts(strategy)
    if split is None:
        return None
    parts = trained_bytes(tuning, compute)
    trained = sum(parts[:split]) / group_size + sum(parts[split:])
    scales = _scale_bytes(shape, tuning)
    frozen = (frozen_bytes(shape, tuning, compute) - scales) / (group_size if split == len(parts) else 1)
    return scales + frozen + trained * trained_parameters(shape, tuning)


def _scale_bytes(shape: Shape, tuning: Tuning) -> float:
    return quantised_parameters(shape) * NF4_SCALE_BYTES if tuning.method == "qlora" else 0.0


# --- wire bytes ---


def wire_bytes(
    shape: Shape, tuning: Tuning, strategy: Named, group_size: int, accumulation: int, reduce: str, compute: str
) -> float | None:
    """Predicted bytes each rank sends per optimizer step; None where the strategy has no formula.

    DDP and ZeRO-1/2 reduce and gather what is trained: P becomes A. FSDP2 and ZeRO-3 also gather the frozen weights as
    they are stored (quantised ones as codes), but reduce the adapters alone. Padding is counted for the adapters only:
    a frozen weight has too many rows for it to matter.
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
    """Elements and bytes of every weight as transformers holds it: q, k, v, gate and up apart, 4-bit codes in pairs."""
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
