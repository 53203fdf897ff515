"""Where the time of a compiled training step on one GPU goes, and what changes to it gain, side by side.

Each variant trains the same decoder on the same tokens in a process of its own: a few steps to settle, then steps for
SECONDS, then two steps under torch's profiler. A variant whose losses differ from those of `base` by more than bf16
explains is different work, whatever its speed. `floor` times every product and the attention of a layer alone,
`casts` the kernels that round to 8 bit.

Run `python benchmarks/training_step.py [--shape NAME] [--variants base,loss,...] [--out DIR]`; one JSON line per
variant, and one file of kernels each in DIR. `--tiny` rehearses everything on a CPU. Nothing here passes or fails.
llama-8b fits on one card of 141 GB with its activations recomputed; 8 of its 32 layers are a shape of their own. `32k`
and `131k` are one sequence of that length in llama-1b's shape, recomputed.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from paceline.contract import Seat
from paceline.experiment.choices import Choice
from paceline.experiment.spec import Precision, RunSpec, Topology, Training
from paceline.host import machine
from paceline.models import arithmetic
from paceline.training import decoder, float8, precision
from paceline.training.data.corpus import Partition, open_corpus
from paceline.training.instruments import attention_backends
from paceline.training.precision import matrix_products
from paceline.training.strategies import single

SECONDS, SETTLING, PROFILED = 4.0, 4, 2
# Dense bf16 rate of an H100 or H200, for the share that other programs print.
PEAK_FLOPS = 989.5e12


@dataclass(frozen=True)
class Case:
    model: str
    micro_batch: int
    length: int
    checkpointing: str = "none"


CASES = {
    "gpt2": Case("gpt2-124m", 64, 1024),
    "llama-1b": Case("llama-1b", 8, 4096),
    "llama-8b": Case("llama-8b", 2, 4096, "full"),
    "llama-8b-8-layers": Case("llama-8b:layers=8", 2, 4096),
    "32k": Case("llama-1b:vocab=32000", 1, 32768, "full"),
    "131k": Case("llama-1b:vocab=32000", 1, 131072, "full"),
}
TINY = {
    "gpt2": Case("tiny", 2, 32),
    "llama-1b": Case("tiny-llama", 2, 32),
    "llama-8b": Case("tiny-llama", 1, 32, "full"),
    "llama-8b-8-layers": Case("tiny-llama:layers=1", 1, 32),
    "32k": Case("tiny-llama", 1, 64, "full"),
    "131k": Case("tiny-llama", 1, 128, "full"),
}
# Part of a kernel's name -> what it does; the first that fits. Other kernels are elementwise.
CLASSES = {
    "attention": ("flash", "fmha", "sdpa"),
    "product": ("gemm", "nvjet", "cutlass", "xmma", "triton_mm", "triton_tem"),
    "optimizer": ("adam", "multi_tensor", "lpnorm"),
    "copy": ("memcpy", "memset", "copy_kernel"),
    "reduction": ("triton_red", "triton_per", "reduce"),
}


# --- changes to the decoder that are tried ---


class LinearLoss(torch.autograd.Function):
    """The output layer and its cross entropy, with the gradient of the logits computed together with the loss."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, count: Tensor) -> Tensor:
        logits = F.linear(x, weight, bias).float()
        total = torch.logsumexp(logits, dim=-1, keepdim=True)
        is_label = torch.arange(logits.shape[-1], device=x.device) == labels[:, None]
        is_learned = (labels != decoder.IGNORED_LABEL)[:, None]
        losses = total - torch.where(is_label, logits, 0.0).sum(dim=-1, keepdim=True)
        gradient = torch.where(is_learned, (logits - total).exp() - is_label.float(), 0.0) / count
        ctx.save_for_backward(x, weight, gradient.to(x.dtype))
        return torch.where(is_learned, losses, 0.0).sum() / count

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, gradient = ctx.saved_tensors
        scale = incoming[0].to(x.dtype)
        return (gradient @ weight) * scale, (gradient.t() @ x) * scale, None, None, None


