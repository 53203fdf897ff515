"""Prefill and decode of the `transformers` engine's model beside what the device can do, measured in the same process.

Prefill is compared with the achievable matrix-product rate, decode with the time that reading must take: every weight
that a step multiplies with, and the keys and values of every context, once, at the achieved copy bandwidth (or the
products at the matrix rate, where that takes longer). Decode is timed as the engine runs it: `eager`, one CUDA `graph`,
`compiled` layers in one graph, `fused` kernels of our own in one graph, and `tuned`, compiled layers with inductor's
coordinate descent. Tokens stay on the device between timed steps; `read_s` is a step whose tokens are read back, as a
server must.

Run `python benchmarks/decode.py [--model NAME] [--batches 1,8,32,128] [--json FILE]`. With `--slots 128` each batch has
the first of 128 slots, which should take no longer than slots of its own. With `--long 4096` further rows say how long
running requests wait for their next token while a prompt of that length is read, whole and in pieces. A row that fails
says why, and the others go on; rows that would begin after the time allowed are skipped. Nothing here passes or fails.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from paceline.errors import UnsupportedError
from paceline.host import machine
from paceline.models import arithmetic
from paceline.serving.replica import weights
from paceline.serving.replica.batching import BatchedRequest, Batching, tokens_of_pass
from paceline.serving.replica.decoding import Decoding, join_projections
from paceline.serving.replica.settings import Settings
from paceline.training.decoder import DTYPES

PREFILL_TOKENS = 16_384
# A step of a row is repeated so often at most, and not beyond the row's share of time.
ROW_S = 8.0
# The largest batch that is worth the time that tuning takes: beyond it products are no longer vectors.
MOST_TUNED = 8
# Requests that run while a long prompt is read, their steps before and after it, and the pieces in which it is read.
RUNNING, STEPS_AROUND, CHUNKS = 8, 16, (0, 2048, 1024, 512)
REACH_MULTIPLE = 128


class Bench:
    """One model on one device; every row installs slots of its own."""

    def __init__(self, asked: argparse.Namespace) -> None:
        self.asked = asked
        self.device = torch.device("cuda", 0) if machine.device_kind() == "cuda" else torch.device("cpu")
        self.on_gpu = self.device.type == "cuda"
        self.settings = Settings(
            engine="transformers", model=asked.model, precision=asked.precision, device=self.device.type
        )
        self.shape = self.settings.shape
        torch.set_float32_matmul_precision("highest")
        self.model = join_projections(weights.open_model(self.settings, 0, self.device))
        self.dtype = DTYPES[asked.precision]
        self.random = random.Random(0)

    def seconds(self, call: Callable[[], object], repeats: int) -> float:
        """The median of calls that each begin when the one before has ended."""
        found = []
        for _ in range(repeats):
            self.wait()
            began = time.perf_counter()
            call()
            self.wait()
            found.append(time.perf_counter() - began)
        return statistics.median(found)

    def wait(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()

    def prompts(self, count: int, length: int) -> list[list[int]]:
        return [[self.random.randrange(self.shape.vocab) for _ in range(length)] for _ in range(count)]

    def decoding(self, slots: int, length: int) -> Decoding:
        heads, width = self.shape.kv_heads, self.shape.head_dim
        return Decoding(self.model, slots=slots, length=length, reaches=(length,), heads=heads, width=width)

    # --- what the device can do ---

    def ceilings(self) -> dict[str, float]:
        return {"copy_bytes_per_s": self._copied(), "matmul_flops_per_s": self._multiplied()}

    def _copied(self) -> float:
        """Bytes read and written a second, between buffers far larger than any cache."""
        size = (1 << 31) if self.on_gpu else (1 << 27)
        source = torch.randint(0, 100, (size,), dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        self.seconds(lambda: target.copy_(source), 3)
        return 2 * size / self.seconds(lambda: target.copy_(source), 10)

    def _multiplied(self) -> float:
        edge = 8192 if self.on_gpu else 1024
        a, b = (torch.randn(edge, edge, device=self.device).to(self.dtype) for _ in range(2))
        self.seconds(lambda: a @ b, 5)
        return 2.0 * edge**3 / self.seconds(lambda: a @ b, 20)

    # --- prefill ---

    def prefill(self, ceilings: dict[str, float], count: int, length: int) -> dict[str, Any]:
        decoding = self.decoding(count, length)
        prompts = self.prompts(count, length)
        decoding.read(list(range(count)), prompts)
        taken = self.seconds(lambda: decoding.read(list(range(count)), prompts), 5)
        rate = prefill_flops(self.shape, count, length) / taken
        found = {"prompts": count, "prompt_tokens": length, "seconds": taken, "tokens_per_s": count * length / taken}
        return {**found, "flops_per_s": rate, "of_matmul_ratio": rate / ceilings["matmul_flops_per_s"]}

    # --- decode ---

    def decode(self, ceilings: dict[str, float], variant: str, batch: int) -> dict[str, Any]:
        asked = self.asked
        length = -(-(asked.prompt + asked.answer) // REACH_MULTIPLE) * REACH_MULTIPLE
        slots = max(batch, asked.slots)
        decoding = self.decoding(slots, length)
        self.compile(decoding, variant)
        began = time.perf_counter()
        decoding.warm_up(graph=self.on_gpu and variant != "eager")
        ready_s = time.perf_counter() - began
        self.fill(decoding, batch)
        steps = self.steps_within(decoding, batch, asked.answer // 2)
        step_s = self.seconds(lambda: [decoding.advance(batch, length) for _ in range(steps)], 1) / steps
        read_s = self.seconds(lambda: decoding.step(batch, length), min(steps, 16))
        context = asked.prompt + steps / 2
        limit_s, bound = self.limit(ceilings, batch, context)
        found = {
            "variant": variant,
            "batch": batch,
            "slots": slots,
            "context": context,
            "step_s": step_s,
            "read_s": read_s,
        }
        found |= {"tokens_per_s": batch / step_s, "limit_tokens_per_s": batch / limit_s, "bound_by": bound}
        return {**found, "of_limit_ratio": limit_s / step_s, "ready_s": ready_s, "steps": steps}

    # --- a long prompt between steps ---

    def interrupted(self, variant: str, chunk: int) -> dict[str, Any]:
        """Time between the tokens of running requests, before a long prompt arrives and while it is read."""
        asked, slots = self.asked, RUNNING + 1
        length = -(-(asked.long + 2 * STEPS_AROUND) // REACH_MULTIPLE) * REACH_MULTIPLE
        decoding = self.decoding(slots, length)
        self.compile(decoding, variant)
        decoding.warm_up(graph=self.on_gpu and variant != "eager")
        # A prompt of this length, so that no kernel is used for the first time below.
        for start in range(0, asked.long, chunk or asked.long):
            decoding.read([RUNNING], self.prompts(1, min(chunk or asked.long, asked.long - start)), start)
        batching = Batching(replace(self.settings, max_batch=slots, max_length=length, prefill_chunk=chunk))
        most = length - asked.prompt
        for number, prompt in enumerate(self.prompts(RUNNING, asked.prompt)):
            batching.arrive(BatchedRequest(number, prompt, most, frozenset()))
        stamps: dict[int, list[float]] = {number: [] for number in range(slots)}

        def pass_until(number: int, count: int) -> None:
            while len(stamps[number]) < count:
                for tokens in tokens_of_pass(decoding, batching):
                    now = time.perf_counter()
                    for each, *_ in tokens:
                        stamps[each].append(now)

        pass_until(RUNNING - 1, STEPS_AROUND)
        before, arrived = len(stamps[0]), time.perf_counter()
        batching.arrive(BatchedRequest(RUNNING, self.prompts(1, asked.long)[0], STEPS_AROUND, frozenset()))
        pass_until(RUNNING, STEPS_AROUND)
        gaps = [later - earlier for earlier, later in itertools.pairwise(stamps[0])]
        found = {"variant": variant, "prompt_tokens": asked.long, "chunk": chunk, "running": RUNNING}
        found |= {
            "gap_s": statistics.median(gaps[before - STEPS_AROUND + 1 : before - 1]),
            "longest_gap_s": max(gaps[before - 1 :]),
        }
        return {**found, "first_token_s": stamps[RUNNING][0] - arrived}

    def compile(self, decoding: Decoding, variant: str) -> None:
        """Layers are compiled for one batch at a time; those of the row before are forgotten."""
        import torch._dynamo
        import torch._inductor.config

        for layer in decoding.layers:
            layer._compiled_call_impl = None
        torch._dynamo.reset()
        torch._inductor.config.coordinate_descent_tuning = variant == "tuned"
        if variant in ("compiled", "tuned"):
            decoding.compile_layers()
        if variant == "fused" and not decoding.fuse():
            raise UnsupportedError("this model and device have no fused step")

    def fill(self, decoding: Decoding, batch: int) -> None:
        together = max(1, PREFILL_TOKENS // self.asked.prompt)
        for first in range(0, batch, together):
            rows = list(range(first, min(batch, first + together)))
            decoding.read(rows, self.prompts(len(rows), self.asked.prompt))

    def steps_within(self, decoding: Decoding, batch: int, most: int) -> int:
        """As many as the row's time allows, by two steps that are not counted."""
        one_s = self.seconds(lambda: decoding.advance(batch, decoding.length), 2)
        return max(2, min(most, int(ROW_S / one_s)))

    def limit(self, ceilings: dict[str, float], batch: int, context: float) -> tuple[float, str]:
        """The least time of a step, and what bounds it."""
        read = step_bytes(self.shape, self.dtype.itemsize, batch, context)
        multiplied = 2 * arithmetic.matmul_parameters(self.shape) * batch
        times = {
            "memory": read / ceilings["copy_bytes_per_s"],
            "products": multiplied / ceilings["matmul_flops_per_s"],
        }
        bound = max(times, key=lambda name: times[name])
        return times[bound], bound


