"""Served models: latencies from the schedule, rates of what was completed, and whether any of it may be believed.

All of it from the raw requests of all launches of a cell, merged; never from percentiles of parts. Latency counts from
when a request was due: one that waited in the client waited. A percentile has distribution-free 95 % bounds by order
statistics; one whose bounds reach beyond what was observed has none.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from paceline import stopping
from paceline.findings import HIGHER, LOWER, Measurement
from paceline.records import RunRecord
from paceline.serving import (
    MOST_CPU_RATIO,
    MOST_READ_LAG_S,
    MOST_SCHEDULE_LAG_OF_TTFT,
    MOST_SCHEDULE_LAG_S,
    OPEN,
    PERCENTILE,
    ClientSample,
    RequestSample,
)

NS = 1e9
PERCENTILES = (50, 90, 95, 99)
Z_95 = 1.959964


# --- one request ---


def ttft_s(request: RequestSample) -> float | None:
    """From when it was due to its first token."""
    return None if request.first_ns is None else (request.first_ns - request.due_ns) / NS


def service_ttft_s(request: RequestSample) -> float | None:
    """From when it was sent: what the server alone is to blame for."""
    missing = request.first_ns is None or request.sent_ns is None
    return None if missing else (request.first_ns - request.sent_ns) / NS  # type: ignore[operator]


def tokens_of(request: RequestSample) -> int:
    """The server's own count; where it gives none, the events with content."""
    return request.pieces if request.tokens is None else request.tokens


def tpot_s(request: RequestSample) -> float | None:
    """Time per further token; an answer of one token has none."""
    if request.first_ns is None or request.last_ns is None or tokens_of(request) < 2:
        return None
    return (request.last_ns - request.first_ns) / NS / (tokens_of(request) - 1)


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


# --- a cell ---


@dataclass(frozen=True, slots=True)
class Served:
    """All launches of one cell."""

    records: tuple[RunRecord, ...]

    @property
    def requests(self) -> list[RequestSample]:
        return [request for record in self.records for request in record.requests]

    @property
    def answered(self) -> list[RequestSample]:
        return [request for request in self.requests if request.error is None]

    @property
    def limits(self) -> dict[str, float | None]:
        serving = self.records[0].spec.serving
        assert serving is not None
        return serving.limits

    def wall_s(self) -> float:
        """From the start of each launch to the end of its last request, summed."""
        return sum(max((r.ended_ns or 0 for r in record.requests), default=0) / NS for record in self.records)


def gather(records: Sequence[RunRecord]) -> list[Served]:
    by_cell: defaultdict[str, list[RunRecord]] = defaultdict(list)
    for record in records:
        if record.requests:
            by_cell[record.spec.cell].append(record)
    return [Served(tuple(sorted(found, key=lambda r: r.spec.repeat))) for found in by_cell.values()]


def percentile_bounds(values: Sequence[float], percent: float) -> tuple[float, float | None, float | None]:
    """The percentile and its 95 % bounds: the order statistics whose ranks a binomial count would not leave."""
    ordered = sorted(values)
    n, share = len(ordered), percent / 100
    value = float(np.percentile(ordered, percent))
    reach = Z_95 * math.sqrt(n * share * (1 - share))
    low, high = math.floor(n * share - reach), math.ceil(n * share + reach)
    return value, ordered[low - 1] if low >= 1 else None, ordered[high - 1] if high <= n else None


Quantity = Callable[[RequestSample], float | None]
LATENCIES: dict[str, Quantity] = {
    "ttft": ttft_s,
    "service_ttft": service_ttft_s,
    "tpot": tpot_s,
    "latency": latency_s,
}
RATES = {
    "output_tokens_per_s": ("tokens/s", HIGHER),
    "prompt_tokens_per_s": ("tokens/s", HIGHER),
    "requests_per_s": ("requests/s", HIGHER),
    "goodput_requests_per_s": ("requests/s", HIGHER),
    "goodput_tokens_per_s": ("tokens/s", HIGHER),
    "goodput_ratio": ("ratio", HIGHER),
    "failed_ratio": ("ratio", LOWER),
}
METRICS = {f"{name}_p{p}_s": ("s", LOWER) for name in (*LATENCIES, "itl") for p in PERCENTILES} | RATES


def measure(served: Served) -> Iterator[Measurement]:
    for name, quantity in LATENCIES.items():
        values = [value for request in served.answered if (value := quantity(request)) is not None]
        yield from _percentiles(served, name, values)
    yield from _percentiles(served, "itl", [gap / NS for r in served.answered for gap in r.token_ns])
    for name, (unit, better) in RATES.items():
        yield _measurement(served, name, unit, better, _rate(served, name), len(served.requests))


