"""Linear layers with float8 products and one scale per tensor: torchao's tensorwise recipe, with less traffic.

Inputs and weights are e4m3, gradients e5m2. Each tensor is scaled so that its largest value becomes the largest of the
format. A product in 8 bit needs both operands with the summed dimension last, and each operand is in one product of the
forward and one of the backward pass: it is rounded once, in both layouts, and kept in 8 bit. In a gated MLP, the
product of gate and up and their gradients are never written in 16 bit.

On a GPU Triton rounds (`float8_kernels`); elsewhere plain torch, with the same numbers. To torch's compiler these
operators are opaque, so it cannot leave out a rounding; it still finds the largest value of a tensor where it computes
the tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.training.decoder import MLP, Attention, Linear, split_heads

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# torchao's; a tensor of zeros has a finite scale.
SMALLEST = 1e-12


class Rounded(NamedTuple):
    """A matrix in 8 bit, as it lies and transposed, and what to multiply it with for its real values."""

    rows: Tensor
    columns: Tensor
    inverse: Tensor


class Float8Linear(Linear):
    precision = "float8"

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        output: Tensor = Product.apply(rows, self.weight)  # type: ignore[no-untyped-call]
        output = output.view(*x.shape[:-1], output.shape[-1])
        return output if self.bias is None else output + self.bias.to(output.dtype)


class GatedMLP(MLP):
    """A gated feed-forward layer without biases, whose layers are Float8Linear."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        output: Tensor = GatedProducts.apply(rows, self.inputs.weight, self.output.weight)  # type: ignore[no-untyped-call]
        return output.view(x.shape)


class Float8Attention(Attention):
    """Attention without biases, whose layers are Float8Linear."""

    def project(self, x: Tensor) -> Any:
        return HeadsProduct.apply(x, self.inputs.weight, self.heads, self.kv_heads)  # type: ignore[no-untyped-call]


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        left, right = rounded(x, E4M3), rounded(weight, E4M3)
        ctx.save_for_backward(left.columns, left.inverse, right.columns, right.inverse)
        ctx.weight_dtype = weight.dtype
        return forward_product(left, right)

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor) -> tuple[Tensor, Tensor]:
        x_columns, x_inverse, weight_columns, weight_inverse = ctx.saved_tensors
        gradient = rounded(incoming[0], E5M2)
        of_x = product(gradient.rows, gradient.inverse, weight_columns, weight_inverse)
        of_w = product(gradient.columns, gradient.inverse, x_columns, x_inverse)
        return of_x, of_w.to(ctx.weight_dtype)


class HeadsProduct(torch.autograd.Function):
    """x @ weight.T as queries, keys and values, whose gradients are never joined in 16 bit."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, heads: int, kv_heads: int) -> tuple[Tensor, ...]:
        left, right = rounded(x.flatten(0, 1), E4M3), rounded(weight, E4M3)
        ctx.save_for_backward(left.columns, left.inverse, right.columns, right.inverse)
        ctx.weight_dtype, ctx.size = weight.dtype, x.shape
        return split_heads(forward_product(left, right).view(*x.shape[:2], -1), heads, kv_heads)

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, x_inverse, weight, weight_inverse = ctx.saved_tensors
        q, k, v = incoming
        largest = torch.maximum(torch.maximum(q.abs().max(), k.abs().max()), v.abs().max())
        scale, inverse = scales(largest, E5M2)
        rows, columns = cast_heads(q, k, v, scale)
        of_w = product(columns, inverse, x, x_inverse)
        return product(rows, inverse, weight, weight_inverse).view(ctx.size), of_w.to(ctx.weight_dtype), None, None


class GatedProducts(torch.autograd.Function):
    """x @ inputs.T, silu(gate) * up, and that @ outputs.T."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, inputs: Tensor, outputs: Tensor) -> Tensor:
        left, first, second = rounded(x, E4M3), rounded(inputs, E4M3), rounded(outputs, E4M3)
        joined = forward_product(left, first)
        scale, inverse = scales(gated_maxima(joined).max(), E4M3)
        rows, columns = gated(joined, scale)
        inner = Rounded(rows, columns, inverse)
        output = forward_product(inner, second)
        kept = (part for operand in (left, first, inner, second) for part in (operand.columns, operand.inverse))
        ctx.save_for_backward(joined, *kept)
        ctx.weight_dtype = inputs.dtype
        return output

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        joined, x, x_inverse, first, first_inverse, inner, inner_inverse, second, second_inverse = ctx.saved_tensors
        gradient = rounded(incoming[0], E5M2)
        of_inner = product(gradient.rows, gradient.inverse, second, second_inverse)
        of_outputs = product(gradient.columns, gradient.inverse, inner, inner_inverse)
        scale, inverse = scales(gated_backward_maxima(joined, of_inner).max(), E5M2)
        rows, columns = gated_backward(joined, of_inner, scale)
        of_x = product(rows, inverse, first, first_inverse)
        of_inputs = product(columns, inverse, x, x_inverse)
        return of_x, of_inputs.to(ctx.weight_dtype), of_outputs.to(ctx.weight_dtype)


def forward_product(left: Rounded, right: Rounded) -> Tensor:
    return product(left.rows, left.inverse, right.rows, right.inverse, fast=True)


def product(left: Tensor, left_inverse: Tensor, right: Tensor, right_inverse: Tensor, *, fast: bool = False) -> Tensor:
    """left @ right.T in bf16. fast: sums in the tensor core's own precision, as torchao does in forward passes only."""
    return torch._scaled_mm(left, right.t(), left_inverse, right_inverse, out_dtype=torch.bfloat16, use_fast_accum=fast)


