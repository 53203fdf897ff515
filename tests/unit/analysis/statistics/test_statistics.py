from __future__ import annotations

import math

import numpy as np
import pytest

from paceline.analysis.statistics import intervals
from paceline.analysis.statistics.intervals import (
    Array,
    Resampled,
    ratio_between,
    ratio_of_sums,
    resample_sums,
    warm_up,
)
from paceline.experiment.spec import WarmUp


def columns(seconds: Array | list[float], tokens: float = 100.0) -> Array:
    return np.column_stack([np.asarray(seconds), np.ones(len(seconds)), np.full(len(seconds), tokens)])


def step_time(launches: list[Array], seed: int = 1) -> Resampled:
    found = ratio_of_sums(launches, resample_sums(launches, seed), 0, 1)
    assert found is not None
    return found


def simulated_launch(rng: np.random.Generator, n: int, between: float, within: float) -> Array:
    """Step times around 1 s: a level of the launch, and neighbouring steps correlated by 0.5."""
    noise, level = within * rng.standard_normal(n), 1 + between * rng.standard_normal()
    for i in range(1, n):
        noise[i] += 0.5 * noise[i - 1]
    return columns(level + noise)


def drawn_one_by_one(launches: list[Array], seed: int, resamples: int) -> tuple[Array, Array | None]:
    """The plain way: blocks of each launch summed one after another, then whole launches as often as they are drawn."""
    rng = np.random.default_rng(seed)
    within = np.zeros((resamples, launches[0].shape[1]))
    for rows in launches:
        n, length = len(rows), intervals.block_length(len(rows))
        blocks = math.ceil(n / length)
        starts = rng.integers(0, n, size=(blocks - 1, resamples))
        final = rng.integers(0, n, size=resamples)
        ends = np.vstack([np.zeros((1, rows.shape[1])), np.cumsum(np.vstack([rows, rows[:length]]), axis=0)])
        for i in range(resamples):
            drawn_sum = ends[final[i] + n - (blocks - 1) * length] - ends[final[i]]
            for start in starts[:, i]:
                drawn_sum = drawn_sum + (ends[start + length] - ends[start])
            within[i] += drawn_sum
    if len(launches) == 1:
        return within, None
    between = np.zeros_like(within)
    for i, often in enumerate(rng.multinomial(len(launches), [1 / len(launches)] * len(launches), size=resamples)):
        for times, rows in zip(often, launches, strict=True):
            between[i] += times * rows.sum(axis=0)
    return within, between


