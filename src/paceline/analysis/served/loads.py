"""Latencies of one request, and the loads of a cell: which requests of which launches belong together.

Latency counts from when a request was due, so time spent waiting in the client counts. A sweep or a search applies
several loads to a cell; launches of the same load are merged as raw requests.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from paceline.analysis.grouping import grouped
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
    """TTFT from when it was sent: only the server's part."""
    first = first_token_ns(request)
    return None if first is None or request.sent_ns is None else (first - request.sent_ns) / NS


def first_reasoning_s(request: RequestSample) -> float | None:
    return None if request.first_reasoning_ns is None else (request.first_reasoning_ns - request.due_ns) / NS


def first_answer_s(request: RequestSample) -> float | None:
    """For a model that reasons: until the first token of the answer itself."""
    return None if request.first_ns is None else (request.first_ns - request.due_ns) / NS


def tpot_s(request: RequestSample) -> float | None:
    """Time per output token after the first; None for an answer of one token."""
    first = first_token_ns(request)
    if first is None or request.last_ns is None or tokens_of(request) < 2:
        return None
    return (request.last_ns - first) / NS / (tokens_of(request) - 1)


def latency_s(request: RequestSample) -> float | None:
    return None if request.ended_ns is None else (request.ended_ns - request.due_ns) / NS


def in_time(request: RequestSample, limits: dict[str, float | None]) -> bool:
    """Whether the answer is complete and within every limit."""
    if request.error is not None:
        return False
    measured = {"ttft_s": ttft_s(request), "tpot_s": tpot_s(request), "latency_s": latency_s(request)}
    return all(limit is None or (value := measured[name]) is None or value <= limit for name, limit in limits.items())


# --- a load of a cell ---


def is_scheduled(scenario: str, rate_per_s: float | None) -> bool:
    """Whether requests have due times of their own; loads of a sweep or a search do if they have a rate."""
    return scenario in OPEN or (scenario not in PLAIN_SCENARIOS and rate_per_s is not None)


class Load(NamedTuple):
    """What distinguishes the loads of a sweep, a search or a paired run; the same in every launch."""

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
        parts = [] if self.rate_per_s is None else [f"{self.rate_per_s:g} requests/s"]
        parts += [] if self.concurrency is None else [f"concurrency {self.concurrency}"]
        parts += [] if self.replica is None else [f"replica {self.replica}"]
        return ", ".join(parts) or WHOLE_RUN


@dataclass(frozen=True, eq=False)
class Stretch:
    """One load applied once, in one launch, with its requests in the order they were due. stage is None in records from
    before a run could have several. clients: what the client processes recorded about themselves."""

    record: RunRecord
    stage: StageSample | None
    requests: tuple[RequestSample, ...]
    clients: tuple[ClientSample, ...] = ()

    @property
    def started_ns(self) -> int:
        return self.stage.started_ns if self.stage else 0

    @cached_property
    def ended_ns(self) -> int:
        """When its last request ended; the time after that was waiting for the next load."""
        return max((r.ended_ns for r in self.requests if r.ended_ns is not None), default=self.started_ns)

    @property
    def wall_s(self) -> float:
        return (self.ended_ns - self.started_ns) / NS