# --- scales ---


def rounded(x: Tensor, dtype: torch.dtype) -> Rounded:
    """A matrix by way of bf16 in 8 bit (see `precision.rounded_weight`). Compiled code finds its largest value where it
    computes the matrix."""
    x = x.contiguous()
    scale, inverse = scales(x.abs().max(), dtype)
    rows, columns = cast(x, scale, dtype)
    return Rounded(rows, columns, inverse)


def scales(largest: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The factor to 8 bit of a tensor with this largest absolute value, not yet rounded to bf16, and its reciprocal: by
    way of fp64, because fp32 divisions of compiled and plain code differ."""
    amax = rounded_to_bf16(largest.float()).double()
    scale = (torch.finfo(dtype).max / amax.clamp(min=SMALLEST)).float()
    return scale, (1 / scale.double()).float()


def rounded_to_bf16(value: Tensor) -> Tensor:
    """An fp32 value rounded by arithmetic on its bits: compiled code leaves out a cast to bf16 between two others."""
    bits = value.view(torch.int32)
    nearest = ((bits + 0x7FFF + ((bits >> 16) & 1)) & ~0xFFFF).view(torch.float32)
    return torch.where(value.isnan(), value, nearest)


# --- operators; all matrices are contiguous ---


@torch.library.custom_op("paceline::float8_cast", mutates_args=())
def cast(x: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x by way of bf16 in 8 bit, and the same transposed."""
    if x.is_cuda:
        from paceline.training import float8_kernels

        return float8_kernels.cast(x, scale, dtype)
    return both(x.to(torch.bfloat16), scale, dtype)


@torch.library.custom_op("paceline::float8_cast_heads", mutates_args=())
def cast_heads(q: Tensor, k: Tensor, v: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """The heads of q, k and v (batch, heads, length, head_dim) as columns of one matrix in e5m2, and its transpose."""
    if q.is_cuda:
        from paceline.training import float8_kernels

        return float8_kernels.cast_heads(q, k, v, scale, E5M2)
    return both(torch.cat((q, k, v), dim=1).transpose(1, 2).flatten(2).flatten(0, 1), scale, E5M2)


@torch.library.custom_op("paceline::float8_gated_maxima", mutates_args=())
def gated_maxima(joined: Tensor) -> Tensor:
    """The largest absolute value of silu(gate) * up in each row."""
    if joined.is_cuda:
        from paceline.training import float8_kernels

        return float8_kernels.gated_maxima(joined)
    return plain_gated(joined).abs().amax(dim=1).float()


@torch.library.custom_op("paceline::float8_gated", mutates_args=())
def gated(joined: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """silu(gate) * up in e4m3, and the same transposed."""
    if joined.is_cuda:
        from paceline.training import float8_kernels

        return float8_kernels.gated(joined, scale, E4M3)
    return both(plain_gated(joined), scale, E4M3)


@torch.library.custom_op("paceline::float8_gated_backward_maxima", mutates_args=())
def gated_backward_maxima(joined: Tensor, incoming: Tensor) -> Tensor:
    """The largest absolute value of the gradients of gate and up in each row."""
    if joined.is_cuda:
        from paceline.training import float8_kernels

        return float8_kernels.gated_backward_maxima(joined, incoming)
    return plain_gated_backward(joined, incoming).abs().amax(dim=1).float()


@torch.library.custom_op("paceline::float8_gated_backward", mutates_args=())
def gated_backward(joined: Tensor, incoming: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of gate and up, joined, in e5m2, and the same transposed."""
    if joined.is_cuda:
        from paceline.training import float8_kernels

        return float8_kernels.gated_backward(joined, incoming, scale, E5M2)
    return both(plain_gated_backward(joined, incoming), scale, E5M2)


@cast.register_fake
def _(x: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return _empty(x, x.shape, dtype)


@cast_heads.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    batch, heads, length, head_dim = q.shape
    return _empty(q, (batch * length, (heads + 2 * k.shape[1]) * head_dim), E5M2)


@gated_maxima.register_fake
def _(joined: Tensor) -> Tensor:
    return joined.new_empty(joined.shape[0], dtype=torch.float32)


@gated.register_fake
def _(joined: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    return _empty(joined, (joined.shape[0], joined.shape[1] // 2), E4M3)


@gated_backward_maxima.register_fake
def _(joined: Tensor, incoming: Tensor) -> Tensor:
    return joined.new_empty(joined.shape[0], dtype=torch.float32)


@gated_backward.register_fake
def _(joined: Tensor, incoming: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    return _empty(joined, joined.shape, E5M2)


def _empty(like: Tensor, size: Sequence[int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    rows, columns = size
    return like.new_empty(rows, columns, dtype=dtype), like.new_empty(columns, rows, dtype=dtype)


# --- the same in plain torch ---


def both(x: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    limit = torch.finfo(dtype).max
    rows = (x.float() * scale).clamp(-limit, limit).to(dtype)
    return rows, rows.t().contiguous()


def plain_gated(joined: Tensor) -> Tensor:
    gate, up = joined.chunk(2, dim=-1)
    return F.silu(gate) * up


def plain_gated_backward(joined: Tensor, incoming: Tensor) -> Tensor:
    gate, up = joined.chunk(2, dim=-1)
    of_gate = torch.ops.aten.silu_backward(incoming * up, gate)
    return torch.cat((of_gate, incoming * F.silu(gate)), dim=-1)
