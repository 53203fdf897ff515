"""One request of a served model, and the loads of a cell: which requests of which launches belong together.

Latency counts from when a request was due: one that waited in the client waited. A sweep or a search puts several loads
on a cell; launches of one load are merged as raw requests.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from paceline.analysis.token_times import first_token_ns, tokens_of
from paceline.records import RunRecord
from paceline.serving import OPEN, PLAIN_SCENARIOS, STAGED_SCENARIOS, RequestSample, Serving, StageSample
from paceline.spec import Scalar

NS = 1e9


# --- one request ---


def ttft_s(request: RequestSample) -> float | None:
    """From when it was due to its first token, of reasoning or of the answer."""
    first = first_token_ns(request)
    return None if first is None else (first - request.due_ns) / NS


def service_ttft_s(request: RequestSample) -> float | None:
    """From when it was sent: what the server alone is to blame for."""
    first = first_token_ns(request)
    return None if first is None or request.sent_ns is None else (first - request.sent_ns) / NS


def first_reasoning_s(request: RequestSample) -> float | None:
    return None if request.first_reasoning_ns is None else (request.first_reasoning_ns - request.due_ns) / NS


def first_answer_s(request: RequestSample) -> float | None:
    """Of a model that reasons: when a reader sees the first word of what was asked for."""
    return None if request.first_ns is None else (request.first_ns - request.due_ns) / NS


def tpot_s(request: RequestSample) -> float | None:
    """Time per further token; an answer of one token has none."""
    first = first_token_ns(request)
    if first is None or request.last_ns is None or tokens_of(request) < 2:
        return None
    return (request.last_ns - first) / NS / (tokens_of(request) - 1)


def latency_s(request: RequestSample) -> float | None:
    return None if request.ended_ns is None else (request.ended_ns - request.due_ns) / NS


def in_time(request: RequestSample, limits: dict[str, float | None]) -> bool:
    """Answered whole, and within every limit that there is."""
    if request.error is not None:
        return False
    seen = {"ttft_s": ttft_s(request), "tpot_s": tpot_s(request), "latency_s": latency_s(request)}
    return all(
        limit is None or value is None or value <= limit for (name, limit) in limits.items() for value in (seen[name],)
    )


# --- a load of a cell ---


def is_scheduled(scenario: str, rate_per_s: float | None) -> bool:
    """Whether requests are due at times of their own; a load of a sweep or a search is, where it has a rate."""
    return scenario in OPEN or (scenario not in PLAIN_SCENARIOS and rate_per_s is not None)


def is_guess(serving: Serving, rate_per_s: float | None) -> bool:
    """The closed loop by which a search guesses where to begin: it says nothing about what keeps limits."""
    return serving.scenario == "search" and rate_per_s is None


class Load(NamedTuple):
    """What tells the loads of a sweep, a search or a paired run apart; the same in every launch."""

    scenario: str
    rate_per_s: float | None
    concurrency: int | None
    replica: int | None

    @classmethod
    def of(cls, stage: StageSample) -> Load:
        return cls(stage.scenario, stage.rate_per_s, stage.concurrency, stage.replica)


@dataclass(frozen=True)
class Stretch:
    """One load put on once, in one launch; stage is None in records of before there were several."""

    record: RunRecord
    stage: StageSample | None
    requests: tuple[RequestSample, ...]

    @property
    def started_ns(self) -> int:
        return self.stage.started_ns if self.stage else 0

    @cached_property
    def wall_s(self) -> float:
        """From its start to the end of its last request."""
        ends = [r.ended_ns - self.started_ns for r in self.requests if r.ended_ns is not None]
        return max(ends, default=0) / NS


@dataclass(frozen=True)
class Served:
    """All launches of one load of one cell; load is None where there was one alone."""

    records: tuple[RunRecord, ...]
    load: Load | None = None

    @cached_property
    def stretches(self) -> tuple[Stretch, ...]:
        return tuple(stretch for record in self.records for stretch in _stretches(record, self.load))

    @cached_property
    def requests(self) -> list[RequestSample]:
        return [request for stretch in self.stretches for request in stretch.requests]

    @cached_property
    def answered(self) -> list[RequestSample]:
        return [request for request in self.requests if request.error is None]

    @property
    def serving(self) -> Serving:
        serving = self.records[0].spec.serving
        assert serving is not None
        return serving

    @property
    def scenario(self) -> str:
        """Of this load: a sweep goes by concurrency or by rate, a search by rate."""
        told = self.stretches[0].stage if self.stretches else None
        return told.scenario if told else self.serving.scenario

    @property
    def limits(self) -> dict[str, float | None]:
        """As asked for; a guess has none to keep."""
        asked = self.serving.limits
        return dict.fromkeys(asked) if is_guess(self.serving, self.rate_per_s) else asked

    @property
    def has_limits(self) -> bool:
        return any(limit is not None for limit in self.limits.values())

    @property
    def is_open(self) -> bool:
        """Whether requests are due by a schedule: such a load serves what it is asked, not what it can."""
        return is_scheduled(self.scenario, self.rate_per_s)

    @property
    def rate_per_s(self) -> float | None:
        return self.load.rate_per_s if self.load else self.serving.rate_per_s

    @property
    def planned_in_flight(self) -> int | None:
        """None where nothing says how many there shall be: offline counts by the most that was reached."""
        stage = self.stretches[0].stage if self.stretches else None
        told = stage.concurrency if stage else self.serving.concurrency
        return 1 if self.scenario == "single_stream" else None if self.scenario == "offline" else told

    def wall_s(self) -> float:
        """From the start of each launch to the end of its last request, summed."""
        return sum(stretch.wall_s for stretch in self.stretches)

    def axes(self) -> dict[str, Scalar]:
        """Those of the cell; of one of several loads its own, and its place among them."""
        axes = self.records[0].spec.axes()
        if self.load is None:
            return axes
        place = min((s.stage.stage for s in self.stretches if s.stage), default=None)
        of_one: dict[str, Scalar] = {"replica": self.load.replica} if self.load.replica is not None else {}
        return {
            **axes,
            "rate_per_s": self.load.rate_per_s,
            "concurrency": self.load.concurrency,
            "stage": place,
            **of_one,
        }

    @property
    def runs(self) -> tuple[str, ...]:
        return tuple(record.spec.run_id for record in self.records)

    @property
    def cell(self) -> str:
        return self.records[0].spec.cell


def _stretches(record: RunRecord, load: Load | None) -> Iterator[Stretch]:
    by_stage: defaultdict[int, list[RequestSample]] = defaultdict(list)
    for request in record.requests:
        by_stage[request.stage].append(request)
    stages = {stage.stage: stage for stage in record.stages}
    for number in sorted(by_stage):
        stage = stages.get(number)
        if load is None or (stage is not None and Load.of(stage) == load):
            yield Stretch(record, stage, tuple(by_stage[number]))


def gather(records: Sequence[RunRecord]) -> list[Served]:
    """Launches by cell, and of a sweep, a search or a paired run by load: a search comes to one in any order."""
    by_cell: defaultdict[str, list[RunRecord]] = defaultdict(list)
    for record in records:
        if record.requests:
            by_cell[record.spec.cell].append(record)
    return [served for found in by_cell.values() for served in _by_load(tuple(sorted(found, key=_repeat)))]


def _repeat(record: RunRecord) -> int:
    return record.spec.repeat


def _by_load(records: tuple[RunRecord, ...]) -> list[Served]:
    stages = sorted((stage for record in records for stage in record.stages), key=lambda stage: stage.stage)
    loads = dict.fromkeys(map(Load.of, stages))
    serving = records[0].spec.serving
    if len(loads) < 2 and not (loads and serving and serving.scenario in STAGED_SCENARIOS):
        return [Served(records)]
    return [served for load in loads if (served := Served(records, load)).requests]
