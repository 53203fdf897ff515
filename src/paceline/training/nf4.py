"""Weights in NF4 with quantised scales as 16-bit numbers, of several layers with the same input in one matrix.

bitsandbytes needs three kernels for it, and hides it from torch's compiler inside its product. Here it is an operator
of torch, and one kernel per layer, with the same numbers bit for bit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

# Numbers per scale, and scales per scale of scales.
BLOCK, SCALE_BLOCK = 64, 256
# Blocks of numbers that one program of the kernel converts, and its warps.
ROWS, WARPS = 64, 4


class Codes(NamedTuple):
    """One weight: two codes per byte, the 8-bit code of each block's scale, the scales of these and their offset.

    levels are the 256 numbers that codes of scales stand for, table the 16 of the weight's codes.
    """

    codes: Tensor
    absmax: Tensor
    scales: Tensor
    offset: Tensor
    levels: Tensor
    table: Tensor


def codes_of_layer(layer: Any) -> Codes | None:
    """The codes of one of bitsandbytes' layers as they are held now; None if they are held differently."""
    state = getattr(layer, "quant_state", None)
    if state is None or state.quant_type != "nf4" or not state.nested or layer.weight.dtype != torch.uint8:
        return None
    numbers = layer.out_features * layer.in_features
    if (state.blocksize, state.state2.blocksize) != (BLOCK, SCALE_BLOCK) or numbers % BLOCK:
        return None
    nested = state.state2
    return Codes(layer.weight, state.absmax, nested.absmax, state.offset, nested.code, state.code)


# Defined by hand: torch's decorator for operators checks every result for shared memory, which takes the host longer
# than launching the kernels.
_LIBRARY: Any = torch.library.Library("paceline", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define(
    "nf4_numbers(Tensor[] codes, Tensor[] absmax, Tensor[] scales, Tensor[] offsets, Tensor levels, Tensor table, "
    "int columns, ScalarType dtype, bool again) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def numbers(
    codes: Sequence[Tensor],
    absmax: Sequence[Tensor],
    scales: Sequence[Tensor],
    offsets: Sequence[Tensor],
    levels: Tensor,
    table: Tensor,
    columns: int,
    dtype: torch.dtype,
    again: bool,
) -> Tensor:
    """The matrix of the weights below each other, (sum of outputs, columns), in `dtype`.

    again: has no effect here; torch's compiler keeps the result of equal calls, and calls that differ are repeated.
    """
    found: Tensor = torch.ops.paceline.nf4_numbers(codes, absmax, scales, offsets, levels, table, columns, dtype, again)
    return found


def _empty(codes: Sequence[Tensor], *others: Any) -> Tensor:
    columns, dtype = others[5:7]
    return codes[0].new_empty(sum(2 * part.numel() for part in codes) // columns, columns, dtype=dtype)


def _numbers(fill: Callable[..., None], codes: Sequence[Tensor], *others: Any) -> Tensor:
    joined, columns = _empty(codes, *others), others[5]
    places = torch.split(joined, [2 * part.numel() // columns for part in codes])
    for place, *parts in zip(places, codes, *others[:3], strict=True):
        fill(place, *parts, *others[3:5])
    return joined


def _fill(
    place: Tensor, codes: Tensor, absmax: Tensor, scales: Tensor, offset: Tensor, levels: Tensor, table: Tensor
) -> None:
    """What the kernel computes, in torch's operators."""
    blocks = absmax.numel()
    of_block = scales.repeat_interleave(SCALE_BLOCK)[:blocks]
    scale = levels[absmax.view(-1).int()] * of_block + offset
    packed = codes.view(blocks, BLOCK // 2).int()
    values = torch.stack((table[packed >> 4], table[packed & 15]), dim=-1).view(blocks, BLOCK)
    place.view(blocks, BLOCK).copy_(values * scale[:, None])


def _fill_on_gpu(
    place: Tensor, codes: Tensor, absmax: Tensor, scales: Tensor, offset: Tensor, levels: Tensor, table: Tensor
) -> None:
    from paceline.training.nf4_kernel import dequantise

    blocks = absmax.numel()
    # Fused multiply-adds would round the scales differently from bitsandbytes.
    dequantise[(-(-blocks // ROWS),)](
        codes, absmax, scales, offset, levels, table, place, blocks, ROWS, num_warps=WARPS, enable_fp_fusion=False
    )


def has_kernel(device: torch.device) -> bool:
    """Whether there is a kernel for this device; plain operators compute the same, slowly."""
    return device.type == "cuda" and find_spec("triton") is not None


_LIBRARY.impl("nf4_numbers", functools.partial(_numbers, _fill), "CPU")
_LIBRARY.impl("nf4_numbers", functools.partial(_numbers, _fill_on_gpu), "CUDA")
torch.library.register_fake("paceline::nf4_numbers", _empty, lib=_LIBRARY)
