"""Findings about inference runs: verdicts, accuracy, comparisons of replicas and engines, and curves for charts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.analysis.findings.compare import Differing
from paceline.analysis.findings.training import Check, Comparison, Measurement
from paceline.errors import Scalar

# The only text that may name MLPerf.
LOADGEN_LABEL = "LoadGen-rule run, not an MLPerf(R) result"
KEPT, NOT_KEPT, UNDECIDED = "kept", "not kept", "undecided"
CLIENT = "client"
VALID, INVALID, INVALID_CLIENT = "VALID", "INVALID", f"INVALID({CLIENT})"
UNDECIDED_GAIN = "no verdict"


def verdict_text(verdict: str, reasons: Sequence[str]) -> str:
    """A verdict with its reasons.

    >>> verdict_text(INVALID_CLIENT, ["client: sent up to 5.0 ms late"])
    'INVALID(client): sent up to 5.0 ms late'
    """
    repeated = f"{CLIENT}: " if verdict == INVALID_CLIENT else ""
    return f"{verdict}: {'; '.join(reason.removeprefix(repeated) for reason in reasons)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One line of a checklist. outcome is KEPT, NOT_KEPT, or UNDECIDED if the record cannot decide it."""

    name: str
    asked: str
    seen: str
    outcome: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CeilingUse:
    """How close the busiest second of a load came to the client's ceiling measured by `selftest`.

    ratio and all ceiling values are None if no such client was measured; text says it in words. is_near is a warning: a
    client this close to its ceiling may itself have been the bottleneck.
    """

    events_per_s: float | None
    ratio: float | None
    ceiling_events_per_s: float | None
    ceiling_streams: int | None
    measured_at_s: float | None
    text: str
    is_near: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedVerdict:
    """Whether one load of one cell is valid: VALID, INVALID for the reasons, or INVALID(client) if only the client
    failed.

    late and allowed refer to the limits at the 99th percentile, None without limits; allowed is also None if there were
    too few requests. label and rules are for runs by LoadGen's rules only, accuracy is their rule about scores.
    left_out are launches that were not measured, each with its reason. ceiling is the share of the client's ceiling
    that the load used; it is informative only.

    is_believed says whether the numbers are accepted: missed limits are a result about the server, while a late client
    or uncounted failures make the numbers unreliable. Rejected numbers are shown but used nowhere else. fails says that
    the load was requested by name and rejected, so the exit code must report it. advice says what to do next if it is
    not VALID. headroom is what was known before the load about the limit of its client, of the worst launch.
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
    advice: tuple[str, ...] = ()
    headroom: str | None = None
    headroom_grade: str | None = None

    @property
    def is_valid(self) -> bool:
        return not self.reasons

    def text(self, most: int | None = None) -> str:
        """The verdict and its first reasons (all by default); empty if VALID."""
        return verdict_text(self.verdict, self.reasons[:most]) if self.reasons else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaShare:
    """One replica's part of a load. Rates are over its own time, from the start of the load to its last answer (or its
    death).

    alone_tokens_per_s is from a run in which only this replica was asked. busy_ratio is the share of the time in which
    it had a request. died_s counts from the start of the load.
    """

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
    """Several replicas under one load.

    speedup is the combined rate over that of the best replica: alone if a paired run measured it (is_paired), else its
    own rate in this run, where the load may have limited it. efficiency is speedup over the number of replicas. Both
    are None for an open-loop load, whose rate is given. straggler_s is how long the last replica worked alone,
    straggler_ratio its share of the time, uneven_ratio the share in which not all replicas had a request. over says
    what speedup is relative to; text is all of it in sentences.
    """

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
    """Throughput of the dynamic partition over the static one, for cells that differ in nothing else.

    verdict is about dynamic: better, worse, equal or inconclusive; UNDECIDED_GAIN if one of them has a single launch
    (low and high are then None).
    """

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
    """Predicted time for the whole dataset, from the samples that were asked; reason says why it is missing."""

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
    """A kind of failure. detail is the message of one of them, or None."""

    name: str
    count: int
    detail: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOfRun:
    """One load of a run; name is None if it is the only one. late is None without limits. latencies are median and 99th
    percentile in seconds over answered requests, None with too few. few names the percentiles that are missing.
    """

    scenario: str
    name: str | None
    requests: int
    failures: tuple[FailureClass, ...]
    late: int | None
    verdict: str
    reasons: tuple[str, ...]
    latencies: Mapping[str, tuple[float | None, float | None]]
    few: tuple[str, ...] = ()
    advice: tuple[str, ...] = ()

    @property
    def failed(self) -> int:
        return sum(each.count for each in self.failures)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaOfRun:
    """One replica of a run. died_s counts from the start of the run, None if it survived; reassigned are its samples
    taken by others. silent_s: when it stopped answering and when it answered again, alternating.
    """

    replica: int
    host: str
    model: str
    requests: int
    failed: int
    died_s: float | None
    reassigned: int
    silent_s: tuple[float, ...] = ()


TTFT, TPOT, LATENCY = "ttft", "tpot", "latency"


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencySpread:
    """Distribution of one latency (ttft, tpot or latency) over the answered requests of a load.

    `seconds[i]` is the quantile at `shares[i]`. Shares increase and end where a single request is left. Percentiles are
    over all requests, with bounds if known; None with too few requests.
    """

    quantity: str
    n: int
    shares: tuple[float, ...]
    seconds: tuple[float, ...]
    p50: tuple[float | None, float | None, float | None]
    p90: tuple[float | None, float | None, float | None]
    p99: tuple[float | None, float | None, float | None]
    limit_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedLoad:
    """One load of a cell over all launches; a sweep or search has several.

    replica is the only one asked, None if all were. late counts requests beyond a limit, None without limits.
    is_believed is that of its verdict.
    """

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
    """One replica over a run, on the time grids of its `ServedTrace`: mean requests in flight, tokens per second, and
    the median TTFT of requests whose first token arrived then (None if none did).
    """

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
    """One launch of a cell over time, from its start.

    seconds are the middles of equal bins for requests in flight, pace_seconds those of longer bins for rates. late
    counts per bin the requests that failed or exceeded a limit. stages are the loads by start time, with rate,
    concurrency, and the only replica asked. is_believed is that of the whole launch.
    """

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
    """The worst client process over all launches of a cell, next to its limits; rejected runs are included.

    schedule_lag_s is None in a closed loop, which has no schedule. unstamped_ratio is the share of answers without
    kernel timestamps, coalesced_ratio the share of events that shared a read with the one before, clock_drift_s how far
    its clocks drifted apart.
    """

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
    """Curves of inference runs for charts. The numbers to quote are measurements."""

    loads: tuple[ServedLoad, ...]
    traces: tuple[ServedTrace, ...]
    audits: tuple[ClientAudit, ...]


PASSED, FAILED, SMOKE = "passed", "failed", "smoke"
AGREES, DIFFERS, UNDECIDED, SILENT = "agrees", "differs", "undecided", "silent"


@dataclass(frozen=True, slots=True, kw_only=True)
class AccuracyTarget:
    """One value that a whole dataset must reach: at least low, and at most high unless that is None."""

    metric: str
    value: float
    low: float
    high: float | None
    ok: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaAnswers:
    """One replica's answers. agreement is about questions that all replicas were asked outside the timed load: agrees
    with or differs from the majority, undecided without a majority, silent without answers; None if they were not
    asked.

    odd of asked answers differ from the majority or have none. scores are empty without reference answers. flag says
    why its speed must not be reported alone; None if there is no reason.
    """

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
    """Answers of one cell. verdict is passed or failed against the targets for the whole set of a known task, smoke for
    anything else that was scored, None if nothing was.
    """

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
        """Replica -> why its speed must not be reported alone."""
        return {each.replica: each.flag for each in self.replicas if each.flag}


FASTER, SLOWER = "faster", "slower"


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedRatio:
    """value(replica) / value(other) over the same samples, its 95 % interval, and the smallest detectable effect.

    verdict is about `replica`: faster, slower, equal or inconclusive; None if the work was not equal. reason explains
    it.
    """

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
    """Two replicas of one cell that answered the same samples in turn. pairs counts samples both answered, dropped
    those that one did not.

    balanced says that both were asked at the same time on average, so a steady drift cancels. flags say why a replica's
    answers make its speed that of other work; differences are known differences of hosts and settings.
    """

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
    """value(cell) / value(other) if the data supports no interval; reason says why."""

    metric: str
    ratio: float
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedPair:
    """Two cells that differ only in their engine, at one load. checks say what had to be equal; comparisons are about
    `cell` and exist only if every check passes, as do those without an interval. flags say why the answers of a side
    make its speed that of other work.
    """

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
    """One side's verdict on a run, with its own numbers in SI units (None if not reported). failed counts incomplete
    answers.
    """

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
    """Two loads of one run over the same replicas: this client's, then LoadGen's on its own schedule.

    They are two samples of one setup, so their numbers also differ by chance. agrees: both verdicts are equal. label is
    for a run by LoadGen's rules, else None.
    """

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
