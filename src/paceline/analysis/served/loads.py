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

from paceline.analysis.served.token_times import first_token_ns, tokens_of
from paceline.errors import Scalar
from paceline.experiment.serving import OPEN, PLAIN_SCENARIOS, STAGED_SCENARIOS, Serving
from paceline.experiment.spec import RunSpec
from paceline.results.records import RunRecord
from paceline.results.served_samples import ClientSample, RequestSample, StageSample

NS = 1e9
WHOLE_RUN = "the whole run"


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


class Load(NamedTuple):
    """What tells the loads of a sweep, a search or a paired run apart; the same in every launch."""

    scenario: str
    rate_per_s: float | None
    concurrency: int | None
    replica: int | None

    @classmethod
    def of(cls, stage: StageSample) -> Load:
        return cls(stage.scenario, stage.rate_per_s, stage.concurrency, stage.replica)

    @property
    def text(self) -> str:
        """`concurrency 4`, `2.5 requests/s`, `replica 1`."""
        rate = None if self.rate_per_s is None else f"{self.rate_per_s:g} requests/s"
        known = (rate, _named("concurrency", self.concurrency), _named("replica", self.replica))
        return ", ".join(filter(None, known)) or WHOLE_RUN


def _named(word: str, value: int | None) -> str | None:
    return None if value is None else f"{word} {value}"


@dataclass(frozen=True, eq=False)
class Stretch:
    """One load put on once, in one launch, its requests in the order they were due; stage is None in records of before
    there were several. clients are what the client's processes tell of themselves during it."""

    record: RunRecord
    stage: StageSample | None
    requests: tuple[RequestSample, ...]
    clients: tuple[ClientSample, ...] = ()

    @property
    def number(self) -> int:
        """By which clients tell what they saw of it."""
        return self.requests[0].stage

    @property
    def started_ns(self) -> int:
        return self.stage.started_ns if self.stage else 0

    @cached_property
    def ended_ns(self) -> int:
        """When its last request ended: what came after was waiting for the next load."""
        return max((r.ended_ns for r in self.requests if r.ended_ns is not None), default=self.started_ns)

    @property
    def wall_s(self) -> float:
        return (self.ended_ns - self.started_ns) / NS


