"""Concluded about two ways to serve: whether they did the same work, and only then which is faster."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.analysis.findings.training import Check, Comparison


@dataclass(frozen=True, slots=True, kw_only=True)
class Undecided:
    """value(cell) / value(other) where the data supports no interval; reason says why."""

    metric: str
    ratio: float
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedPair:
    """Two cells that differ in their engine alone, at one load. checks say what had to be the same; comparisons speak
    about `cell` and exist only where every check holds, and so do those that have no interval. flags are why answers of
    a side make its speed that of other work."""

    cell: str
    other: str
    label: str
    other_label: str
    load: str | None
    checks: tuple[Check, ...]
    comparisons: tuple[Comparison, ...]
    flags: tuple[str, ...]
    runs: tuple[str, ...]
    undecided: tuple[Undecided, ...] = ()

    @property
    def equal(self) -> bool:
        return all(check.ok for check in self.checks)

    @property
    def reasons(self) -> tuple[str, ...]:
        return tuple(f"{c.name}: {c.expected} against {c.observed}" for c in self.checks if not c.ok)
