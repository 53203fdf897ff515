"""Cells that save time by other arithmetic, such as compressed gradients or 8-bit products, and its price in loss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from paceline.analysis.findings.training import BETTER, EQUAL, INCONCLUSIVE, WORSE
from paceline.errors import Scalar

UNSTABLE = "training is unstable"
_LOSS_WORDS = {BETTER: "lower", WORSE: "higher", EQUAL: "equal", INCONCLUSIVE: "inconclusive"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Relative:
    """One number of a cell over that of its baseline: a ratio with its 95 % interval and a verdict about the cell.

    low and high are None for a single pair of runs; the verdict is then inconclusive.
    """

    value: float
    low: float | None
    high: float | None
    verdict: str
    reason: str

    @property
    def loss_word(self) -> str:
        """The verdict about a loss in words; rounding alone decides the loss of an unstable training."""
        return UNSTABLE if self.reason == UNSTABLE else _LOSS_WORDS[self.verdict]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTrace:
    """Loss against tokens and against seconds of training, of the first seed; the series is a strategy or precision."""

    series: str
    tokens: tuple[int, ...]
    seconds: tuple[float, ...]
    losses: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tradeoff:
    """A strategy that declares other arithmetic, beside an exact one on the same seeds, data and machine.

    With axis `precision`, strategy and baseline are two precisions instead, each certified by a reference of its own.
    loss: after all tokens, the mean over the last steps. loss_in_time: when the faster of the two has ended. speed is
    in tokens per second, None where ranks share a GPU. wire bytes are counted, per step of the busiest rank. pairs are
    runs of both with the same seed and repeat; seeds are what the loss is judged by.
    """

    strategy: str
    baseline: str
    approximation: str
    cells: tuple[str, ...]
    axes: Mapping[str, Scalar]
    seeds: int
    pairs: int
    steps: int
    tokens: int
    wire_bytes: float | None
    baseline_wire_bytes: float | None
    speed: Relative | None
    loss: Relative
    loss_in_time: Relative | None
    text: str
    runs: tuple[str, ...]
    axis: str = "strategy"
    traces: tuple[LossTrace, ...] = field(default=(), metadata={"exported": False})