def prefill_flops(shape: arithmetic.Shape, count: int, length: int) -> int:
    """Products of the blocks and causal attention for every token, the head for the last of each prompt."""
    head = shape.hidden * shape.vocab
    blocks = 2 * (arithmetic.matmul_parameters(shape) - head) + arithmetic.attention_flops_per_token(shape, length)
    return count * (length * blocks + 2 * head)


def step_bytes(shape: arithmetic.Shape, element_bytes: int, batch: int, context: float) -> float:
    """Weights that are multiplied with, once, and what every place keeps; the rows of the embedding are next to
    nothing."""
    # Keys and values of one token over all layers.
    kept = 2 * shape.layers * shape.kv_heads * shape.head_dim * element_bytes
    return arithmetic.matmul_parameters(shape) * element_bytes + batch * context * kept


def measured(name: str, call: Callable[[], dict[str, Any]], deadline: float, clean: bool = True) -> dict[str, Any]:
    """A row, or why there is none."""
    if time.monotonic() > deadline:
        return {"row": name, "error": "skipped: the time allowed is over"}
    # What the row before held, graphs and keys, is in the way of this one.
    if clean:
        gc.collect()
    if clean and torch.cuda.is_available():
        torch.cuda.empty_cache()
    try:
        return {"row": name, **call()}
    except Exception as error:
        return {"row": name, "error": f"{type(error).__name__}: {str(error).strip().splitlines()[0][:300]}"}


