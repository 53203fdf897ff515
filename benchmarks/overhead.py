"""What Paceline itself costs, each as a ratio or a time measured in one run on this machine.

    loop     tokens/s inside Paceline's loop (clocks, samples, data thread, progress) over a bare loop of the same
             model, optimizer and step, alternating in one process. Goal: 0.99 on a GPU, 0.97 on a CPU.
    certificate  tokens/s inside Paceline's loop with what the certificate observes in every step (parameter groups,
             precision switches), over the same without, alternating. On a CPU by processor time, which other work on
             the machine changes least. Goal: 0.99.
    telemetry    step time inside Paceline's loop while gauges are read, over the same without, alternating in one
             process; and what one reading takes, in wall time and in processor time of its thread.
    start    cold start of `paceline --help` over `python -c pass`.

Run `python benchmarks/overhead.py [loop] [certificate] [telemetry] [start]`; each prints one JSON line. Nothing here
passes or fails.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from paceline.experiment import expansion
from paceline.experiment.spec import RunSpec
from paceline.host import machine

PAIRS = 8


# --- loop ----------------------------------------------------------------------------------------------------------


def loop_overhead() -> dict[str, Any]:
    device = machine.device_kind()
    with tempfile.TemporaryDirectory() as folder:
        spec = _loop_spec(device, Path(folder))
        ratios, bare, watched = _alternate(spec, Path(folder))
    return {
        "benchmark": "loop",
        "device": device,
        "model": str(spec.model),
        "steps_per_segment": spec.steps,
        "pairs": PAIRS,
        "bare_tokens_per_s": round(statistics.median(bare)),
        "paceline_tokens_per_s": round(statistics.median(watched)),
        "ratio_median": round(statistics.median(ratios), 4),
        "ratio_low": round(min(ratios), 4),
        "ratio_high": round(max(ratios), 4),
        "goal": 0.99 if device == "cuda" else 0.97,
    }


def _loop_spec(device: str, folder: Path) -> RunSpec:
    sizes = {
        "cuda": "{model: gpt2-124m, precision: bf16, micro_batch: 32, sequence_length: 1024, compile: true, steps: 20}",
        "cpu": "{model: small, precision: fp32, micro_batch: 2, sequence_length: 64, steps: 12}",
    }
    file = folder / "loop.yaml"
    file.write_text(f"name: loop\nbase: {sizes[device]}\n")
    settings = ["strategy=single", "processes=1", "accumulation=2", f"device={device}"]
    return expansion.load(str(file), settings)[0]


def _alternate(spec: RunSpec, folder: Path) -> tuple[list[float], list[float], list[float]]:
    """Bare and watched segments in turns, each pair in the reverse order of the one before, so that drift cancels."""
    from paceline.training.instruments import attention_backends
    from paceline.workloads import worker

    _join_alone(spec)
    seat = worker.take_seat(spec, 0)
    with attention_backends(seat.device):
        bare, watched = _bare_segment(spec, seat), _watched_segment(spec, seat, folder)
        segments = {"bare": bare, "watched": watched}
        for run in segments.values():
            run()
        rates: dict[str, list[float]] = {"bare": [], "watched": []}
        for pair in range(PAIRS):
            for name in ("bare", "watched")[:: -1 if pair % 2 else 1]:
                rates[name].append(spec.tokens_per_step * spec.steps / segments[name]())
    ratios = [w / b for w, b in zip(rates["watched"], rates["bare"], strict=True)]
    return ratios, rates["bare"], rates["watched"]


def _join_alone(spec: RunSpec) -> None:
    import torch.distributed as dist

    from paceline.workloads import worker

    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29577"}
    os.environ.update(alone | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"})
    if not dist.is_initialized():
        worker.join(spec, worker.take_seat(spec, 0))


def _bare_segment(spec: RunSpec, seat: Any) -> Any:
    """What a user would write: batches in memory, one clock around all steps."""
    import torch

    from paceline.experiment.plugins import load as load_plugin
    from paceline.models.arithmetic import load
    from paceline.training.data.corpus import Partition, open_corpus

    training = spec.training
    trainer = load_plugin("strategies", "single").wrap(spec, seat)
    model, optimizer = trainer.module, trainer.optimizer
    corpus = open_corpus(training.data, load(spec.model).vocab, training.sequence_length, spec.seed)
    batches = [Partition.of(spec, 0).step_batch(corpus, step) for step in range(spec.steps)]
    normaliser = torch.tensor(batches[0].normaliser, device=seat.torch_device)
    parameters = list(model.parameters())

    def run() -> float:
        _drain(seat.device)
        begin = time.perf_counter()
        for batch in batches:
            for micro in batch.micro_batches:
                tokens = torch.from_numpy(micro).to(seat.torch_device, non_blocking=True)
                (model(tokens[:, :-1], tokens[:, 1:], normaliser) / training.accumulation).backward()
            torch.nn.utils.clip_grad_norm_(parameters, training.clip_norm)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        _drain(seat.device)
        return time.perf_counter() - begin

    return run


def _watched_segment(spec: RunSpec, seat: Any, folder: Path) -> Any:
    """The same steps through the loop of the pretrain workload, recorder and progress included."""
    from paceline.experiment.plugins import load as load_plugin
    from paceline.models.arithmetic import load
    from paceline.training.data.corpus import Partition, open_corpus
    from paceline.training.instruments import clock_for
    from paceline.workloads._loop import Loop
    from paceline.workloads.worker import FolderRecorder

    training = spec.training
    trainer = load_plugin("strategies", "single").wrap(spec, seat)
    corpus = open_corpus(training.data, load(spec.model).vocab, training.sequence_length, spec.seed)
    recorder = FolderRecorder(folder, 0)

    def run(observed: bool = True) -> float:
        loop = Loop(trainer, corpus, Partition.of(spec, 0), seat, clock_for(seat.device), recorder, spec.steps)
        if not observed:
            loop.watch.watching = contextlib.nullcontext  # type: ignore[method-assign, assignment]
        return loop.window(range(spec.steps))

    return run


def _drain(device: str) -> None:
    import torch

    if device == "cuda":
        torch.cuda.synchronize()


# --- certificate ---------------------------------------------------------------------------------------------------


def certificate_overhead() -> dict[str, Any]:
    from paceline.training.instruments import attention_backends
    from paceline.workloads import worker

    device = machine.device_kind()
    seconds: dict[bool, list[float]] = {True: [], False: []}
    with tempfile.TemporaryDirectory() as folder:
        spec = _loop_spec(device, Path(folder))
        _join_alone(spec)
        seat = worker.take_seat(spec, 0)
        with attention_backends(seat.device):
            run = _watched_segment(spec, seat, Path(folder))
            run()
            for pair in range(2 * PAIRS):
                for observed in (True, False)[:: -1 if pair % 2 else 1]:
                    began = time.process_time()
                    wall_s = run(observed)
                    seconds[observed].append(wall_s if device == "cuda" else time.process_time() - began)
    ratios = [without / with_ for with_, without in zip(seconds[True], seconds[False], strict=True)]
    return {
        "benchmark": "certificate",
        "device": device,
        "model": str(spec.model),
        "steps_per_segment": spec.steps,
        "pairs": 2 * PAIRS,
        "ratio_median": round(statistics.median(ratios), 4),
        "ratio_low": round(min(ratios), 4),
        "ratio_high": round(max(ratios), 4),
        "goal": 0.99,
    }


# --- telemetry -----------------------------------------------------------------------------------------------------


def telemetry_overhead() -> dict[str, Any]:
    device = machine.device_kind()
    with tempfile.TemporaryDirectory() as folder:
        spec = _loop_spec(device, Path(folder))
        with_s, without_s = _gauged_in_turns(spec, Path(folder))
    ratios = [a / b for a, b in zip(with_s, without_s, strict=True)]
    return {
        "benchmark": "telemetry",
        "device": device,
        "model": str(spec.model),
        "telemetry_hz": spec.telemetry_hz,
        "steps_per_segment": spec.steps,
        "pairs": PAIRS,
        "step_s_without": round(statistics.median(without_s) / spec.steps, 6),
        "step_s_with": round(statistics.median(with_s) / spec.steps, 6),
        "ratio_median": round(statistics.median(ratios), 4),
        "ratio_low": round(min(ratios), 4),
        "ratio_high": round(max(ratios), 4),
        **_reading_cost(),
    }


def _gauged_in_turns(spec: RunSpec, folder: Path) -> tuple[list[float], list[float]]:
    """Seconds of segments with and without gauges, each pair in the reverse order of the one before."""
    from paceline.training.instruments import attention_backends
    from paceline.workloads import worker

    _join_alone(spec)
    seat = worker.take_seat(spec, 0)
    seconds: dict[bool, list[float]] = {True: [], False: []}
    with attention_backends(seat.device):
        run = _watched_segment(spec, seat, folder)
        run()
        for pair in range(PAIRS):
            for gauged in (True, False)[:: -1 if pair % 2 else 1]:
                asked = spec if gauged else dataclasses.replace(spec, telemetry_hz=0.0)
                with worker.gauged(folder, asked, seat):
                    seconds[gauged].append(run())
    return seconds[True], seconds[False]


def _reading_cost(readings: int = 50) -> dict[str, float]:
    from paceline.host.gauges import Gauges

    wall, own = [], []
    with Gauges(marks=()) as gauges:
        for _ in range(readings):
            began, busy = time.perf_counter(), time.thread_time()
            gauges.read()
            wall.append(time.perf_counter() - began)
            own.append(time.thread_time() - busy)
    return {"reading_s": round(statistics.median(wall), 6), "reading_cpu_s": round(statistics.median(own), 6)}


# --- start ---------------------------------------------------------------------------------------------------------


def start_overhead(launches: int = 11) -> dict[str, Any]:
    def median_s(*command: str) -> float:
        times = []
        for _ in range(launches):
            begin = time.perf_counter()
            subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
            times.append(time.perf_counter() - begin)
        return statistics.median(times)

    python = median_s(sys.executable, "-c", "pass")
    help_s = median_s(sys.executable, "-m", "paceline.cli", "--help")
    return {
        "benchmark": "start",
        "python_pass_s": round(python, 4),
        "paceline_help_s": round(help_s, 4),
        "ratio": round(help_s / python, 2),
        "launches": launches,
    }


def main() -> None:
    chosen = {
        "loop": loop_overhead,
        "certificate": certificate_overhead,
        "telemetry": telemetry_overhead,
        "start": start_overhead,
    }
    for name in sys.argv[1:] or chosen:
        print(json.dumps(chosen[name]()), flush=True)


if __name__ == "__main__":
    main()
