"""Percentiles of values that come in clusters, as gaps between tokens come in answers: known draws, known laws."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.analysis.statistics import intervals
from paceline.analysis.statistics.clustered_percentiles import _percentiles_of, clustered_percentiles
from paceline.analysis.statistics.intervals import Array, Resampled

Clusters = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


def numbered(clusters: int, each: int) -> Clusters:
    return np.repeat(np.arange(clusters), each)


def one(values: Array, clusters: Clusters, percent: float, **more: int) -> Resampled:
    (found,) = clustered_percentiles([(values, clusters)], (percent,), more.pop("seed", 1), **more)
    assert found is not None
    return found


def width(found: Resampled) -> float:
    low, high = found.interval
    assert low is not None
    assert high is not None
    return high - low


def test_the_same_as_drawing_clusters_one_by_one() -> None:
    rng = np.random.default_rng(5)
    sizes = rng.integers(1, 30, size=40)
    groups = [rng.lognormal(0, 0.4) * rng.lognormal(0, 0.3, size) for size in sizes]
    values, clusters = np.concatenate(groups), np.repeat(np.arange(40), sizes)
    # Of one launch, which is drawn once each time.
    seeded = np.random.default_rng(9)
    launch = seeded.multinomial(1, [1.0], size=200)
    times = seeded.multinomial(40 * launch[:, 0], np.full(40, 1 / 40))
    drawn = [np.repeat(np.arange(40), row) for row in times]
    again = np.array([np.percentile(np.concatenate([groups[g] for g in row]), 90) for row in drawn])
    plain = intervals.from_replicates(float(np.percentile(values, 90)), again, 40, 1)
    # Values may stand in any order, and clusters have any numbers.
    order = rng.permutation(len(values))
    found = one(values[order], 3 * clusters[order], 90, seed=9, resamples=200)
    assert found.value == pytest.approx(plain.value)
    assert found.interval == pytest.approx(plain.interval)
    assert found.freedom == 39


def test_values_that_occur_often_count_as_often() -> None:
    counts = np.array([[2, 0, 1, 3, 0], [1, 1, 1, 1, 1]])
    written_out = [np.percentile([10, 10, 30, 40, 40, 40], 37), np.percentile([10, 20, 30, 40, 50], 37)]
    ascending = np.array([10.0, 20, 30, 40, 50])
    assert _percentiles_of(ascending, counts, 37) == pytest.approx(written_out)


def of_independent(values: np.ndarray, percent: float) -> tuple[float, float]:
    """95 % bounds by order statistics: the ranks that a binomial count would not leave."""
    n, share = len(values), percent / 100
    reach = 1.959964 * (n * share * (1 - share)) ** 0.5
    low, high = np.sort(values)[[int(np.floor(n * share - reach)) - 1, int(np.ceil(n * share + reach)) - 1]]
    return float(low), float(high)


def test_bounds_hold_the_truth_about_as_often_as_they_say() -> None:
    """10 + N(0, 1) of the answer + N(0, 1) of the gap: its percentiles are those of N(10, sqrt 2)."""
    rng, clusters = np.random.default_rng(1), numbered(100, 20)
    truth = {50: 10.0, 90: 10 + 1.281552 * np.sqrt(2)}
    held, naive = dict.fromkeys(truth, 0), dict.fromkeys(truth, 0)
    for trial in range(80):
        values = 10 + np.repeat(rng.standard_normal(100), 20) + rng.standard_normal(2000)
        found = clustered_percentiles([(values, clusters)], tuple(truth), trial, resamples=150)
        for (percent, true), drawn in zip(truth.items(), found, strict=True):
            assert drawn is not None
            low, high = drawn.interval
            held[percent] += low is not None and high is not None and low <= true <= high
            least, most = of_independent(values, percent)
            naive[percent] += least <= true <= most
    assert all(72 <= count <= 79 for count in held.values())
    # As if all gaps were independent, a third of the intervals would miss.
    assert all(count < 60 for count in naive.values())


@pytest.mark.parametrize("percent", [50, 90])
def test_gaps_that_are_all_alike_within_an_answer_tell_no_more_than_answers(percent: float) -> None:
    levels = np.random.default_rng(2).lognormal(0, 0.5, 400)
    answers = one(levels, numbered(400, 1), percent)
    alike = one(np.repeat(levels, 50), numbered(400, 50), percent)
    assert width(alike) == pytest.approx(width(answers), rel=0.05)
    as_if_independent = one(np.repeat(levels, 50), np.arange(20_000), percent, resamples=300)
    assert width(alike) > 3 * width(as_if_independent)


def test_gaps_that_have_nothing_to_do_with_their_answer_have_the_bounds_of_gaps() -> None:
    values = np.random.default_rng(3).exponential(1.0, 20_000)
    low, high = of_independent(values, 90)
    assert width(one(values, numbered(400, 50), 90)) == pytest.approx(high - low, rel=0.25)


def test_several_launches_have_the_interval_of_launches() -> None:
    """Three launches, each sure of its own level, whose levels differ: the interval is that of launches."""
    rng = np.random.default_rng(8)
    levels = (97.4, 152.4, 149.5)
    launches = [(level * rng.lognormal(0, 0.01, 2000), numbered(100, 20)) for level in levels]
    for drawn in clustered_percentiles(launches, (50, 99), 1):
        assert drawn is not None
        assert (drawn.launches, drawn.freedom) == (3, 2)
        low, high = drawn.interval
        assert low is not None
        assert high is not None
        assert low < min(levels) < max(levels) < high


def test_a_percentile_that_few_answers_tell_has_no_bounds() -> None:
    rng = np.random.default_rng(6)
    few = clustered_percentiles([(rng.random(400), numbered(4, 100))], (50, 99), 1)
    assert few == [None, None]
    # All gaps beyond the 99th percentile are of one slow answer.
    values = np.concatenate([rng.random(9900), 5 + rng.random(100)])
    median, tail = clustered_percentiles([(values, numbered(100, 100))], (50, 99), 1)
    assert median is not None
    assert tail is None
    nothing = (np.zeros(0), np.zeros(0, dtype=np.int64))
    assert clustered_percentiles([nothing], (50,), 1) == [None]
    assert clustered_percentiles([(values, numbered(100, 100)), nothing], (50,), 1) == [None]


def test_values_that_are_all_the_same_have_no_width() -> None:
    found = one(np.full(500, 0.02), numbered(50, 10), 99)
    assert (found.value, found.interval) == (0.02, pytest.approx((0.02, 0.02)))
