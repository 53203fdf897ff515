"""One run of a served model, load by load: what became of its requests, before launches are merged."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from paceline.analysis.findings.served import FailureClass, LoadOfRun, ReplicaOfRun
from paceline.analysis.served.loads import Served, gather, latency_s, tpot_s, ttft_s
from paceline.analysis.served.verdicts import verdict_of
from paceline.results.records import RunRecord
from paceline.results.served_samples import RequestSample

NS = 1e9
LATENCIES = {"TTFT": ttft_s, "TPOT": tpot_s, "latency": latency_s}


def loads(record: RunRecord) -> list[LoadOfRun]:
    """In the order they were put on; of a client that is not believed too, whose verdict says so."""
    return [_load(served) for served in gather([record])]


def _load(served: Served) -> LoadOfRun:
    verdict = verdict_of(served)
    return LoadOfRun(
        scenario=served.scenario,
        name=served.name,
        requests=len(served.requests),
        failures=tuple(_failures(served)),
        late=verdict.late,
        verdict=verdict.verdict,
        reasons=verdict.reasons,
        latencies={name: found for name in LATENCIES if (found := _median_and_tail(served, name)) is not None},
    )


def _failures(served: Served) -> Iterator[FailureClass]:
    """The most frequent first, each with the first detail that was told."""
    by_class: dict[str, list[RequestSample]] = {}
    for request in served.requests:
        if request.error is not None:
            by_class.setdefault(request.error, []).append(request)
    for name, found in sorted(by_class.items(), key=lambda each: -len(each[1])):
        detail = next((request.detail for request in found if request.detail), None)
        yield FailureClass(name=name, count=len(found), detail=detail)


def _median_and_tail(served: Served, name: str) -> tuple[float, float] | None:
    values = [value for request in served.answered if (value := LATENCIES[name](request)) is not None]
    if not values:
        return None
    median, tail = np.percentile(values, (50, 99))
    return float(median), float(tail)


def replicas(record: RunRecord) -> list[ReplicaOfRun]:
    """As the engine started or found them, each with the requests that were recorded of it."""
    return [
        ReplicaOfRun(
            replica=each.replica,
            host=each.host,
            model=each.model,
            requests=sum(request.replica == each.replica for request in record.requests),
            failed=sum(request.replica == each.replica and request.error is not None for request in record.requests),
            died_s=None if each.died_ns is None else each.died_ns / NS,
            reassigned=each.reassigned,
        )
        for each in record.replicas
    ]
