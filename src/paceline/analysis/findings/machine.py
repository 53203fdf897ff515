"""Findings about machines: collectives, slow ranks and links, accepted or rejected nodes, and gauges."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from paceline.analysis.findings.compare import Differing
from paceline.errors import Scalar


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveRow:
    """One row as nccl-tests prints it. time_s is the slowest rank's mean; percentiles are of per-iteration maxima over
    ranks, None where too few iterations support them. skew_ratio is the longest rank's mean over the shortest's, and
    early_rank / late_rank are the ranks that spent most and least time inside: the others wait for the late one.
    Repeats of one configuration are one row: run is the first of them, iterations counts those of all launches.
    status is ok; oom or unsupported where nothing was measured; invalid where data arrived wrong (error says so)."""

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
    launches: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveFit:
    """t = alpha + S*f/beta of one operation by weighted least squares over its sizes; residual is the RMS of
    (fitted - measured) / measured. note says where alpha was held at 0, or why this is not a speed."""

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
    note: str | None = None


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
    ratio is its bandwidth over its peers' median, or, for a rank that comes late to a sweep, its time inside
    collectives over theirs; z the modified z of that.
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
class Pair:
    """One pair of ranks of a tournament, both turns together. ratio is its bandwidth over the median of its kind: pairs
    inside a node are one kind, pairs across nodes another."""

    run: str
    ranks: tuple[int, int]
    hosts: tuple[str, str]
    size_bytes: int
    bandwidth_bytes_per_s: float
    ratio: float
    turns: int


PASS, UNDECIDED, SUSPECT, FAIL = "pass", "undecided", "suspect", "fail"
WORST_FIRST = (FAIL, SUSPECT, UNDECIDED, PASS)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeMeasure:
    """One quantity of one rank. relative is its ratio to the median of its peers (or of a baseline), what all share
    over time taken out; of a temperature it is the difference in degrees. low and high are its 95 % interval over the
    repeats, None where there is one reading. accepted are the ends of the band; z is the modified z among the peers."""

    measure: str
    unit: str
    rank: int
    value: float
    relative: float
    low: float | None
    high: float | None
    accepted: tuple[float | None, float | None]
    z: float | None
    verdict: str = PASS


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeEvidence:
    """One thing that speaks against a node, or that its repeats could not tell. next_command is what an operator should
    try there."""

    kind: str
    verdict: str
    text: str
    next_command: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeVerdict:
    """One node of one run. against names what it was compared with; differences are facts in which it stands apart
    from the majority (first is the node's, second the majority's); condition is what its devices and host said."""

    run: str
    cell: str
    node: str
    host: str
    ranks: tuple[int, ...]
    devices: tuple[str, ...]
    verdict: str
    against: str
    evidence: tuple[NodeEvidence, ...] = ()
    measures: tuple[NodeMeasure, ...] = ()
    differences: tuple[Differing, ...] = ()
    condition: tuple[tuple[str, str], ...] = ()

    @property
    def is_refused(self) -> bool:
        """Whether automation must not take it: it failed, or something of it could not be told, whatever else makes it
        suspect. A suspect alone is a person's decision."""
        return any(e.verdict in (FAIL, UNDECIDED) for e in self.evidence)


def worst(verdicts: tuple[str, ...]) -> str:
    return next((verdict for verdict in WORST_FIRST if verdict in verdicts), PASS)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceGauges:
    """One GPU, or one host's processors (device None), over the measured steps or loads of all runs that ended ok.

    busy_ratio is the driver's busy share of a GPU, or that of all cores; clock_hz the multiprocessors' or the cores'.
    throttled_ratio is the share of readings in which it was held back, for throttle_reasons; None where none told.
    What was never told is None.
    """

    host: str
    device: int | None
    readings: int
    busy_median_ratio: float | None
    memory_max_bytes: float | None
    power_median_w: float | None
    power_max_w: float | None
    temperature_median_c: float | None
    temperature_max_c: float | None
    clock_min_hz: float | None
    clock_median_hz: float | None
    throttled_ratio: float | None
    throttle_reasons: tuple[str, ...]
    runs: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GaugeTrace:
    """One device of one run from its first reading to its last, thinned to what a chart can show.

    seconds count from the first measured step or load, or from the first reading of a run that measured none; window is
    the measured part, throttled the stretches in which the device was held back. A reading that lacks a gauge has None.
    power_cap_w and clock_max_hz are the machine's own limits.
    """

    run: str
    cell: str
    host: str
    device: int | None
    seconds: tuple[float, ...]
    power_w: tuple[float | None, ...]
    temperature_c: tuple[float | None, ...]
    clock_hz: tuple[float | None, ...]
    busy_ratio: tuple[float | None, ...]
    throttled: tuple[tuple[float, float], ...]
    window: tuple[float, float] | None
    power_cap_w: float | None
    clock_max_hz: float | None
