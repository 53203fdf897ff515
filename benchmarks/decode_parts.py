"""The kernels of a decode step one by one: how fast they read memory, beside other ways of dividing their work.

Every row computes all layers of the model in one CUDA graph, each with its own weights, so that no weight is in a
cache. Before it is timed its result is compared with plain products in fp32. A row that fails says why. `decode.py`
times whole steps.

Run `python benchmarks/decode_parts.py [--model NAME] [--batches 1,8,32,128] [--json FILE]`. `--compile` only compiles
all kernels, for the Hopper generation: it needs triton, but no GPU. Nothing here passes or fails.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from decode import REACH_MULTIPLE, Bench, facts, measured
from torch import Tensor

from paceline.models.arithmetic import Shape
from paceline.serving.replica import fused, kernels, plans
from paceline.serving.replica.decoding import captured
from paceline.serving.replica.fused import FusedStep
from paceline.serving.replica.plans import PRODUCTS, Division, Plan, Tile
from paceline.serving.replica.settings import Settings

REPLAYS = 8
# Of the norm of the result: rounding to 16 bits is 0.002 of each number.
PART_ERROR = 0.03
# Beside the division and the tile that a step has.
DIVISIONS = {
    1: [(8, 64, 2, 4), (4, 64, 3, 4), (8, 128, 1, 4), (8, 32, 4, 2), (16, 32, 3, 4)],
    8: [(2, 64, 2, 4), (2, 32, 4, 2), (1, 64, 4, 4), (4, 64, 2, 4)],
    32: [(1, 64, 3, 4), (1, 32, 5, 2), (2, 64, 3, 4)],
    128: [(1, 64, 3, 4), (1, 32, 5, 2), (1, 128, 2, 8)],
}
TILES = [(2, 2048, 4), (1, 2048, 4), (8, 1024, 8), (2, 1024, 4)]
# What `--compile` takes for the processors of the device: an H200's.
PROCESSORS = 132


class Parts:
    """Kernels for one number of slots, in the middle of their answers."""

    def __init__(self, bench: Bench, batch: int) -> None:
        self.batch, self.device = batch, bench.device
        asked = bench.asked
        self.decoding = bench.decoding(batch, length_of(asked))
        self.decoding.positions.fill_(asked.prompt + asked.answer // 4)
        self.step = FusedStep(self.decoding.model, self.decoding.tokens, self.decoding.positions, length_of(asked))
        self.default = self.step.plan
        self.layers = self.step.layers
        for layer in self.layers:
            layer.keys.normal_()
            layer.values.normal_()
        self.given = {name: self.normal(self.layers[0], name) for name in PRODUCTS}

    def normal(self, layer: fused.Layer, name: str) -> Tensor:
        return torch.randn(self.batch, getattr(layer, name).shape[1], device=self.device).to(layer.keys.dtype)

    def rows(self) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
        yield f"attention {self.batch} flash", self.flash
        default = self.default.attention
        for division in dict.fromkeys((default, *(Division(*each) for each in DIVISIONS.get(self.batch, [])))):
            name = f"attention {self.batch} {tuple(asdict(division).values())}"
            yield name, partial(self.attention, division, False)
        yield f"attention {self.batch} early", partial(self.attention, default, True)
        for product in PRODUCTS:
            yield f"{product} {self.batch} torch", partial(self.product, product, None)
            for tile in tiles_of(self.default, product):
                name = f"{product} {self.batch} {tuple(asdict(tile).values())}"
                yield name, partial(self.product, product, tile)

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

    def product(self, name: str, tile: Tile | None) -> dict[str, Any]:
        """A product with the norm before it, or the activation or sum after it."""
        first, step = self.layers[0], self.step
        early = self.default.early
        step.plan = Plan(self.default.attention, {} if tile is None else {name: tile}, early)
        outputs, inputs = getattr(first, name).shape
        if tile is not None and not tile.fits(outputs // (2 if name == "mlp_in" else 1), inputs):
            raise ValueError("this tile does not divide the product")
        given = self.given[name]

        def call(layer: fused.Layer) -> Tensor:
            weight = getattr(layer, name)
            if name == "attention_in":
                step._enter(name, layer.norm, weight, layer.epsilon, step.joined)
                return step.joined
            if name == "mlp_in":
                step._enter(name, layer.mlp_norm, weight, layer.epsilon, step.active if tile else step.gates)
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
        row = {"part": name, "batch": self.batch, "tile": asdict(tile) if tile else None, "early": early}
        return {**row, "us": taken * 1e6, "bytes_per_s": moved / taken, "error": error}

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
        attend = kernels.SplitAttention(slots, heads, group, width, division, self.device)
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
        mixed = torch.empty_like(query)
        for slot in range(slots):
            known = keys[slot, : position + 1].float()
            scores = torch.einsum("hgd,nhd->hgn", query[slot], known) * scale
            mixed[slot] = torch.einsum("hgn,nhd->hgd", scores.softmax(dim=-1), values[slot, : position + 1].float())
        return mixed.flatten(1)

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
            mixed: Tensor = torch.ops.aten._flash_attention_forward(
                asked, keys, values, current.each, current.starts, 1, length, 0.0, False, False, **more
            )[0]
            return mixed

        return self._attention_row({"division": None, "early": False}, call, None)

    def _attention_row(
        self, how: dict[str, Any], call: Callable[[fused.Layer], object], error: float | None
    ) -> dict[str, Any]:
        taken = self.per_layer(call)
        moved = 2 * self.step.keyed * self.layers[0].keys.itemsize * int((self.step.positions + 1).sum())
        row = {"part": "attention", "batch": self.batch, **how}
        return {**row, "us": taken * 1e6, "bytes_per_s": moved / taken, "error": error}


def length_of(asked: argparse.Namespace) -> int:
    return int(-(-(asked.prompt + asked.answer) // REACH_MULTIPLE) * REACH_MULTIPLE)


def tiles_of(plan: Plan, product: str) -> list[Tile]:
    """For a product that a step of this plan computes with our kernel."""
    tile = plan.tiles.get(product)
    return [tile, *(Tile(*each) for each in TILES)] if tile else []


def distance(result: Tensor, expected: Tensor) -> float:
    error = float((result.float() - expected).norm() / expected.norm())
    if not error < PART_ERROR:
        raise ValueError(f"the result is wrong: off by {error:.3g} of its norm")
    return error


# --- compilation without a GPU ---


class Hopper:
    """What triton asks of a driver before it compiles."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0


