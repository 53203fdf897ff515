"""Overhead of observing a foreign training script: processor time per step beside the bare script.

    python benchmarks/scripts.py [PAIRS]

Each pair starts the same script twice, bare and observed, in alternating order, as separate processes. The script
counts its own processor time, which other programs on the host disturb less than wall time. `small` is a decoder whose
step takes about 0.1 s on one core; the difference of `empty`, a step of microseconds, is the cost of the observer.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from paceline.training import attachment

SCRIPT = """
import sys, time
import torch

torch.manual_seed(0)
torch.set_num_threads(1)
width, layers, length, steps = map(int, sys.argv[1:])


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


model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
warm = steps // 4
for step in range(steps):
    if step == warm:
        began = time.process_time()
    loss = model(torch.randint(0, 512, (4, length)))
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
print((time.process_time() - began) / (steps - warm))
"""
SHAPES = {"empty": (8, 0, 4, 400), "small": (128, 2, 128, 24)}


def seconds_per_step(script: Path, shape: tuple[int, ...], observed: bool) -> float:
    """Processor time of one step, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        if observed:
            path = os.pathsep.join(filter(None, (str(Path(attachment.__file__).parent), env.get("PYTHONPATH"))))
            env |= {"PYTHONPATH": path, "PACELINE_OBSERVE": folder}
        command = [sys.executable, str(script), *map(str, shape)]
        output = subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout
        lines = sum(len(path.read_text().splitlines()) for path in Path(folder).glob("rank-0.jsonl"))
        assert lines == (shape[-1] + 1 if observed else 0), lines
    return float(output)


def main(pairs: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "train.py"
        script.write_text(SCRIPT)
        for name, shape in SHAPES.items():
            found = []
            for pair in range(pairs):
                order = (True, False) if pair % 2 else (False, True)
                found.append({observed: seconds_per_step(script, shape, observed) for observed in order})
            ratios = [each[False] / each[True] for each in found]
            row = {
                "benchmark": f"script_{name}",
                "pairs": pairs,
                "bare_s": statistics.median(each[False] for each in found),
                "added_s": statistics.median(each[True] - each[False] for each in found),
                "speed_ratio": statistics.median(ratios),
                "lowest": min(ratios),
                "highest": max(ratios),
            }
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 8)
