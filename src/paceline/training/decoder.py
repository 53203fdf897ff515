"""The reference decoder: GPT, Llama and Mixtral, with the same arithmetic and initial weights for every strategy.

Each weight is cast to the compute dtype where it is used. A strategy with fp32 weights (DDP) and one with 16-bit copies
(FSDP2, ZeRO) then run the same kernels on the same numbers, so that their losses can be compared. Initial weights are a
function of (seed, parameter name, position). They are exact on every device and rounded to the compute dtype, so a
master copy of 16-bit weights equals one taken before the rounding.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from paceline.models.shape import Shape
from paceline.training.data.packing import IGNORED_LABEL as IGNORED_LABEL
from paceline.training.mixture import Mixture, Router

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Tensor cores prefer a vocabulary that is a multiple of 64; the padded rows never reach the loss.
VOCAB_MULTIPLE = 64
INIT_STD = 0.02
INIT_CHUNK = 1 << 20


class Linear(nn.Linear):
    """A linear layer that computes in its input's dtype."""

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.linear(x, self.weight.to(x.dtype), bias)


class LayerNorm(nn.LayerNorm):
    """Layer norm in its input's dtype (its statistics are fp32 inside the kernel)."""

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.layer_norm(x, self.normalized_shape, self.weight.to(x.dtype), bias, self.eps)