def with_the_gradient_in_the_loss() -> None:
    def forward(self: decoder.Decoder, tokens: Tensor, labels: Tensor, normaliser: Tensor) -> Tensor:
        table = self.embedding.weight.to(self.dtype)
        x, turn = F.embedding(tokens, table), None
        if self.positions is not None:
            x = x + self.positions.weight[: tokens.shape[1]].to(self.dtype)
        else:
            turn = decoder.rotation(self.shape, tokens.shape[1], tokens.device)
        x, _ = decoder.run_blocks(self.blocks, self.run_block, x, turn, None)
        head = decoder._head(table if self.head is None else self.head.weight.to(self.dtype))
        return LinearLoss.apply(self.norm(x).flatten(0, 1), *head, labels.flatten(), normaliser)

    decoder.Decoder.forward = forward


def with_two_products_for_the_gate() -> None:
    """Gate and up as two products of the same weight: no concatenation of their gradients."""

    def forward(self: decoder.MLP, x: Tensor) -> Tensor:
        if not self.gated:
            return self.output(F.gelu(self.inputs(x), approximate="tanh"))
        gate, up = self.inputs.weight.to(x.dtype).chunk(2)
        return self.output(F.silu(F.linear(x, gate)) * F.linear(x, up))

    decoder.MLP.forward = forward


def with_inductor(**settings: Any) -> Callable[[], None]:
    def change() -> None:
        import torch._inductor.config

        for name, value in settings.items():
            setattr(torch._inductor.config, name, value)

    return change


def with_both() -> None:
    with_the_gradient_in_the_loss()
    with_two_products_for_the_gate()


def with_torchao() -> None:
    """The layers of torchao in place of our own."""

    def convert(blocks: nn.Module) -> None:
        recipe = precision.torchao("torchao.float8", "float8").Float8LinearConfig()
        precision.convert_by_torchao(blocks, "float8", recipe)

    precision.convert_tensorwise = convert


def with_plain_gate() -> None:
    """Our float8 layers, but silu(gate) * up and its gradients in 16 bit, by the compiler."""
    float8.GatedMLP = decoder.MLP


def with_plain_heads() -> None:
    """Our float8 layers, but the gradients of q, k and v joined in 16 bit, by the compiler."""
    float8.Float8Attention = decoder.Attention


