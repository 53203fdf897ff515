"""Findings about inference runs: verdicts, accuracy, comparisons of replicas and engines, and curves for charts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.analysis.findings.compare import Differing
from paceline.analysis.findings.training import Check, Comparison, Measurement
from paceline.errors import Scalar

# What such a run is, and is not: the only words in which the other name stands.
LOADGEN_LABEL = "LoadGen-rule run, not an MLPerf(R) result"
KEPT, NOT_KEPT, UNTOLD = "kept", "not kept", "cannot be told"
CLIENT = "client"
VALID, INVALID, INVALID_CLIENT = "VALID", "INVALID", f"INVALID({CLIENT})"
UNDECIDED_GAIN = "no verdict"


def told(verdict: str, reasons: Sequence[str]) -> str:
    """`INVALID(client): sent up to 5.0 ms late`: what the verdict says of all of them no reason says again."""
    said = f"{CLIENT}: " if verdict == INVALID_CLIENT else ""
    return f"{verdict}: {'; '.join(reason.removeprefix(said) for reason in reasons)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One line of a checklist. outcome is KEPT, NOT_KEPT, or UNTOLD where the record holds nothing that could tell."""

    name: str
    asked: str
    seen: str
    outcome: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CeilingUse:
    """How near a load came to what `selftest` had believed this client at, by its busiest second. ratio and all of the
    ceiling are None where none was measured of such a client; text says it in words, or why it is not known. is_near
    warns: a client this near to its ceiling may have been what was measured."""

    events_per_s: float | None
    ratio: float | None
    ceiling_events_per_s: float | None
    ceiling_streams: int | None
    measured_at_s: float | None
    text: str
    is_near: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedVerdict:
    """Whether one load of one cell counts: verdict is VALID, or INVALID for each of the reasons; INVALID(client) where
    it was the client alone that could not be believed.

    late and allowed are of the limits at the 99th percentile, None where there are none; allowed is None too where the
    requests are too few to tell. label and rules are of runs by LoadGen's rules only; accuracy is their rule about
    scores. left_out are launches that were not measured, each with its reason. ceiling is the share of the client's
    ceiling that the load used: it is told, and decides nothing.

    is_believed says whether its numbers are: limits that were not kept are an answer of the server, a client that was
    late or requests that failed uncounted are none. Numbers that are not believed are shown, and are part of nothing
    else. fails says that the load was asked for by name and is not believed, so that the exit code must tell.
    """

    cell: str
    axes: Mapping[str, Scalar]
    verdict: str
    reasons: tuple[str, ...]
    requests: int
    failed: int
    late: int | None
    allowed: int | None
    runs: tuple[str, ...]
    label: str | None = None
    rules: tuple[Rule, ...] = ()
    accuracy: Rule | None = None
    left_out: tuple[str, ...] = ()
    ceiling: CeilingUse | None = None
    is_believed: bool = True
    fails: bool = False

    @property
    def is_valid(self) -> bool:
        return not self.reasons

    def told(self, most: int | None = None) -> str:
        """The verdict and its reasons, all or the first ones; nothing where it is VALID."""
        return told(self.verdict, self.reasons[:most]) if self.reasons else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaShare:
    """What one replica did of a load. Rates are of its own time, from the start of the load to its last answer (or to
    its end, where it died); alone_tokens_per_s is from a run in which it was asked alone. busy_ratio is the share of
    the whole time in which it had a request. died_s counts from the start of the load."""

    replica: int
    host: str | None
    requests: int
    failed: int
    output_tokens_per_s: float | None
    prompt_tokens_per_s: float | None
    busy_ratio: float | None
    finished_s: float
    alone_tokens_per_s: float | None = None
    died_s: float | None = None
    reassigned: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """Several replicas under one load. speedup is the combined rate over that of the best replica: alone where a paired
    run tells it (is_paired), else its own in this run, where the load may have held it back. efficiency is the same
    over as many of the best as there are; both are None for a load that comes by a schedule, which serves what
    it is asked. straggler_s is how long the last replica worked alone, straggler_ratio its share of the time; uneven
    the share in which not all had a request. over says in words what speedup is over, and under how much load that was;
    text says all of it in sentences."""

    cell: str
    axes: Mapping[str, Scalar]
    replicas: tuple[ReplicaShare, ...]
    combined: Measurement
    speedup: Measurement | None
    efficiency: Measurement | None
    best: int | None
    straggler_s: float | None
    straggler_ratio: float | None
    uneven_ratio: float | None
    text: str
    runs: tuple[str, ...]
    is_paired: bool = False
    over: str = "the best one"


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionGain:
    """Tokens a second of the dynamic partition over those of the static one, of cells that differ in nothing else.
    verdict speaks about dynamic: better, worse, tie, or UNDECIDED_GAIN where one of them has a single launch, so that
    low and high are None."""

    cell: str
    other: str
    axes: Mapping[str, Scalar]
    ratio: float
    low: float | None
    high: float | None
    verdict: str
    reason: str
    text: str
    runs: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FullSet:
    """The time that the whole set would take, told from those samples that were asked; reason says why it is not."""

    cell: str
    axes: Mapping[str, Scalar]
    samples: int
    asked: int
    time: Measurement | None
    law: str
    reason: str | None
    runs: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureClass:
    """detail is what was told of one of them, None where nothing was."""

    name: str
    count: int
    detail: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOfRun:
    """name tells it from the other loads of its run, None where it is the only one. late is None without limits.
    latencies are median and 99th percentile in seconds, of those that were answered."""

    scenario: str
    name: str | None
    requests: int
    failures: tuple[FailureClass, ...]
    late: int | None
    verdict: str
    reasons: tuple[str, ...]
    latencies: Mapping[str, tuple[float, float]]

    @property
    def failed(self) -> int:
        return sum(each.count for each in self.failures)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaOfRun:
    """died_s counts from the start of the run, None where it stayed; reassigned are its samples that others took."""

    replica: int
    host: str
    model: str
    requests: int
    failed: int
    died_s: float | None
    reassigned: int