@dataclass(frozen=True, eq=False)
class Served:
    """One load of one cell in all launches that applied it; load is None if the cell has only one."""

    stretches: tuple[Stretch, ...]
    load: Load | None = None

    @cached_property
    def records(self) -> tuple[RunRecord, ...]:
        return tuple({id(stretch.record): stretch.record for stretch in self.stretches}.values())

    @cached_property
    def launches(self) -> tuple[Served, ...]:
        """The same load, one object per launch."""
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
        """The scenario of this load: a sweep is by concurrency or by rate, a search by rate."""
        stage = self.stretches[0].stage
        return stage.scenario if stage else self.serving.scenario

    @cached_property
    def late(self) -> int:
        """How many requests failed or exceeded a limit."""
        return sum(not in_time(request, self.limits) for request in self.requests)

    @cached_property
    def limits(self) -> dict[str, float | None]:
        """The requested limits; the first estimate of a search has none."""
        limits = self.serving.limits
        return dict.fromkeys(limits) if self.is_guess else limits

    @property
    def has_limits(self) -> bool:
        return any(limit is not None for limit in self.limits.values())

    @property
    def is_guess(self) -> bool:
        """The closed loop with which a search estimates its first rate: it says nothing about limits."""
        return self.serving.scenario == "search" and self.rate_per_s is None

    @property
    def is_tried(self) -> bool:
        """A load that a search, or a sweep that doubles its rate, tried on its own: nobody requested this one by
        name."""
        serving = self.serving
        doubles = serving.scenario == "sweep" and serving.loads is None and serving.rate_per_s is not None
        return serving.scenario == "search" or doubles

    @property
    def is_open(self) -> bool:
        """Whether requests are due on a schedule: such a load shows what was requested, not the capacity."""
        return is_scheduled(self.scenario, self.rate_per_s)

    @property
    def rate_per_s(self) -> float | None:
        return self._requested.rate_per_s

    @property
    def concurrency(self) -> int | None:
        """As requested: a load of a plain scenario may have a cap that nobody requested."""
        return self._requested.concurrency

    @property
    def _requested(self) -> Load | Serving:
        return self.load if self.load and self.serving.scenario in STAGED_SCENARIOS else self.serving

    @property
    def replica(self) -> int | None:
        """The only replica used; None if all were."""
        return self.load.replica if self.load else None

    @property
    def planned_in_flight(self) -> int | None:
        """Planned requests in flight; None if there is no plan: then the most that was reached counts."""
        stage = self.stretches[0].stage
        planned = stage.concurrency if stage else self.serving.concurrency
        return 1 if self.scenario == "single_stream" else None if self.scenario == "offline" else planned

    def wall_s(self) -> float:
        """From the start of each launch to the end of its last request, summed."""
        return sum(stretch.wall_s for stretch in self.stretches)

    def output_tokens(self) -> int:
        return sum(map(tokens_of, self.answered))

    def prompt_tokens(self) -> int | None:
        """None unless the server reported it for every answer."""
        counts = [request.prompt_tokens for request in self.answered]
        return None if None in counts else sum(count for count in counts if count is not None)

    @property
    def name(self) -> str | None:
        """What distinguishes it from the other loads of its cell."""
        return self.load.text if self.load else None

    @property
    def seed_text(self) -> str:
        """The load itself, whether or not there are others; used as a seed."""
        stage = self.stretches[0].stage
        return self.name or (Load.of(stage).text if stage else WHOLE_RUN)

    def axes(self) -> dict[str, Scalar]:
        """The axes of the cell; for a sweep or a search also the load and its stage."""
        axes = self.stretches[0].record.axes()
        if self.load is None:
            return axes
        stage = min((s.stage.stage for s in self.stretches if s.stage), default=None)
        replica: dict[str, Scalar] = {"replica": self.load.replica} if self.load.replica is not None else {}
        return {
            **axes,
            "rate_per_s": self.load.rate_per_s,
            "concurrency": self.load.concurrency,
            "stage": stage,
            **replica,
        }

    @property
    def runs(self) -> tuple[str, ...]:
        return tuple(record.spec.run_id for record in self.records)

    @property
    def cell(self) -> str:
        return self.spec.cell


def gather(records: Sequence[RunRecord]) -> list[Served]:
    """The loads of all cells, with their launches merged. A search may reach its loads in any order."""
    loads: list[Served] = []
    for launches in grouped((record for record in records if record.requests), lambda r: r.spec.cell).values():
        ordered = sorted(launches, key=lambda record: record.spec.repeat)
        stretches = [stretch for record in ordered for stretch in _stretches(record)]
        by_load: dict[Load, list[Stretch]] = {}
        for stretch in stretches:
            if stretch.stage:
                by_load.setdefault(Load.of(stretch.stage), []).append(stretch)
        serving = launches[0].spec.serving
        if len(by_load) < 2 and not (by_load and serving and serving.scenario in STAGED_SCENARIOS):
            loads.append(Served(tuple(stretches)))
            continue
        parts = sorted(by_load.items(), key=lambda part: min(stretch.requests[0].stage for stretch in part[1]))
        loads += [Served(tuple(found), load) for load, found in parts]
    return loads


def _stretches(record: RunRecord) -> Iterator[Stretch]:
    ordered = sorted(record.requests, key=lambda request: (request.due_ns, request.number))
    stages = {stage.stage: stage for stage in record.stages}
    clients = grouped(record.clients, lambda client: client.stage)
    for number, requests in sorted(grouped(ordered, lambda request: request.stage).items()):
        yield Stretch(record, stages.get(number), tuple(requests), tuple(clients.get(number, ())))
