"""Triton kernels that round to 8 bit: each value is read once, and written as it lies and transposed.

Products in 8 bit need both operands with the summed dimension last, so that each operand is needed in both layouts:
one in the forward and one in the backward pass. `float8` has the same arithmetic in plain torch, for CPUs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


class Tile(NamedTuple):
    """Rows and columns that one program handles, and its warps."""

    rows: int
    columns: int
    warps: int


# 1 / (1 + 2**(x * -log2(e))) to the last bits of fp32. Triton's division and exponential take four times as many
# instructions, with which these kernels are not limited by memory any more.
SIGMOID = tl.constexpr(
    "{ .reg .f32 t; mul.f32 t, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 t, t; add.f32 t, t, 0f3F800000; "
    "rcp.approx.ftz.f32 $0, t; }"
)
# Two numbers at once: the conversion of a single one is slow.
ROUND = tl.constexpr("cvt.rn.bf16x2.f32 $0, $2, $1;")

CAST = Tile(64, 128, 4)
GATED = Tile(64, 128, 4)
GATED_BACKWARD = Tile(64, 64, 4)
MAXIMA = Tile(4, 1024, 8)
# Of the heads of queries, keys and values.
TILE_ELEMENTS = 8192


@triton.jit
def _quantised(value, scale, OUT: tl.constexpr):
    """Rounded to 8 bit; the conversion turns what is beyond the largest number into that number, and NaN stays NaN."""
    return (value.to(tl.float32) * scale).to(OUT)


@triton.jit
def _larger(left, right):
    return tl.maximum(left, right, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _store(out, turned, rows, columns, mask, value, rows_total, columns_total):
    """One tile, as it lies and transposed."""
    tl.store(out + rows.to(tl.int64)[:, None] * columns_total + columns[None, :], value, mask=mask)
    turned_rows = columns.to(tl.int64)
    tl.store(turned + turned_rows[:, None] * rows_total + rows[None, :], tl.trans(value), mask=tl.trans(mask))


@triton.jit
def _tile(columns_total, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr):
    """Rows and columns of this program's tile. Backwards: what was written last is still in the cache."""
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    across = tl.cdiv(columns_total, TILE_COLUMNS)
    rows = program // across * TILE_ROWS + tl.arange(0, TILE_ROWS)
    columns = program % across * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    return rows, columns


@triton.jit
def float8_cast_kernel(
    x, scale, out, turned, rows_total, columns_total, stride, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr,
):  # fmt: skip
    rows, columns = _tile(columns_total, TILE_ROWS, TILE_COLUMNS)
    mask = (rows < rows_total)[:, None] & (columns < columns_total)[None, :]
    value = tl.load(x + rows.to(tl.int64)[:, None] * stride + columns[None, :], mask=mask, other=0.0)
    quantised = _quantised(value.to(tl.bfloat16), tl.load(scale), out.dtype.element_ty)
    _store(out, turned, rows, columns, mask, quantised, rows_total, columns_total)


