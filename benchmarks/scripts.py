"""Overhead of observing a foreign training script: processor time per step beside the bare script.

    python benchmarks/scripts.py [PAIRS] [cpu|cuda]

Two processes import torch, one of them observed. In each pair both fork a child that trains the same model, one after
the other and in alternating order; it counts its own processor time, which other programs on the host disturb less than
wall time. `small` is a decoder whose step takes about 0.1 s on one core; the difference of `empty`, a step of
microseconds, is the cost of the observer. On a GPU the time is that of the wall clock, from one synchronisation to
another, and `short` is a step of about 5 ms. The interval is that of the median, from the order of the pairs alone.
With 12 pairs it takes a minute on an idle host.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from paceline.training import attachment

SCRIPT = """
import os, sys, time
import torch, torch._dynamo  # the first step of an optimizer imports it

torch.set_num_threads(1)


def child(number, line):
    global width, layers, length, steps, device
    os.environ["RANK"] = str(number)
    *shape, device = line.split()
    width, layers, length, steps = map(int, shape)
    print(train(), flush=True)


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = torch.nn.MultiheadAttention(width, 4, batch_first=True)
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(width) for _ in range(2))

    def forward(self, x):
        y = self.norms[0](x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.down(torch.nn.functional.gelu(self.up(self.norms[1](x))))


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(512, width)
        self.blocks = torch.nn.Sequential(*(Block() for _ in range(layers)))
        self.head = torch.nn.Linear(width, 512)

    def forward(self, ids):
        logits = self.head(self.blocks(self.embedding(ids)))
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())


def clock():
    if device == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def train():
    torch.manual_seed(0)
    model = Model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    warm = steps // 4
    for step in range(steps):
        if step == warm:
            began = clock()
        loss = model(torch.randint(0, 512, (4, length), device=device))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return (clock() - began) / (steps - warm)


for number, line in enumerate(sys.stdin):
    if (pid := os.fork()) == 0:
        child(number, line)
        sys.exit(0)
    os.waitpid(pid, 0)
"""
# Width, layers, sequence length and steps.
SHAPES = {
    "cpu": {"small": (128, 2, 128, 16), "empty": (8, 0, 4, 200)},
    "cuda": {"short": (256, 2, 256, 200), "long": (1024, 12, 1024, 24)},
}


class Trainer:
    """A process that has imported torch, and trains in a child of its own whenever it is asked."""

    def __init__(self, script: Path, folder: str | None) -> None:
        self.folder, self.asked = folder, 0
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        if folder is not None:
            path = os.pathsep.join(filter(None, (str(Path(attachment.__file__).parent), env.get("PYTHONPATH"))))
            env |= {"PYTHONPATH": path, "PACELINE_OBSERVE": folder}
        command = [sys.executable, str(script)]
        self.process = subprocess.Popen(command, env=env, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def seconds_per_step(self, shape: tuple[int, ...], device: str) -> float:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(" ".join(map(str, (*shape, device))) + "\n")
        self.process.stdin.flush()
        found = float(self.process.stdout.readline())
        self.asked += 1
        return found

    def end(self, steps: int) -> None:
        """Every step of every child must have been observed, or the ratio means nothing."""
        self.process.communicate()
        if self.folder is not None:
            lines = [line for path in Path(self.folder).glob("rank-*.jsonl") for line in path.read_text().splitlines()]
            assert sum(json.loads(line)["kind"] == "step" for line in lines) == steps


def interval(values: Sequence[float]) -> tuple[float, float]:
    """An interval that contains the median with 95 % or more, whatever the distribution.

    The number of values below the median is binomial: leave out as many at each end as 2.5 % allow.
    """
    n, left_out, below = len(values), 0, 0.0
    while (below := below + math.comb(n, left_out) / 2**n) <= 0.025:
        left_out += 1
    ordered = sorted(values)
    first = max(left_out - 1, 0)
    return ordered[first], ordered[-1 - first]


def main(pairs: int, device: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        script, observed = Path(folder) / "train.py", Path(folder) / "observed"
        script.write_text(SCRIPT)
        observed.mkdir()
        trainers = {False: Trainer(script, None), True: Trainer(script, str(observed))}
        for name, shape in SHAPES[device].items():
            found = []
            for pair in range(pairs):
                order = (True, False) if pair % 2 else (False, True)
                found.append({side: trainers[side].seconds_per_step(shape, device) for side in order})
            ratios = [each[True] / each[False] for each in found]
            low, high = interval(ratios)
            row = {
                "benchmark": f"script_{name}",
                "device": device,
                "pairs": pairs,
                "bare_s": statistics.median(each[False] for each in found),
                "added_s": statistics.median(each[True] - each[False] for each in found),
                "time_ratio": statistics.median(ratios),
                "low": low,
                "high": high,
            }
            print(json.dumps(row), flush=True)
        steps = pairs * sum(shape[-1] for shape in SHAPES[device].values())
        for trainer in trainers.values():
            trainer.end(steps)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 12, sys.argv[2] if len(sys.argv) > 2 else "cpu")
