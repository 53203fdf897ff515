"""The time that the full set would take, from a part of it that was sent at once.


    T(N) = T(n) + (N - n) x tokens per request / steady tokens per second

T(n) is the whole time of the n requests that were sent, with ramp-up and end; only the rest runs at the steady rate.
With a static partition each replica has its share of N and its own rate, and the slowest ends last. The interval comes
from resampling blocks of the requests' tokens and of the steady rate in every launch, and from resampling launches if
there are several.
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
from paceline.analysis.statistics import intervals
from paceline.analysis.statistics.intervals import Array, Resampled, seed_of
from paceline.results.served_samples import RequestSample

# Every slot in flight must have been used so often, otherwise the load was one burst and not a rate.
LEAST_TURNS = 3
# If a load was full for less of its time, most of it is ramp-up and end, which the formula does not model.
LEAST_STEADY_RATIO = 0.5
SLICES = 100
FORMULA = "T(N) = T(n) + (N - n) x tokens per request / steady tokens/s"
STATIC_FORMULA = f"{FORMULA}, for the replica that ends last"


@dataclass(frozen=True)
class Portion:
    """The requests of one launch: all, or those of one replica."""

    requests: tuple[RequestSample, ...]
    seconds: float
    steady: Steady

    @property
    def tokens(self) -> Array:
        return np.array([[tokens_of(request), 1.0] for request in self.requests if request.error is None])


def full_set(served: Served) -> FullSet | None:
    """None if there is nothing to extrapolate: the size of the set is unknown, or all of it was sent."""
    summaries = served.records[0].spec.training.data.name == SET_NAME
    samples = served.serving.full_set or (WHOLE_SET if summaries else None)
    sent = min(len(stretch.requests) for stretch in served.stretches)
    if samples is None or samples <= sent or served.load is not None:
        return None
    static = served.serving.partition == "static" and len(replicas_of(served)) > 1
    if static:
        groups = [
            [_portion(each, tuple(r for r in each.requests if r.replica == number)) for each in served.stretches]
            for number in replicas_of(served)
        ]
    else:
        groups = [[_portion(each, each.requests) for each in served.stretches]]
    reason = _why_not(served, groups)
    times = [] if reason else [_time(each, samples / sent, served.cell) for each in groups]
    slowest = max(times, key=lambda time: time.value, default=None)
    formula = STATIC_FORMULA if static else FORMULA
    time = measured.measurement(served, "full_set_s", intervals.bounded(slowest), note=formula) if slowest else None
    return FullSet(
        cell=served.cell,
        axes=served.axes(),
        samples=samples,
        asked=sent,
        time=time,
        law=formula,
        reason=reason,
        runs=served.runs,
    )


def _portion(stretch: Stretch, requests: tuple[RequestSample, ...]) -> Portion:
    ends = [r.ended_ns - stretch.started_ns for r in requests if r.ended_ns is not None]
    return Portion(requests, max(ends, default=0) / measured.NS, steady(stretch.requests, None, requests))


def _why_not(served: Served, groups: Sequence[Sequence[Portion]]) -> str | None:
    """Why an extrapolation would be unreliable."""
    if served.scenario != "offline":
        return f"the replicas do not set the rate in scenario {served.scenario}; use offline"
    if failed := len(served.requests) - len(served.answered):
        return f"{failed} requests failed"
    if any(replica.died_ns is not None for record in served.records for replica in record.replicas):
        return "a replica died"
    for stretch in served.stretches:
        count, most = len(stretch.requests), most_in_flight(stretch.requests)
        if count < LEAST_TURNS * most:
            return f"{count} requests with {most} in flight are one burst; send at least {LEAST_TURNS} times as many"
    for portions in zip(*groups, strict=True):
        reason = next((portion.steady.reason for portion in portions if portion.steady.reason), None)
        if reason:
            return f"no steady rate: {reason}"
        # A static partition is full until the first replica has ended.
        whole = min(portion.seconds for portion in portions)
        share = portions[0].steady.seconds / whole if whole > 0 else 0.0
        if share < LEAST_STEADY_RATIO:
            return f"the load was full for {share:.0%} of the time; at least {LEAST_STEADY_RATIO:.0%} are needed"
    return None


def _time(launches: Sequence[Portion], times: float, cell: str) -> Resampled:
    """The time for so many times the requests of a launch."""
    tokens, slices = [portion.tokens for portion in launches], [portion.steady.slices(SLICES) for portion in launches]
    # Columns: tokens and requests, tokens and seconds of the steady part, time and all requests of the launch.
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
    if len(launches) > 1:
        # All columns of a launch together: a slow launch was slow in each of them.
        drawn = intervals.redrawn_sums(totals, np.random.default_rng(seed_of(cell, "launches")))
        units = len(launches)
    else:
        parts = (
            intervals.resample_sums(x, seed_of(cell, name)) for x, name in ((tokens, "tokens"), (slices, "steady"))
        )
        drawn = np.column_stack((*parts, np.tile(whole[4:], (intervals.RESAMPLES, 1))))
        units = intervals.block_count(SLICES)
    with np.errstate(divide="ignore", invalid="ignore"):
        value, again = float(time(whole)), time(drawn)
    if not np.isfinite(again).all():
        return intervals.unbounded(value, len(launches))
    return intervals.from_replicates(value, again, units, len(launches))
