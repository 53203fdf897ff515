"""A proof group: the same configurations of a reduced form of the model, where a reference of the whole does not fit.

`Proof` is what a user requests. `Reduction` marks the runs of a proof group, the one-process reference included: its
sizes, and those of the work that it proves. `reduced.reduced` makes the spec of such a run. See docs/method.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from paceline.errors import require

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
        given = ", ".join(name for name in SIZES if getattr(self, name) is not None)
        require(self.mode != NEVER or not given, "proof", f"never with {given}", "never or sizes, not both")
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

    def __post_init__(self) -> None:
        for name in SIZES:
            own, whole = getattr(self, name), getattr(self, f"of_{name}")
            valid = type(own) is type(whole) is int and 1 <= own <= whole
            require(valid, f"reduction.{name}", own, f"a whole number from 1 to of_{name} ({whole})")

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
