"""One training loop for each known framework, as its users write it: the scripts of presets such as `huggingface`.

`python -m paceline.examples.NAME --strategy ddp` trains a small model on random sequences. Every example does the same
work (`work`), so presets compare the strategies of one framework, and the preset `frameworks` compares frameworks. An
example imports its own framework only, when it trains. Start with `plain_loop`.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from paceline.errors import MissingPackageError, UnsupportedError

PREFIX = f"{__name__}."
HUGGING_FACE = ("transformers", "accelerate")
# Accelerate decides by the device, before it reads its FSDP plugin; Trainer and TRL start their ranks through it.
SILENT_DDP = (
    "on a CPU Accelerate trains under DDP when FSDP is requested, without a message; the strategy fsdp needs a GPU"
)


@dataclass(frozen=True)
class Example:
    """packages: what has to be installed, with the version where the loop is of that version only. strategies: the
    framework's own, the first by default, each with the packages that it needs besides. gpu_only: why a strategy does
    not run on a CPU."""

    packages: Sequence[str]
    strategies: Mapping[str, Sequence[str]]
    gpu_only: Mapping[str, str] = field(default_factory=dict)


ZERO = {"zero2": ("deepspeed",), "zero3": ("deepspeed",)}
EXAMPLES = {
    "plain_loop": Example(("transformers",), {"ddp": (), "fsdp": ()}),
    "accelerate": Example(HUGGING_FACE, {"ddp": (), "fsdp": (), **ZERO}, {"fsdp": SILENT_DDP}),
    "huggingface": Example(HUGGING_FACE, {"ddp": (), "fsdp": (), **ZERO}, {"fsdp": SILENT_DDP}),
    "trl": Example(("trl", "datasets", *HUGGING_FACE), {"ddp": (), "fsdp": (), **ZERO}, {"fsdp": SILENT_DDP}),
    "lightning": Example(
        ("lightning", "transformers"),
        {"ddp": (), "fsdp": (), "fsdp2": ()},
        {"fsdp": "Lightning's FSDP strategy refuses a CPU; the strategy fsdp needs a GPU"},
    ),
    "deepspeed": Example(("deepspeed", "transformers"), {"zero1": (), "zero0": (), "zero2": (), "zero3": ()}),
    "torchtitan": Example(("torchtitan==0.2.2", "triton"), {"ddp": (), "fsdp": ()}),
}


def source_of(module: str) -> list[Path]:
    """The files of `paceline.examples.NAME`, on which its results depend; none for any other module.

    >>> [path.name for path in source_of("paceline.examples.trl")], source_of("trl.scripts.sft")
    (['trl.py', 'work.py'], [])
    """
    name = module.removeprefix(PREFIX)
    if name == module or name not in EXAMPLES:
        return []
    return [Path(__file__).with_name(f"{each}.py") for each in (name, "work")]


def require_runnable(command: Sequence[str], device: str) -> None:
    """UnsupportedError if the command is an example whose framework is not installed here, or does not run on this
    device with its strategy."""
    name = command[1].removeprefix(PREFIX) if command[0] == "-m" and len(command) > 1 else ""
    if name not in EXAMPLES or command[1] == name:
        return
    example = EXAMPLES[name]
    chosen = (
        command[command.index("--strategy") + 1] if "--strategy" in command[:-1] else next(iter(example.strategies))
    )
    if chosen not in example.strategies:
        raise UnsupportedError(f"{name}: got the strategy {chosen!r}, expected {', '.join(example.strategies)}")
    needed = (*example.packages, *example.strategies[chosen])
    if missing := [package for package in needed if not is_installed(package)]:
        raise MissingPackageError(missing[0], f"the example {name}", " ".join(missing))
    if device == "cpu" and chosen in example.gpu_only:
        raise UnsupportedError(f"{name}: {example.gpu_only[chosen]}")


def is_installed(package: str) -> bool:
    """Whether a package is here: of the same minor version, if it names one.

    >>> is_installed("paceline"), is_installed("paceline==0.0.1"), is_installed("no_such_package")
    (True, False, False)
    """
    name, _, wanted = package.partition("==")
    if importlib.util.find_spec(name) is None:
        return False
    return not wanted or importlib.metadata.version(name).startswith(f"{wanted.rpartition('.')[0]}.")
