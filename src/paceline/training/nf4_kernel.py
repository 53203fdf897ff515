"""The kernel of `nf4`, in a module of its own because it needs Triton to be read."""

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def dequantise(  # type: ignore[no-untyped-def]
    codes, absmax, scales, offset, levels, table, out, blocks, ROWS: tl.constexpr
):
    """ROWS blocks of 64 numbers each, of 32 bytes; the first number of a byte is in its upper half."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < blocks
    level = tl.load(absmax + row, mask=inside, other=0).to(tl.int32)
    of_block = tl.load(scales + row // 256, mask=inside, other=0.0)
    scale = tl.load(levels + level) * of_block + tl.load(offset)
    place = row[:, None] * 32 + tl.arange(0, 32)[None, :]
    packed = tl.load(codes + place, mask=inside[:, None], other=0).to(tl.int32)
    high = tl.load(table + (packed >> 4)) * scale[:, None]
    low = tl.load(table + (packed & 15)) * scale[:, None]
    values = tl.reshape(tl.join(high, low), (ROWS, 64)).to(out.dtype.element_ty)
    place = row[:, None] * 64 + tl.arange(0, 64)[None, :]
    tl.store(out + place, values, mask=inside[:, None])
