"""Rules of thumb if nothing was measured: which strategies fit, by arithmetic on sizes alone. Never a speed.

Per GPU: state (models.state_bytes), gathered units of strategies that shard the weights, and activations of one
sequence with full checkpointing, against 90 % of the nominal memory. docs/recommendations.md compares it with measured
peaks.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from paceline.analysis.findings import RuleOfThumb
from paceline.analysis.grouping import grouped
from paceline.errors import RequestError, require
from paceline.experiment.choices import Choice
from paceline.host import machine
from paceline.models import arithmetic
from paceline.models.adapters import DTYPE_BYTES
from paceline.models.shape import Shape
from paceline.results.records import RunRecord, Status

STRATEGIES = ("ddp", "zero:stage=1", "zero:stage=2", "zero:stage=3", "fsdp2")
WORLD_SIZES = (1, 2, 4, 8, 16, 32, 64)
LONGEST_DEFAULT_SEQUENCE = 4096
COMPUTE_DTYPE = "bf16"
# The rest is for the CUDA context, NCCL buffers and fragmentation.
USABLE_RATIO = 0.9
# Per token and hidden element: the 16-bit input of every checkpointed block, and one block's own activations (34, of
# Korthikanti et al. 2022, equation 1, without the attention maps that fused attention never writes).
KEPT_BYTES, BLOCK_BYTES = 2, 34
# Per token and vocabulary entry: logits and their gradient, each in 16 bit and in fp32.
LOGIT_BYTES = 12
# FSDP2 and ZeRO-3 gather the next block while they compute one; weights outside the blocks stay gathered.
LIVE_BLOCKS = 2
_GIB = 2.0**30


def rules(records: Sequence[RunRecord]) -> tuple[RuleOfThumb, ...]:
    """For each trained model, on kinds of GPU that were not measured: the number of GPUs from which each strategy fits.

    A model that fits one GPU of every kind with every strategy needs no rule.
    """
    seen = {str(gpu.get("name")) for r in records for m in r.machines for gpu in m.get("gpus") or ()}
    measured = [machine.gpu_row(name) for name in seen]
    sizes = {name: float(row["memory_bytes"]) for name, row in _table().items() if "memory_bytes" in row}
    unmeasured = (name for name in sizes if machine.gpu_row(name) not in measured)
    by_size = grouped(unmeasured, lambda name: sizes[name])
    found: list[RuleOfThumb] = []
    for shape, sequence_length in _trained(records):
        ours = []
        for memory, names in sorted(by_size.items()):
            for strategy in STRATEGIES:
                tried = [rule(shape, strategy, ", ".join(names), memory, n, sequence_length) for n in WORLD_SIZES]
                ours.append(next((r for r in tried if r.fits), dataclasses.replace(tried[-1], gpus=None)))
        found += ours if any(one.gpus != 1 for one in ours) else ()
    return tuple(found)


def advise(model: Choice, gpu: str, gpus: int, sequence_length: int | None = None) -> tuple[RuleOfThumb, ...]:
    """Every strategy with this model on this number of GPUs of this kind."""
    shape = dataclasses.replace(arithmetic.load(model), name=str(model))
    require(gpus >= 1, "--gpus", gpus, "an integer of at least 1")
    length = min(shape.context, LONGEST_DEFAULT_SEQUENCE) if sequence_length is None else sequence_length
    require(
        1 <= length <= shape.context, "--sequence-length", length, f"1 to {shape.context}, the context of {shape.name}"
    )
    names, memory = find_gpu(gpu)
    return tuple(rule(shape, strategy, names, memory, gpus, length) for strategy in STRATEGIES)


def find_gpu(text: str) -> tuple[str, float]:
    """The names and the memory of the GPUs whose name contains these words (A10 is not A10G); the smallest memory if
    several.
    """
    words = _words(text)

    def contains(name: Sequence[str]) -> bool:
        return any(list(name[i : i + len(words)]) == words for i in range(len(name)))

    known = {name: float(row["memory_bytes"]) for name, row in _table().items() if "memory_bytes" in row}
    alike = {name: size for name, size in known.items() if words and contains(_words(name))}
    require(bool(alike), "--gpu", text, f"one of {', '.join(known)}")
    smallest = min(alike.values())
    return ", ".join(name for name, size in alike.items() if size == smallest), smallest


def rule(
    shape: Shape, strategy: str, gpu: str, memory_bytes: float, gpus: int, sequence_length: int, micro_batch: int = 1
) -> RuleOfThumb:
    """One strategy on one number of GPUs."""
    choice, count = Choice.parse(strategy), arithmetic.parameters(shape)
    state = arithmetic.state_bytes(choice, count, gpus, COMPUTE_DTYPE)
    assert state is not None, f"no formula for the state of {strategy}"
    live = 0.0
    if gpus > 1 and arithmetic.sharded_parts(choice) == 3:  # gathered weights and their gradients, in the compute dtype
        gathered = LIVE_BLOCKS * arithmetic.block_parameters(shape) + arithmetic.root_parameters(shape)
        live = 2.0 * DTYPE_BYTES[COMPUTE_DTYPE] * gathered
    activations = activation_bytes(shape, sequence_length, micro_batch)
    usable = USABLE_RATIO * memory_bytes
    needed = state + live + activations
    units = f" + {_gib(live)} gathered weights" if live else ""
    text = (
        f"{shape.name}: 16 B x {count / 1e9:.3g}e9 = {_gib(16.0 * count)} of state; {strategy} on {gpus} "
        f"GPU{'' if gpus == 1 else 's'}: {_gib(state)} of state{units} + {_gib(activations)} activations = "
        f"{_gib(needed)} per GPU of {_gib(usable)} usable ({USABLE_RATIO:g} x {memory_bytes / 1e9:g} GB): "
        f"{'fits' if needed <= usable else 'does not fit'} (16 bit, {micro_batch} x {sequence_length} tokens, full "
        "checkpointing)"
    )
    return RuleOfThumb(
        model=shape.name,
        parameters=count,
        strategy=strategy,
        gpu=gpu,
        memory_bytes=memory_bytes,
        gpus=gpus,
        state_bytes=state,
        live_bytes=live,
        activation_bytes=activations,
        usable_bytes=usable,
        fits=needed <= usable,
        text=text,
    )


def activation_bytes(shape: Shape, sequence_length: int, micro_batch: int = 1) -> float:
    """Activations of one micro batch with full checkpointing."""
    hidden = shape.hidden * (KEPT_BYTES * shape.layers + BLOCK_BYTES)
    return float(micro_batch * sequence_length * (hidden + LOGIT_BYTES * shape.vocab))


# --- models and GPUs ---


def _trained(records: Iterable[RunRecord]) -> list[tuple[Shape, int]]:
    """Each fully trained model with its longest sequence: the rules do not cover frozen weights."""
    found: dict[str, tuple[Shape, int]] = {}
    for record in records:
        frozen = record.spec.tuning is not None and record.spec.tuning.has_adapters
        if record.status is not Status.OK or not record.spec.is_certified or frozen:
            continue
        try:
            shape = record.shape
        except RequestError:
            continue
        length = record.spec.training.sequence_length
        found[shape.name] = (shape, max(length, found.get(shape.name, (shape, 0))[1]))
    return list(found.values())


def _table() -> dict[str, Mapping[str, Any]]:
    return {name: row for name in machine.gpu_summaries() if (row := machine.gpu_row(name)) is not None}


def _words(name: str) -> list[str]:
    return [word for word in re.split(r"[\s-]+", name.casefold()) if word and word != "nvidia"]


def _gib(size: float) -> str:
    return f"{size / _GIB:.1f} GiB"