class TestBootstrap:
    def test_rate_is_the_ratio_of_sums_and_not_the_mean_of_rates(self) -> None:
        launch = columns([1.0, 3.0])
        found = ratio_of_sums([launch], resample_sums([launch], 0), 2, 0)
        assert found is not None
        assert found.value == pytest.approx(200 / 4)  # the mean of rates would be (100 + 33.3) / 2

    @pytest.mark.parametrize("lengths", [(1,), (1, 1), (30,), (5, 17, 30), (101,) * 5])
    def test_sums_are_those_of_blocks_drawn_one_by_one(self, lengths: tuple[int, ...]) -> None:
        """To the last digit: another order of adding would change reports of stored runs."""
        rng = np.random.default_rng(3)
        launches = [columns(rng.lognormal(size=n)) for n in lengths]
        for found, plain in zip(resample_sums(launches, 8, 50), drawn_one_by_one(launches, 8, 50), strict=True):
            assert (found is None) == (plain is None)
            assert found is None or plain is None or found.tobytes() == plain.tobytes()

    def test_launches_of_unequal_length_weigh_by_their_steps(self) -> None:
        assert step_time([columns([1.0] * 30), columns([2.0] * 10)]).value == pytest.approx(50 / 40)

    def test_constant_steps_have_an_interval_without_width(self) -> None:
        assert step_time([columns([0.5] * 40)] * 3).interval == pytest.approx((0.5, 0.5))

    def test_same_seed_gives_the_same_interval(self) -> None:
        launches = [columns(np.random.default_rng(i).uniform(1, 2, 40)) for i in range(3)]
        assert step_time(launches, seed=5).interval == step_time(launches, seed=5).interval
        assert step_time(launches, seed=5).interval != step_time(launches, seed=6).interval

    @pytest.mark.parametrize(("launches", "steps"), [(3, 20), (5, 20), (2, 20)])
    def test_interval_covers_the_truth_when_launches_differ(self, launches: int, steps: int) -> None:
        """A percentile bootstrap of 3 launches without the correction covers about 0.7 here."""
        rng = np.random.default_rng(2024)
        inside = 0
        for trial in range(200):
            low, high = step_time([simulated_launch(rng, steps, 0.02, 0.002) for _ in range(launches)], trial).interval
            assert low is not None
            assert high is not None
            inside += low <= 1 <= high
        assert inside / 200 >= 0.90

    def test_ratio_interval_covers_one_for_equal_cells(self) -> None:
        rng = np.random.default_rng(7)
        inside = 0
        for trial in range(200):
            sides = [
                step_time([simulated_launch(rng, 20, 0.02, 0.002) for _ in range(3)], seed)
                for seed in (trial, trial + 10_000)
            ]
            found = ratio_between(sides[:1], sides[1:])
            assert found is not None
            inside += found.low <= 1 <= found.high
        assert inside / 200 >= 0.90

    def test_three_launches_are_wider_than_their_steps_pretend(self) -> None:
        """Three launches at 1.00, 1.02 and 1.04 s without noise inside: steps alone would claim certainty."""
        launches = [columns([level] * 30) for level in (1.00, 1.02, 1.04)]
        low, high = step_time(launches).interval
        assert low is not None
        assert high is not None
        half_by_student = 4.303 * 0.02 / math.sqrt(3)
        assert high - low == pytest.approx(2 * half_by_student, rel=0.15)

    def test_correlated_steps_get_a_wider_interval_than_shuffled_ones(self) -> None:
        slow = np.repeat([1.0, 1.1, 1.0, 1.1, 1.0, 1.1, 1.0, 1.1, 1.0, 1.1], 10)
        shuffled = np.random.default_rng(3).permutation(slow)
        widths = [np.subtract(*reversed(step_time([columns(x)]).interval)) for x in (slow, shuffled)]
        assert widths[0] > 1.5 * widths[1]

    def test_one_step_has_no_interval(self) -> None:
        assert step_time([columns([1.0])]).interval == (None, None)

    def test_missing_is_none_and_never_zero(self) -> None:
        launch = columns([math.nan, 1.0, 1.0])
        assert ratio_of_sums([launch], resample_sums([launch], 0), 0, 1) is None

    def test_zero_bytes_keep_a_value_of_zero(self) -> None:
        launch = columns([0.0] * 9)
        assert step_time([launch]).value == 0.0
        assert step_time([launch]).interval == (0.0, 0.0)

    def test_times_changes_the_unit_of_value_and_interval_alike(self) -> None:
        found = step_time([columns(np.linspace(1, 2, 40))])
        low, high = found.interval
        assert low is not None
        assert high is not None
        assert found.times(1000).interval == pytest.approx((1000 * low, 1000 * high))

    def test_a_thousand_runs_take_seconds(self) -> None:
        import time

        rows = np.random.default_rng(0).uniform(1, 2, (100, 11))
        began = time.perf_counter()
        for seed in range(20):
            resample_sums([rows] * 3, seed)
        assert (time.perf_counter() - began) / 60 * 1000 < 20  # 20 repetitions of 3 runs, scaled to 1,000 runs


def test_ratio_of_exact_sides() -> None:
    a, b = step_time([columns([2.0] * 20)] * 3), step_time([columns([1.0] * 20)] * 3)
    found = ratio_between([a], [b])
    assert found is not None
    assert (found.value, found.low, found.high) == pytest.approx((2, 2, 2))
    assert found.detectable == pytest.approx(0, abs=1e-9)


def test_detectable_effect_is_2_8_standard_errors_of_the_log_ratio() -> None:
    spread = np.random.default_rng(1).standard_normal(intervals.RESAMPLES) * 0.01
    a, b = (Resampled(1.0, deviations, math.inf, 9, True) for deviations in (spread, np.zeros_like(spread)))
    found = ratio_between([a], [b])
    assert found is not None
    assert found.detectable == pytest.approx(math.expm1(2.8 * 0.01), rel=0.05)


