"""LoRA's arithmetic: how many numbers an adapter has."""

from __future__ import annotations

from paceline.models import Shape


def adapter_parameters(shape: Shape, rank: int, targets: str) -> int:
    """Numbers that learn: rank * (inputs + outputs) for each target of each layer (A and B of LoRA)."""
    heads, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    sides = {
        "q": (shape.hidden, heads),
        "k": (shape.hidden, keys),
        "v": (shape.hidden, keys),
        "o": (heads, shape.hidden),
        "gate": (shape.hidden, shape.ffn),
        "up": (shape.hidden, shape.ffn),
        "down": (shape.ffn, shape.hidden),
    }
    return shape.layers * sum(rank * sum(sides[target]) for target in targets.split("+"))
