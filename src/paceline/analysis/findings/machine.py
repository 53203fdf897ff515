"""Findings about machines: collectives, slow ranks and links, accepted or rejected nodes, and gauges."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from paceline.analysis.findings.compare import Differing
from paceline.errors import Scalar


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveRow:
    """One row as nccl-tests prints it. time_s is the mean of the slowest rank.

    Percentiles are over per-iteration maxima across ranks, and None if there were too few iterations. skew_ratio is the
    longest mean of a rank over the shortest. early_rank and late_rank spent the most and the least time inside: the
    others wait for the late one. Repeats of one configuration form one row: run is the first of them, iterations counts
    all launches. status is ok, oom or unsupported (nothing measured), or invalid (data arrived corrupted; see error).
    link limits the operation, with its nominal rate in one direction: busbw can be compared with it.
    """

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
    link: str | None = None
    link_bytes_per_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveFit:
    """t = alpha + S*f/beta for one operation, by weighted least squares over its sizes.

    residual_ratio is the RMS of (fitted - measured) / measured. note says if alpha was fixed at 0, or why this is not a
    speed.
    """

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
    """hidden_ratio is the part of the collective that overlapped with matrix products (1 all, 0 none)."""

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
    """A rank, node or link that is significantly and relevantly slower than its peers.

    kind is rank, node or link. confirmed is True if a second turn with other partners agreed. ratio is its bandwidth
    over the median of its peers, or, for a rank that arrives late in a sweep, its time inside collectives over theirs;
    z is the modified z-score of that.
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
    """One pair of ranks of a tournament, both turns combined. ratio is its bandwidth over the median of its kind: pairs
    inside a node are one kind, pairs across nodes another.
    """

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
    """One quantity of one rank. relative is its ratio to the median of its peers (or of a baseline), after removing
    what all share over time; for a temperature, the difference in degrees.

    low and high are the 95 % interval over repeats, None for a single reading. accepted is the accepted band; z is the
    modified z-score among peers.
    """

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
    """One piece of evidence against a node, or a measure that its repeats could not decide. next_command is what an
    operator should try there.
    """

    kind: str
    verdict: str
    text: str
    next_command: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeVerdict:
    """The verdict about one node of one run. against says what it was compared with.

    differences are facts in which it differs from the majority (first is the node's value, second the majority's).
    condition is what its devices and host reported. tokens_per_s is the sum of its ranks, each training alone;
    samples_per_s is None for data without a fixed length, usd_per_mtok without a price for its devices.
    """

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
    tokens_per_s: float | None = None
    samples_per_s: float | None = None
    usd_per_mtok: float | None = None

    @property
    def is_refused(self) -> bool:
        """Whether automation must not use the node: it failed, or one of its measures is undecided. A node that is only
        suspect is a person's decision.
        """
        return any(e.verdict in (FAIL, UNDECIDED) for e in self.evidence)


def worst(verdicts: tuple[str, ...]) -> str:
    """The worst verdict; pass if there is none.

    >>> worst((PASS, SUSPECT))
    'suspect'
    """
    return next((verdict for verdict in WORST_FIRST if verdict in verdicts), PASS)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceGauges:
    """One GPU, or the processors of one host (device None), over the measured steps or loads of all ok runs.

    busy_median_ratio is the driver's busy share of a GPU, or that of all cores. clock_* is the clock of the
    multiprocessors or cores. throttled_ratio is the share of readings while throttled, with throttle_reasons. Values
    never reported are None.
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
    """One device of one run from its first reading to its last, thinned for a chart.

    seconds count from the first measured step or load, or from the first reading if nothing was measured. window is the
    measured part, throttled the intervals while the device was throttled. A missing reading is None. power_cap_w and
    clock_max_hz are the device's limits.
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