@pytest.mark.parametrize(
    ("freedom", "t"), [(1, 12.706), (2, 4.303), (4, 2.776), (30, 2.042), (60, 2.000), (1e9, 1.960)]
)
def test_student_t_against_the_published_table(freedom: float, t: float) -> None:
    assert intervals.student_t(freedom) == pytest.approx(t, abs=0.003)


def test_launch_notes_say_what_was_not_repeated(golden: object) -> None:
    assert intervals.launches_note(1) == golden
    assert intervals.launches_note(2) == golden
    assert intervals.launches_note(3) is None


class TestOutliers:
    def test_modified_z_by_hand(self) -> None:
        """Median 10, MAD 1: 15 has z = 0.6745 * 5 = 3.37, 15.3 has 3.57."""
        values = [9.0, 9.0, 10.0, 10.0, 10.0, 11.0, 11.0]
        assert not intervals.outliers([*values, 15.0, 8.0, 8.0]).any()
        assert intervals.outliers([*values, 15.3, 8.0, 8.0]).tolist() == [False] * 7 + [True, False, False]

    def test_equal_values_but_one(self) -> None:
        assert intervals.outliers([1.0] * 20 + [2.0]).tolist() == [False] * 20 + [True]

    def test_equal_values_and_none(self) -> None:
        assert not intervals.outliers([1.0] * 20).any()
        assert not intervals.outliers([]).any()


class TestPercentile:
    def test_value(self) -> None:
        assert intervals.percentile([float(i) for i in range(101)], 99) == pytest.approx(99)

    @pytest.mark.parametrize(("n", "q"), [(99, 99), (9, 90), (1, 50), (99, 1)])
    def test_none_when_n_cannot_support_it(self, n: int, q: float) -> None:
        assert intervals.percentile([1.0] * n, q) is None
        assert intervals.percentile([1.0] * 100, q) == 1.0


class TestWarmUp:
    RULE = WarmUp(minimum=5, maximum=50, window=10, slope_ratio=0.01)

    def test_ends_at_the_minimum_when_steady(self) -> None:
        assert warm_up([1.0] * 60, self.RULE)[:2] == (5, True)

    def test_ends_when_the_median_stops_moving(self) -> None:
        """Steps fall by 2 % each until step 30 and stay: the medians of 10 agree within 1 % from step 24 on."""
        durations = [0.98 ** min(step, 30) for step in range(100)]
        expected = next(
            e
            for e in range(5, 51)
            if abs(np.median(durations[e + 10 : e + 20]) / np.median(durations[e : e + 10]) - 1) < 0.01
        )
        found = warm_up(durations, self.RULE)
        assert found[:2] == (expected, True)
        assert 20 < expected < 31

    def test_a_single_slow_step_does_not_prolong_it(self) -> None:
        assert warm_up([1.0] * 8 + [9.0] + [1.0] * 60, self.RULE).excluded == 5

    def test_is_capped_and_says_so(self) -> None:
        found = warm_up([1.01**step for step in range(200)], self.RULE)
        assert found[:2] == (50, False)
        assert "the maximum" in found.text

    def test_never_settled_leaves_two_windows(self, golden: object) -> None:
        found = warm_up([1.02**step for step in range(40)], self.RULE)
        assert found[:2] == (20, False)
        assert found.text == golden

    @pytest.mark.parametrize("n", [8, 12, 20, 24])
    def test_few_steps_exclude_the_minimum_and_say_so(self, n: int, golden: object) -> None:
        found = warm_up([1.0] * n, self.RULE)
        assert found[:2] == (5, False)
        assert found.text == golden

    def test_nothing_is_left_of_a_run_within_the_minimum(self) -> None:
        assert warm_up([1.0] * 4, self.RULE)[:2] == (4, False)


@pytest.mark.parametrize("values", [[], [2.0], [3.0, 1.0], [5.0, 1.0, 2.0], [1.0, math.nan, 2.0], [math.inf, 1.0, 0.1]])
def test_the_median_is_numpys(values: list[float]) -> None:
    expected = float(np.median(values)) if values else math.nan
    assert intervals.median(np.array(values)) == pytest.approx(expected, rel=0, abs=0, nan_ok=True)