class RMSNorm(nn.RMSNorm):
    """RMS norm in its input's dtype."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


def _norm(shape: Shape) -> nn.Module:
    kind = LayerNorm if shape.norm == "layernorm" else RMSNorm
    return kind(shape.hidden, eps=shape.norm_eps)


def rotation(shape: Shape, length: int, device: torch.device) -> Tensor:
    """Cosines and sines of RoPE for each position, as (2, length, head_dim / 2)."""
    exponents = torch.arange(0, shape.head_dim, 2, device=device, dtype=torch.float32) / shape.head_dim
    angles = torch.outer(torch.arange(length, device=device, dtype=torch.float32), shape.rope_theta**-exponents)
    return torch.stack((angles.cos(), angles.sin()))


def rotate(x: Tensor, turn: Tensor) -> Tensor:
    """Apply RoPE to (batch, heads, length, head_dim), rotating the two halves as Llama does."""
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = turn[0], turn[1]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Fused causal attention over (batch, heads, length, head_dim), with grouped keys and values."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=k.shape[1] != q.shape[1])


def split_heads(joined: Tensor, heads: int, kv_heads: int) -> tuple[Tensor, ...]:
    """Queries, keys and values of (batch, length, columns of all heads) as (batch, heads, length, head_dim)."""
    parts: Any = joined.view(*joined.shape[:2], heads + 2 * kv_heads, -1).transpose(1, 2)
    return tuple(parts.split((heads, kv_heads, kv_heads), dim=1))


class Attention(nn.Module):
    """Causal attention with grouped keys and values; a layout may replace `attend` and share the heads."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = shape.heads, shape.kv_heads, shape.head_dim
        self.attend: Callable[[Tensor, Tensor, Tensor], Tensor] = causal_attention
        self.inputs = Linear(shape.hidden, (shape.heads + 2 * shape.kv_heads) * shape.head_dim, bias=shape.bias)
        self.output = Linear(shape.heads * shape.head_dim, shape.hidden, bias=shape.bias)

    def project(self, x: Tensor) -> Any:
        return split_heads(self.inputs(x), self.heads, self.kv_heads)

    def forward(self, x: Tensor, turn: Tensor | None) -> Tensor:
        q, k, v = self.project(x)
        if turn is not None:
            q, k = rotate(q, turn), rotate(k, turn)
        mixed = self.attend(q, k, v)
        # With sequence parallelism x is a part of the sequence, and q, k and v have all of it.
        return self.output(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class MLP(nn.Module):
    """Plain (GELU) or gated (SiLU) feed-forward layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gated = shape.gated
        self.inputs = Linear(shape.hidden, shape.ffn * (2 if shape.gated else 1), bias=shape.bias)
        self.output = Linear(shape.ffn, shape.hidden, bias=shape.bias)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.inputs(x)
        if self.gated:
            gate, up = inner.chunk(2, dim=-1)
            return self.output(F.silu(gate) * up)  # type: ignore[no-any-return]
        return self.output(F.gelu(inner, approximate="tanh"))  # type: ignore[no-any-return]


class Block(nn.Module):
    """One layer: the unit of sharding, of checkpointing and of per-block compilation.

    A mixture of experts adds its term to the `balance` of the layers before and returns both.
    """

    def __init__(self, shape: Shape, layer: int) -> None:
        super().__init__()
        self.attention_norm, self.attention = _norm(shape), Attention(shape)
        self.mlp_norm, self.mlp = _norm(shape), Mixture(shape, layer) if shape.experts else MLP(shape)

    def forward(self, x: Tensor, turn: Tensor | None, balance: Tensor | None = None) -> Any:
        x = x + self.attention(self.attention_norm(x), turn)
        inner = self.mlp(self.mlp_norm(x))
        if balance is None:
            return x + inner
        return x + inner[0], balance + inner[1]


def run_blocks(
    blocks: Iterable[nn.Module], run: Callable[..., Any], x: Tensor, turn: Tensor | None, balance: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """The activations after all blocks and, of a mixture of experts, the balance term."""
    for block in blocks:
        if balance is None:
            x = run(block, x, turn)
        else:
            x, balance = run(block, x, turn, balance)
    return x, balance


def balance_loss(shape: Shape, balance: Tensor) -> Tensor:
    """The auxiliary loss of a micro batch: the mean over layers, weighted."""
    return balance * (shape.aux_loss / shape.layers)


class Decoder(nn.Module):
    """Maps tokens to the sum of their losses divided by `normaliser`, so micro batches of unequal length add up."""

    def __init__(self, shape: Shape, compute: str = "fp32", checkpointing: str = "none") -> None:
        super().__init__()
        self.shape, self.dtype = shape, DTYPES[compute]
        self.embedding = nn.Embedding(shape.vocab, shape.hidden)
        self.positions = nn.Embedding(shape.context, shape.hidden) if shape.positions == "learned" else None
        self.blocks = nn.ModuleList(Block(shape, layer) for layer in range(shape.layers))
        self.norm = _norm(shape)
        self.head = None if shape.tied else Linear(shape.hidden, shape.vocab, bias=False)
        self.head_parts = 1
        self.run_block = block_runner(checkpointing)

    def forward(self, tokens: Tensor, labels: Tensor, normaliser: Tensor) -> Tensor:
        length = tokens.shape[1]
        table = self.embedding.weight.to(self.dtype)
        x = F.embedding(tokens, table)
        turn = None
        if self.positions is not None:
            x = x + self.positions.weight[:length].to(self.dtype)
        else:
            turn = rotation(self.shape, length, tokens.device)
        balance = torch.zeros((), device=x.device) if self.shape.experts else None
        x, balance = run_blocks(self.blocks, self.run_block, x, turn, balance)
        head = table if self.head is None else self.head.weight.to(self.dtype)
        loss = self._loss(self._logits(self.norm(x), head), labels, normaliser)
        return loss if balance is None else loss + balance_loss(self.shape, balance)

    def _logits(self, x: Tensor, head: Tensor) -> Tensor:
        if self.head_parts == 1:
            return F.linear(x, *_head(head))
        return torch.cat([F.linear(x, words) for words in head.chunk(self.head_parts)], -1)

    def _loss(self, logits: Tensor, labels: Tensor, normaliser: Tensor) -> Tensor:
        flat = logits.flatten(0, 1).float()
        losses = F.cross_entropy(flat, labels.flatten(), reduction="sum", ignore_index=IGNORED_LABEL)
        return losses / normaliser


class Head(Linear):
    """The output layer as a module, padded like the decoder's unless ranks share its words."""

    pads = True

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.to(x.dtype)
        return F.linear(x, *_head(weight)) if self.pads else F.linear(x, weight)


def _head(weight: Tensor) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of the output layer, padded on a GPU."""
    return padded_head(weight) if weight.is_cuda else (weight, None)


def output_words(vocab: int, device: str) -> int:
    """The number of logits of a token on this device, padding included."""
    return _head(torch.empty(vocab, 1, device=device))[0].shape[0]


def padded_head(weight: Tensor) -> tuple[Tensor, Tensor | None]:
    """The head padded for tensor cores, and a bias that keeps the padding out of the softmax.

    The bias is 0 for words, and so low for padding that its exponential and its gradient are exactly 0. It is free in
    the product's epilogue; masking or slicing the logits would cost a pass over the largest tensor.
    """
    words = weight.shape[0]
    rows = -words % VOCAB_MULTIPLE
    if not rows:
        return weight, None
    is_word = torch.arange(words + rows, device=weight.device) < words
    lowest = torch.finfo(weight.dtype).min / 2
    return F.pad(weight, (0, 0, 0, rows)), torch.where(is_word, 0.0, lowest).to(weight.dtype)


def block_runner(checkpointing: str) -> Callable[..., Tensor]:
    """Calls a block: plainly, fully recomputed, or recomputed except for matrix products and attention."""
    if checkpointing == "none":
        return lambda block, *arguments, **named: block(*arguments, **named)
    if checkpointing == "full":
        return partial(checkpoint, use_reentrant=False)
    assert checkpointing == "selective"
    contexts = partial(create_selective_checkpoint_contexts, _keep_expensive)
    return partial(checkpoint, use_reentrant=False, context_fn=contexts)


def _keep_expensive(_context: Any, operation: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    name = str(operation)
    kept = ("aten.mm", "aten.addmm", "aten.bmm", "_grouped_mm", "_scaled_mm", "gemm_4bit", "scaled_dot_product")
    expensive = any(part in name for part in kept)
    return CheckpointPolicy.MUST_SAVE if expensive else CheckpointPolicy.PREFER_RECOMPUTE


def initial_values(name: str, size: torch.Size, layers: int, seed: int, device: torch.device) -> Tensor:
    """The fp32 initial value of one whole parameter, by its name: norms 1, biases 0, matrices uniform.

    The output projections of attention and MLP are scaled by 1/sqrt(2 * layers), as in GPT-2.
    """
    count = size.numel()
    flat = torch.empty(count, device=device)
    for start in range(0, count, INIT_CHUNK):
        stop = min(start + INIT_CHUNK, count)
        flat[start:stop] = initial_part(name, start, stop, layers, seed, device)
    return flat.view(size)


def initial_part(name: str, start: int, stop: int, layers: int, seed: int, device: torch.device) -> Tensor:
    """The elements from `start` to `stop` of a flattened initial parameter."""
    if name.endswith("bias"):
        return torch.zeros(stop - start, device=device)
    if "norm" in name:
        return torch.ones(stop - start, device=device)
    scale = 1 / math.sqrt(2 * layers) if name.endswith(("output.weight", "experts.output")) else 1.0
    index = torch.arange(start, stop, device=device, dtype=torch.int64)
    return _uniform(index, zlib.crc32(f"{seed}/{name}".encode())) * (INIT_STD * math.sqrt(3) * scale)


def _uniform(index: Tensor, stream: int) -> Tensor:
    """Uniform in [-1, 1) from an integer hash (lowbias32), the same on CPU and GPU."""
    mask = 0xFFFFFFFF
    x = (index * 0x9E3779B1 + stream) & mask
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & mask
    x = ((x ^ (x >> 15)) * 0x846CA68B) & mask
    x = x ^ (x >> 16)
    return (x >> 8).to(torch.float32) * (2.0 / (1 << 24)) - 1.0


def fill(
    decoder: nn.Module, layers: int, seed: int, compute: str, place: Callable[[Tensor, Tensor], None], reseed: int = 0
) -> None:
    """Give every parameter its initial value; `place(parameter, value)` stores it as the strategy needs.

    reseed 0 rounds to nearest. Other values round up or down at random: equally good weights, which show how much a
    trajectory changes with the rounding alone.
    """
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            value = initial_values(name, parameter.shape, layers, seed, parameter.device)
            place(parameter, rounded(name, value, compute, reseed))


def rounded(name: str, value: Tensor, compute: str, reseed: int = 0) -> Tensor:
    """The fp32 value rounded to the compute dtype: to nearest, or at random with a `reseed`."""
    if reseed:
        # Uniform noise of half a unit in the last place, so that rounding to nearest rounds at random.
        _, exponent = torch.frexp(value)
        last_place = torch.ldexp(torch.finfo(DTYPES[compute]).eps * torch.ones_like(value), exponent - 1)
        stream = zlib.crc32(f"{reseed}/{name}".encode())
        chance = _uniform(torch.arange(value.numel(), device=value.device), stream).view_as(value)
        value = value + chance * last_place / 2 * (value != 0)
    return value.to(DTYPES[compute]).to(torch.float32)


def change_rounding(blocks: nn.Module, reseed: int) -> None:
    """Let every layer inside the blocks round its 16-bit output differently in the last digit, as other kernels do, or
    ranks that each round their part of a sum. The router of a mixture is left alone: its choices are compared.

    It does not imitate ranks that share the words of the output layer. The gradient of its input is a sum over words
    whose parts cancel: each part is much larger than the sum, and nearly the same for all tokens. So is the error of
    its rounding, and the whole model follows it. `Decoder.head_parts` computes it in such parts.
    """

    def hook(name: str) -> Callable[[nn.Module, Any, Tensor], Tensor]:
        return lambda module, inputs, output: other_rounding(name, output, reseed)

    for name, module in blocks.named_modules():
        if not list(module.children()) and not isinstance(module, Router):
            module.register_forward_hook(hook(name))


def other_rounding(name: str, value: Tensor, reseed: int) -> Tensor:
    """A 16-bit value with noise in its last digit, the same for the same name: recomputed values must agree."""
    if value.dtype.itemsize != 2:
        return value
    generator = torch.Generator(value.device).manual_seed(zlib.crc32(f"{reseed}/{name}".encode()))
    noise = torch.rand(value.shape, device=value.device, generator=generator).mul_(2).sub_(1)
    noise.mul_(torch.finfo(value.dtype).eps).mul_(value.detach())
    return (value + noise).to(value.dtype)
