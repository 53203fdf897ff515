"""Attention that keeps keys and values itself, in tensors that never move: one row for each place of the batch.

transformers hands every attention of a model to a function it was registered under; this one stores what it is given
before it attends. The model then needs no cache of transformers' own, whose interface changes with its versions, and
its layers differ in nothing but tensors, so that one compiled layer serves for all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.errors import UnsupportedError

NAME = "paceline_places"


@dataclass
class Page:
    """What every layer must know about the pass under way. rows: the places whose prompts are read, None in a step.
    positions: where each place stands; reach: how many columns a step looks at; seen: 0 for those that count, else
    minus infinity."""

    positions: Tensor
    places: Tensor
    rows: Tensor | None = None
    reach: int = 0
    seen: Tensor | None = None


class Kept(nn.Module):
    """Keys and values of one layer, (places, heads, length, width)."""

    keys: Tensor
    values: Tensor

    def __init__(self, size: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device, page: Page) -> None:
        super().__init__()
        self.page = page
        self.register_buffer("keys", torch.zeros(size, dtype=dtype, device=device), persistent=False)
        self.register_buffer("values", torch.zeros(size, dtype=dtype, device=device), persistent=False)


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _mask: Tensor | None,
    *,
    scaling: float | None = None,
    **_more: Any,
) -> tuple[Tensor, None]:
    """As transformers calls it: (batch, heads, tokens, width) in, (batch, tokens, heads, width) out."""
    kept: Kept = module.kept
    if kept.page.rows is None:
        mixed = _look_back(kept, query, key, value, scaling)
    else:
        mixed = _read(kept, kept.page.rows, query, key, value, scaling)
    return mixed.transpose(1, 2).contiguous(), None


def _read(kept: Kept, rows: Tensor, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
    """Prompts from their first token on, padded at the end: causal attention never sees what stands behind."""
    length = key.shape[2]
    kept.keys[rows, :, :length] = key
    kept.values[rows, :, :length] = value
    grouped = query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(query, key, value, is_causal=length > 1, scale=scaling, enable_gqa=grouped)


def _look_back(kept: Kept, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
    """One token of every place against all that its place keeps.

    Query heads that share a key head stand side by side as if they were tokens: the keys are read once, not copied for
    each of them, which is what bounds a step with many places.
    """
    page = kept.page
    kept.keys[page.places, :, page.positions] = key[:, :, 0]
    kept.values[page.places, :, page.positions] = value[:, :, 0]
    places, heads, _, width = query.shape
    shared = key.shape[1]
    folded = query.reshape(places, shared, heads // shared, width)
    keys, values = kept.keys[:, :, : page.reach], kept.values[:, :, : page.reach]
    mixed = F.scaled_dot_product_attention(folded, keys, values, attn_mask=page.seen, scale=scaling)
    return mixed.reshape(places, heads, 1, width)


def install(model: Any, heads: int, width: int, length: int, page: Page) -> None:
    """Give every attention of the model its keeper. heads: key heads on this device."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attend)
    model.config._attn_implementation = NAME
    places = page.positions.shape[0]
    first = next(model.parameters())
    named = (part for part in model.modules() if type(part).__name__.endswith("Attention"))
    found = [part for part in named if hasattr(part, "layer_idx")]
    if len(found) != model.config.num_hidden_layers:
        raise UnsupportedError(
            f"{type(model).__name__} has {len(found)} attentions that can keep keys for "
            f"{model.config.num_hidden_layers} layers: this engine needs one in each"
        )
    for part in found:
        part.kept = Kept((places, heads, length, width), first.dtype, first.device, page)
