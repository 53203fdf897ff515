"""Variants of a QLoRA step side by side on one GPU: each in a process of its own, prepared together, timed in turn.

`python benchmarks/qlora_variants.py [NAME ...] [--out FOLDER] [--steps N] [--layers N]`; a table last.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import traceback
from collections import defaultdict
from pathlib import Path
from typing import Any

WARM, PROFILED = 4, 2
# name: checkpointing, and what is switched
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain-full": ("full", {"plain": True}),
    "plain-none": ("none", {"plain": True}),
    "before-full": ("full", {"old": True, "joined": False}),
    "layers-full": ("full", {}),
    "layers-none": ("none", {}),
    "whole-full": ("full", {"whole": True}),
    "cat-full": ("full", {"cat": True}),
    "whole-graph-full": ("full", {"whole": True, "graph": True}),
    "layers-graph-none": ("none", {"graph": True}),
}


def prepared(name: str, layers: int, steps: int) -> Any:
    """A function that makes one step and returns its loss."""
    import torch
    import torch.nn.functional as F

    from paceline.contract import Seat
    from paceline.experiment.fields import Cell, build
    from paceline.training import finetuned, tuned_blocks
    from paceline.training.data.corpus import Partition, open_data
    from paceline.training.strategies import _torch, single

    checkpointing, switches = VARIANTS[name]
    model = "mistral-7b" if layers == 32 else f"mistral-7b:layers={layers}"
    fields = {
        "workload": "finetune", "strategy": "single", "processes": 1, "model": model, "data": "synthetic",
        "method": "qlora", "reduce_dtype": "fp32", "checkpointing": checkpointing, "compile": True, "steps": steps,
        "sequence_length": 512, "micro_batch": 8,
    }  # fmt: skip
    spec = build("qlora", Cell.model_validate(fields), "cuda")
    corpus, partition = open_data(spec, 32000), Partition.of(spec, 0)

    def rows(step: int) -> Any:
        return torch.from_numpy(partition.step_batch(corpus, step).micro_batches[0]).cuda()

    if switches.get("plain"):
        import bitsandbytes as bnb
        from qlora import restore_layers

        llama = finetuned.build(spec, "cuda").model
        restore_layers(llama)
        if checkpointing == "full":
            llama.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            llama.enable_input_require_grads()
        adapters = [p for p in llama.parameters() if p.requires_grad]
        rate, decay = spec.training.learning_rate, spec.training.weight_decay
        optimizer = bnb.optim.PagedAdamW8bit(adapters, lr=rate, weight_decay=decay)

        def plain(step: int) -> Any:
            batch = rows(step)
            with torch.autocast("cuda", torch.bfloat16):
                logits = llama(input_ids=batch[:, 0]).logits
            loss = F.cross_entropy(logits.float().flatten(0, 1), batch[:, 2].flatten())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(adapters, spec.training.clip_norm)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            return loss.detach()

        return plain
    if switches.get("old"):
        finetuned.Tuned.compile_layers = lambda self, mode: False
        if not switches.get("joined", True):
            _torch.Joined.suits = staticmethod(lambda *_: False)
    if switches.get("whole"):
        tuned_blocks.checkpoint = lambda function, x, use_reentrant: function(x)
    if switches.get("cat"):
        tuned_blocks.prepare_compiler = lambda: None
    trainer = single.wrap(spec, Seat(rank=0, local_rank=0, world_size=1, device="cuda"))
    if switches.get("whole"):
        torch._functorch.config.activation_memory_budget = 0.0
    if not switches.get("old"):
        assert "compile_layers" in trainer.module.run_block.__qualname__, trainer.module.run_block
    normaliser = torch.full((), 4096.0, device="cuda")

    def ours(step: int) -> Any:
        batch = rows(step)
        loss = trainer.forward(batch[:, :2], batch[:, 2], normaliser, True)
        trainer.backward(loss, True)
        trainer.update()
        return loss.detach()

    if not switches.get("graph"):
        return ours
    held = torch.zeros_like(rows(0))
    learned = [p for p in trainer.module.parameters() if p.requires_grad]
    recorded: list[Any] = []

    def graphed(step: int) -> Any:
        if step < 2:
            return ours(step)
        held.copy_(rows(step))
        if not recorded:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                loss = trainer.forward(held[:, :2], held[:, 2], normaliser, True)
                trainer.backward(loss, True)
            recorded.extend((graph, loss, [p.grad for p in learned]))
        graph, loss, gradients = recorded
        graph.replay()
        for parameter, gradient in zip(learned, gradients, strict=True):
            parameter.grad = gradient
        trainer.update()
        return loss.detach()

    return graphed


def child(name: str, folder: Path, layers: int, steps: int) -> dict[str, Any]:
    import torch

    began = time.perf_counter()
    if name == "kernel":
        return kernel()
    step, losses, first_s = prepared(name, layers, WARM + steps + 2 * PROFILED), [], 0.0
    built_s = time.perf_counter() - began
    losses += [float(step(number)) for number in range(WARM)]
    torch.cuda.synchronize()
    ready_s = time.perf_counter() - began
    torch.cuda.empty_cache()
    (folder / f"{name}.ready").touch()
    while not (folder / f"{name}.go").exists():
        time.sleep(0.05)
    torch.cuda.reset_peak_memory_stats()
    seconds = []
    for number in range(WARM, WARM + steps):
        torch.cuda.synchronize()
        began = time.perf_counter()
        loss = step(number)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
        losses.append(float(loss))
    reserved = torch.cuda.memory_reserved()
    peak = torch.cuda.max_memory_allocated() if "graph" not in name else torch.cuda.memory_reserved()
    middle = sorted(seconds)[len(seconds) // 2]
    found = {
        "name": name,
        "step_ms": middle * 1e3,
        "samples_per_s": 8 / middle,
        "peak_gb": peak / 1e9,
        "reserved_gb": reserved / 1e9,
    }
    found |= {"built_s": built_s, "ready_s": ready_s, "seconds": seconds, "losses": losses, "first_s": first_s}
    save(folder, name, found)
    found |= profiled(step, WARM + steps)
    save(folder, name, found)
    return found


def save(folder: Path, name: str, found: dict[str, Any]) -> None:
    (folder / f"{name}.json").write_text(json.dumps(found))


def profiled(step: Any, first: int) -> dict[str, Any]:
    """Milliseconds per step by class and by kernel, gaps and the longest of them."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    from paceline.training.step_profile import class_of

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        torch.cuda.synchronize()
        began = time.perf_counter()
        for number in range(first, first + PROFILED):
            step(number)
        torch.cuda.synchronize()
        wall = time.perf_counter() - began
    spans, classes, kernels = [], defaultdict(float), defaultdict(lambda: [0, 0.0])
    for event in profiler.profiler.kineto_results.events():
        if "CUDA" not in str(event.device_type()):
            continue
        start, length = event.start_ns() / 1e6, event.duration_ns() / 1e6
        spans.append((start, start + length, event.name()))
        classes[class_of(event.name(), "cuda")] += length / PROFILED
        kernels[event.name()][0] += 1
        kernels[event.name()][1] += length
    spans.sort()
    gaps, reached, before, busy = [], spans[0][0], "begin", 0.0
    for start, end, name in spans:
        if start > reached:
            gaps.append((start - reached, before[:60], name[:60]))
        busy += max(0.0, end - max(start, reached))
        if end > reached:
            reached, before = end, name
    gaps.sort(reverse=True)
    longest = sorted(kernels.items(), key=lambda item: -item[1][1])[:40]
    return {
        "profiled_step_ms": wall * 1e3 / PROFILED,
        "classes_ms": dict(classes),
        "idle_ms": (wall * 1e3 - busy) / PROFILED,
        "launches": len(spans) / PROFILED,
        "kernels": [{"name": n[:140], "calls": c / PROFILED, "ms": ms / PROFILED} for n, (c, ms) in longest],
        "gaps": gaps[:25],
    }