def rows_of(bench: Bench, ceilings: dict[str, float]) -> list[dict[str, Any]]:
    deadline = time.monotonic() + bench.asked.seconds
    found = []
    for name, call in plan_of(bench, ceilings):
        row = measured(name, call, deadline)
        found.append(row)
        print(line_of(row), flush=True)
    return found


def plan_of(bench: Bench, ceilings: dict[str, float]) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """Every row by its name: what takes long to compile comes last."""
    asked = bench.asked
    for count in (1, max(1, PREFILL_TOKENS // asked.prompt) if bench.on_gpu else 4):
        yield f"prefill {count} x {asked.prompt}", partial(bench.prefill, ceilings, count, asked.prompt)
    kinds = ("eager", "graph", "compiled", "fused", "tuned") if bench.on_gpu else ("eager", "compiled")
    for variant in (kind for kind in kinds if not asked.variants or kind in asked.variants.split(",")):
        for batch in map(int, asked.batches.split(",")):
            if variant != "tuned" or batch <= MOST_TUNED:
                slots = f" of {max(batch, asked.slots)}" if asked.slots else ""
                yield f"decode {variant} {batch}{slots}", partial(bench.decode, ceilings, variant, batch)
        for chunk in CHUNKS if asked.long and variant != "tuned" else ():
            if chunk < asked.long:
                how = f"in pieces of {chunk}" if chunk else "whole"
                yield f"read {variant} {asked.long} {how}", partial(bench.interrupted, variant, chunk)


def line_of(row: dict[str, Any]) -> str:
    if "error" in row:
        return f"{row['row']:24} {row['error']}"
    if "of_matmul_ratio" in row:
        beside = f"{row['flops_per_s'] / 1e12:.1f} TFLOP/s, {row['of_matmul_ratio']:.0%} of the matrix rate"
        return f"{row['row']:24} {row['tokens_per_s']:10.0f} tokens/s  {beside}"
    if "longest_gap_s" in row:
        return (
            f"{row['row']:36} {row['gap_s'] * 1e3:8.2f} ms between tokens before it, "
            f"{row['longest_gap_s'] * 1e3:.2f} at most while it is read, its first token after "
            f"{row['first_token_s'] * 1e3:.1f} ms"
        )
    return (
        f"{row['row']:24} {row['tokens_per_s']:10.1f} tokens/s  {row['step_s'] * 1e3:8.3f} ms a step "
        f"({row['read_s'] * 1e3:.3f} read back)  limit {row['limit_tokens_per_s']:.0f} by {row['bound_by']}: "
        f"{row['of_limit_ratio']:.0%}  ready in {row['ready_s']:.0f} s"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="llama-8b")
    parser.add_argument("--precision", choices=tuple(DTYPES), default="bf16")
    parser.add_argument("--batches", default="1,8,32,128")
    parser.add_argument(
        "--variants", default="", help="eager,graph,compiled,fused,tuned; all that there are unless given"
    )
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--answer", type=int, default=128)
    parser.add_argument("--slots", type=int, default=0, help="at least so many, whatever the batch")
    parser.add_argument("--long", type=int, default=0, help="also read a prompt of so many tokens between steps")
    parser.add_argument("--seconds", type=float, default=240.0, help="no row begins later than that")
    parser.add_argument("--json", type=Path, help="write everything there")
    asked = parser.parse_args()
    bench = Bench(asked)
    ceilings = bench.ceilings()
    copied, multiplied = ceilings["copy_bytes_per_s"] / 1e9, ceilings["matmul_flops_per_s"] / 1e12
    print(f"{asked.model} {asked.precision}: copies {copied:.0f} GB/s, products {multiplied:.2f} TFLOP/s", flush=True)
    rows = rows_of(bench, ceilings)
    if asked.json:
        asked.json.write_text(json.dumps({**facts(bench), "ceilings": ceilings, "rows": rows}, indent=1) + "\n")
    return 0


def facts(bench: Bench) -> dict[str, Any]:
    import transformers

    name = torch.cuda.get_device_name(0) if bench.on_gpu else "cpu"
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    return {"device": name, **versions, "model": bench.asked.model, "precision": bench.asked.precision}


if __name__ == "__main__":
    sys.exit(main())
