"""Concluded about what served models answered: how good it is, whether replicas agree, and who is fast but wrong."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from paceline.analysis.findings.training import Measurement
from paceline.errors import Scalar

PASSED, FAILED, SMOKE = "passed", "failed", "smoke"
AGREES, DIFFERS, UNDECIDED, SILENT = "agrees", "differs", "undecided", "silent"


@dataclass(frozen=True, slots=True, kw_only=True)
class AccuracyTarget:
    """One value that a whole set must reach: at least low, and at most high where that is not None."""

    metric: str
    value: float
    low: float
    high: float | None
    ok: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaAnswers:
    """One replica's answers. agreement is about the questions that all replicas were asked outside the timed load:
    differs from the majority, undecided where no majority exists, silent where it answered nothing; None where they
    were not asked. odd of asked were answered otherwise than by most, or have no majority. scores are empty without
    references. flag says why its speed must not be told alone; None where nothing speaks against it."""

    replica: int
    host: str | None
    agreement: str | None
    asked: int
    odd: int
    tokens_per_s: float | None
    scores: tuple[Measurement, ...] = ()
    flag: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Accuracy:
    """Answers of one cell beside its speed. verdict is of the whole set of a known task: passed or failed against its
    targets; smoke for anything else that was scored, which can do neither; None where nothing was."""

    cell: str
    axes: Mapping[str, Scalar]
    scored: int
    scores: tuple[Measurement, ...]
    targets: tuple[AccuracyTarget, ...]
    verdict: str | None
    replicas: tuple[ReplicaAnswers, ...]
    runs: tuple[str, ...]
    note: str | None = None

    @property
    def flags(self) -> dict[int, str]:
        """Replica -> why its speed must not be told alone."""
        return {each.replica: each.flag for each in self.replicas if each.flag}
