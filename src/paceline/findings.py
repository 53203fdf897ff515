"""Concluded: what the data says, and on which runs each sentence rests. All that an exporter may print stands here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.spec import PROBING, UNCERTIFIED, Scalar

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

    @property
    def workload(self) -> str:
        return str(self.axes.get("workload")).partition(":")[0]

    @property
    def is_certified(self) -> bool:
        """Whether a run of this workload must prove equal work."""
        return self.workload not in UNCERTIFIED

    @property
    def is_failure(self) -> bool:
        """Neither ok nor refused beforehand, nor a probe that found no room, which is what it was sent to find."""
        return self.status not in ("ok", "unsupported") and not (self.status == "oom" and self.workload in PROBING)


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
class CollectiveRow:
    """One row as nccl-tests prints it. time_s is the slowest rank's mean; percentiles are of per-iteration maxima over
    ranks, None where too few iterations support them. skew_ratio is the longest rank's mean over the shortest's, and
    early_rank / late_rank are the ranks that spent most and least time inside: the others wait for the late one.
    A row that was not measured has status oom or unsupported and an error."""

    run: str
    cell: str
    operation: str
    dtype: str
    world_size: int
    size_bytes: int
    count: int
    in_place: bool
    mode: str
    iterations: int
    time_s: float | None
    p50_s: float | None
    p95_s: float | None
    p99_s: float | None
    algbw_bytes_per_s: float | None
    busbw_bytes_per_s: float | None
    wrong: int | None
    skew_ratio: float | None
    early_rank: int | None
    late_rank: int | None
    status: str
    error: str | None
    axes: Mapping[str, Scalar]
    note: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveFit:
    """t = alpha + S*f/beta of one operation by weighted least squares over its sizes; residual is the RMS of
    (fitted - measured) / measured."""

    operation: str
    dtype: str
    world_size: int
    in_place: bool
    alpha_s: float
    beta_bytes_per_s: float
    residual_ratio: float
    sizes: int
    axes: Mapping[str, Scalar]
    runs: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """hidden_ratio: the part of the collective that took no time of its own beside matrix products (1 all, 0 none)."""

    operation: str
    dtype: str
    world_size: int
    size_bytes: int
    collective_s: float
    compute_s: float
    together_s: float
    hidden_ratio: float
    axes: Mapping[str, Scalar]
    runs: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspect:
    """A rank, node or link that is slower than its peers by more than chance and by enough to matter.

    kind is rank, node or link; confirmed is True when a second turn with other partners said the same.
    ratio is its bandwidth over its peers' median; z the modified z of that.
    """

    kind: str
    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    devices: tuple[str, ...]
    ratio: float
    z: float
    confirmed: bool
    text: str
    runs: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRow:
    """Memory of one cell by component, predicted from its shape beside what the busiest rank showed, in bytes.

    Keys of both: parameters, gradients, optimizer, activations, communication, other, peak; measured has also reserved,
    device and fragmentation. None is unknown. error_ratio is predicted peak / measured peak - 1.
    """

    cell: str
    axes: Mapping[str, Scalar]
    predicted: Mapping[str, int | None]
    measured: Mapping[str, int | None]
    error_ratio: float | None
    capacity_bytes: int | None
    runs: tuple[str, ...]
    note: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """One try of a frontier search, in a process of its own."""

    run: str
    micro_batch: int
    status: str
    peak_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontierPoint:
    """The largest micro batch that ran and the smallest that did not, at one sequence length of one series.

    settled is True when the two are neighbours or the search reached its limit: nothing between them is untried.
    """

    series: str
    sequence_length: int
    largest_fitting: int | None
    smallest_failing: int | None
    predicted: int | None
    settled: bool
    probes: tuple[Probe, ...]
    axes: Mapping[str, Scalar]


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
    collectives: tuple[CollectiveRow, ...] = ()
    fits: tuple[CollectiveFit, ...] = ()
    overlaps: tuple[Overlap, ...] = ()
    suspects: tuple[Suspect, ...] = ()
    memory: tuple[MemoryRow, ...] = ()
    frontier: tuple[FrontierPoint, ...] = ()
    distributions: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()
    schema: int = SCHEMA
