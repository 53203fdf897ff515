"""Bounds of latencies and gaps of answers that are in flight together: simulated engines whose law is known."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from served_records import S, record, request

from paceline.analysis.findings import Measurement
from paceline.analysis.report import build
from paceline.analysis.served import latency_bounds, measurements
from paceline.analysis.statistics.intervals import Array
from paceline.results.records import RunRecord

PERCENTS = (50, 90)
STALL, STALLED = 5.0, 0.15


def step_times(rng: np.random.Generator, count: int, level: float = 0.01) -> Array:
    """Log-normal decode steps, some of which wait for a prefill."""
    return level * rng.lognormal(0, 0.3, count) * np.where(rng.random(count) < STALLED, STALL, 1.0)


def batched(
    rng: np.random.Generator, answers: int = 600, in_flight: int = 32, repeat: int = 0, level: float = 0.01
) -> RunRecord:
    """An engine that gives every answer in flight one token a step; a slot that is free is filled at once."""
    sizes = rng.integers(6, 15, size=answers)
    free, begins = np.zeros(in_flight, dtype=np.int64), []
    for size in sizes:
        slot = int(free.argmin())
        begins.append(int(free[slot]))
        free[slot] += size
    ends = np.rint(np.cumsum(step_times(rng, int(free.max()) + 1, level)) * S).astype(np.int64)
    asked = []
    for n, (begin, size) in enumerate(zip(begins, sizes, strict=True)):
        times = [int(t) for t in ends[begin : begin + size]]
        gaps = tuple(after - before for before, after in pairwise(times))
        sent = int(ends[begin - 1]) + 1 if begin else 0
        of_answer = {"due_ns": sent, "sent_ns": sent, "first_ns": times[0], "last_ns": times[-1], "ended_ns": times[-1]}
        asked.append(request(n, **of_answer, token_ns=gaps, pieces=int(size), tokens=int(size)))
    return record(asked, repeat=repeat)


def bounds(records: Sequence[RunRecord], quantity: str = "itl") -> dict[int, Measurement]:
    (load,) = measurements.gather(records)
    found = {m.metric: m for m in measurements.measure(load)}
    return {percent: found[f"{quantity}_p{percent}_s"] for percent in (*PERCENTS, 99)}


def test_bounds_of_answers_that_share_their_steps_hold_the_truth() -> None:
    """The truth is that of the law of steps. Drawing answers as if they were independent holds it in a quarter."""
    truth = np.percentile(step_times(np.random.default_rng(99), 1_000_000), PERCENTS)
    held, trials = dict.fromkeys(PERCENTS, 0), 40
    for trial in range(trials):
        found = bounds([batched(np.random.default_rng(trial))])
        for percent, true in zip(PERCENTS, truth, strict=True):
            low, high = found[percent].low, found[percent].high
            held[percent] += low is not None and high is not None and low <= true <= high
    assert all(count >= 0.8 * trials for count in held.values()), held


@pytest.mark.parametrize("quantity", ["itl", "ttft", "tpot", "latency"])
def test_launches_of_different_levels_have_bounds_that_hold_them_all(quantity: str) -> None:
    levels = (0.0097, 0.0152, 0.0149)
    rng = np.random.default_rng(3)
    launches = [batched(rng, 460, repeat=n, level=level) for n, level in enumerate(levels)]
    alone = [bounds([launch], quantity) for launch in launches]
    for percent, found in bounds(launches, quantity).items():
        each = [one[percent].value for one in alone]
        assert found.low is not None
        assert found.high is not None
        assert found.low <= min(filter(None, each)) < max(filter(None, each)) <= found.high


@pytest.mark.parametrize("quantity", ["itl", "tpot"])
def test_one_launch_of_few_blocks_has_no_bounds_rather_than_false_ones(quantity: str) -> None:
    found = bounds([batched(np.random.default_rng(1), answers=460, in_flight=100)], quantity)
    assert all(m.value is not None for m in found.values())
    assert [(m.low, m.high) for m in found.values()] == [(None, None)] * 3


def test_answers_that_came_one_after_another_have_bounds() -> None:
    found = bounds([batched(np.random.default_rng(1), answers=200, in_flight=1)])[50]
    assert found.low is not None
    assert found.high is not None
    assert found.low < 0.011 < found.high * 1.2
    assert bounds([batched(np.random.default_rng(1), answers=200, in_flight=1)])[50] == found


def test_the_curve_has_the_bounds_of_the_table() -> None:
    launches = [batched(np.random.default_rng(n), 200, repeat=n) for n in range(3)]
    shapes = build(launches, "test").served_shapes
    assert shapes is not None
    (shown,) = shapes.loads
    told = bounds(launches, "tpot")
    spread = next(found for found in shown.spreads if found.quantity == "tpot")
    assert [spread.p50, spread.p90, spread.p99] == [(m.value, m.low, m.high) for m in told.values()]


@pytest.mark.parametrize(("in_flight", "most", "count"), [(1, 2000, 20), (32, 2000, 6), (300, 2000, 1), (1, 5, 5)])
def test_a_block_is_of_neighbours_and_longer_than_what_was_in_flight(in_flight: int, most: int, count: int) -> None:
    answers = np.repeat(np.arange(400), 3)
    found = latency_bounds.blocks(answers, in_flight, most)
    assert len(set(found)) == count
    assert (np.diff(found) >= 0).all()
    assert min(np.bincount(found)) >= 3 * latency_bounds.ROUNDS * in_flight or count == 1