def _percentiles(served: Served, name: str, values: Sequence[float]) -> Iterator[Measurement]:
    for percent in PERCENTILES:
        found = percentile_bounds(values, percent) if values else (None, None, None)
        unit, better = METRICS[f"{name}_p{percent}_s"]
        yield _measurement(served, f"{name}_p{percent}_s", unit, better, found, len(values))


def _rate(served: Served, name: str) -> tuple[float | None, float | None, float | None]:
    """Of the whole run; bounds are those of its launches' own values, where there are three or more."""
    each = [_rate_of(Served((record,)), name) for record in served.records]
    known = [value for value in each if value is not None]
    low, high = (min(known), max(known)) if len(known) >= 3 else (None, None)
    return _rate_of(served, name), low, high


def _rate_of(served: Served, name: str) -> float | None:
    wall, requests, answered = served.wall_s(), served.requests, served.answered
    good = [request for request in answered if in_time(request, served.limits)]
    if name == "failed_ratio":
        return 1 - len(answered) / len(requests)
    if name == "goodput_ratio":
        return len(good) / len(requests) if any(limit is not None for limit in served.limits.values()) else None
    if wall <= 0:
        return None
    counted = good if name.startswith("goodput") else answered
    if name.endswith("requests_per_s"):
        return len(counted) / wall
    if name == "prompt_tokens_per_s":
        told = [request.prompt_tokens for request in answered]
        return None if None in told or not told else sum(t for t in told if t is not None) / wall
    return sum(map(tokens_of, counted)) / wall


def _measurement(
    served: Served,
    metric: str,
    unit: str,
    better: str,
    found: tuple[float | None, float | None, float | None],
    n: int,
) -> Measurement:
    value, low, high = found
    spec = served.records[0].spec
    return Measurement(
        metric=metric,
        unit=unit,
        better=better,
        cell=spec.cell,
        value=value,
        low=low,
        high=high,
        n=n,
        launches=len(served.records),
        axes=spec.axes(),
        runs=tuple(record.spec.run_id for record in served.records),
    )


# --- may it be believed ---


def client_problems(clients: Sequence[ClientSample], requests: Sequence[RequestSample], scenario: str) -> list[str]:
    """Why the client itself may have been what was measured. Of a closed loop nothing is due before it is sent."""
    first = [value for request in requests if (value := ttft_s(request)) is not None]
    bound = max(MOST_SCHEDULE_LAG_S, MOST_SCHEDULE_LAG_OF_TTFT * float(np.median(first)) if first else 0.0)
    found = []
    for client in clients:
        late, read = (client.schedule_lag_p99_ns or 0) / NS, (client.read_lag_p99_ns or 0) / NS
        cpu = client.cpu_s / client.wall_s if client.wall_s > 0 else 0.0
        if scenario in OPEN and late > bound:
            found.append(f"sent up to {late * 1e3:.1f} ms late (p99; at most {bound * 1e3:.1f} ms)")
        if read > MOST_READ_LAG_S:
            found.append(f"read up to {read * 1e3:.1f} ms late (p99; at most {MOST_READ_LAG_S * 1e3:.0f} ms)")
        if cpu > MOST_CPU_RATIO:
            found.append(f"used {cpu:.0%} of a core (at most {MOST_CPU_RATIO:.0%})")
    return [f"client: {text}" for text in dict.fromkeys(found)]


def rule_problems(served: Served) -> list[str]:
    """Why the limits of the scenario do not count as kept, by early stopping; none where there are no limits."""
    limits = served.limits
    if all(limit is None for limit in limits.values()):
        return []
    late = sum(not in_time(request, limits) for request in served.requests)
    count = len(served.requests)
    allowed = stopping.late_allowed(count, PERCENTILE)
    if allowed is None:
        least = stopping.requests_needed(0, PERCENTILE)
        return [f"{count} requests tell nothing about the 99th percentile: at least {least} are needed"]
    return [f"{late} of {count} requests were late or failed; {allowed} may be"] if late > allowed else []


def exactly_once(record: RunRecord) -> list[str]:
    """What a run's own numbers say against it: samples that were answered twice, or never."""
    answered = Counter(request.number for request in record.requests if request.error is None)
    twice = sorted(number for number, count in answered.items() if count > 1)
    return [f"requests {', '.join(map(str, twice[:5]))} were answered more than once"] if twice else []


def problems(record: RunRecord) -> list[str]:
    """Why a run of this workload must not be believed. Limits that were not kept are its answer, not a problem."""
    if not record.requests:
        return ["nothing was recorded"]
    if not any(request.error is None for request in record.requests):
        classes = Counter(str(request.error) for request in record.requests)
        return [f"no request was answered: {', '.join(f'{name} {count} times' for name, count in classes.items())}"]
    assert record.spec.serving is not None
    scenario = record.spec.serving.scenario
    return [*exactly_once(record), *client_problems(record.clients, record.requests, scenario)]
