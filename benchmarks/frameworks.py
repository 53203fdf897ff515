"""One framework as docs/measured/h200-frameworks measured it, so that further launches join those that are there.

    python benchmarks/frameworks.py FRAMEWORK [STEPS] [OPTION...]
    paceline run benchmarks/frameworks-gpu.yaml     gpt2-124m in bf16 on a GPU, defaults and best settings

The loops and their options are those of `paceline.examples`; `paceline run frameworks` measures them elsewhere.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

# What two of them were called there.
NAMES = {"plain": "plain_loop", "trainer": "huggingface"}


def main() -> None:
    framework, *rest = sys.argv[1:]
    steps = ["--steps", rest.pop(0)] if rest and rest[0].isdecimal() else []
    sys.path.insert(0, str(Path(__file__).parents[1] / "src"))
    sys.argv[1:] = [*steps, *rest]
    runpy.run_module(f"paceline.examples.{NAMES.get(framework, framework)}", run_name="__main__")


if __name__ == "__main__":
    main()
