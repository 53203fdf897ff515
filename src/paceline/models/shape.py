"""The dimensions of a decoder, with their validation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.errors import RequestError

FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "gpt": {"positions": "learned", "norm": "layernorm", "gated": False, "tied": True, "bias": True},
    "llama": {"positions": "rope", "norm": "rmsnorm", "gated": True, "tied": False, "bias": False},
}
_WORDS = {"family": tuple(FAMILIES), "positions": ("learned", "rope"), "norm": ("layernorm", "rmsnorm")}
_COUNTS = ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab", "context")
_OPTIONAL_COUNTS = ("experts", "experts_per_token")
_FLAGS = ("gated", "tied", "bias")
_NUMBERS = ("rope_theta", "norm_eps")
_WEIGHTS = ("aux_loss",)
SETTABLE = (*_WORDS, *_COUNTS, *_OPTIONAL_COUNTS, *_FLAGS, *_NUMBERS, *_WEIGHTS)
# Other names of fields.
ALIASES = {"top_k": "experts_per_token"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The dimensions of a decoder. context: the number of positions. ffn: the width of one MLP or expert.

    bias: every projection of the blocks has a bias; the head and the router have none, a LayerNorm always has one.
    qkv_bias: q, k and v have one. qk_norm: each head of q and k has a norm of head_dim. The reference decoder supports
    neither. experts: None for a dense MLP. aux_loss: the weight of the loss that balances experts (docs/moe.md).
    published_parameters: a count published by others for exactly this shape.
    """

    name: str
    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    context: int
    positions: str
    gated: bool
    tied: bool
    bias: bool
    norm: str
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    experts: int | None = None
    experts_per_token: int | None = None
    published_parameters: int | None = None
    qkv_bias: bool = False
    qk_norm: bool = False
    aux_loss: float = 0.0

    def __post_init__(self) -> None:
        for field in SETTABLE:
            accepted = accepted_by(field, getattr(self, field))
            require_field(accepted is None, self.name, field, getattr(self, field), accepted or "")
        experts, chosen = self.experts or 0, self.experts_per_token or 0
        for valid, field, accepted in (
            (self.heads % self.kv_heads == 0, "kv_heads", f"a divisor of {self.heads}"),
            (self.positions != "rope" or self.head_dim % 2 == 0, "head_dim", "an even number with rope"),
            (chosen <= experts, "experts_per_token", f"at most experts ({experts})"),
            (bool(chosen) == bool(experts), "experts", "set together with experts_per_token"),
        ):
            require_field(valid, self.name, field, getattr(self, field), accepted)


def require_field(condition: bool, model: str, field: str, given: object, accepted: str) -> None:
    if not condition:
        raise RequestError(f"model {model}, {field}: got {given!r}, expected {accepted}.")


def accepted_by(field: str, value: object) -> str | None:
    """What the field accepts, or None if the value is valid."""
    if field in _WORDS:
        return None if value in _WORDS[field] else " or ".join(_WORDS[field])
    if field in _FLAGS:
        return None if isinstance(value, bool) else "true or false"
    if field in _OPTIONAL_COUNTS and value is None:
        return None
    if isinstance(value, bool):
        value = None
    if field in _WEIGHTS:
        return None if isinstance(value, int | float) and value >= 0 else "a number from 0"
    if field in _NUMBERS:
        return None if isinstance(value, int | float) and value > 0 else "a positive number"
    return None if isinstance(value, int) and value > 0 else "a whole number from 1"