@triton.jit
def float8_heads_kernel(
    q, k, v, scale, out, turned, rows_total, length, heads, kv_heads,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    TILE_ROWS: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    across = heads + 2 * kv_heads
    head = program % across
    rows = program // across * TILE_ROWS + tl.arange(0, TILE_ROWS)
    inner = tl.arange(0, HEAD_DIM)
    mask = (rows < rows_total)[:, None] & (inner < HEAD_DIM)[None, :]
    batch, row = (rows // length).to(tl.int64), (rows % length).to(tl.int64)
    if head < heads:
        at = q + (batch * q_batch + head * q_head + row * q_row)[:, None] + inner[None, :]
        value = tl.load(at, mask=mask, other=0.0)
    elif head < heads + kv_heads:
        at = k + (batch * k_batch + (head - heads) * k_head + row * k_row)[:, None] + inner[None, :]
        value = tl.load(at, mask=mask, other=0.0)
    else:
        at = v + (batch * v_batch + (head - heads - kv_heads) * v_head + row * v_row)[:, None] + inner[None, :]
        value = tl.load(at, mask=mask, other=0.0)
    quantised = _quantised(value, tl.load(scale), out.dtype.element_ty)
    _store(out, turned, rows, head * HEAD_DIM + inner, mask, quantised, rows_total, across * HEAD_DIM)


@triton.jit
def _gated(joined, rows, columns, mask, ffn):
    """Gate, its sigmoid, up and silu(gate), rounded to 16 bit as plain code does."""
    at = joined + rows.to(tl.int64)[:, None] * (2 * ffn) + columns[None, :]
    gate = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(at + ffn, mask=mask, other=0.0)
    sigmoid = tl.inline_asm_elementwise(SIGMOID, "=f,f", [gate], dtype=tl.float32, is_pure=True, pack=1)
    return gate, sigmoid, up, (gate * sigmoid).to(tl.bfloat16)


@triton.jit
def _gated_backward(joined, incoming, rows, columns, mask, ffn):
    """The gradients of gate, in fp32, and of up. Products of two bf16 numbers are rounded once, as in plain code."""
    gate, sigmoid, up, activated = _gated(joined, rows, columns, mask, ffn)
    incoming = tl.load(incoming + rows.to(tl.int64)[:, None] * ffn + columns[None, :], mask=mask, other=0.0)
    inner = (incoming * up).to(tl.float32)
    return inner * sigmoid * (1.0 + gate * (1.0 - sigmoid)), incoming * activated


@triton.jit
def float8_gated_maxima_kernel(joined, maxima, rows_total, ffn, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr):
    rows = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    largest = tl.zeros([TILE_ROWS, TILE_COLUMNS], dtype=tl.float32)
    for first in range(0, ffn, TILE_COLUMNS):
        columns = first + tl.arange(0, TILE_COLUMNS)
        mask = (rows < rows_total)[:, None] & (columns < ffn)[None, :]
        _, _, up, activated = _gated(joined, rows, columns, mask, ffn)
        largest = _larger(largest, tl.abs((activated * up).to(tl.float32)))
    tl.store(maxima + rows, tl.reduce(largest, 1, _larger), mask=rows < rows_total)


@triton.jit
def float8_gated_kernel(
    joined, scale, out, turned, rows_total, ffn, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr,
):  # fmt: skip
    rows, columns = _tile(ffn, TILE_ROWS, TILE_COLUMNS)
    mask = (rows < rows_total)[:, None] & (columns < ffn)[None, :]
    _, _, up, activated = _gated(joined, rows, columns, mask, ffn)
    quantised = _quantised(activated * up, tl.load(scale), out.dtype.element_ty)
    _store(out, turned, rows, columns, mask, quantised, rows_total, ffn)


@triton.jit
def float8_gated_backward_maxima_kernel(
    joined, incoming, maxima, rows_total, ffn, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    largest = tl.zeros([TILE_ROWS, TILE_COLUMNS], dtype=tl.float32)
    for first in range(0, ffn, TILE_COLUMNS):
        columns = first + tl.arange(0, TILE_COLUMNS)
        mask = (rows < rows_total)[:, None] & (columns < ffn)[None, :]
        of_gate, of_up = _gated_backward(joined, incoming, rows, columns, mask, ffn)
        largest = _larger(largest, _larger(tl.abs(of_gate), tl.abs(of_up.to(tl.float32))))
    tl.store(maxima + rows, tl.reduce(largest, 1, _larger), mask=rows < rows_total)


@triton.jit
def float8_gated_backward_kernel(
    joined, incoming, scale, out, turned, rows_total, ffn, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr,
):  # fmt: skip
    rows, columns = _tile(ffn, TILE_ROWS, TILE_COLUMNS)
    mask = (rows < rows_total)[:, None] & (columns < ffn)[None, :]
    of_gate, of_up = _gated_backward(joined, incoming, rows, columns, mask, ffn)
    factor = tl.load(scale)
    of_gate = tl.inline_asm_elementwise(ROUND, "=r,f,f", [of_gate], dtype=tl.bfloat16, is_pure=True, pack=2)
    of_gate = _quantised(of_gate, factor, out.dtype.element_ty)
    _store(out, turned, rows, columns, mask, of_gate, rows_total, 2 * ffn)
    of_up = _quantised(of_up, factor, out.dtype.element_ty)
    _store(out, turned, rows, columns + ffn, mask, of_up, rows_total, 2 * ffn)


def _launch(kernel: Any, rows: int, columns: int, tile: Tile, *arguments: Any) -> None:
    programs = -(-rows // tile.rows) * -(-columns // tile.columns)
    kernel[(programs,)](*arguments, TILE_ROWS=tile.rows, TILE_COLUMNS=tile.columns, num_warps=tile.warps)


def _both(rows: int, columns: int, like: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    out = torch.empty(rows, columns, dtype=dtype, device=like.device)
    return out, torch.empty(columns, rows, dtype=dtype, device=like.device)


def cast(x: Tensor, scale: Tensor, dtype: torch.dtype, tile: Tile = CAST) -> tuple[Tensor, Tensor]:
    rows, columns = x.shape
    out, turned = _both(rows, columns, x, dtype)
    _launch(float8_cast_kernel, rows, columns, tile, x, scale, out, turned, rows, columns, x.stride(0))
    return out, turned


def cast_heads(q: Tensor, k: Tensor, v: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    batch, heads, length, head_dim = q.shape
    across, rows = heads + 2 * k.shape[1], batch * length
    out, turned = _both(rows, across * head_dim, q, dtype)
    parts = [part if part.stride(-1) == 1 else part.contiguous() for part in (q, k, v)]
    strides = [stride for part in parts for stride in part.stride()[:3]]
    tile_rows = max(16, TILE_ELEMENTS // head_dim)
    float8_heads_kernel[(-(-rows // tile_rows) * across,)](
        *parts, scale, out, turned, rows, length, heads, k.shape[1], *strides,
        TILE_ROWS=tile_rows, HEAD_DIM=head_dim, num_warps=4,
    )  # fmt: skip
    return out, turned


def gated_maxima(joined: Tensor, tile: Tile = MAXIMA) -> Tensor:
    rows, ffn = joined.shape[0], joined.shape[1] // 2
    maxima = torch.empty(rows, device=joined.device)
    _launch(float8_gated_maxima_kernel, rows, 1, tile, joined, maxima, rows, ffn)
    return maxima


def gated(joined: Tensor, scale: Tensor, dtype: torch.dtype, tile: Tile = GATED) -> tuple[Tensor, Tensor]:
    rows, ffn = joined.shape[0], joined.shape[1] // 2
    out, turned = _both(rows, ffn, joined, dtype)
    _launch(float8_gated_kernel, rows, ffn, tile, joined, scale, out, turned, rows, ffn)
    return out, turned


def gated_backward_maxima(joined: Tensor, incoming: Tensor, tile: Tile = MAXIMA) -> Tensor:
    rows, ffn = incoming.shape
    maxima = torch.empty(rows, device=joined.device)
    _launch(float8_gated_backward_maxima_kernel, rows, 1, tile, joined, incoming, maxima, rows, ffn)
    return maxima


def gated_backward(
    joined: Tensor, incoming: Tensor, scale: Tensor, dtype: torch.dtype, tile: Tile = GATED_BACKWARD
) -> tuple[Tensor, Tensor]:
    rows, ffn = incoming.shape
    out, turned = _both(rows, 2 * ffn, joined, dtype)
    _launch(float8_gated_backward_kernel, rows, ffn, tile, joined, incoming, scale, out, turned, rows, ffn)
    return out, turned