def compile_all(asked: argparse.Namespace) -> int:
    """Compile every kernel of the rows, without running it, and say what it needs of a processor."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    driver.set_active(Hopper())
    failures = 0

    def compiled(kernel: Any, grid: Any) -> Callable[..., None]:
        def call(*given: Any, **more: Any) -> None:
            result = kernel.warmup(*given, grid=grid, **more)
            needs = f"{result.metadata.shared / 1024:.0f} KiB of shared memory, {result.metadata.num_warps} warps"
            print(f"  {kernel.fn.__name__}{' early' if more['EARLY'] else ''}: {needs}", flush=True)

        return call

    JITFunction.__getitem__ = compiled
    shape = Settings(engine="transformers", model=asked.model).shape
    for batch in map(int, asked.batches.split(",")):
        for name, call in compilations(shape, batch, length_of(asked)):
            print(f"{name} {batch}", flush=True)
            try:
                call()
            except Exception as error:
                failures += 1
                print(f"  not compiled: {type(error).__name__}: {str(error)[:200]}", flush=True)
    return min(failures, 1)


def compilations(shape: Shape, batch: int, length: int) -> Iterator[tuple[str, Callable[[], None]]]:
    hidden, asking, keyed = shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    sizes = {
        "attention_in": (asking + 2 * keyed, hidden),
        "attention_out": (hidden, asking),
        "mlp_in": (shape.ffn, hidden),
        "mlp_out": (hidden, shape.ffn),
    }
    plan = plans.plan_of(sizes, batch, shape.kv_heads, length, PROCESSORS, early=True)
    for early in (False, True):
        for division in dict.fromkeys((plan.attention, *(Division(*each) for each in DIVISIONS.get(batch, [])))):
            yield f"{division}", partial(_compile_attention, shape, batch, length, division, early)
        for product, size in sizes.items():
            for tile in tiles_of(plan, product):
                yield f"{product} {tile}", partial(_compile_product, product, size, tile, early)
        given, out = _empty(batch, hidden), _empty(batch, shape.ffn)
        yield "norm", partial(kernels.normalise, given, _empty(hidden), given, 1e-5, early=early)
        yield "gate", partial(kernels.gate, _empty(batch, 2 * shape.ffn), out, early=early)
        tokens, positions = _empty(batch, 1, dtype=torch.long), _empty(batch, dtype=torch.long)
        choice = kernels.Choice(batch, shape.vocab, torch.device("meta"))
        yield "choice", partial(choice, _empty(batch, shape.vocab), tokens, positions, length - 1, early)


def _empty(*size: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(size, dtype=dtype, device="meta")


def _compile_attention(shape: Shape, batch: int, length: int, division: Division, early: bool) -> None:
    heads, width = shape.kv_heads, shape.head_dim
    attend = kernels.SplitAttention(batch, heads, shape.heads // heads, width, division, torch.device("meta"))
    joined = _empty(batch, (shape.heads + 2 * heads) * width)
    asked, key, value = joined.split([shape.heads * width, heads * width, heads * width], dim=1)
    table, keys = _empty(length, width), _empty(batch, length, heads, width)
    new = key, value, table, table
    positions = _empty(batch, dtype=torch.long)
    attend(asked, keys, keys, positions, asked.contiguous(), width**-0.5, new=new, early=early)
    # As compiled layers call it.
    attend(asked.contiguous(), keys, keys, positions, asked.contiguous(), width**-0.5)


def _compile_product(name: str, size: tuple[int, int], tile: Tile, early: bool) -> None:
    outputs, inputs = size
    gated, adds = name == "mlp_in", name.endswith("_out")
    weight = _empty(2 * outputs if gated else outputs, inputs)
    scales = None if adds else _empty(inputs)
    given, out = _empty(1, inputs), _empty(1, outputs)
    kernels.multiply_one(given, weight, out, tile, scales=scales, epsilon=1e-5, gated=gated, adds=adds, early=early)


# --- ---


def line_of(row: dict[str, Any]) -> str:
    if "us" not in row:
        return f"{row['row']:32} {row['error']}"
    error = "" if row["error"] is None else f"  off by {row['error']:.4f}"
    return f"{row['row']:32} {row['us']:9.1f} us  {row['bytes_per_s'] / 1e9:5.0f} GB/s{error}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="llama-8b")
    parser.add_argument("--precision", choices=("bf16",), default="bf16")
    parser.add_argument("--batches", default="1,8,32,128")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--answer", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=120.0, help="no row begins later than that")
    parser.add_argument("--json", type=Path, help="write everything there")
    parser.add_argument("--compile", action="store_true", help="compile all kernels without a GPU, and no more")
    asked = parser.parse_args()
    if asked.compile:
        return compile_all(asked)
    bench = Bench(asked)
    ceilings = bench.ceilings()
    print(f"copies {ceilings['copy_bytes_per_s'] / 1e9:.0f} GB/s", flush=True)
    # torch collects garbage before it captures a graph: for every part, through all that was imported.
    gc.collect()
    gc.freeze()
    deadline = time.monotonic() + asked.seconds
    rows = []
    for batch in map(int, asked.batches.split(",")):
        for name, call in Parts(bench, batch).rows():
            rows.append(measured(name, call, deadline, clean=False))
            print(line_of(rows[-1]), flush=True)
        if asked.json:
            asked.json.write_text(json.dumps({**facts(bench), "ceilings": ceilings, "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
