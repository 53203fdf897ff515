"""Concluded: what the data says, and on which runs each sentence rests. All that an exporter may print stands here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.spec import Scalar

SCHEMA = 1

BETTER, WORSE, TIE = "better", "worse", "tie"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One metric of one cell. low and high bound a 95 % interval; None where the data cannot support one.

    n counts steps inside the measured window, launches the repeats they came from.
    """

    metric: str
    unit: str
    better: str
    cell: str
    value: float | None
    low: float | None
    high: float | None
    n: int
    launches: int
    axes: Mapping[str, Scalar]
    runs: tuple[str, ...]
    note: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One line of a certificate: what the group expects, what this run showed."""

    name: str
    ok: bool
    expected: str
    observed: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """Proof that a run did the work of its group, or the reasons why not."""

    run: str
    cell: str
    work: str
    reference: str | None
    checks: tuple[Check, ...]

    @property
    def valid(self) -> bool:
        return bool(self.checks) and all(check.ok for check in self.checks)

    @property
    def reasons(self) -> tuple[str, ...]:
        return tuple(f"{c.name}: expected {c.expected}, observed {c.observed}" for c in self.checks if not c.ok)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """value(cell) / value(other): a ratio, its 95 % interval, the smallest effect it could show, and the verdict.

    verdict speaks about `cell`: better, worse or tie; reason says why a tie is one.
    """

    metric: str
    better: str
    cell: str
    other: str
    label: str
    other_label: str
    ratio: float
    low: float
    high: float
    detectable_ratio: float
    verdict: str
    reason: str
    certified: bool
    axes: Mapping[str, Scalar]
    runs: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """A choice within one category of one group, made only by the comparisons it cites."""

    category: str
    metric: str
    group: str
    choose: tuple[str, ...]
    over: tuple[str, ...]
    because: tuple[Comparison, ...]
    text: str
    caveats: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmUpOutcome:
    """What the warm-up rule decided for one run."""

    run: str
    excluded_steps: int
    measured_steps: int
    by_rule: bool
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFinding:
    """One run as the report lists it: its end, and everything a reader should know before trusting it."""

    run: str
    cell: str
    status: str
    reason: str | None
    axes: Mapping[str, Scalar]
    repeat: int
    is_reference: bool
    started_at: float
    duration_s: float
    loss_first: float | None
    loss_last: float | None
    outlier_steps: int
    health: tuple[str, ...]
    warmup: WarmUpOutcome | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingPoint:
    """Efficiency of one cell against the measured baseline of its series. kind is weak or strong."""

    kind: str
    series: str
    cell: str
    baseline: str
    world_size: int
    baseline_world_size: int
    speedup_ratio: float
    efficiency: Measurement


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All that was concluded from a set of runs; exporters print it and decide nothing."""

    title: str
    created_at: float
    paceline_version: str
    machines: tuple[Mapping[str, Any], ...]
    runs: tuple[RunFinding, ...]
    measurements: tuple[Measurement, ...]
    certificates: tuple[Certificate, ...]
    comparisons: tuple[Comparison, ...]
    recommendations: tuple[Recommendation, ...]
    scaling: tuple[ScalingPoint, ...]
    distributions: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()
    schema: int = SCHEMA
