"""A decoder layer with 4-bit weights and adapters as two functions of tensors, written for torch's compiler.

The numbers are those of the layers of transformers, PEFT and bitsandbytes, rounded wherever these round in the forward
pass. Layers with the same input are one product (q, k and v; gate and up), and so are the first halves of their
adapters; the gradients of this input are then summed in fp32 and rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from paceline.training.nf4 import Codes, codes_of_layer, numbers

# Decoder layers of transformers that compute what is computed here.
KNOWN = ("LlamaDecoderLayer", "MistralDecoderLayer")


class Adapter(NamedTuple):
    """What is added to a layer's output: the second product of the first one, times a factor."""

    first: Tensor
    second: Tensor
    factor: float


class Layer(NamedTuple):
    codes: Codes
    outputs: int
    adapter: Adapter | None


class Half(NamedTuple):
    """Attention or MLP with its norm and the sum around it: x + last(f(first(norm(x))))."""

    scale: Tensor
    eps: float
    first: tuple[Layer, ...]
    last: Layer


class Product(torch.autograd.Function):
    """x times the transpose of a matrix held in NF4; backward converts it once more instead of keeping it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, parts: int, *held: Tensor) -> Tensor:
        ctx.save_for_backward(*held)
        ctx.parts, ctx.columns = parts, x.shape[-1]
        return x @ _matrix(held, parts, x.shape[-1], x.dtype, False).t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        held = ctx.saved_tensors
        weight = _matrix(held, ctx.parts, ctx.columns, gradient.dtype, True)
        return gradient @ weight, None, *(None for _ in held)


def _matrix(held: Sequence[Tensor], parts: int, columns: int, dtype: torch.dtype, again: bool) -> Tensor:
    codes, absmax, scales, offsets = (held[i * parts : (i + 1) * parts] for i in range(4))
    levels, table = held[4 * parts :]
    return numbers(codes, absmax, scales, offsets, levels, table, columns, dtype, again)


def joined(x: Tensor, layers: Sequence[Layer], recomputed: bool) -> list[Tensor]:
    """The outputs of layers with the same input x (rows, columns). recomputed: the caller computes them once more for
    backward, which then has the matrix already."""
    held = [getattr(layer.codes, name) for name in ("codes", "absmax", "scales", "offset") for layer in layers]
    held += [layers[0].codes.levels, layers[0].codes.table]
    if recomputed:
        whole = x @ _matrix(held, len(layers), x.shape[-1], x.dtype, False).t()
    else:
        whole = Product.apply(x, len(layers), *held)  # type: ignore[no-untyped-call]
    adapters = [layer.adapter for layer in layers if layer.adapter is not None]
    if adapters:
        factor = adapters[0].factor
        inner = x @ torch.cat([adapter.first.to(x.dtype) for adapter in adapters]).t()
        if exact := math.frexp(factor)[0] == 0.5:
            inner = (
                inner * factor
            )  # A power of two, so the product below is the same, and its gradient needs no factor.
        added = inner @ _seconds(layers, x).t()
        whole = whole + (added if exact else added * factor)
    return list(torch.split(whole, [layer.outputs for layer in layers], dim=1))


def _seconds(layers: Sequence[Layer], x: Tensor) -> Tensor:
    """The second factors of the layers' adapters, below and beside each other, with zeros elsewhere."""
    ranks = [layer.adapter.first.shape[0] if layer.adapter else 0 for layer in layers]
    rows, before = [], 0
    for layer, rank in zip(layers, ranks, strict=True):
        own = layer.adapter.second.to(x.dtype) if layer.adapter else x.new_zeros(layer.outputs, 0)
        rows.append(F.pad(own, (before, sum(ranks) - before - rank)))
        before += rank
    return torch.cat(rows)


def normed(x: Tensor, half: Half) -> Tensor:
    exact = x.float()
    exact = exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + half.eps)
    return half.scale * exact.to(x.dtype)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    # The halves swapped by reading them in the other order: a concatenation would be written to memory.
    first, second = sin.chunk(2, dim=-1)
    swapped = x.view(*x.shape[:-1], 2, -1).flip(-2) * torch.stack((-first, second), dim=-2)
    return x * cos + swapped.flatten(-2)


