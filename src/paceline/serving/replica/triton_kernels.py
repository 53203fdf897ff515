"""Triton kernels of a decode step. Each reads what must be read once, and does the small work around it on the way.

The kernels of a step follow one another so closely that starting them costs as much as some of them take. Launched with
`early`, a kernel starts while the one before it still runs; `griddepcontrol.wait` holds it before it reads a result.
Every kernel waits, also one that needs nothing of the kernel just before it: what it needs is older, and finished.
"""

# Triton's language has no types that mypy knows.
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

# Elements of 16 bits in a line of the cache.
LINE = tl.constexpr(64)


@triton.jit
def begin(EARLY: tl.constexpr):
    """The next kernel may start; this one waits until the one before it has ended."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def touch(at):
    """Bring lines into the cache of all processors. Nothing waits for it."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [at.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def rotated(base, cosines, sines, offsets, turned, sign, mask):
    straight = tl.load(base + offsets, mask=mask, other=0.0).to(tl.float32)
    across = tl.load(base + turned, mask=mask, other=0.0).to(tl.float32)
    return straight * cosines + across * sign * sines


@triton.jit
def own_part(split, cached, SPLITS: tl.constexpr, MULTIPLE: tl.constexpr):
    """What this split reads of a context: its first token, the one after its last, and how many splits have any."""
    length = tl.cdiv(tl.cdiv(cached, SPLITS), MULTIPLE) * MULTIPLE
    active = tl.maximum(tl.cdiv(cached, tl.maximum(length, 1)), 1)
    first = split * length
    return first, tl.minimum(first + length, cached), active


@triton.jit
def touch_tile(keys, values, cache_at, token_stride, first, last, TILE: tl.constexpr, WIDTH: tl.constexpr):
    """Bring the first tile of keys and values into the cache of all processors."""
    lines: tl.constexpr = (WIDTH + LINE - 1) // LINE
    early = tl.maximum(tl.minimum(first + tl.arange(0, TILE), last - 1), 0).to(tl.int64)
    line_at = cache_at + early[:, None] * token_stride + (tl.arange(0, lines) * LINE)[None, :]
    touch(keys + line_at)
    touch(values + line_at)