def kernel() -> dict[str, Any]:
    """Whether the kernel's numbers are those of bitsandbytes, and its time, for several shapes of its programs."""
    import bitsandbytes as bnb
    import torch

    from paceline.training import nf4
    from paceline.training.nf4_kernel import dequantise

    found: dict[str, Any] = {"equal": {}, "us": {}}
    for rows, columns in ((4096, 4096), (14336, 4096), (1000, 448)):
        weight = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16) * 0.02
        packed, state = bnb.functional.quantize_4bit(weight, blocksize=64, compress_statistics=True, quant_type="nf4")
        codes = nf4.Codes(packed, state.absmax, state.state2.absmax, state.offset, state.state2.code, state.code)
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            state.dtype = dtype
            wanted = bnb.functional.dequantize_4bit(packed, state)
            got = torch.empty_like(wanted)
            nf4._fill_on_gpu(got, *codes)
            found["equal"][f"{rows}x{columns} {dtype}"] = torch.equal(got, wanted)
        state.dtype = torch.bfloat16
    rows, columns = 14336, 4096
    weight = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16) * 0.02
    packed, state = bnb.functional.quantize_4bit(weight, blocksize=64, compress_statistics=True, quant_type="nf4")
    codes = nf4.Codes(packed, state.absmax, state.state2.absmax, state.offset, state.state2.code, state.code)
    place = torch.empty_like(weight)
    calls = {"bitsandbytes": lambda: bnb.functional.dequantize_4bit(packed, state)}
    blocks = state.absmax.numel()
    for size in (32, 64, 128, 256):
        for warps in (2, 4, 8):

            def call(size: int = size, warps: int = warps) -> None:
                dequantise[(-(-blocks // size),)](*codes, place, blocks, size, num_warps=warps, enable_fp_fusion=False)

            calls[f"rows {size} warps {warps}"] = call
    for name, each in calls.items():
        for _ in range(3):
            each()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(20):
            each()
        end.record()
        torch.cuda.synchronize()
        found["us"][name] = begin.elapsed_time(end) / 20 * 1e3
    return found


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "/tmp")) / "qlora")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--ready-s", type=float, default=75)
    parser.add_argument("--child")
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    sys.path.insert(0, str(Path(__file__).parent))
    if asked.child:
        try:
            found = child(asked.child, asked.out, asked.layers, asked.steps)
            save(asked.out, asked.child, found)
        except Exception:
            (asked.out / f"{asked.child}.error").write_text(traceback.format_exc())
            raise
        return 0
    names, began = asked.names or [*VARIANTS], time.perf_counter()
    for old in [file for kind in ("ready", "go", "json", "error") for file in asked.out.glob(f"*.{kind}")]:
        old.unlink()
    started = {}
    for name in names:
        arguments = [
            "--child",
            name,
            "--out",
            str(asked.out),
            "--layers",
            str(asked.layers),
            "--steps",
            str(asked.steps),
        ]
        log = (asked.out / f"{name}.log").open("w")
        environment = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "3"}
        started[name] = subprocess.Popen(
            [sys.executable, __file__, *arguments], stdout=log, stderr=subprocess.STDOUT, env=environment
        )
    waiting = [name for name in names if name != "kernel"]

    def ready(name: str) -> bool:
        return (asked.out / f"{name}.ready").exists() or started[name].poll() is not None

    while time.perf_counter() - began < asked.ready_s and not all(map(ready, waiting)):
        time.sleep(0.1)
    print(f"prepared after {time.perf_counter() - began:.0f} s", [n for n in waiting if not ready(n)], flush=True)
    for name in sorted(waiting, key=lambda each: not ready(each)):
        (asked.out / f"{name}.go").touch()
        try:
            started[name].wait(timeout=60)
        except subprocess.TimeoutExpired:
            started[name].kill()
    for name in names:
        if started[name].poll() is None:
            started[name].kill()
    table(asked.out, names)
    print(f"{time.perf_counter() - began:.0f} s in all")
    return 0


