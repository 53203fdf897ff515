"""Series whose change, or lack of one, is known."""

from __future__ import annotations

import math

import numpy as np
import pytest

from paceline.analysis.statistics.changepoints import FEWEST, splits
from paceline.analysis.statistics.intervals import Array


def noise(n: int, seed: int, spread: float = 0.01) -> Array:
    return np.asarray(spread * np.random.default_rng(seed).standard_normal(n))


def correlated(n: int, seed: int, correlation: float, spread: float) -> Array:
    x = np.random.default_rng(seed).standard_normal(n)
    for index in range(1, n):
        x[index] = correlation * x[index - 1] + math.sqrt(1 - correlation**2) * x[index]
    return np.asarray(spread * x)


@pytest.mark.parametrize(("n", "spread"), [(12, 0.02), (25, 0.05)])
def test_white_noise_raises_at_most_four_false_alarms_in_a_hundred(n: int, spread: float) -> None:
    alarms = sum(bool(splits(noise(n, seed, spread), seed)) for seed in range(200))
    assert alarms <= 8


@pytest.mark.parametrize(("n", "correlation"), [(20, 0.5), (40, 0.5), (40, 0.7)])
def test_launches_that_resemble_their_neighbours_are_no_change(n: int, correlation: float) -> None:
    """Permuting the values themselves called 29 to 40 of 100 such series changed."""
    alarms = sum(bool(splits(correlated(n, seed, correlation, 0.015), seed)) for seed in range(100))
    assert alarms <= 8


def test_one_launch_at_minus_30_percent_does_not_hide_a_step_of_3_percent() -> None:
    found = 0
    for seed in range(50):
        x = noise(20, seed, 0.005)
        x[10:] -= 0.03
        x[seed % 20] -= 0.35
        found += any(abs(split.at - 10) <= 1 for split in splits(x, seed))
    assert found >= 45


@pytest.mark.parametrize(("n", "at"), [(12, 6), (20, 10), (20, 15), (30, 6), (60, 45)])
@pytest.mark.parametrize("step", [0.05, -0.05])
def test_a_step_of_five_percent_is_found_where_it_is(n: int, at: int, step: float) -> None:
    for seed in range(5):
        x = noise(n, seed, 0.006)
        x[at:] += step
        (found,) = splits(x, seed)
        assert found.at == at
        assert found.p_value <= 0.01


def test_a_fault_that_was_fixed_is_two_changes() -> None:
    x = noise(40, 3)
    x[12:28] += 0.06
    assert [s.at for s in splits(x, 0)] == [12, 28]


@pytest.mark.parametrize("size", [0.05, 0.3, -0.5])
def test_an_outlier_is_not_a_change(size: float) -> None:
    for place in range(20):
        x = noise(20, place, 0.005)
        x[place] += size
        assert splits(x, place) == []


def test_an_outlier_does_not_hide_a_change() -> None:
    x = noise(24, 1, 0.004)
    x[12:] += 0.05
    x[5] += 0.06
    assert [s.at for s in splits(x, 0)] == [12]


def test_what_no_order_could_prove_is_not_claimed() -> None:
    """Ten values in two clear levels have a chance of 2/252."""
    levels = np.array([0.0] * 5 + [1.0] * 5)
    assert splits(levels, 0) == []
    assert splits(np.array([0.0] * 5 + [1.0] * 6), 0)[0].at == 5
    assert FEWEST == 11


def test_equal_values_and_effects_under_one_percent_are_no_change() -> None:
    assert splits(np.zeros(30), 0) == []
    x = noise(40, 0, 0.0005)
    x[20:] += 0.008
    assert splits(x, 0) == []