@triton.jit
def store_new(
    query_at,
    key_at,
    value_at,
    cosines_at,
    sines_at,
    keys,
    values,
    cache_at,
    mine,
    scale,
    real,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Rotate query and key of the new token, store its key and value, and begin the sums of `attend_tiles` with it.

    Only one split does so (`mine`); the sums of the others begin empty. Returns the rotated query too.
    """
    row = tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    half: tl.constexpr = WIDTH // 2
    turned = tl.where(column < half, column + half, column - half)
    sign = tl.where(column < half, -1.0, 1.0)
    cosine = tl.load(cosines_at + column).to(tl.float32)
    sine = tl.load(sines_at + column).to(tl.float32)
    straight = row[:, None] * WIDTH + column[None, :]
    across = row[:, None] * WIDTH + turned[None, :]
    asked = rotated(query_at, cosine[None, :], sine[None, :], straight, across, sign[None, :], real)
    own_key = rotated(key_at, cosine, sine, column, turned, sign, column >= 0).to(keys.dtype.element_ty)
    own_value = tl.load(value_at + column)
    asked = asked.to(keys.dtype.element_ty)
    place = cache_at + column
    tl.store(keys + place, own_key, mask=(column >= 0) & mine)
    tl.store(values + place, own_value, mask=(column >= 0) & mine)
    own_score = tl.sum(asked.to(tl.float32) * own_key.to(tl.float32)[None, :], axis=1) * scale
    highest = tl.where(mine, own_score, float("-inf"))
    total = tl.where(mine, 1.0, 0.0) + tl.zeros([ROWS], tl.float32)
    mixed = tl.where(mine, 1.0, 0.0) * own_value.to(tl.float32)[None, :] + tl.zeros([ROWS, WIDTH], tl.float32)
    return asked, highest, total, mixed


@triton.jit
def attend_tiles(
    asked,
    keys,
    values,
    cache_at,
    token_stride,
    first,
    last,
    scale,
    highest,
    total,
    mixed,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Continue the softmax over the tokens from `first` to `last`. highest: the best score so far; total and mixed: the
    sums of all shares and of the values by share, both relative to it."""
    column = tl.arange(0, WIDTH)
    within = tl.arange(0, TILE)
    for start in tl.range(first, last, TILE, num_stages=STAGES):
        token = start + within
        known = token < last
        at = cache_at + token.to(tl.int64)[:, None] * token_stride + column[None, :]
        tile = tl.load(keys + at, mask=known[:, None], other=0.0)
        score = tl.dot(asked, tl.trans(tile)) * scale
        score = tl.where(known[None, :], score, float("-inf"))
        higher = tl.maximum(highest, tl.max(score, axis=1))
        share = tl.exp2(score - higher[:, None])
        shrunk = tl.exp2(highest - higher)
        total = total * shrunk + tl.sum(share, axis=1)
        tile = tl.load(values + at, mask=known[:, None], other=0.0)
        mixed = tl.dot(share.to(tile.dtype), tile, mixed * shrunk[:, None])
        highest = higher
    return highest, total, mixed


@triton.jit
def put_together(
    out_at,
    partial,
    maxima,
    sums,
    group,
    active,
    GROUP: tl.constexpr,
    FEW: tl.constexpr,
    WIDTH: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLITS_2: tl.constexpr,
):
    """The result of all splits of a group of query heads, from what they have left."""
    column = tl.arange(0, WIDTH)
    part = tl.arange(0, SPLITS_2)
    few = tl.arange(0, FEW)
    there = (part < active)[:, None] & (few < GROUP)[None, :]
    at = (group * SPLITS + part)[:, None] * GROUP + few[None, :]
    tops = tl.load(maxima + at, mask=there, other=float("-inf"), cache_modifier=".cg")
    tops = tl.where((few < GROUP)[None, :], tops, 0.0)
    weights = tl.exp2(tops - tl.max(tops, axis=0)[None, :])
    whole = tl.sum(weights * tl.load(sums + at, mask=there, other=0.0, cache_modifier=".cg"), axis=0)
    whole = tl.where(few < GROUP, whole, 1.0)
    cells = at[:, :, None] * WIDTH + column[None, None, :]
    pieces = tl.load(
        partial + cells, mask=there[:, :, None] & (column >= 0)[None, None, :], other=0.0, cache_modifier=".cg"
    )
    result = tl.sum(pieces * weights[:, :, None], axis=0) / whole[:, None]
    to = out_at + few[:, None] * WIDTH + column[None, :]
    tl.store(to, result.to(out_at.dtype.element_ty), mask=(few < GROUP)[:, None] & (column >= 0)[None, :])


@triton.jit
def attend(
    query,
    key,
    value,
    cosines,
    sines,
    keys,
    values,
    positions,
    out,
    partial,
    maxima,
    sums,
    arrived,
    scale,
    query_slot,
    key_slot,
    value_slot,
    slot_stride,
    token_stride,
    head_stride,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    FEW: tl.constexpr,
    WIDTH: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLITS_2: tl.constexpr,
    MULTIPLE: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    STORES: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One token of one slot against one split of what the slot has cached, for all query heads of a key head.

    STORES: query and key are not rotated yet, and key and value not in the cache; otherwise the cache has them.
    """
    head, split, slot = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    # What is cached and how far does not depend on the kernels just before.
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    position = tl.load(positions + slot).to(tl.int32)
    first, last, active = own_part(split, position if STORES else position + 1, SPLITS, MULTIPLE)
    if split >= active:
        return
    row = tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    cell = row[:, None] * WIDTH + column[None, :]
    real = (row < GROUP)[:, None] & (column >= 0)[None, :]
    cache_at = slot.to(tl.int64) * slot_stride + head * head_stride
    if EARLY:
        touch_tile(keys, values, cache_at, token_stride, first, last, TILE, WIDTH)
        tl.extra.cuda.gdc_wait()
    query_at = query + slot.to(tl.int64) * query_slot + head * GROUP * WIDTH
    if STORES:
        key_at = key + slot.to(tl.int64) * key_slot + head * WIDTH
        value_at = value + slot.to(tl.int64) * value_slot + head * WIDTH
        turns = position * WIDTH
        asked, highest, total, mixed = store_new(
            query_at,
            key_at,
            value_at,
            cosines + turns,
            sines + turns,
            keys,
            values,
            cache_at + position.to(tl.int64) * token_stride,
            split == 0,
            scale,
            real,
            ROWS,
            WIDTH,
        )
    else:
        asked = tl.load(query_at + cell, mask=real, other=0.0)
        highest = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        mixed = tl.zeros([ROWS, WIDTH], tl.float32)
    highest, total, mixed = attend_tiles(
        asked, keys, values, cache_at, token_stride, first, last, scale, highest, total, mixed, WIDTH, TILE, STAGES
    )
    group = slot * HEADS + head
    out_at = out + group * GROUP * WIDTH
    if SPLITS == 1:
        tl.store(out_at + cell, (mixed / total[:, None]).to(out.dtype.element_ty), mask=real)
    else:
        piece = group * SPLITS + split
        tl.store(partial + piece * GROUP * WIDTH + cell, mixed, mask=real)
        tl.store(maxima + piece * GROUP + row, highest, mask=row < GROUP)
        tl.store(sums + piece * GROUP + row, total, mask=row < GROUP)
        tl.debug_barrier()
        before = tl.atomic_add(arrived + group, 1, sem="acq_rel")
        # The last one to arrive puts the splits together.
        if before == active - 1:
            tl.store(arrived + group, 0)
            put_together(out_at, partial, maxima, sums, group, active, GROUP, FEW, WIDTH, SPLITS, SPLITS_2)


@triton.jit
def multiply_one(
    given,
    weight,
    scales,
    out,
    epsilon,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPTH: tl.constexpr,
    NORMED: tl.constexpr,
    GATED: tl.constexpr,
    ADDS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """out = given @ weight.T for a single row of `given`. NORMED: an RMSNorm with `scales` comes first. GATED: weight
    has the rows of the gate and then those of the other half; out is silu(gate) * other. ADDS: added to what out has.

    Weights do not depend on the kernel before: some are read while it ends.
    """
    output = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    depth = tl.arange(0, DEPTH)
    at = weight + output.to(tl.int64)[:, None] * INPUTS + depth[None, :]
    sums = tl.zeros([BLOCK, DEPTH], tl.float32)
    others = tl.zeros([BLOCK, DEPTH], tl.float32)
    squares = tl.zeros([DEPTH], tl.float32)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    tile = tl.load(at)
    other = tile
    if GATED:
        other = tl.load(at + OUTPUTS * INPUTS)
    if EARLY:
        tl.extra.cuda.gdc_wait()
    for step in tl.static_range(0, INPUTS // DEPTH):
        if step > 0:
            tile = tl.load(at + step * DEPTH)
            if GATED:
                other = tl.load(at + (OUTPUTS * INPUTS + step * DEPTH))
        number = tl.load(given + step * DEPTH + depth).to(tl.float32)
        if NORMED:
            squares += number * number
            number *= tl.load(scales + step * DEPTH + depth).to(tl.float32)
        sums += tile.to(tl.float32) * number[None, :]
        if GATED:
            others += other.to(tl.float32) * number[None, :]
    found = tl.sum(sums, axis=1)
    norm = tl.rsqrt(tl.sum(squares, axis=0) / INPUTS + epsilon)
    if NORMED:
        found *= norm
    if GATED:
        beside = tl.sum(others, axis=1)
        if NORMED:
            beside *= norm
        found = found / (1.0 + tl.exp(-found)) * beside
    if ADDS:
        found += tl.load(out + output).to(tl.float32)
    tl.store(out + output, found.to(out.dtype.element_ty))


@triton.jit
def normalise(
    given,
    scales,
    out,
    epsilon,
    WIDTH: tl.constexpr,
    WIDTH_2: tl.constexpr,
    EARLY: tl.constexpr,
):
    row = tl.program_id(0)
    begin(EARLY)
    column = tl.arange(0, WIDTH_2)
    mask = column < WIDTH
    number = tl.load(given + row * WIDTH + column, mask=mask, other=0.0).to(tl.float32)
    number *= tl.rsqrt(tl.sum(number * number, axis=0) / WIDTH + epsilon)
    number *= tl.load(scales + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + column, number.to(out.dtype.element_ty), mask=mask)


@triton.jit
def gate(
    given,
    out,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    program = tl.program_id(0)
    begin(EARLY)
    blocks: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    row = program // blocks
    column = program % blocks * BLOCK + tl.arange(0, BLOCK)
    mask = column < WIDTH
    first = tl.load(given + row * 2 * WIDTH + column, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(given + (row * 2 + 1) * WIDTH + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + column, (first / (1.0 + tl.exp(-first)) * second).to(out.dtype.element_ty), mask=mask)


@triton.jit
def choose(
    logits,
    tokens,
    positions,
    best,
    where,
    arrived,
    most,
    VOCABULARY: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """The best token of each slot, and the position of the next."""
    begin(EARLY)
    part, slot = tl.program_id(0), tl.program_id(1)
    column = part * BLOCK + tl.arange(0, BLOCK)
    at = logits + slot.to(tl.int64) * VOCABULARY + column
    score = tl.load(at, mask=column < VOCABULARY, other=float("-inf")).to(tl.float32)
    highest, index = tl.max(score, axis=0, return_indices=True)
    tl.store(best + slot * PARTS + part, highest)
    tl.store(where + slot * PARTS + part, part * BLOCK + index)
    tl.debug_barrier()
    if tl.atomic_add(arrived + slot, 1, sem="acq_rel") == PARTS - 1:
        tl.store(arrived + slot, 0)
        parts = tl.arange(0, PARTS)
        bests = tl.load(best + slot * PARTS + parts, cache_modifier=".cg")
        places = tl.load(where + slot * PARTS + parts, cache_modifier=".cg")
        first = tl.min(tl.where(bests == tl.max(bests, axis=0), places, VOCABULARY), axis=0)
        tl.store(tokens + slot, first.to(tl.int64))
        # The position of a free slot advances too; it must stay within its row.
        tl.store(positions + slot, tl.minimum(tl.load(positions + slot) + 1, most))