def table(folder: Path, names: list[str]) -> None:
    found = {name: json.loads(file.read_text()) for name in names if (file := folder / f"{name}.json").exists()}
    for name in names:
        if name not in found:
            error = folder / f"{name}.error"
            print(name, "FAILED", error.read_text()[-1500:] if error.exists() else "", flush=True)
    if "kernel" in found:
        print(json.dumps(found.pop("kernel")))
    for name, each in found.items():
        if "kernels" in each and ("full" in name or "none" in name):
            print(name)
            for line in each["kernels"][:14]:
                print(f"   {line['ms']:8.2f} ms {line['calls']:6.0f} x {line['name'][:100]}")
            print("   gaps", [(round(g, 2), a[:28], b[:28]) for g, a, b in each["gaps"][:6]])
    print("variant              step  samples/s ratio  peak  ready  prod deq  att  elem copy idle launches  loss diff")
    for name, each in found.items():
        base = found.get("plain-none" if name.endswith("none") else "plain-full")
        ratio = base["step_ms"] / each["step_ms"] if base else float("nan")
        reference = (found.get("plain-full") or each)["losses"]
        differs = max(abs(a / b - 1) for a, b in zip(each["losses"], reference, strict=True))
        c = each.get("classes_ms", {})
        row = [c.get(k, 0.0) for k in ("products", "dequantisation", "attention", "elementwise", "copies")]
        print(
            f"{name:20s} {each['step_ms']:6.1f} {each['samples_per_s']:7.2f} {ratio:5.2f} {each['peak_gb']:6.2f} "
            f"{each['ready_s']:5.0f} "
            + " ".join(f"{x:5.1f}" for x in row)
            + f" {each.get('idle_ms', 0):5.1f} {each.get('launches', 0):6.0f}  {differs:.1e}"
        )
        print("    losses", [round(x, 4) for x in each["losses"]][::3])


if __name__ == "__main__":
    sys.exit(main())
