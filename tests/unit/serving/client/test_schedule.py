"""Schedules: true to their law, the same for the same seed, each sample exactly once over any number of processes."""

from __future__ import annotations

import math

import numpy as np
import pytest

from paceline.serving.client import schedule


def made(count: int = 1000, replicas: int = 3, seed: int = 7) -> schedule.Plan:
    return schedule.Plan(
        due_ns=schedule.poisson(50.0, count, seed),
        samples=schedule.permuted(count, count, seed),
        replicas=schedule.spread(count, replicas),
    )


def kolmogorov_smirnov(gaps_s: np.ndarray, rate: float) -> float:
    """The largest distance between the gaps' distribution and the exponential one, times sqrt(n)."""
    ordered = np.sort(gaps_s)
    law = 1 - np.exp(-rate * ordered)
    n = len(ordered)
    above, below = np.arange(1, n + 1) / n - law, law - np.arange(n) / n
    return float(max(above.max(), below.max()) * math.sqrt(n))


def test_gaps_of_a_poisson_schedule_are_exponential() -> None:
    due = schedule.poisson(200.0, 20_000, seed=3)
    gaps = np.diff(due, prepend=0) / 1e9
    # 1.63 is the critical value at 1 %; evenly spaced or rescaled gaps are far above it.
    assert kolmogorov_smirnov(gaps, 200.0) < 1.63
    assert kolmogorov_smirnov(np.diff(schedule.constant(200.0, 20_000), prepend=0) / 1e9, 200.0) > 10
    assert due[-1] / 1e9 != pytest.approx(100.0, rel=1e-6), "the mean of a sample is not the mean of the law"


def test_a_constant_rate_does_not_drift() -> None:
    due = schedule.constant(3.0, 3_000_001)
    assert due[-1] == 1_000_000 * schedule.NS


def test_a_trace_starts_at_its_first_entry() -> None:
    assert schedule.trace(np.array([5.5, 5.0, 7.25])).tolist() == [0, 500_000_000, 2_250_000_000]


def test_the_digest_is_of_the_load_alone() -> None:
    assert made().digest == made().digest
    assert made().digest != made(seed=8).digest
    assert made().digest != made(replicas=2).digest


@pytest.mark.parametrize("parts", [1, 2, 3, 7])
def test_every_sample_goes_to_exactly_one_process(parts: int) -> None:
    whole = made()
    sent = np.concatenate([whole.samples[share] for share in whole.shares(parts)])
    assert sorted(sent.tolist()) == list(range(1000))


def test_more_requests_than_samples_use_each_as_often_as_the_others() -> None:
    drawn = schedule.permuted(10, 35, seed=1)
    counts = np.bincount(drawn)
    assert counts.min() == 3
    assert counts.max() == 4
    assert drawn[:10].tolist() != drawn[10:20].tolist()
