"""Overhead of observing a foreign training script: processor time per step beside the bare script.

    python benchmarks/scripts.py [PAIRS] [cpu|cuda|host]

Two processes import torch, one of them observed. In each pair both fork a child that trains the same model, one after
the other and in alternating order; it counts its own processor time, which other programs on the host disturb less than
wall time. `small` is a decoder whose step takes about 0.1 s on one core; the difference of `empty`, a step of
microseconds, is the cost of the observer. On a GPU the time is that of the wall clock, from one synchronisation to
another, and `short` is a step of about 5 ms. The interval is that of the median, from the order of the pairs alone.
With 12 pairs it takes a minute on an idle host.

`host` is `empty` alone, and what the observer does in a step, counted: calls of Python functions, operations on tensors
other than views and reads (each is a launch on a GPU, where a copy of the loss of each micro batch is one more) and
marks of the clock (each is an event there). Other programs on the host do not disturb counts.
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
from typing import Any

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
# What the observer does in each of 96 steps, of which it reads all: three groups.
COUNTED = """
import os, sys
import torch, torch._dynamo
from torch.utils._python_dispatch import TorchDispatchMode

steps, micro_batches, modules = 96, int(sys.argv[2]), int(sys.argv[3])
folder = os.environ.get("PACELINE_OBSERVE")


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = torch.nn.Embedding(32, 8), torch.nn.Linear(8, 32)
        self.rest = torch.nn.Sequential(*(torch.nn.Identity() for _ in range(modules)))

    def forward(self, input_ids, labels=None, attention_mask=None):
        logits = self.head(self.rest(self.embedding(input_ids)))
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), input_ids.flatten())


class Operations(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        # To read a number is no launch, and only done where nothing has to be waited for.
        Operations.count += not func.is_view and func is not torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


calls = marks = 0


def count_call(frame, event, _):
    global calls
    calls += event == "call" and "attachment" in frame.f_code.co_filename


def train(steps):
    for step in range(steps):
        for _ in range(micro_batches):
            ids = torch.randint(0, 32, (4, 4))
            more = {} if sys.argv[1] == "ids" else {"labels": ids, "attention_mask": torch.ones_like(ids)}
            model(ids, **more).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
train(steps)
if folder:
    import paceline_observer, paceline_steps

    # By their number alone, not because this host is slow.
    paceline_steps.GROUP_S = 1e9
    mark = paceline_observer.observer.clock.mark

    def counted_mark():
        global marks
        marks += 1
        return mark()

    paceline_observer.observer.clock.mark = counted_mark
    train(steps)
    marks = 0
with Operations():
    train(steps)
marks_of_steps = marks
sys.setprofile(count_call)
train(steps)
sys.setprofile(None)
print(Operations.count / steps, calls / steps, marks_of_steps / steps)
"""
# What a forward pass is given, micro batches of a step, and modules of the model.
CASES = {
    "ids": ("ids", 1, 0),
    "labels_and_mask": ("all", 1, 0),
    "4_micro_batches": ("all", 4, 0),
    "64_modules": ("ids", 1, 64),
}
# Width, layers, sequence length and steps.
SHAPES = {
    "cpu": {"small": (128, 2, 128, 16), "empty": (8, 0, 4, 200)},
    "host": {"empty": (8, 0, 4, 200)},
    "cuda": {"short": (256, 2, 256, 200), "long": (1024, 12, 1024, 24)},
}


def environment(folder: str | None) -> dict[str, str]:
    """Our own, with the observer if it has a folder."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    if folder is not None:
        path = os.pathsep.join(filter(None, (str(Path(attachment.__file__).parent), env.get("PYTHONPATH"))))
        env |= {"PYTHONPATH": path, "PACELINE_OBSERVE": folder}
    return env


class Trainer:
    """A process that has imported torch, and trains in a child of its own whenever it is asked."""

    def __init__(self, script: Path, folder: str | None) -> None:
        self.folder, self.asked = folder, 0
        command = [sys.executable, str(script)]
        streams: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = subprocess.Popen(command, env=environment(folder), text=True, **streams)

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


def count(case: tuple[str, int, int]) -> dict[str, float]:
    """What the observer adds to a step of one case."""
    found = []
    for is_observed in (False, True):
        with tempfile.TemporaryDirectory() as folder:
            words = [sys.executable, "-c", COUNTED, *map(str, case)]
            env = environment(folder if is_observed else None)
            printed = subprocess.run(words, env=env, check=True, text=True, stdout=subprocess.PIPE).stdout
            found.append([float(word) for word in printed.split()])
    names = "operations_per_step", "calls_per_step", "marks_per_step"
    return {name: round(after - before, 2) for name, before, after in zip(names, *found, strict=True)}


def main(pairs: int, device: str) -> None:
    for name, case in CASES.items() if device == "host" else ():
        print(json.dumps({"benchmark": f"script_{name}", **count(case)}), flush=True)
    clock = "cuda" if device == "cuda" else "cpu"
    with tempfile.TemporaryDirectory() as folder:
        script, observed = Path(folder) / "train.py", Path(folder) / "observed"
        script.write_text(SCRIPT)
        observed.mkdir()
        trainers = {False: Trainer(script, None), True: Trainer(script, str(observed))}
        for name, shape in SHAPES[device].items():
            found = []
            for pair in range(pairs):
                order = (True, False) if pair % 2 else (False, True)
                found.append({side: trainers[side].seconds_per_step(shape, clock) for side in order})
            ratios = [each[True] / each[False] for each in found]
            low, high = interval(ratios)
            row = {
                "benchmark": f"script_{name}",
                "device": clock,
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