TTFT, TPOT, LATENCY = "ttft", "tpot", "latency"


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencySpread:
    """How one quantity (ttft, tpot or latency) spreads over the answered requests of a load: `seconds[i]` is what the
    share `shares[i]` of them took at most. Shares grow and end where a single request is left: beyond it the data says
    nothing. Percentiles are of all requests, with bounds where these are known."""

    quantity: str
    n: int
    shares: tuple[float, ...]
    seconds: tuple[float, ...]
    p50: tuple[float, float | None, float | None]
    p90: tuple[float, float | None, float | None]
    p99: tuple[float, float | None, float | None]
    limit_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedLoad:
    """One load of a cell, over all launches: a plain scenario has one, a sweep or a search one for each it went
    through. replica is the only one that was asked, None where all were. late counts requests beyond a limit, None
    where there is no limit. is_believed is that of its verdict."""

    cell: str
    axes: Mapping[str, Scalar]
    runs: tuple[str, ...]
    scenario: str
    rate_per_s: float | None
    concurrency: int | None
    replica: int | None
    requests: int
    failed: int
    late: int | None
    output_tokens_per_s: float | None
    requests_per_s: float | None
    spreads: tuple[LatencySpread, ...]
    is_believed: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaTrace:
    """What one replica did over a run, on the grids of its `ServedTrace`: requests in flight (mean of each moment),
    tokens a second, and the median TTFT of the requests whose first token came then (None where none did)."""

    replica: int
    host: str | None
    answered: int
    failed: int
    in_flight: tuple[float, ...]
    tokens_per_s: tuple[float, ...]
    ttft_s: tuple[float | None, ...]
    ttft: LatencySpread | None
    died_s: float | None = None
    reassigned: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedTrace:
    """One launch of a cell over its time, from its start. seconds are the middles of equal moments for what is in
    flight, pace_seconds those of longer ones for rates. late counts by moment the requests that ended beyond a limit or
    failed. stages are the loads by when they began, with their rate, their concurrency, and the only replica that was
    asked. is_believed is that of the whole launch."""

    run: str
    cell: str
    axes: Mapping[str, Scalar]
    scenario: str
    wall_s: float
    seconds: tuple[float, ...]
    pace_seconds: tuple[float, ...]
    replicas: tuple[ReplicaTrace, ...]
    late: tuple[int, ...]
    limited: bool
    stages: tuple[tuple[float, float | None, int | None, int | None], ...] = ()
    is_believed: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientAudit:
    """The worst process of the client over all launches of a cell beside its bounds, of runs that are believed and of
    those that for this reason are not. schedule_lag_s is None in a closed loop, where nothing is due before it is
    sent. unstamped_ratio is of the answers whose times are not the kernel's, coalesced_ratio of the events that shared
    a read with the one before; clock_drift_s is what its clocks moved by against each other."""

    cell: str
    axes: Mapping[str, Scalar]
    runs: tuple[str, ...]
    processes: int
    schedule_lag_s: float | None
    schedule_bound_s: float
    read_lag_s: float | None
    read_bound_s: float
    cpu_ratio: float | None
    cpu_bound_ratio: float
    clock_drift_s: float | None = None
    unstamped_ratio: float | None = None
    coalesced_ratio: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedShapes:
    """All of it, for charts; the numbers to quote are measurements."""

    loads: tuple[ServedLoad, ...]
    traces: tuple[ServedTrace, ...]
    audits: tuple[ClientAudit, ...]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Opinion:
    """One side's word on a run. Figures are its own, in SI units; None where it tells none. failed counts requests
    that were not answered whole."""

    source: str
    verdict: str
    reasons: tuple[str, ...]
    requests: int
    failed: int
    output_tokens_per_s: float | None
    ttft_p99_s: float | None
    tpot_p99_s: float | None
    latency_p99_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadgenVerdict:
    """Two loads of one run over the same replicas: this client's, then LoadGen's by its own schedule. They are two
    samples of one set-up, so that their figures differ by chance too. agrees: both verdicts are the same. label is
    that of a run by LoadGen's rules, None of any other."""

    run: str
    cell: str
    scenario: str
    version: str
    theirs: Opinion
    ours: Opinion
    agrees: bool
    text: str
    axes: Mapping[str, Scalar]
    label: str | None = None
