"""Fit the four parameters of predicted serving to published rows, and print how well each model is predicted unseen.

    python benchmarks/fit_serving.py [--check]

Uses the dense Llama rows of benchmarks/data/inference.csv: maximum throughput of TensorRT-LLM on H100 and H200 (fp8).
Single streams in bf16 on A100 are shown only. Writes src/paceline/prediction/serving.toml.
"""

from __future__ import annotations

import csv
import math
import sys
from pathlib import Path

import numpy as np

from paceline.experiment.choices import Choice
from paceline.models import arithmetic
from paceline.prediction import hardware, serving
from paceline.prediction.serving import Served

TABLE = Path(__file__).parent / "data" / "inference.csv"
MODELS = {
    "Llama-3.1-8B": "llama-8b",
    "Llama-3.3-70B": "llama-70b",
    "Llama-3.1-405B": "llama-70b:layers=126,hidden=16384,heads=128,kv_heads=8,head_dim=128,ffn=53248",
    "Llama 2": "llama-7b",
    "Qwen-7B-Chat": "llama-7b",
}


def rows() -> list[tuple[str, Served, float]]:
    found = []
    with TABLE.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            precision, name = row["precision"].casefold(), MODELS.get(row["model"])
            alone = row["batch"] == "1"
            if (
                name is None
                or precision not in ("fp8", "bf16")
                or (row["model"] == "Llama 2" and row["params_b"] != "7.0")
            ):
                continue
            served = Served(
                shape=arithmetic.load(Choice.parse(name)),
                gpu=hardware.accelerator(row["gpu"]),
                tp=int(row["tp"] or row["n_gpus"]),
                precision=precision,
                input_tokens=int(row["input_len"] or 64),
                output_tokens=int(row["output_len"] or 256),
                batch=1 if alone else None,
            )
            if served.most_sequences() > 0:
                found.append((row["model"], served, float(row["output_tokens_per_s"])))
    return found


def main() -> int:
    found = rows()
    # Single streams of plain PyTorch are another engine: they are shown, and not fitted.
    loaded = [(name, one, value) for name, one, value in found if one.batch is None]
    spread = []
    for name in dict.fromkeys(name for name, _, _ in loaded):
        fit = serving.fit_rows([(one, value) for other, one, value in loaded if other != name])
        mine = [(one, value) for other, one, value in loaded if other == name]
        ratios = [math.log(serving.throughput(one, max(one.most_sequences(), 1), fit.values) / v) for one, v in mine]
        spread += ratios
        error = np.abs(np.exp(ratios) - 1)
        sys.stdout.write(f"without {name}: {len(mine)} rows, error {100 * np.median(error):.0f} % median, "
                         f"{100 * np.quantile(error, 0.9):.0f} % at the 90th percentile\n")  # fmt: skip
    fit = serving.fit_rows([(one, value) for _, one, value in loaded])
    sd = float(np.sqrt(np.mean(np.square(spread))))
    for name, one, value in found:
        if one.batch == 1:
            rate = serving.throughput(one, 1, fit.values)
            sys.stdout.write(f"single stream, not fitted: {name} predicted {rate:.0f} tokens/s, measured {value:.0f}\n")
    lines = ["# Written by benchmarks/fit_serving.py: do not edit by hand.", "", "[fit]", f"rows = {len(loaded)}"]
    lines += [f"sd = {sd:.4g}  # of the logarithm of tokens/s, models left out one by one", "", "[parameters]"]
    lines += [f"{name} = {math.exp(value):.6g}  # {serving.PRIORS[name][2]}" for name, value in fit.values.items()]
    if "--check" not in sys.argv:
        serving.PATH.write_text("\n".join(lines) + "\n", encoding="utf-8")
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
