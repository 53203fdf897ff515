"""Concluded about what to do: what holds a cell back, what was left out of a choice, and rules of thumb."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from paceline.errors import Scalar

COMPUTE, MEMORY, NETWORK, INPUT, LAUNCH = "compute", "memory bandwidth", "network", "input", "launch overhead"
# Of runs that hold weights in few bits; no share of any other.
DEQUANTISATION = "dequantisation"
# In the order in which tables show them.
BOTTLENECKS = (COMPUTE, MEMORY, DEQUANTISATION, NETWORK, INPUT, LAUNCH)
UNDECIDED = "undecided"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareOfStep:
    """What one kind of bottleneck takes of a step. share_ratio is the part that is certain, low and high what it may be
    at most: they span the launches' interval and all time that the evidence lets nobody else claim.

    share_ratio is None where nothing was measured that could tell.
    """

    kind: str
    share_ratio: float | None
    low: float
    high: float
    text: str
    runs: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bottleneck:
    """What one cell's step waits for most.

    kind is one of BOTTLENECKS; `between A and B` where their shares cannot be told apart; `undecided` where evidence
    that could decide was not measured, which `missing` then names. share_ratio is the winner's, else None.
    told_apart says whether the profile knew kernels by class.
    """

    cell: str
    kind: str
    share_ratio: float | None
    evidence: tuple[ShareOfStep, ...]
    text: str
    missing: tuple[str, ...]
    axes: Mapping[str, Scalar]
    runs: tuple[str, ...]
    told_apart: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """A cell that belongs to a group by its axes but has no valid run, and how its runs ended."""

    name: str
    status: str
    reason: str | None
    runs: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleOfThumb:
    """Whether one strategy fits by arithmetic alone, in bytes per GPU: nothing here was measured, nothing is a speed.

    gpu names every kind of GPU that has this memory. gpus is the number asked about, or the smallest of those tried
    that fits; None where none does, and the bytes are then of the largest number tried.
    """

    model: str
    parameters: int
    strategy: str
    gpu: str
    memory_bytes: float
    gpus: int | None
    state_bytes: float
    live_bytes: float
    activation_bytes: float
    usable_bytes: float
    fits: bool
    text: str

    @property
    def needed_bytes(self) -> float:
        return self.state_bytes + self.live_bytes + self.activation_bytes
