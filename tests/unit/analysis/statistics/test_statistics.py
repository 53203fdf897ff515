from __future__ import annotations

import math

import numpy as np
import pytest

from paceline.analysis.statistics import intervals
from paceline.analysis.statistics.intervals import (
    Array,
    Ratio,
    Resampled,
    ratio_between,
    ratio_of_sums,
    resample_sums,
    sharing_of,
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


def drawn_one_by_one(launches: list[Array], seed: int, resamples: int) -> Array:
    """The plain way: blocks of the only launch summed one after another, or whole launches as often as they are
    drawn."""
    rng = np.random.default_rng(seed)
    found = np.zeros((resamples, launches[0].shape[1]))
    if len(launches) > 1:
        for i, often in enumerate(rng.multinomial(len(launches), [1 / len(launches)] * len(launches), size=resamples)):
            for times, rows in zip(often, launches, strict=True):
                found[i] += times * rows.sum(axis=0)
        return found
    (rows,) = launches
    n, length = len(rows), intervals.block_length(len(rows))
    blocks = math.ceil(n / length)
    starts = rng.integers(0, n, size=(blocks - 1, resamples))
    final = rng.integers(0, n, size=resamples)
    ends = np.vstack([np.zeros((1, rows.shape[1])), np.cumsum(np.vstack([rows, rows[:length]]), axis=0)])
    for i in range(resamples):
        found[i] = ends[final[i] + n - (blocks - 1) * length] - ends[final[i]]
        for start in starts[:, i]:
            found[i] = found[i] + (ends[start + length] - ends[start])
    return found


class TestBootstrap:
    def test_rate_is_the_ratio_of_sums_and_not_the_mean_of_rates(self) -> None:
        launch = columns([1.0, 3.0])
        found = ratio_of_sums([launch], resample_sums([launch], 0), 2, 0)
        assert found is not None
        assert found.value == pytest.approx(200 / 4)  # the mean of rates would be (100 + 33.3) / 2

    @pytest.mark.parametrize("lengths", [(1,), (1, 1), (30,), (5, 17, 30), (101,) * 5])
    def test_sums_are_those_of_units_drawn_one_by_one(self, lengths: tuple[int, ...]) -> None:
        """To the last digit: another order of adding would change reports of stored runs."""
        rng = np.random.default_rng(3)
        launches = [columns(rng.lognormal(size=n)) for n in lengths]
        assert resample_sums(launches, 8, 50).tobytes() == drawn_one_by_one(launches, 8, 50).tobytes()

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
        assert high - low == pytest.approx(2 * half_by_student, rel=0.08)

    def test_what_varies_inside_launches_adds_nothing_to_what_varies_between_them(self) -> None:
        """The same steps in other orders: their sums are equal, so there is nothing between the launches."""
        rng = np.random.default_rng(4)
        found = step_time([columns(rng.permutation(np.arange(100.0, 200.0))) for _ in range(3)])
        assert found.launches == 3
        assert found.interval == pytest.approx((149.5, 149.5))

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

    @pytest.mark.parametrize("lengths", [(1,), (7, 300), (1000,), (90, 0, 91)])
    def test_a_total_is_the_sum_of_its_column_to_the_last_digit(self, lengths: tuple[int, ...]) -> None:
        rng = np.random.default_rng(1)
        launches = [rng.random((n, 5)) for n in lengths]
        wanted = [float(sum(rows[:, column].sum() for rows in launches)) for column in range(5)]
        assert intervals.column_totals(launches).tolist() == wanted

    def test_a_column_that_one_launch_lacks_is_missing_and_no_other(self) -> None:
        launches = [np.array([[1.0, math.nan, 3.0]]), np.array([[1.0, 2.0, 3.0]])]
        sums = resample_sums(launches, 0)
        assert np.isnan(sums[:, 1]).all()
        assert (sums[:, [0, 2]] == [2.0, 6.0]).all()

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


def launches_of(levels: list[float], seed: int = 1) -> Resampled:
    """Launches of 30 equal steps each, which differ only by their levels."""
    return step_time([columns([level] * 30) for level in levels], seed)


class TestRatio:
    def test_of_exact_sides(self) -> None:
        found = ratio_between([launches_of([2.0] * 3)], [launches_of([1.0] * 3)])
        assert found is not None
        assert (found.value, found.low, found.high) == pytest.approx((2, 2, 2))
        assert found.detectable() == pytest.approx(0, abs=1e-9)

    def test_interval_is_students_for_the_family_and_normal_for_the_common_error(self) -> None:
        """The common error is the same in all of a family: its tail is halved and not divided by ten."""
        alone = Ratio(1.1, error=0.01, freedom=4, launches=3)
        assert math.log(alone.high / 1.1) == pytest.approx(2.7764 * 0.01, rel=1e-4)
        assert math.log(1.1 / alone.interval(family=10)[0]) == pytest.approx(5.5976 * 0.01, rel=1e-4)
        days = alone._replace(common=0.02)
        for family, own, common in ((1, 2.7764, 1.95996), (10, 5.5976, 2.24140)):
            reach = math.hypot(own * 0.01, common * 0.02)
            assert math.log(days.interval(family)[1] / 1.1) == pytest.approx(reach, rel=1e-4)
        slack = alone._replace(slack=(math.inf, 0.1))
        assert slack.low == 0
        assert math.log(slack.high / 1.1) == pytest.approx(0.1 + 2.7764 * 0.01, rel=1e-4)

    def test_an_interval_too_wide_for_a_float_is_wide(self) -> None:
        """Two launches of a replica and 496 pairs: Student's t with one degree of freedom is 6,300."""
        low, high = Ratio(1.0, error=0.5, freedom=1, launches=2).interval(family=496)
        assert low < 1e-200
        assert high > 1e200

    @pytest.mark.parametrize(
        ("family", "freedom", "least"),
        [(1, math.inf, 0.78), (1, 4, 0.75), (1, 2, 0.75), (10, math.inf, 0.78), (10, 10, 0.75), (10, 2, 0.66)],
    )
    def test_the_detectable_effect_is_shown_four_times_out_of_five(
        self, family: int, freedom: float, least: float
    ) -> None:
        """Of 4,000 comparisons with that true effect, each with its own estimate of the spread. The sum of two of
        Student's values promises a little too much for few degrees of freedom and many comparisons."""
        error, launches, rng = 0.01, 3, np.random.default_rng(int(min(freedom, 99)) + family)
        effect = Ratio(1.0, error, freedom, launches).detectable(family)
        shown = 0
        for _ in range(4000):
            chi = 1.0 if math.isinf(freedom) else math.sqrt(rng.chisquare(freedom) / freedom)
            value = math.exp(math.log1p(effect) + error * rng.standard_normal())
            shown += Ratio(value, error * chi, freedom, launches).interval(family)[0] > 1
        assert least <= shown / 4000 <= 0.86


class TestSharedSpread:
    """Cells that were measured together share the spread of their launches."""

    def side(self, s: float, launches: int = 3) -> Resampled:
        return Resampled(1.0, s / math.sqrt(launches), launches - 1, launches, True)

    def test_two_cells_pool_their_freedom(self) -> None:
        found = ratio_between([self.side(0.01)], [self.side(0.01)])
        assert found is not None
        assert found.error == pytest.approx(0.01 * math.sqrt(2 / 3))
        assert (found.freedom, found.launches) == (4, 3)

    def test_five_cells_have_ten_degrees_of_freedom(self) -> None:
        five = [self.side(0.01)] * 5
        found = ratio_between(five[:1], five[1:2], sharing_of(five))
        assert found is not None
        assert found.freedom == 10
        assert math.log(found.high) == pytest.approx(2.2281 * 0.01 * math.sqrt(2 / 3), rel=1e-4)

    def test_a_cell_that_looks_quiet_has_at_least_the_mean_variance(self) -> None:
        """Three launches may agree by chance: (0 + 0.02^2) / 2 is the variance of a launch of the quiet one."""
        quiet, loud = self.side(0.0), self.side(0.02)
        found = ratio_between([quiet], [loud])
        assert found is not None
        assert found.error == pytest.approx(math.sqrt((0.0002 + 0.0004) / 3))

    def test_a_cell_that_is_loud_keeps_its_own(self) -> None:
        sides = [self.side(0.03), self.side(0.01), self.side(0.01)]
        found = ratio_between(sides[:1], sides[1:2], sharing_of(sides))
        assert found is not None
        mean = (0.03**2 + 2 * 0.01**2) / 3
        assert found.error == pytest.approx(math.sqrt((0.03**2 + mean) / 3))

    def test_unequal_launches_weigh_by_their_freedom(self) -> None:
        two, five = self.side(0.02, 2), self.side(0.01, 5)
        found = ratio_between([two], [five])
        assert found is not None
        mean = (1 * 0.02**2 + 4 * 0.01**2) / 5
        assert found.error == pytest.approx(math.sqrt(0.02**2 / 2 + mean / 5))
        assert (found.freedom, found.launches) == (5, 2)

    def test_one_launch_shares_nothing_and_says_so(self) -> None:
        alone = Resampled(1.0, 0.001, 9, 1, True)
        found = ratio_between([alone], [self.side(0.02)])
        assert found is not None
        assert found.launches == 1
        assert found.error == pytest.approx(math.hypot(0.001, 0.02 / math.sqrt(3)))
        assert ratio_between([Resampled(1.0, None, math.inf, 1, True)], [alone]) is None

    def test_a_number_without_a_logarithm_lends_no_spread(self) -> None:
        """The error of one that may be negative is in its own unit."""
        plain = Resampled(-5.0, 100.0, 2, 3, False)
        sides = [self.side(0.01), self.side(0.01)]
        assert ratio_between(sides[:1], sides[1:], sharing_of([*sides, plain])) == ratio_between(sides[:1], sides[1:])


@pytest.mark.parametrize(
    ("freedom", "tail", "t"),
    [
        *((1, 0.025, 12.706), (2, 0.025, 4.303), (4, 0.025, 2.776), (30, 0.025, 2.042), (60, 0.025, 2.000)),
        *((1e9, 0.025, 1.960), (1, 0.0005, 636.619), (2, 0.0005, 31.599), (4, 0.0025, 5.598), (10, 0.2, 0.879)),
        *((120, 0.0005, 3.373), (99_999, 0.025, 1.960), (math.inf, 0.0005, 3.291)),
    ],
)
def test_student_t_against_the_published_table(freedom: float, tail: float, t: float) -> None:
    assert intervals.student_t(freedom, tail) == pytest.approx(t, abs=0.0006)


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

    @pytest.mark.parametrize("q", [1, 50, 90, 99])
    def test_is_numpys_to_the_last_digit(self, q: float) -> None:
        rng = np.random.default_rng(0)
        for n in range(100, 700, 7):
            values = rng.random(n)
            assert intervals.percentile(values, q) == float(np.percentile(values, q))


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
