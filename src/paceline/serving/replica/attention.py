"""Attention that keeps keys and values itself, in tensors that never move: one row for each place of the batch.

transformers hands every attention of a model to a function it was registered under; this one stores what it is given
before it attends. The model then needs no cache of transformers' own, whose interface changes with its versions, and
its layers differ in nothing but tensors, so that one compiled layer serves for all of them.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from paceline.errors import UnsupportedError

NAME = "paceline_places"


@dataclass
class Page:
    """What every layer must know about the pass under way. rows: the places whose prompts are read, None in a step.
    positions: where each place stands; reach: how many columns a step looks at; seen: 0 for those that count, else
    minus infinity; used: how many count in each place. Of the last two a step has the one that its kernel asks for."""

    positions: Tensor
    places: Tensor
    length: int
    rows: Tensor | None = None
    reach: int = 0
    seen: Tensor | None = None
    used: Tensor | None = None

    def __post_init__(self) -> None:
        # One token of every place, and where the places begin among all tokens kept.
        count = torch.arange(len(self.places) + 1, dtype=torch.int32, device=self.places.device)
        self.each, self.starts = count, count * self.length


class Kept(nn.Module):
    """Keys and values of one layer, (places, length, heads, width)."""

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
    kept.keys[rows, :length] = key.transpose(1, 2)
    kept.values[rows, :length] = value.transpose(1, 2)
    grouped = query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(query, key, value, is_causal=length > 1, scale=scaling, enable_gqa=grouped)


def at_any_length() -> AbstractContextManager[None]:
    """Prompts come at any length. cuDNN, which torch prefers on some GPUs, plans each length anew: 50 ms on an H200,
    where reading 512 tokens of an 8B model takes 23."""
    return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])


def _look_back(kept: Kept, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
    """One token of every place against all that its place keeps."""
    page = kept.page
    kept.keys[page.places, page.positions] = key[:, :, 0]
    kept.values[page.places, page.positions] = value[:, :, 0]
    if page.used is not None:
        return _look_back_used(kept, query, scaling)
    # Query heads that share a key head stand side by side as if they were tokens: the keys are read once, not copied
    # for each of them, which is what bounds a step with many places.
    places, heads, _, width = query.shape
    shared = key.shape[1]
    folded = query.reshape(places, shared, heads // shared, width)
    keys, values = (part[:, : page.reach].transpose(1, 2) for part in (kept.keys, kept.values))
    mixed = F.scaled_dot_product_attention(folded, keys, values, attn_mask=page.seen, scale=scaling)
    return mixed.reshape(places, heads, 1, width)


def has_flash(dtype: torch.dtype, device: torch.device, width: int) -> bool:
    """Whether FlashAttention's kernel for decoding can be had. It reads what a place uses and no more; where query
    heads share key heads, it divides long contexts among processors that a few places would leave idle."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16) or width % 8 or width > 256:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


def _look_back_used(kept: Kept, query: Tensor, scaling: float | None) -> Tensor:
    """Through torch's own operator: `scaled_dot_product_attention` has no word for how much of a place counts."""
    page = kept.page
    keys, values = (part.flatten(0, 1) for part in (kept.keys, kept.values))
    told = {"scale": scaling, "seqused_k": page.used}
    mixed = torch.ops.aten._flash_attention_forward(
        query[:, :, 0], keys, values, page.each, page.starts, 1, page.reach, 0.0, False, False, **told
    )[0]
    return mixed[:, :, None]  # type: ignore[no-any-return]


def install(model: Any, heads: int, width: int, page: Page) -> None:
    """Give every attention of the model its keeper. heads: key heads on this device."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attend)
    model.config._attn_implementation = NAME
    places = len(page.places)
    first = next(model.parameters())
    named = (part for part in model.modules() if type(part).__name__.endswith("Attention"))
    found = [part for part in named if hasattr(part, "layer_idx")]
    if len(found) != model.config.num_hidden_layers:
        raise UnsupportedError(
            f"{type(model).__name__} has {len(found)} attentions that can keep keys for "
            f"{model.config.num_hidden_layers} layers: this engine needs one in each"
        )
    for part in found:
        part.kept = Kept((places, page.length, heads, width), first.dtype, first.device, page)
