"""One load of a served cell, over all its launches: what was asked while it was on, for how long, and how fast the
answers came, resampled so that two of them can be compared.

A run of a plain scenario has one load; a sweep or a search has several, told apart by rate or concurrency; of a paired
run each replica has its own, put on twice.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from paceline import stopping
from paceline.analysis import served, statistics
from paceline.analysis.served_loads import is_guess
from paceline.analysis.statistics import Array, Resampled
from paceline.analysis.token_times import first_token_ns
from paceline.findings import HIGHER, LOWER
from paceline.records import RunRecord
from paceline.serving import PERCENTILE, RequestSample, StageSample
from paceline.spec import RunSpec, Scalar

NS = 1e9
# A load is cut into slices of time of two answers each: from the fewest that tell a spread to the most that tell more.
ANSWERS_PER_SLICE, FEWEST_SLICES, MOST_SLICES = 2, 8, 256
TOKENS_PER_S, JOULES = "output_tokens_per_s", "joules_per_output_token"
LATENCIES: Mapping[str, tuple[Callable[[RequestSample], float | None], float]] = {
    "ttft_p50_s": (served.ttft_s, 50),
    "ttft_p99_s": (served.ttft_s, 99),
    "tpot_p50_s": (served.tpot_s, 50),
    "tpot_p99_s": (served.tpot_s, 99),
}
# Metrics by which two loads are compared: unit, direction.
COMPARED = {TOKENS_PER_S: ("tokens/s", HIGHER), **dict.fromkeys(LATENCIES, ("s", LOWER))}


class Key(NamedTuple):
    """What tells the loads of one run apart; all None for a record that names no stage."""

    rate_per_s: float | None = None
    concurrency: int | None = None
    replica: int | None = None

    @property
    def text(self) -> str:
        """`concurrency 4`, `2.5 requests/s`, `replica 1`."""
        rate = None if self.rate_per_s is None else f"{self.rate_per_s:g} requests/s"
        known = (rate, _named("concurrency", self.concurrency), _named("replica", self.replica))
        return ", ".join(filter(None, known)) or "the whole run"


def _named(word: str, value: int | None) -> str | None:
    return None if value is None else f"{word} {value}"


@dataclass(frozen=True, slots=True, eq=False)
class Launch:
    """The requests of one load in one launch in the order they were due, and when it was on (nanoseconds)."""

    record: RunRecord
    requests: tuple[RequestSample, ...]
    spans: tuple[tuple[int, int], ...]
    stages: tuple[StageSample, ...] = ()

    @property
    def answered(self) -> list[RequestSample]:
        return [request for request in self.requests if request.error is None]

    @property
    def seconds(self) -> float:
        return sum(end - start for start, end in self.spans) / NS


@dataclass(frozen=True, slots=True, eq=False)
class Load:
    """One load of one cell. alone: the cell has no other, so that it needs no name."""

    key: Key
    alone: bool
    launches: tuple[Launch, ...]

    @property
    def spec(self) -> RunSpec:
        return self.launches[0].record.spec

    @property
    def runs(self) -> tuple[str, ...]:
        return tuple(launch.record.spec.run_id for launch in self.launches)

    @property
    def requests(self) -> list[RequestSample]:
        return [request for launch in self.launches for request in launch.requests]

    @property
    def answered(self) -> list[RequestSample]:
        return [request for launch in self.launches for request in launch.answered]

    @property
    def axes(self) -> dict[str, Scalar]:
        own = {} if self.alone else {name: value for name, value in self.key._asdict().items() if value is not None}
        return {**self.spec.axes(), **own}

    @property
    def name(self) -> str | None:
        return None if self.alone else self.key.text

    def output_tokens(self) -> int:
        return sum(map(served.tokens_of, self.answered))

    def prompt_tokens(self) -> int | None:
        """None unless the server told it of every answer."""
        told = [request.prompt_tokens for request in self.answered]
        return None if None in told else sum(count for count in told if count is not None)


def gather(records: Sequence[RunRecord]) -> list[Load]:
    """Every load of every cell, in the order of time; launches of one cell by repeat."""
    found: defaultdict[tuple[str, Key], list[Launch]] = defaultdict(list)
    for record in sorted(records, key=lambda r: (r.started_at, r.spec.repeat)):
        for key, launch in _launches(record):
            found[record.spec.cell, key].append(launch)
    cells = [cell for cell, _ in found]
    return [Load(key, cells.count(cell) == 1, tuple(each)) for (cell, key), each in found.items()]


def believed(records: Sequence[RunRecord]) -> list[Load]:
    """Those whose client can be believed in every launch: a search goes on until it cannot."""
    return [load for load in gather(records) if not any(map(_is_doubted, load.launches))]


def _is_doubted(launch: Launch) -> bool:
    doubts = served.client_doubts(launch.record)
    return any(number in doubts for number in {request.stage for request in launch.requests})


def _launches(record: RunRecord) -> list[tuple[Key, Launch]]:
    by_stage: defaultdict[int, list[RequestSample]] = defaultdict(list)
    for request in sorted(record.requests, key=lambda r: (r.stage, r.due_ns, r.number)):
        by_stage[request.stage].append(request)
    stages: dict[Key, list[StageSample]] = {}
    for stage in sorted(record.stages, key=lambda s: s.stage):
        if by_stage.get(stage.stage):
            stages.setdefault(Key(stage.rate_per_s, stage.concurrency, stage.replica), []).append(stage)
    if not stages:
        whole = tuple(request for requests in by_stage.values() for request in requests)
        end = max((request.ended_ns or 0 for request in whole), default=0)
        return [(Key(), Launch(record, whole, ((0, end),)))] if whole else []
    return [(key, _launch(record, each, by_stage)) for key, each in stages.items()]


def _launch(
    record: RunRecord, stages: Sequence[StageSample], by_stage: Mapping[int, Sequence[RequestSample]]
) -> Launch:
    """A stage that was left while requests were still out goes on until the last of them ended."""
    spans = []
    for stage in stages:
        ended = max((request.ended_ns or 0 for request in by_stage[stage.stage]), default=0)
        spans.append((stage.started_ns, max(stage.ended_ns, ended)))
    requests = tuple(request for stage in stages for request in by_stage[stage.stage])
    return Launch(record, requests, tuple(spans), tuple(stages))


# --- how fast ---


def estimate(load: Load, metric: str) -> Resampled | None:
    """One of COMPARED with its spread; None where too little was answered to tell one."""
    seed = statistics.seed_of(load.spec.cell, load.key.text, metric)
    if metric == TOKENS_PER_S:
        sliced = [rows for launch in load.launches if len(rows := _slices(launch))]
        if not sliced:
            return None
        return statistics.ratio_of_sums(sliced, statistics.resample_sums(sliced, seed), 0, 1)
    quantity, percent = LATENCIES[metric]
    values = [_known(launch, quantity) for launch in load.launches]
    return statistics.resampled_percentile([x for x in values if len(x)], percent, seed)


def value(load: Load, metric: str) -> float | None:
    """The same without its spread."""
    if metric == TOKENS_PER_S:
        seconds = sum(launch.seconds for launch in load.launches)
        return load.output_tokens() / seconds if seconds > 0 else None
    quantity, percent = LATENCIES[metric]
    values = np.concatenate([_known(launch, quantity) for launch in load.launches])
    return statistics.percentile(values, percent)


def _known(launch: Launch, quantity: Callable[[RequestSample], float | None]) -> Array:
    return np.array([value for request in launch.answered if (value := quantity(request)) is not None])


def _slices(launch: Launch) -> Array:
    """Tokens and seconds of every slice of the load. Tokens of an answer lie evenly between its first and its last."""
    answered = launch.answered
    if not answered or launch.seconds <= 0:
        return np.empty((0, 2))
    tokens = np.array([served.tokens_of(request) for request in answered], dtype=np.float64)
    last = np.array([request.last_ns or request.ended_ns or 0 for request in answered], dtype=np.float64)
    first = np.array([first_token_ns(request) or request.ended_ns or 0 for request in answered], dtype=np.float64)
    count = min(max(len(answered) // ANSWERS_PER_SLICE, FEWEST_SLICES), MOST_SLICES)
    rows = []
    for start, end in launch.spans:
        edges = np.linspace(start, end, count + 1)
        made = np.array([_made_until(edge, tokens, first, last) for edge in edges])
        rows.append(np.column_stack([np.diff(made), np.diff(edges) / NS]))
    return np.vstack(rows)


def _made_until(moment: float, tokens: Array, first: Array, last: Array) -> float:
    """The first token when it came; the others as time passes from it to the last."""
    length = np.maximum(last - first, 1.0)
    share = np.clip((moment - first) / length, 0.0, 1.0)
    return float(((moment >= first) * np.minimum(tokens, 1.0) + share * np.maximum(tokens - 1.0, 0.0)).sum())


# --- the load that limits allow ---


class Kept(NamedTuple):
    """Whether a load kept its limits, and by what this is known; ok is None where it has none. proved: requests were
    enough to tell it of the 99th percentile."""

    ok: bool | None
    text: str
    proved: bool = False


def kept(load: Load) -> Kept:
    """By early stopping where requests are enough; of fewer, by the share that was late."""
    serving = load.spec.serving
    assert serving is not None
    requests = load.requests
    if all(limit is None for limit in serving.limits.values()):
        return Kept(None, "no limits were set")
    late, count = sum(not served.in_time(request, serving.limits) for request in requests), len(requests)
    allowed = stopping.late_allowed(count, PERCENTILE)
    if allowed is not None:
        return Kept(late <= allowed, f"{late} of {count} requests were late or failed, {allowed} may be", True)
    few = f"{late} of {count} requests were late or failed; so few prove nothing about the 99th percentile"
    return Kept(late <= (1 - PERCENTILE) * count, few)


def at_limits(found: Sequence[Load]) -> tuple[Load, Kept] | None:
    """Of the loads of one cell the one with the most tokens a second that kept its limits, by proof where any has it;
    of a cell with one load that one, kept or not. None where several were put on and none kept them, and where a search
    came no further than its guess."""
    judged = [(load, kept(load)) for load in found if not _guesses(load)]
    if len(judged) == 1:
        return judged[0]
    standing = [each for each in judged if each[1].ok is not False]
    return max(standing, key=lambda each: (each[1].proved, value(each[0], TOKENS_PER_S) or 0.0), default=None)


def _guesses(load: Load) -> bool:
    return load.spec.serving is not None and is_guess(load.spec.serving, load.key.rate_per_s)
