"""The kernels of a decode step one by one, with what else could compute the same, and whole steps of what was fastest.

Every candidate computes all layers of the model in one CUDA graph, each with its own weights, so that no weight is in a
cache. Before it is timed its result is compared with plain products in fp32. A candidate that fails says why.

Run `python benchmarks/decode_parts.py [--model NAME] [--batches 1,8,32,128] [--json FILE]`. Kernels are compiled by
other processes while the model is built. Nothing here passes or fails.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from decode import REACH_MULTIPLE, Bench, facts, measured
from torch import Tensor

from paceline.serving.replica import fused, kernels
from paceline.serving.replica.decoding import Decoding, captured
from paceline.serving.replica.fused import FusedStep
from paceline.serving.replica.kernels import SplitAttention
from paceline.serving.replica.plans import PRODUCTS, Division, Plan, Tile

COMPILERS = 12
REPLAYS = 8
# Of the norm of the result: rounding to 16 bits is 0.002 of each number, and a whole step rounds hundreds of times.
PART_ERROR, STEP_ERROR = 0.03, 0.15
DIVISIONS = {
    1: [(8, 64, 2, 4), (4, 64, 3, 4), (8, 128, 1, 4), (8, 32, 4, 2), (4, 128, 2, 8), (16, 64, 1, 4)],
    8: [(2, 64, 3, 4), (2, 64, 2, 4), (2, 128, 2, 8), (1, 64, 4, 4), (2, 32, 5, 4), (4, 64, 2, 4), (4, 128, 1, 4)],
    32: [(1, 64, 3, 4), (1, 64, 4, 4), (1, 128, 3, 8), (2, 64, 3, 4), (1, 32, 6, 4), (1, 32, 5, 2)],
    128: [(1, 64, 3, 4), (1, 128, 2, 8), (1, 32, 4, 2), (1, 32, 5, 4), (1, 64, 2, 4), (1, 64, 4, 4)],
}
TILES = {
    1: [(4, 1024, 0, 0, 4), (2, 2048, 0, 0, 4), (1, 2048, 0, 0, 4), (8, 1024, 0, 0, 8), (2, 1024, 0, 0, 4)],
    8: [
        (16, 512, 4, 3, 4),
        (16, 256, 4, 4, 4),
        (16, 256, 4, 6, 4),
        (16, 128, 4, 4, 4),
        (32, 256, 4, 4, 4),
        (16, 512, 8, 3, 8),
    ],
    32: [
        (16, 512, 4, 3, 4),
        (32, 256, 4, 3, 4),
        (32, 256, 4, 3, 8),
        (16, 256, 4, 4, 4),
        (32, 128, 2, 4, 4),
        (64, 128, 1, 4, 4),
    ],
    128: [(64, 64, 1, 4, 4), (64, 64, 1, 5, 4), (128, 64, 1, 3, 8), (64, 128, 1, 3, 4)],
}
MIB = 1 << 20
# Bytes that are fetched ahead of a product by the small kernels before it, and by attention.
MOST_SHORT = 8
AHEADS = ((8 * MIB, 0), (16 * MIB, 0), (8 * MIB, 16 * MIB))


class Parts:
    """Kernels for one number of slots, in the middle of their answers."""

    def __init__(self, bench: Bench, batch: int) -> None:
        self.batch, self.device = batch, bench.device
        asked = bench.asked
        length = -(-(asked.prompt + asked.answer) // REACH_MULTIPLE) * REACH_MULTIPLE
        self.decoding = bench.decoding(batch, length)
        self.decoding.positions.fill_(asked.prompt + asked.answer // 4)
        self.step = FusedStep(self.decoding.model, self.decoding.tokens, self.decoding.positions, length)
        self.layers = self.step.layers
        for layer in self.layers:
            layer.keys.normal_()
            layer.values.normal_()
        self.given = {name: self.normal(self.layers[0], name) for name in PRODUCTS}

    def normal(self, layer: fused.Layer, name: str) -> Tensor:
        return torch.randn(self.batch, getattr(layer, name).shape[1], device=self.device).to(layer.keys.dtype)

    def per_layer(self, call: Callable[[fused.Layer], object]) -> float:
        """Seconds of one layer among all of them."""

        def whole() -> None:
            for layer in self.layers:
                call(layer)

        whole()
        replay = captured(whole)
        replay()
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        for _ in range(REPLAYS):
            replay()
        ended.record()
        ended.synchronize()
        return began.elapsed_time(ended) / 1e3 / REPLAYS / len(self.layers)

    # --- products ---

    def product(self, name: str, tile: Tile | None, early: bool) -> dict[str, Any]:
        """A product with the norm before it, or the activation or sum after it."""
        first, step = self.layers[0], self.step
        step.plan = Plan(step.plan.attention, {} if tile is None else {name: tile}, early)
        outputs, inputs = getattr(first, name).shape
        if tile is not None and not tile.fits(self.batch, outputs // (2 if name == "mlp_in" else 1), inputs):
            raise ValueError("this tile does not divide the product")
        given, nothing = self.given[name], dict.fromkeys(PRODUCTS)

        def call(layer: fused.Layer) -> Tensor:
            weight = getattr(layer, name)
            if name == "attention_in":
                step._enter(name, layer.norm, weight, layer.epsilon, step.joined, nothing)
                return step.joined
            if name == "mlp_in":
                step._enter(name, layer.mlp_norm, weight, layer.epsilon, step.active if tile else step.gates, nothing)
                if tile is None:
                    kernels.gate(step.gates, step.active, early=early)
                return step.active
            step._leave(name, given, weight)
            return step.hidden

        entering = name.endswith("_in")
        step.hidden.copy_(given) if entering else step.hidden.zero_()
        error = distance(call(first), self.expected(name))
        step.hidden.copy_(given) if entering else step.hidden.zero_()
        taken = self.per_layer(call)
        moved = getattr(first, name).numel() * 2
        found = {"part": name, "batch": self.batch, "tile": asdict(tile) if tile else None, "early": early}
        return {**found, "us": taken * 1e6, "bytes_per_s": moved / taken, "error": error}

    def expected(self, name: str) -> Tensor:
        layer, given = self.layers[0], self.given[name].float()
        if name.endswith("_in"):
            scales = layer.norm if name == "attention_in" else layer.mlp_norm
            given = F.rms_norm(given, given.shape[1:], scales.float(), layer.epsilon)
        result = given @ getattr(layer, name).float().t()
        if name == "mlp_in":
            gate, other = result.chunk(2, dim=1)
            return F.silu(gate) * other
        return result

    # --- attention ---

    def attention(self, division: Division, early: bool) -> dict[str, Any]:
        """Rotation, caching and attention."""
        slots, _, heads, width = self.layers[0].keys.shape
        step = self.step
        group = step.asking // step.keyed
        attend = SplitAttention(slots, heads, group, width, division, self.device)
        step.joined.normal_()
        asked, key, value = step.joined.split([step.asking, step.keyed, step.keyed], dim=1)

        def call(layer: fused.Layer) -> Tensor:
            new = key, value, step.cosines, step.sines
            attend(asked, layer.keys, layer.values, step.positions, step.mixed, layer.scale, new=new, early=early)
            return step.mixed

        first = self.layers[0]
        mixed = call(first).clone()
        error = distance(mixed, self.attended(asked, first.keys, first.values, first.scale))
        return self._attention_row({"division": asdict(division), "early": early}, call, error)

    def attended(self, asked: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        """In fp32, after the new key and value are in the cache."""
        slots, _, heads, width = keys.shape
        position = int(self.step.positions[0])
        cosine, sine = self.step.cosines[position].float(), self.step.sines[position].float()
        query = asked.float().view(slots, heads, -1, width)
        low, high = query.chunk(2, dim=-1)
        query = query * cosine + torch.cat((-high, low), dim=-1) * sine
        found = torch.empty_like(query)
        for slot in range(slots):
            known = keys[slot, : position + 1].float()
            scores = torch.einsum("hgd,nhd->hgn", query[slot], known) * scale
            found[slot] = torch.einsum("hgn,nhd->hgd", scores.softmax(dim=-1), values[slot, : position + 1].float())
        return found.flatten(1)

    def flash(self) -> dict[str, Any]:
        """FlashAttention's kernel alone: nothing is rotated or cached."""
        step, first = self.step, self.layers[0]
        length, width = first.keys.shape[1], first.keys.shape[3]
        current = self.decoding.current
        asked = torch.randn(self.batch, step.asking // width, width, device=self.device).to(first.keys.dtype)
        used = (step.positions + 1).int()

        def call(layer: fused.Layer) -> Tensor:
            keys, values = layer.keys.flatten(0, 1), layer.values.flatten(0, 1)
            more = {"scale": layer.scale, "seqused_k": used}
            found: Tensor = torch.ops.aten._flash_attention_forward(
                asked, keys, values, current.each, current.starts, 1, length, 0.0, False, False, **more
            )[0]
            return found

        return self._attention_row({"division": None, "early": False}, call, 0.0)

    def _attention_row(
        self, told: dict[str, Any], call: Callable[[fused.Layer], object], error: float
    ) -> dict[str, Any]:
        taken = self.per_layer(call)
        moved = 2 * self.step.keyed * self.layers[0].keys.itemsize * int((self.step.positions + 1).sum())
        found = {"part": "attention", "batch": self.batch, **told}
        return {**found, "us": taken * 1e6, "bytes_per_s": moved / taken, "error": error}


def distance(found: Tensor, expected: Tensor) -> float:
    error = float((found.float() - expected).norm() / expected.norm())
    if not error < PART_ERROR:
        raise ValueError(f"the result is wrong: off by {error:.3g} of its norm")
    return error


def parts_of(parts: Parts) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    batch = parts.batch
    yield f"attention {batch} flash", parts.flash
    for numbers in DIVISIONS.get(batch, []):
        division = Division(*numbers)
        yield f"attention {batch} {numbers}", partial(parts.attention, division, False)
    first = Division(*DIVISIONS[batch][0])
    yield f"attention {batch} early", partial(parts.attention, first, True)
    for name in PRODUCTS:
        yield f"{name} {batch} torch", partial(parts.product, name, None, True)
        for numbers in TILES.get(batch, []):
            yield f"{name} {batch} {numbers}", partial(parts.product, name, Tile(*numbers), True)


# --- whole steps ---


def whole(bench: Bench, ceilings: dict[str, float], variant: str, batch: int, plan: Plan | None) -> dict[str, Any]:
    """Whole steps in the middle of answers. flash: transformers' layers, compiled, with FlashAttention's kernel; split:
    with ours instead. What is cached is drawn: it changes no time."""
    asked = bench.asked
    length = -(-(asked.prompt + asked.answer) // REACH_MULTIPLE) * REACH_MULTIPLE
    decoding = bench.decoding(batch, length)
    bench.compile(decoding, "compiled" if plan is None else "eager")
    if variant == "flash":
        decoding.current.split, decoding._flash = None, True
    for layer in fused.layers_of(decoding.model):
        layer.keys.normal_()
        layer.values.normal_()
    decoding.tokens.random_(bench.shape.vocab)
    decoding.positions.fill_(asked.prompt)
    error = None if plan is None else step_error(decoding, plan)
    began = time.perf_counter()
    if plan is not None and not decoding.fuse(plan):
        raise ValueError("this model cannot be fused")
    advance = partial(decoding._advance, length)
    for _ in range(3):
        advance()
    replay = captured(advance)
    ready_s = time.perf_counter() - began
    decoding.positions.fill_(asked.prompt)
    steps = asked.answer // 4
    for _ in range(2):
        replay()
    # Contexts grow within a repetition and from one to the next.
    step_s = bench.seconds(lambda: [replay() for _ in range(steps)], 3) / steps
    limit_s, _ = bench.limit(ceilings, batch, asked.prompt + 2 + 1.5 * steps)
    found = {"part": "step", "variant": variant, "batch": batch, "us": step_s * 1e6, "of_limit_ratio": limit_s / step_s}
    return {**found, "ready_s": ready_s, "error": error, "plan": plan_json(plan)}


def step_error(decoding: Decoding, plan: Plan | None) -> float:
    """Of the scores, beside transformers' layers without compilation, with FlashAttention's kernel."""
    step = FusedStep(decoding.model, decoding.tokens, decoding.positions, decoding.length, plan)
    found = step.scores().float()
    current = decoding.current
    current.reach, current.split, current.used = decoding.length, None, (decoding.positions + 1).int()
    with torch.inference_mode():
        positions = decoding.positions[:, None]
        expected = decoding.model(input_ids=decoding.tokens, position_ids=positions, use_cache=False).logits[:, -1]
    error = float((found - expected.float()).norm() / expected.float().norm())
    if not error < STEP_ERROR:
        raise ValueError(f"the scores are wrong: off by {error:.3g} of their norm")
    chosen = found.argmax(dim=-1)
    step.choice(found.to(expected.dtype), decoding.tokens, decoding.positions, decoding.length - 1)
    if not torch.equal(found.to(expected.dtype).gather(1, decoding.tokens), found.to(expected.dtype).amax(1, True)):
        raise ValueError(f"the choice is wrong: {decoding.tokens.view(-1)[:4].tolist()}, {chosen[:4].tolist()}")
    return error


def plan_json(plan: Plan | None) -> dict[str, Any] | None:
    if plan is None:
        return None
    return {**asdict(plan), "tiles": {name: asdict(tile) for name, tile in plan.tiles.items()}}


def chosen(rows: list[dict[str, Any]], batch: int) -> Plan:
    """The fastest of every part."""

    def best(part: str) -> dict[str, Any]:
        named = [row for row in rows if row.get("part") == part and row["batch"] == batch]
        return min(named, key=lambda row: row["us"])

    splits = [row for row in rows if row.get("division") and row["batch"] == batch]
    division = Division(**min(splits, key=lambda row: row["us"])["division"])
    tiles = {name: best(name)["tile"] for name in PRODUCTS}
    return Plan(division, {name: Tile(**tile) for name, tile in tiles.items() if tile}, early=True)


def whole_of_best(
    bench: Bench,
    ceilings: dict[str, float],
    rows: list[dict[str, Any]],
    variant: str,
    batch: int,
    changes: dict[str, Any],
) -> dict[str, Any]:
    return whole(bench, ceilings, variant, batch, replace(chosen(rows, batch), **changes))


# --- compilation ahead ---


def compile_share(asked: argparse.Namespace) -> int:
    """Compile this process's share of the candidates, without running them."""
    from triton.runtime.jit import JITFunction

    from paceline.serving.replica.settings import Settings

    number, count = map(int, asked.compile.split("/"))
    JITFunction.__getitem__ = lambda self, grid: partial(self.warmup, grid=grid)
    shape = Settings(engine="transformers", model=asked.model).shape
    length = -(-(asked.prompt + asked.answer) // REACH_MULTIPLE) * REACH_MULTIPLE
    calls = []
    for batch in map(int, asked.batches.split(",")):
        for numbers in DIVISIONS.get(batch, []):
            division = Division(*numbers)
            calls += [partial(_compile_attention, shape, batch, length, division, early) for early in (False, True)]
        for numbers in TILES.get(batch, []):
            calls += [partial(_compile_product, shape, batch, name, Tile(*numbers)) for name in PRODUCTS]
    for call in calls[number::count]:
        try:
            call()
        except Exception as error:
            print(f"not compiled: {type(error).__name__}: {str(error)[:200]}", flush=True)
    return 0


def _empty(*size: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(size, dtype=dtype, device="meta")


def _compile_attention(shape: Any, batch: int, length: int, division: Division, early: bool) -> None:
    heads, width = shape.kv_heads, shape.head_dim
    attend = SplitAttention(batch, heads, shape.heads // heads, width, division, torch.device("meta"))
    joined = _empty(batch, (shape.heads + 2 * heads) * width)
    asked, key, value = joined.split([shape.heads * width, heads * width, heads * width], dim=1)
    table, keys = _empty(length, width), _empty(batch, length, heads, width)
    positions = _empty(batch, dtype=torch.long)
    new = key, value, table, table
    attend(asked, keys, keys, positions, asked.contiguous(), width**-0.5, new=new, early=early)


def _compile_product(shape: Any, batch: int, name: str, tile: Tile) -> None:
    hidden, asking = shape.hidden, shape.heads * shape.head_dim
    sizes = {
        "attention_in": (asking + 2 * shape.kv_heads * shape.head_dim, hidden),
        "attention_out": (hidden, asking),
        "mlp_in": (2 * shape.ffn, hidden),
        "mlp_out": (hidden, shape.ffn),
    }
    outputs, inputs = sizes[name]
    gated = name == "mlp_in"
    out = _empty(batch, outputs // 2 if gated else outputs)
    given, weight, adds = _empty(batch, inputs), _empty(outputs, inputs), name.endswith("_out")
    if not tile.fits(batch, out.shape[1], inputs):
        return
    if tile.parts:
        kernels.multiply(given, weight, out, tile, gated=gated, adds=adds, early=True)
    else:
        scales = None if adds else _empty(inputs)
        kernels.multiply_one(given, weight, out, tile, scales=scales, epsilon=1e-5, gated=gated, adds=adds, early=True)


# --- ---


def rows_of(bench: Bench, ceilings: dict[str, float], save: Callable[[list[dict[str, Any]]], None]) -> None:
    asked = bench.asked
    deadline = time.monotonic() + asked.seconds
    rows: list[dict[str, Any]] = []
    batches = [int(number) for number in asked.batches.split(",")]

    def add(name: str, call: Callable[[], dict[str, Any]]) -> None:
        whole_step = name.startswith("step")
        rows.append(measured(name, call, deadline, clean=whole_step))
        if whole_step:
            save(rows)

    for batch in batches:
        parts = Parts(bench, batch)
        for name, call in parts_of(parts):
            add(name, call)
        del parts
        # Attention of many contexts leaves no memory bandwidth to others.
        is_short = batch <= MOST_SHORT
        variants: dict[str, dict[str, Any]] = {"torch": {"tiles": {}}, "chosen": {}}
        variants |= {"late": {"early": False}} if is_short else {}
        for before, around in AHEADS if is_short else AHEADS[:2]:
            fetched = {"ahead": before, "around_attention": around}
            named = f"{before // MIB}+{around // MIB} MiB ahead"
            variants |= {f"torch, {named}": {"tiles": {}, **fetched}, f"chosen, {named}": fetched}
        for variant, changes in variants.items():
            add(f"step {batch} {variant}", partial(whole_of_best, bench, ceilings, rows, variant, batch, changes))
    for variant, count in (("flash", len(batches)), ("split", 2)):
        for batch in batches[-count:]:
            add(f"step {batch} {variant}", partial(whole, bench, ceilings, variant, batch, None))
    for row in sorted(rows, key=lambda row: row["row"].startswith("step")):
        print(line_of(row))


def line_of(row: dict[str, Any]) -> str:
    if "us" not in row:
        return f"{row['row']:40} {row['error']}"
    more = f"{row['of_limit_ratio']:6.1%}" if row["part"] == "step" else f"{row['bytes_per_s'] / 1e9:5.0f} GB/s"
    error = "" if row["error"] is None else f"  off by {row['error']:.4f}"
    return f"{row['row']:40} {row['us']:9.1f} us  {more}{error}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="llama-8b")
    parser.add_argument("--precision", choices=("bf16",), default="bf16")
    parser.add_argument("--batches", default="1,8,32,128")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--answer", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=60.0, help="no row begins later than that")
    parser.add_argument("--json", type=Path, help="write everything there")
    parser.add_argument("--compile", default="", help="N/M: compile this share of the candidates, and no more")
    asked = parser.parse_args()
    if asked.compile:
        return compile_share(asked)
    command = [sys.executable, __file__, *sys.argv[1:], "--compile"]
    others = [subprocess.Popen([*command, f"{n}/{COMPILERS}"]) for n in range(COMPILERS)]
    began = time.monotonic()
    bench = Bench(asked)
    ceilings = bench.ceilings()
    print(f"model after {time.monotonic() - began:.1f} s", flush=True)
    for other in others:
        try:
            other.wait(timeout=max(1.0, 45 - (time.monotonic() - began)))
        except subprocess.TimeoutExpired:
            # What is missing is compiled when it is needed.
            other.kill()
    # torch collects garbage before it captures a graph: for every part, through all that was imported.
    gc.collect()
    gc.freeze()
    print(f"kernels after {time.monotonic() - began:.1f} s", flush=True)

    def save(rows: list[dict[str, Any]]) -> None:
        if asked.json:
            asked.json.write_text(json.dumps({**facts(bench), "ceilings": ceilings, "rows": rows}, indent=1) + "\n")

    rows_of(bench, ceilings, save)
    print(f"copies {ceilings['copy_bytes_per_s'] / 1e9:.0f} GB/s; all after {time.monotonic() - began:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
