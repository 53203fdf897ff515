"""LoRA's arithmetic: which products of a block may carry an adapter, and how many numbers an adapter has."""

from __future__ import annotations

from paceline.models import Shape


def projections(shape: Shape) -> dict[str, tuple[int, int]]:
    """Inputs and outputs of each product of a block, by the word of `spec.TARGETS`."""
    heads, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    attention = {
        "q": (shape.hidden, heads),
        "k": (shape.hidden, keys),
        "v": (shape.hidden, keys),
        "o": (heads, shape.hidden),
    }
    gate = {"gate": (shape.hidden, shape.ffn)} if shape.gated else {}
    return {**attention, **gate, "up": (shape.hidden, shape.ffn), "down": (shape.ffn, shape.hidden)}


def adapter_parameters(shape: Shape, rank: int, targets: str) -> int:
    """Numbers that learn: rank * (inputs + outputs) for each target of each layer (A and B of LoRA)."""
    sizes = projections(shape)
    return shape.layers * sum(rank * sum(sizes[target]) for target in targets.split("+"))
