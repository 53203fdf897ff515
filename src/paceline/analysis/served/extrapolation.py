"""The time the whole set would take, from a part of it that was asked at once.

    T(N) = T(n) + (N - n) x tokens per request / steady tokens per second

T(n) is the whole time of the n requests that were asked, with its ramp and its end; only what is added goes at the
steady rate. Of a static partition each replica has its share of the N and its own part of that rate, and the slowest
one ends last. The interval is of the tokens of requests and of the steady rate, blocks of which are drawn again in
every launch, and of all of it together where there are several launches, which are drawn again too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paceline.analysis.findings.served import FullSet
from paceline.analysis.served import measurements as measured
from paceline.analysis.served.fleets import replicas_of
from paceline.analysis.served.loads import Served, Stretch
from paceline.analysis.served.mlperf_rules import SET_NAME, WHOLE_SET
from paceline.analysis.served.token_times import Steady, most_in_flight, steady, tokens_of
from paceline.analysis.statistics.intervals import (
    Array,
    Resampled,
    block_count,
    bounded,
    components,
    from_components,
    redrawn_sums,
    resample_sums,
    seed_of,
    unbounded,
)
from paceline.results.served_samples import RequestSample

# Every place in flight must have been used so often, else what was seen is one burst and no rate.
LEAST_TURNS = 3
# Of a load that was full for less of its time, most is ramp and end, which the law does not know.
LEAST_STEADY_RATIO = 0.5
SLICES = 100
LAW = "T(N) = T(n) + (N - n) x tokens per request / steady tokens/s"
LAW_OF_STATIC = f"{LAW}, of the replica that ends last"


@dataclass(frozen=True)
class Portion:
    """What one launch shows of the requests in question: all, or those of one replica."""

    requests: tuple[RequestSample, ...]
    seconds: float
    steady: Steady

    @property
    def tokens(self) -> Array:
        return np.array([[tokens_of(request), 1.0] for request in self.requests if request.error is None])


def full_set(served: Served) -> FullSet | None:
    """None where nobody asked for it: the set has no known size, or all of it was asked."""
    samples, asked = _size(served), min(len(stretch.requests) for stretch in served.stretches)
    if samples is None or samples <= asked or served.load is not None:
        return None
    static = served.serving.partition == "static" and len(replicas_of(served)) > 1
    groups = _by_replica(served) if static else [[_portion(each, each.requests) for each in served.stretches]]
    reason = _why_not(served, groups)
    slowest = None if reason else max((_time(each, samples / asked, served.cell) for each in groups), key=_value)
    law = LAW_OF_STATIC if static else LAW
    time = measured.measurement(served, "full_set_s", bounded(slowest), note=law) if slowest else None
    return FullSet(
        cell=served.cell,
        axes=served.axes(),
        samples=samples,
        asked=asked,
        time=time,
        law=law,
        reason=reason,
        runs=served.runs,
    )


def _value(found: Resampled) -> float:
    return found.value


def _size(served: Served) -> int | None:
    summaries = served.records[0].spec.training.data.name == SET_NAME
    return served.serving.full_set or (WHOLE_SET if summaries else None)


def _by_replica(served: Served) -> list[list[Portion]]:
    return [
        [_portion(each, tuple(r for r in each.requests if r.replica == number)) for each in served.stretches]
        for number in replicas_of(served)
    ]


def _portion(stretch: Stretch, requests: tuple[RequestSample, ...]) -> Portion:
    ends = [r.ended_ns - stretch.started_ns for r in requests if r.ended_ns is not None]
    return Portion(requests, max(ends, default=0) / measured.NS, steady(stretch.requests, None, requests))


def _why_not(served: Served, groups: Sequence[Sequence[Portion]]) -> str | None:
    """What makes it dishonest to tell more than was seen."""
    if served.scenario != "offline":
        return f"{served.scenario} is no load whose rate the replicas decide; offline is"
    if failed := len(served.requests) - len(served.answered):
        return f"{failed} requests failed"
    if any(replica.died_ns is not None for record in served.records for replica in record.replicas):
        return "a replica died"
    found = (*map(_one_burst, served.stretches), *map(_unsteady, zip(*groups, strict=True)))
    return next((reason for reason in found if reason), None)


def _one_burst(stretch: Stretch) -> str | None:
    count, most = len(stretch.requests), most_in_flight(stretch.requests)
    least = f"{LEAST_TURNS} times as many are needed"
    return f"{count} requests with {most} in flight are one burst; {least}" if count < LEAST_TURNS * most else None


def _unsteady(portions: Sequence[Portion]) -> str | None:
    """Of one launch: a static partition is full until the first replica has ended."""
    reason = next((portion.steady.reason for portion in portions if portion.steady.reason), None)
    if reason:
        return f"no steady rate: {reason}"
    whole = min(portion.seconds for portion in portions)
    share = portions[0].steady.seconds / whole if whole > 0 else 0.0
    needed = f"{LEAST_STEADY_RATIO:.0%} are needed"
    return f"the load was full for {share:.0%} of the time; {needed}" if share < LEAST_STEADY_RATIO else None


def _time(launches: Sequence[Portion], times: float, cell: str) -> Resampled:
    """For so many times the requests of a launch."""
    tokens, slices = [portion.tokens for portion in launches], [portion.steady.slices(SLICES) for portion in launches]
    # Of each launch: tokens and requests, tokens and seconds of its steady part, its own time and all its requests.
    totals = np.array(
        [
            [*each.sum(axis=0), *rate.sum(axis=0), portion.seconds, len(portion.requests)]
            for each, rate, portion in zip(tokens, slices, launches, strict=True)
        ]
    )

    def time(sums: Array) -> Array:
        each, rate = sums[..., 0] / sums[..., 1], sums[..., 2] / sums[..., 3]
        return np.asarray((sums[..., 4] + (times - 1) * sums[..., 5] * each / rate) / len(launches))

    whole = totals.sum(axis=0)
    drawn = [resample_sums(rows, seed_of(cell, word)).within for rows, word in ((tokens, "tokens"), (slices, "steady"))]
    within = np.column_stack((*drawn, np.tile(whole[4:], (len(drawn[0]), 1))))
    # All columns of a launch together: one that was slow was slow in each of them.
    between = redrawn_sums(totals, np.random.default_rng(seed_of(cell, "launches"))) if len(launches) > 1 else None
    with np.errstate(divide="ignore", invalid="ignore"):
        value, blocks = float(time(whole)), [block_count(SLICES)] * len(launches)
        found = components(time(within), None if between is None else time(between), blocks)
    if not all(np.isfinite(component.replicates).all() for component in found):
        return unbounded(value, len(launches))
    return from_components(value, found, len(launches))
