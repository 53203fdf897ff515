"""Fit the four parameters of predicted serving to published rows, and print how well each model is predicted unseen.

    python benchmarks/fit_serving.py [--check]

Uses the dense Llama rows of benchmarks/data/inference.csv: maximum throughput of TensorRT-LLM on H100 and H200 (fp8).
Single streams in bf16 on A100 are shown only. Writes src/paceline/prediction/serving.toml.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np

from paceline.prediction import serving
from paceline.prediction.served_anchors import MODELS, read_table
from paceline.prediction.serving import Served

TABLE = Path(__file__).parent / "data" / "inference.csv"


def rows() -> list[tuple[str, Served, float]]:
    """Dense Llama rows in fp8 and bf16, by model."""
    return [
        (one.name.rpartition(": ")[2], one.served, one.tokens_per_s)
        for one in read_table(TABLE)
        if one.served.precision in ("fp8", "bf16") and one.name.rpartition(": ")[2] in MODELS
    ]


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
