"""Concluded about numbers that others state: what they contradict, and what would explain them. Never a measurement."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from paceline.errors import Scalar

# Published numbers are rounded to three digits or so: less than this is no contradiction.
AGREES_WITHIN = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """One number as its source states it, beside the same number computed from the source's other numbers.

    claimed is None where the source does not state it, recomputed is None where its other numbers do not give it.
    how says the arithmetic. Neither is measured, so neither has an interval, a certificate or a rank.
    """

    run: str
    axes: Mapping[str, Scalar]
    source: str
    metric: str
    unit: str
    claimed: float | None
    recomputed: float | None
    how: str | None = None

    @property
    def contradicted(self) -> bool:
        """Whether the source's own numbers give another one."""
        if self.claimed is None or self.recomputed is None:
            return False
        return abs(self.claimed - self.recomputed) > AGREES_WITHIN * abs(self.recomputed)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimedTransfer:
    """One claimed step beside the time that its bytes alone would take."""

    run: str
    axes: Mapping[str, Scalar]
    sent_bytes: float
    claimed_s: float
    explained_s: float

    @property
    def error_ratio(self) -> float:
        return self.explained_s / self.claimed_s - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimedTransfers:
    """t = alpha + sent bytes / link for all rows of one source: alpha is the only number fitted, one for all rows."""

    source: str
    alpha_s: float
    link_bytes_per_s: float
    rows: tuple[ClaimedTransfer, ...]

    @property
    def largest_error_ratio(self) -> float:
        return max(abs(row.error_ratio) for row in self.rows)