def attention(
    x: Tensor, half: Half, cos: Tensor, sin: Tensor, mask: Tensor | None, head: int, recomputed: bool
) -> Tensor:
    batch, length, _ = x.shape
    flat = x.flatten(0, 1)
    parts = joined(normed(flat, half), half.first, recomputed)
    q, k, v = (part.view(batch, length, -1, head).transpose(1, 2) for part in parts)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    q, k = turned(q, cos, sin), turned(k, cos, sin)
    groups = q.shape[1] // k.shape[1]
    if mask is not None and groups > 1:
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    mixed = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=mask is None and groups > 1
    )
    (out,) = joined(mixed.transpose(1, 2).reshape(flat.shape[0], -1), [half.last], recomputed)
    return x + out.view(x.shape)


def mlp(x: Tensor, half: Half, recomputed: bool) -> Tensor:
    gate, up = joined(normed(x.flatten(0, 1), half), half.first, recomputed)
    (out,) = joined(F.silu(gate) * up, [half.last], recomputed)
    return x + out.view(x.shape)


def prepare_compiler() -> None:
    """Let parts of a gradient be written to their places: by default one kernel computes every part in every place,
    which takes twice as long for the gradients of gate and up."""
    import torch._inductor.config as config

    for name in ("max_pointwise_cat_inputs", "max_complex_pointwise_cat_inputs"):
        if hasattr(config, name):
            setattr(config, name, 0)


def block(
    x: Tensor, halves: tuple[Half, Half], cos: Tensor, sin: Tensor, mask: Tensor | None, head: int, recomputed: bool
) -> Tensor:
    """A decoder layer; `recomputed` keeps the inputs of its halves for backward and computes the rest once more."""
    first, second = halves
    if not recomputed:
        return mlp(attention(x, first, cos, sin, mask, head, False), second, False)
    x = checkpoint(lambda y: attention(y, first, cos, sin, mask, head, True), x, use_reentrant=False)
    return checkpoint(lambda y: mlp(y, second, True), x, use_reentrant=False)  # type: ignore[no-any-return]


def halves_of(blocks: Iterable[Any]) -> dict[Any, tuple[Half, Half]] | None:
    """Attention and MLP of each of transformers' decoder layers; None if a layer has parts that are not known here, or
    hooks, which these functions would not call."""
    found = {}
    for block in blocks:
        if type(block).__name__ not in KNOWN or type(block.mlp.act_fn).__name__ not in ("SiLU", "SiLUActivation"):
            return None
        attention, gated = block.self_attn, block.mlp
        first = _half(block.input_layernorm, [attention.q_proj, attention.k_proj, attention.v_proj], attention.o_proj)
        second = _half(block.post_attention_layernorm, [gated.gate_proj, gated.up_proj], gated.down_proj)
        if first is None or second is None or any(module._forward_hooks for module in block.modules()):
            return None
        found[block] = first, second
    return found


def _half(norm: Any, first: Sequence[Any], last: Any) -> Half | None:
    layers = [_layer(module) for module in (*first, last)]
    known = tuple(layer for layer in layers if layer is not None)
    factors = {layer.adapter.factor for layer in known if layer.adapter is not None}
    if len(known) < len(layers) or len(factors) > 1:
        return None
    return Half(norm.weight, norm.variance_epsilon, known[:-1], known[-1])


def _layer(module: Any) -> Layer | None:
    base = getattr(module, "base_layer", module)
    codes = codes_of_layer(base)
    if codes is None or base.bias is not None:
        return None
    adapter = None
    if base is not module:
        (name,) = module.active_adapters
        first, second = module.lora_A[name], module.lora_B[name]
        adapter = Adapter(first.weight, second.weight, module.scaling[name])
    return Layer(codes, base.out_features, adapter)
