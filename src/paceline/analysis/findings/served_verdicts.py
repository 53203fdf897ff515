"""Concluded about served models: whether a result counts, by which rules, and what several replicas gain together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.analysis.findings.training import Measurement
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