@dataclass(frozen=True, eq=False)
class Served:
    """One load of one cell in all launches in which it was put on; load is None where the cell has no other."""

    stretches: tuple[Stretch, ...]
    load: Load | None = None

    @cached_property
    def records(self) -> tuple[RunRecord, ...]:
        return tuple({id(stretch.record): stretch.record for stretch in self.stretches}.values())

    @cached_property
    def launches(self) -> tuple[Served, ...]:
        """The same load of each launch by itself."""
        return tuple(
            Served(tuple(stretch for stretch in self.stretches if stretch.record is record), self.load)
            for record in self.records
        )

    @cached_property
    def requests(self) -> list[RequestSample]:
        return [request for stretch in self.stretches for request in stretch.requests]

    @cached_property
    def answered(self) -> list[RequestSample]:
        return [request for request in self.requests if request.error is None]

    @property
    def spec(self) -> RunSpec:
        return self.stretches[0].record.spec

    @property
    def serving(self) -> Serving:
        assert self.spec.serving is not None
        return self.spec.serving

    @property
    def scenario(self) -> str:
        """Of this load: a sweep goes by concurrency or by rate, a search by rate."""
        told = self.stretches[0].stage
        return told.scenario if told else self.serving.scenario

    @property
    def limits(self) -> dict[str, float | None]:
        """As asked for; a guess has none to keep."""
        asked = self.serving.limits
        return dict.fromkeys(asked) if self.is_guess else asked

    @property
    def has_limits(self) -> bool:
        return any(limit is not None for limit in self.limits.values())

    @property
    def is_guess(self) -> bool:
        """The closed loop by which a search guesses where to begin: it says nothing about what keeps limits."""
        return self.serving.scenario == "search" and self.rate_per_s is None

    @property
    def is_tried(self) -> bool:
        """One of those that a search, or a sweep that doubles its rate, goes through until the client or the server
        gives up: nobody asked for this one by name."""
        asked = self.serving
        doubles = asked.scenario == "sweep" and asked.loads is None and asked.rate_per_s is not None
        return asked.scenario == "search" or doubles

    @property
    def is_open(self) -> bool:
        """Whether requests are due by a schedule: such a load serves what it is asked, not what it can."""
        return is_scheduled(self.scenario, self.rate_per_s)

    @property
    def rate_per_s(self) -> float | None:
        return self._asked.rate_per_s

    @property
    def concurrency(self) -> int | None:
        """As asked for: of a plain scenario a load may have a cap that nobody asked for."""
        return self._asked.concurrency

    @property
    def _asked(self) -> Load | Serving:
        return self.load if self.load and self.serving.scenario in STAGED_SCENARIOS else self.serving

    @property
    def replica(self) -> int | None:
        """The only one that was asked; None where all were."""
        return self.load.replica if self.load else None

    @property
    def planned_in_flight(self) -> int | None:
        """None where nothing says how many there shall be: offline counts by the most that was reached."""
        stage = self.stretches[0].stage
        told = stage.concurrency if stage else self.serving.concurrency
        return 1 if self.scenario == "single_stream" else None if self.scenario == "offline" else told

    def wall_s(self) -> float:
        """From the start of each launch to the end of its last request, summed."""
        return sum(stretch.wall_s for stretch in self.stretches)

    def output_tokens(self) -> int:
        return sum(map(tokens_of, self.answered))

    def prompt_tokens(self) -> int | None:
        """None unless the server told it of every answer."""
        told = [request.prompt_tokens for request in self.answered]
        return None if None in told else sum(count for count in told if count is not None)

    @property
    def name(self) -> str | None:
        """What tells it from the other loads of its cell."""
        return self.load.text if self.load else None

    @property
    def words(self) -> str:
        """The load itself, whether or not there are others: what random draws about it are seeded with."""
        stage = self.stretches[0].stage
        return self.name or (Load.of(stage).text if stage else WHOLE_RUN)

    def axes(self) -> dict[str, Scalar]:
        """Of the cell; of a sweep or a search also the load and its place among them."""
        axes = self.spec.axes()
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
        return self.spec.cell


def gather(records: Sequence[RunRecord]) -> list[Served]:
    """Launches by cell, and of a sweep, a search or a paired run by load: a search comes to one in any order."""
    by_cell: defaultdict[str, list[RunRecord]] = defaultdict(list)
    for record in records:
        if record.requests:
            by_cell[record.spec.cell].append(record)
    return [served for found in by_cell.values() for served in _by_load(sorted(found, key=_repeat))]


def _repeat(record: RunRecord) -> int:
    return record.spec.repeat


def _by_load(records: Sequence[RunRecord]) -> list[Served]:
    stretches = [stretch for record in records for stretch in _stretches(record)]
    found: defaultdict[Load, list[Stretch]] = defaultdict(list)
    for stretch in stretches:
        if stretch.stage:
            found[Load.of(stretch.stage)].append(stretch)
    serving = records[0].spec.serving
    if len(found) < 2 and not (found and serving and serving.scenario in STAGED_SCENARIOS):
        return [Served(tuple(stretches))]
    order = sorted(found, key=lambda load: min(stretch.number for stretch in found[load]))
    return [Served(tuple(found[load]), load) for load in order]


def _stretches(record: RunRecord) -> Iterator[Stretch]:
    by_stage: defaultdict[int, list[RequestSample]] = defaultdict(list)
    for request in sorted(record.requests, key=lambda request: (request.due_ns, request.number)):
        by_stage[request.stage].append(request)
    stages = {stage.stage: stage for stage in record.stages}
    clients = clients_by_stage(record)
    for number in sorted(by_stage):
        yield Stretch(record, stages.get(number), tuple(by_stage[number]), tuple(clients.get(number, ())))


def clients_by_stage(record: RunRecord) -> dict[int, list[ClientSample]]:
    found: defaultdict[int, list[ClientSample]] = defaultdict(list)
    for client in record.clients:
        found[client.stage].append(client)
    return dict(found)
