"""QLoRA through Paceline over the plain loop of PEFT and bitsandbytes: samples per second, and whether both learn.

Both train the same weights, adapters and token ids on one GPU, each launch in a process of its own, in the order plain,
Paceline, Paceline, plain. The plain loop is what a user writes: bitsandbytes' own layers, the model's own forward under
autocast, its own gradient checkpointing, PagedAdamW8bit. Goal: a ratio of 1.3 or more at equal checkpointing, with
losses that agree as far as bf16 does.

Run `python benchmarks/qlora.py [--model NAME] [--steps N] [--checkpointing full|none]`; one JSON line per launch, then
the ratio. `--launch paceline --method lora` makes one launch of another method. Nothing here passes or fails.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from paceline.campaign.run import controller
from paceline.experiment.fields import Cell, build
from paceline.experiment.spec import RunSpec
from paceline.host import machine
from paceline.results import store

WARM_STEPS = 5


class Silent:
    """An observer of a campaign that says nothing."""

    def begin(self, specs: Any) -> None: ...
    def started(self, spec: Any, run_dir: Any) -> None: ...
    def waiting(self, spec: Any, reason: str, seconds: float) -> None: ...
    def moved(self, spec: Any, positions: Any) -> None: ...
    def restarting(self, spec: Any, reason: str, left: int) -> None: ...
    def advising(self, spec: Any, seconds: float) -> None: ...
    def ended(self, spec: Any, status: Any, error: Any, known: Any) -> None: ...


def spec_of(asked: argparse.Namespace) -> RunSpec:
    """The run that Paceline makes, and whose work the plain loop repeats."""
    fields = {
        "workload": "finetune",
        "strategy": "single",
        "processes": 1,
        "model": asked.model,
        "data": "synthetic",
        "method": asked.method,
        "reduce_dtype": "bf16" if asked.method == "full" else "fp32",
        "checkpointing": asked.checkpointing,
        "compile": asked.compile,
        "steps": asked.steps,
        "sequence_length": asked.sequence_length,
        "micro_batch": asked.micro_batch,
    }
    cell = Cell.model_validate(fields)
    return build("qlora", cell, machine.device_kind())


def paceline_launch(asked: argparse.Namespace) -> dict[str, Any]:
    """Seconds and loss of every step as a run of the workload recorded them; certified elsewhere."""
    with tempfile.TemporaryDirectory() as folder:
        spec = spec_of(asked)
        controller.execute(spec, Path(folder), Silent(), None)
        record = store.read_run(Path(folder) / spec.experiment / spec.run_id)
    if not record.steps:
        return {"error": record.error}
    peak = max((m.allocated_bytes or 0 for m in record.memory if m.moment == "steps"), default=0)
    return summary([s.duration_s for s in record.steps], [s.loss for s in record.steps], peak, asked)


def plain_launch(asked: argparse.Namespace) -> dict[str, Any]:
    """The loop a user writes, on the same weights and data."""
    import bitsandbytes as bnb
    import torch
    import torch.nn.functional as F

    from paceline.training import finetuned
    from paceline.training.data.corpus import Partition, open_data

    spec, device = spec_of(asked), "cuda" if machine.device_kind() == "cuda" else "cpu"
    model = finetuned.build(spec, device).model
    restore_layers(model)
    if asked.checkpointing == "full":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
    adapters = [p for p in model.parameters() if p.requires_grad]
    rate, decay = spec.training.learning_rate, spec.training.weight_decay
    optimizer = bnb.optim.PagedAdamW8bit(adapters, lr=rate, weight_decay=decay)
    corpus, partition = open_data(spec, model.config.vocab_size), Partition.of(spec, 0)
    seconds, losses = [], []
    for step in range(asked.steps):
        rows = torch.from_numpy(partition.step_batch(corpus, step).micro_batches[0]).to(device)
        synchronise(device)
        began = time.perf_counter()
        with torch.autocast(device, torch.bfloat16):
            logits = model(input_ids=rows[:, 0]).logits
        loss = F.cross_entropy(logits.float().flatten(0, 1), rows[:, 2].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(adapters, spec.training.clip_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        synchronise(device)
        seconds.append(time.perf_counter() - began)
        losses.append(float(loss.detach()))
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else 0
    return summary(seconds, losses, peak, asked)


def restore_layers(model: Any) -> None:
    """bitsandbytes' own 4-bit layer in the place of Paceline's, with the same bits."""
    import bitsandbytes as bnb

    for path, module in list(model.named_modules()):
        if isinstance(module, bnb.nn.Linear4bit):
            plain = bnb.nn.Linear4bit(
                module.in_features, module.out_features, False, module.compute_dtype, device="meta", quant_type="nf4"
            )
            plain.weight, plain.quant_state = module.weight, module.quant_state
            model.set_submodule(path, plain)


def synchronise(device: str) -> None:
    import torch

    with contextlib.suppress(AssertionError, RuntimeError):
        if device == "cuda":
            torch.cuda.synchronize()


def summary(seconds: list[float], losses: list[float], peak: int, asked: argparse.Namespace) -> dict[str, Any]:
    timed = seconds[WARM_STEPS:]
    rate = asked.micro_batch * len(timed) / sum(timed)
    found = {"samples_per_s": rate, "tokens_per_s": rate * asked.sequence_length, "peak_memory_bytes": peak}
    return {**found, "step_time_p50_s": statistics.median(timed), "losses": [round(x, 4) for x in losses]}


def launch(kind: str) -> dict[str, Any]:
    done = subprocess.run([sys.executable, *sys.argv, "--launch", kind], capture_output=True, text=True, check=False)
    lines = done.stdout.strip().splitlines()
    return json.loads(lines[-1]) if done.returncode == 0 and lines else {"error": done.stderr[-2000:]}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="mistral-7b")
    parser.add_argument("--method", choices=("qlora", "lora", "full"), default="qlora", help="of Paceline's launches")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--sequence-length", type=int, default=512)
    parser.add_argument("--micro-batch", type=int, default=8)
    parser.add_argument("--checkpointing", choices=("full", "none"), default="full")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--launch", choices=("plain", "paceline"), help="make one launch only")
    asked = parser.parse_args()
    if asked.launch:
        print(json.dumps(plain_launch(asked) if asked.launch == "plain" else paceline_launch(asked)))
        return 0
    found: dict[str, list[dict[str, Any]]] = {"plain": [], "paceline": []}
    for kind in ("plain", "paceline", "paceline", "plain"):
        found[kind].append(launch(kind))
        print(json.dumps({"loop": kind, "checkpointing": asked.checkpointing, **found[kind][-1]}), flush=True)
    if any("error" in each for launches in found.values() for each in launches):
        return 1
    print(json.dumps(compared(found)))
    return 0


def compared(found: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    rates = {kind: [each["samples_per_s"] for each in launches] for kind, launches in found.items()}
    pairs = zip(found["paceline"][0]["losses"], found["plain"][0]["losses"], strict=True)
    again = zip(found["plain"][1]["losses"], found["plain"][0]["losses"], strict=True)
    return {
        "ratio": statistics.mean(rates["paceline"]) / statistics.mean(rates["plain"]),
        "largest_loss_difference_ratio": max(abs(a / b - 1) for a, b in pairs),
        "of_two_plain_launches": max(abs(a / b - 1) for a, b in again),
    }


if __name__ == "__main__":
    sys.exit(main())
