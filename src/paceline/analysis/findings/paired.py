"""Concluded about two replicas that answered the same samples in turn, there and back again."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.analysis.findings.between import Differing

FASTER, SLOWER = "faster", "slower"


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedRatio:
    """value(replica) / value(other) over the same samples, its 95 % interval, and the smallest effect that could have
    been shown. verdict speaks about `replica`: faster, slower or tie; None where the work was not equal, and reason
    says what a tie or no verdict rests on."""

    metric: str
    unit: str
    ratio: float
    low: float | None
    high: float | None
    detectable_ratio: float | None
    verdict: str | None
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedReplicas:
    """Two replicas of one cell. pairs counts the samples that both answered, dropped those that one did not; balanced
    says that both were asked around the same moment on average, so that a steady drift cancels. flags are why a
    replica's answers make its speed that of other work; differences are what is known of their hosts and settings."""

    cell: str
    replica: int
    other: int
    host: str | None
    other_host: str | None
    pairs: int
    dropped: int
    balanced: bool
    ratios: tuple[PairedRatio, ...]
    differences: tuple[Differing, ...]
    flags: tuple[str, ...]
    runs: tuple[str, ...]