def with_plain_casts() -> None:
    """Our float8 layers without kernels of our own: the compiler writes the rounding in both layouts."""
    with_plain_gate()
    with_plain_heads()

    def cast(x: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return float8.both(precision.rounded_weight(x, torch.bfloat16), scale, dtype)

    float8.cast = cast


@dataclass(frozen=True)
class Variant:
    change: Callable[[], None] | None = None  # before the model is built
    compile: bool | str = True
    compute: str = "bf16"


VARIANTS = {
    "base": Variant(),
    "loss": Variant(with_the_gradient_in_the_loss),
    "gate": Variant(with_two_products_for_the_gate),
    "both": Variant(with_both),
    "tuned": Variant(with_inductor(coordinate_descent_tuning=True)),
    "flash": Variant(),
    "rounded-sums": Variant(),
    "block": Variant(compile="default:scope=block"),
    "autotuned": Variant(compile="max-autotune-no-cudagraphs"),
    "reduce-overhead": Variant(compile="reduce-overhead"),
    "float8": Variant(compute="float8"),
    "float8-block": Variant(compile="default:scope=block", compute="float8"),
    "float8-gate": Variant(with_plain_gate, "default:scope=block", "float8"),
    "float8-heads": Variant(with_plain_heads, "default:scope=block", "float8"),
    "float8-plain": Variant(with_plain_casts, "default:scope=block", "float8"),
    "torchao": Variant(with_torchao, compute="float8"),
    "torchao-block": Variant(with_torchao, "default:scope=block", "float8"),
    "float8_rowwise": Variant(compute="float8_rowwise"),
    "float8_rowwise_gw_hp": Variant(compute="float8_rowwise_gw_hp"),
}


# --- one variant ---


class Bench:
    def __init__(self, asked: argparse.Namespace) -> None:
        self.device = "cuda" if machine.device_kind() == "cuda" and not asked.tiny else "cpu"
        case = (TINY if asked.tiny else CASES)[asked.shape]
        self.case, self.out = replace(case, micro_batch=asked.micro_batch or case.micro_batch), asked.out
        self.seconds, self.settling = 0.1 if asked.tiny else asked.seconds, asked.settling

    def wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def timed(self, call: Callable[[], object], repeats: int) -> float:
        call()
        self.wait()
        began = time.perf_counter()
        for _ in range(repeats):
            call()
        self.wait()
        return (time.perf_counter() - began) / repeats

    def train(self, variant: str) -> dict[str, Any]:
        chosen = VARIANTS[variant]
        if chosen.change is not None:
            chosen.change()
        spec = self.spec(chosen)
        shape = arithmetic.load(spec.model)
        corpus = open_corpus(spec.training.data, shape.vocab, self.case.length, spec.seed)
        batches = [Partition.of(spec, 0).step_batch(corpus, step) for step in range(4)]
        tokens = [torch.from_numpy(batch.micro_batches[0]).to(self.device) for batch in batches]
        normaliser = torch.full((), batches[0].normaliser, dtype=torch.float32, device=self.device)
        flash = sdpa_kernel([SDPBackend.FLASH_ATTENTION])
        losses: list[Tensor] = []
        # torch's default, with which cuBLAS may round the parts of a long sum to 16 bit.
        products = nullcontext() if variant == "rounded-sums" else matrix_products(spec.training.precision)
        with products, flash if variant == "flash" else attention_backends(self.device):
            trainer: Any = single.wrap(spec, Seat(rank=0, local_rank=0, world_size=1, device=self.device))

            def step() -> None:
                row = tokens[len(losses) % len(tokens)]
                loss = trainer.forward(row[:, :-1], row[:, 1:], normaliser, True)
                trainer.backward(loss, True)
                trainer.update()
                losses.append(loss.detach())

            began = time.perf_counter()
            for _ in range(self.settling):
                step()
            self.wait()
            ready_s = time.perf_counter() - began
            if self.device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            times = self.steps_for(step)
            peak = torch.cuda.max_memory_allocated() if self.device == "cuda" else None
            classes = self.profile(variant, step)
        step_s = statistics.median(times)
        rate = self.case.micro_batch * self.case.length / step_s
        flops = arithmetic.flops_per_token(shape, self.case.length, "full")
        found = {"variant": variant, "step_ms": 1e3 * step_s, "least_ms": 1e3 * min(times), "tokens_per_s": rate}
        found |= {"mfu_full_attention": rate * flops / PEAK_FLOPS, "peak_bytes": peak, "ready_s": ready_s}
        return {**found, "losses": [loss.item() for loss in losses[:8]], "kernels_ms": classes}

    def spec(self, chosen: Variant) -> RunSpec:
        training = Training(
            sequence_length=self.case.length,
            micro_batch=self.case.micro_batch,
            precision=Precision(compute=chosen.compute),
            compile=chosen.compile,
            checkpointing=self.case.checkpointing,
        )
        return RunSpec(
            experiment="training-step",
            workload=Choice("pretrain"),
            model=Choice.parse(self.case.model),
            strategy=Choice("single"),
            topology=Topology(device=self.device),
            steps=2,
            training=training,
        )

    def steps_for(self, step: Callable[[], None]) -> list[float]:
        """Seconds of each pair of steps, until the time is over; the first third, before the clock settles, is left
        out."""
        times, until = [], time.perf_counter() + self.seconds
        while not times or time.perf_counter() < until:
            times.append(self.timed_pair(step))
        return times[len(times) // 3 :]

    def timed_pair(self, step: Callable[[], None]) -> float:
        began = time.perf_counter()
        step()
        step()
        self.wait()
        return (time.perf_counter() - began) / 2

    def profile(self, variant: str, step: Callable[[], None]) -> dict[str, float]:
        """Milliseconds of a step by class of kernel; every kernel is in a file."""
        from torch.profiler import ProfilerActivity, profile

        on_gpu = self.device == "cuda"
        with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as recorded:
            for _ in range(PROFILED):
                step()
            self.wait()
        times: collections.Counter[str] = collections.Counter()
        calls: collections.Counter[str] = collections.Counter()
        for event in recorded.events():
            if not on_gpu or "CUDA" in str(event.device_type):
                times[event.name] += event.time_range.elapsed_us() / PROFILED / 1e3
                calls[event.name] += 1
        classes: collections.Counter[str] = collections.Counter()
        lines = []
        for name, ms in times.most_common():
            kind = kernel_class(name)
            classes[kind] += ms
            lines.append(f"{ms:9.3f} ms {calls[name] / PROFILED:6.1f}x {kind:11s} {name[:230]}")
        if self.out is not None:
            self.out.mkdir(parents=True, exist_ok=True)
            (self.out / f"{variant}.kernels.txt").write_text("\n".join(lines) + "\n")
        return {kind: round(ms, 2) for kind, ms in classes.most_common()}

    # --- the floor ---

    def floor(self) -> dict[str, Any]:
        """Every product of a step alone: forward, gradient of the input, gradient of the weight; and attention."""
        shape, rows = arithmetic.load(Choice.parse(self.case.model)), self.case.micro_batch * self.case.length
        wide = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
        sizes = {
            "qkv": (shape.hidden, wide, shape.layers),
            "out": (shape.heads * shape.head_dim, shape.hidden, shape.layers),
            "up": (shape.hidden, shape.ffn * (2 if shape.gated else 1), shape.layers),
            "down": (shape.ffn, shape.hidden, shape.layers),
            "head": (shape.hidden, shape.vocab + -shape.vocab % decoder.VOCAB_MULTIPLE, 1),
        }
        repeats, total_s, flops, parts = (20 if self.device == "cuda" else 1), 0.0, 0.0, {}
        for name, (inputs, outputs, times) in sizes.items():
            x, w, y = (self.random(*size) for size in ((rows, inputs), (outputs, inputs), (rows, outputs)))
            calls = (lambda a, b, c: a @ b.t(), lambda a, b, c: c @ b, lambda a, b, c: c.t() @ a)
            each = [self.timed(lambda call=call, a=x, b=w, c=y: call(a, b, c), repeats) for call in calls]
            total_s, flops = total_s + sum(each) * times, flops + 6 * rows * inputs * outputs * times
            parts[name] = [round(1e3 * seconds, 3) for seconds in each]
        found = {"variant": "floor", "products_ms": 1e3 * total_s, "products_flops_per_s": flops / total_s}
        return {**found, "each_ms": parts, "attention_ms": self.attention(shape, repeats)}

    def casts(self) -> dict[str, Any]:
        """Each kernel that rounds to 8 bit alone, on the tensors of a layer, by its tile: milliseconds and GB/s."""
        from paceline.training import float8_kernels as kernels

        shape, rows = arithmetic.load(Choice.parse(self.case.model)), self.case.micro_batch * self.case.length
        x, inner = self.random(rows, shape.hidden), self.random(rows, shape.ffn)
        joined, scale = self.random(rows, 2 * shape.ffn), torch.full((), 80.0, device=self.device)
        e4m3, e5m2 = float8.E4M3, float8.E5M2
        tiles = ((64, 64, 4), (64, 128, 4), (64, 128, 8), (128, 64, 4))
        flat = ((2, 1024, 4), (4, 1024, 4), (4, 1024, 8), (8, 512, 8))
        calls: dict[str, tuple[Callable[[Any], object], tuple[tuple[int, int, int], ...], int]] = {
            "cast": (lambda tile: kernels.cast(x, scale, e4m3, tile), tiles[1:2], 4 * x.numel()),
            "gated": (lambda tile: kernels.gated(joined, scale, e4m3, tile), tiles, 6 * inner.numel()),
            "gated-maxima": (lambda tile: kernels.gated_maxima(joined, tile), flat, 4 * inner.numel()),
            "gated-backward": (
                lambda tile: kernels.gated_backward(joined, inner, scale, e5m2, tile),
                tiles,
                10 * inner.numel(),
            ),
            "gated-backward-maxima": (
                lambda tile: kernels.gated_backward_maxima(joined, inner, tile),
                flat,
                6 * inner.numel(),
            ),
        }
        each: dict[str, list[float]] = {}
        for name, (call, sizes, moved) in calls.items():
            for tile in itertools.starmap(kernels.Tile, sizes):
                seconds = self.timed(lambda tile=tile, call=call: call(tile), 50)
                each[f"{name} {tile.rows}x{tile.columns}/{tile.warps}"] = [
                    round(1e3 * seconds, 4),
                    round(moved / seconds / 1e9),
                ]
        return {"variant": "casts", "ms_and_gb_per_s": each}

    def random(self, *size: int) -> Tensor:
        return torch.randn(*size, device=self.device, dtype=torch.bfloat16)

    def attention(self, shape: Any, repeats: int) -> dict[str, list[float]]:
        """Forward and backward of one layer, by kernel."""
        batch, length = self.case.micro_batch, self.case.length
        heads = (shape.heads, shape.kv_heads, shape.kv_heads)
        parts = self.random(batch, length, sum(heads), shape.head_dim).transpose(1, 2).split(heads, dim=1)
        q, k, v = (nn.Parameter(part) for part in parts)
        gradient = self.random(batch, length, shape.heads, shape.head_dim).transpose(1, 2)
        kernels = ("CUDNN_ATTENTION", "FLASH_ATTENTION") if self.device == "cuda" else ("MATH",)
        found = {}
        for name in kernels:
            with sdpa_kernel([getattr(SDPBackend, name)]):
                forward_s = self.timed(lambda: decoder.causal_attention(q, k, v), repeats)
                both_s = self.timed(
                    lambda: torch.autograd.grad(decoder.causal_attention(q, k, v), (q, k, v), gradient), repeats
                )
            found[name.lower()] = [round(1e3 * forward_s, 3), round(1e3 * (both_s - forward_s), 3)]
        return found


def kernel_class(name: str) -> str:
    """What a kernel does, by its name.

    >>> kernel_class("nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT")
    'product'
    """
    low = name.lower()
    return next((kind for kind, words in CLASSES.items() if any(word in low for word in words)), "elementwise")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=CASES, default="gpt2")
    parser.add_argument("--variants", default="floor,base,loss,gate,tuned,flash")
    parser.add_argument("--micro-batch", type=int, help="rows of a step instead of the shape's own")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of timed steps per variant")
    parser.add_argument("--settling", type=int, default=SETTLING, help="steps before the timed ones")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--launch", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.launch:
        bench = Bench(asked)
        alone = {"floor": bench.floor, "casts": bench.casts}.get(asked.launch)
        print(json.dumps(alone() if alone else bench.train(asked.launch)), flush=True)
        return
    for variant in asked.variants.split(","):
        command = [sys.executable, __file__, *sys.argv[1:], "--launch", variant]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        lines = done.stderr.strip().splitlines() or ["no output"]
        print(done.stdout.strip() or json.dumps({"variant": variant, "error": lines[-1][:300]}), flush=True)


if __name__ == "__main__":
    main()
