"""A proof group: the same configurations of a reduced form of the model, where a reference of the whole does not fit.

`Proof` is what a user requests. `Reduction` marks the runs of a proof group, the one-process reference included: its
sizes, and those of the work that it proves. `reduced` makes the spec of such a run. See docs/method.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from paceline.errors import require
from paceline.experiment.choices import Choice
from paceline.experiment.layout import layout_of, replicas_of

if TYPE_CHECKING:
    from paceline.experiment.spec import RunSpec

AUTO, NEVER = "auto", "never"
MODES = (AUTO, NEVER)
SIZES = ("layers", "sequence_length", "global_batch")


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """What to do where a reference does not fit: `auto` reduces the model as far as needed, `never` does not.

    Sizes that are given are used even if the reference fits. limit_gib: the most memory that a reference may use; None
    for that of the device.
    """

    mode: str = AUTO
    layers: int | None = None
    sequence_length: int | None = None
    global_batch: int | None = None
    limit_gib: float | None = None

    def __post_init__(self) -> None:
        require(self.mode in MODES, "proof", self.mode, f"{' or '.join(MODES)}, or a mapping of sizes")
        for name in SIZES:
            value = getattr(self, name)
            require(value is None or value >= 1, f"proof.{name}", value, "a whole number from 1")
        limit = self.limit_gib
        require(limit is None or 0 < limit < math.inf, "proof.limit_gib", limit, "a positive number of GiB")

    @property
    def has_sizes(self) -> bool:
        return any(getattr(self, name) is not None for name in SIZES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduction:
    """The sizes of a proof group, and those of the work that it proves."""

    work: str
    layers: int
    of_layers: int
    sequence_length: int
    of_sequence_length: int
    global_batch: int
    of_global_batch: int

    @property
    def text(self) -> str:
        """What is smaller than in the whole.

        >>> Reduction(
        ...     work="", layers=4, of_layers=80, sequence_length=2048, of_sequence_length=8192,
        ...     global_batch=64, of_global_batch=64,
        ... ).text
        '4 of 80 layers, sequence 2,048 of 8,192'
        """
        parts = (
            (self.layers, self.of_layers, "", " layers"),
            (self.sequence_length, self.of_sequence_length, "sequence ", ""),
            (self.global_batch, self.of_global_batch, "batch ", ""),
        )
        return ", ".join(f"{name}{own:,} of {whole:,}{unit}" for own, whole, name, unit in parts if own != whole)

    @property
    def level(self) -> str:
        """The level of a certificate that rests on this proof."""
        return f"proved on {self.text}"

    @property
    def size(self) -> tuple[int, int, int]:
        return self.layers, self.sequence_length, self.global_batch


def reduced(spec: RunSpec, to: Reduction) -> RunSpec:
    """The same configuration with these sizes, over the first steps, as one launch without restarts and design.

    A split of layers over stages keeps its proportions.
    """
    from paceline.experiment.spec import WarmUp

    training, strategy, layout = spec.training, spec.strategy, layout_of(spec)
    share = training.micro_batch * replicas_of(strategy, spec.topology.world_size)
    if strategy is not None and layout.split and to.layers != to.of_layers:
        split = "+".join(map(str, scaled_split(layout.split, to.layers)))
        strategy = Choice(strategy.name, {**strategy.options, "layers": split})
    model = spec.model
    if to.layers != to.of_layers:
        model = Choice(model.name, {**model.options, "layers": to.layers})
    return replace(
        spec,
        model=model,
        strategy=strategy,
        training=replace(training, sequence_length=to.sequence_length, accumulation=max(1, to.global_batch // share)),
        steps=min(spec.steps, spec.reference_steps),
        warmup=WarmUp(),
        repeat=0,
        max_restarts=0,
        checkpoint_every=None,
        checkpoint_async=False,
        design=None,
        lineage=None,
        reduction=to,
    )


def scaled_split(split: Sequence[int], layers: int) -> tuple[int, ...]:
    """The layers of each stage of a smaller model, each at least 1, as near to the proportions as possible.

    >>> scaled_split((39, 41), 4), scaled_split((5, 3), 4), scaled_split((7, 1), 4)
    ((2, 2), (3, 1), (3, 1))
    """
    whole, found = sum(split), [1] * len(split)
    for _ in range(layers - len(split)):
        missing = [layers * share / whole - own for share, own in zip(split, found, strict=True)]
        found[missing.index(max(missing))] += 1
    return tuple(found)


def is_proof_of(proof: RunSpec, spec: RunSpec) -> bool:
    """Whether a run of a proof group has this configuration; the number of its steps does not matter."""
    to = proof.reduction
    return to is not None and to.work == spec.work and same_but_steps(proof, reduced(spec, to))


def same_but_steps(a: RunSpec, b: RunSpec) -> bool:
    return replace(a, steps=1).cell == replace(b, steps=1).cell
