"""The highest rate within the limits, from loads whose late requests are known."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from served_records import S, record, request, stage

from paceline.analysis.findings import BETTER, HIGHER, INCONCLUSIVE, WORSE, Measurement
from paceline.analysis.served import measurements, rate_search
from paceline.analysis.statistics.verdict import verdict_of
from paceline.results.records import RunRecord
from paceline.serving import early_stopping


def launch(*loads: tuple[float, int, int], scenario: str = "search", repeat: int = 0) -> RunRecord:
    """Each load: its rate, its requests, and how many came after 3 s, where 2 s are allowed."""
    requests, stages = [], []
    for number, (rate, count, late) in enumerate(loads):
        stages.append(stage(number, scenario="server", rate_per_s=rate))
        slow = {"first_ns": 3 * S, "last_ns": 3 * S}
        requests += [request(n, stage=number, **(slow if n < late else {})) for n in range(count)]
    return record(requests, repeat=repeat, stages=stages, scenario=scenario, rate_per_s=1.0, ttft_limit_s=2.0)


def searched(*loads: tuple[float, int, int], scenario: str = "search") -> Measurement | None:
    return rate_search.max_rate(measurements.gather([launch(*loads, scenario=scenario)]))


def test_the_highest_that_passed_below_the_lowest_that_failed(golden: object) -> None:
    found = searched((1, 459, 0), (4, 459, 100), (2, 662, 1), (8, 459, 400))
    assert found is not None
    assert (found.value, found.low, found.high) == (2, 2, 4)
    assert found.n == 459 + 459 + 662 + 459
    assert found.note == golden
    assert "662" in found.note
    assert "459" in found.note
    assert "100" in found.note
    assert "stage" not in found.axes


def test_too_few_requests_bound_nothing(golden: object) -> None:
    found = searched((1, 459, 0), (2, 100, 0), (4, 459, 100))
    assert found is not None
    assert (found.value, found.high) == (1, 4)
    assert found.note
    assert found.note == golden


def test_a_rate_that_passes_above_one_that_failed_is_reported_but_not_used(golden: object) -> None:
    found = searched((1, 459, 0), (2, 459, 100), (4, 459, 0))
    assert found is not None
    assert (found.value, found.high) == (1, 2)
    assert found.note
    assert found.note == golden


@pytest.mark.parametrize(("load", "bounds"), [((1, 459, 0), (1, None)), ((1, 459, 100), (None, 1))])
def test_an_end_that_was_not_seen_is_none(load: tuple[float, int, int], bounds: tuple[float | None, ...]) -> None:
    found = searched(load, load)
    assert found is not None
    assert (found.value, found.high) == bounds


def test_a_search_that_found_no_rate_to_fail_says_why(golden: object) -> None:
    why = "at least 8/s: above it this client cannot ask; at 16/s: sent up to 5.1 ms late"
    ended = launch((8, 459, 0))
    assert ended.evidence is not None
    told = dataclasses.replace(ended.evidence, settings={"search_ended_by": why})
    rank = dataclasses.replace(ended.outcomes[0], evidence=told)
    found = rate_search.max_rate(measurements.gather([dataclasses.replace(ended, outcomes=(rank,))]))
    assert found is not None
    assert (found.value, found.high) == (8, None)
    assert found.note == golden
    assert f"{why}" in found.note
    assert "459" in found.note
    assert "higher" in found.note


def test_a_plain_run_is_no_search() -> None:
    assert searched((1, 459, 0), scenario="server") is None


def test_failing_is_as_sure_as_passing() -> None:
    """Of 24 requests two may be late by chance at 1 %: P(2 or more) is 2.4 %, P(3 or more) 0.2 %."""
    assert not early_stopping.too_many_late(24, 2, 0.99)
    assert early_stopping.too_many_late(24, 3, 0.99)
    assert not early_stopping.too_many_late(24, 0, 0.99)


# --- several launches ---


def launches(*found: tuple[tuple[float, int, int], ...], scenario: str = "search") -> Measurement | None:
    return rate_search.max_rate(
        measurements.gather([launch(*loads, scenario=scenario, repeat=n) for n, loads in enumerate(found)])
    )


def test_each_launch_is_bracketed_by_itself() -> None:
    """A rate that failed in one launch does not take away what passed in another."""
    found = launches(((8, 459, 0), (9, 459, 100)), ((7, 459, 0), (7.5, 459, 100)), ((8, 459, 0), (8.5, 459, 100)))
    assert found is not None
    assert found.value == pytest.approx((8 * 7 * 8) ** (1 / 3))
    assert (found.low, found.high, found.launches) == (pytest.approx(6.31, abs=0.01), pytest.approx(10.1, abs=0.1), 3)
    assert found.note
    assert found.note.count(" passed (459 requests, 0 late)") == 3


def test_launches_that_agree_have_the_bounds_of_their_bracket() -> None:
    found = launches(((8, 459, 0), (9, 459, 100)), ((8, 459, 0), (9, 459, 100)))
    assert found is not None
    assert (found.value, found.low, found.high) == pytest.approx((8, 8, 9))


def test_a_launch_that_lacks_an_end_takes_that_bound_away() -> None:
    found = launches(((8, 459, 0), (9, 459, 100)), ((8, 459, 100),))
    assert found is not None
    assert (found.value, found.low, found.high) == (pytest.approx(8), None, 9)
    found = launches(((8, 459, 0), (9, 459, 100)), ((8, 459, 0),))
    assert found is not None
    assert (found.low, found.high) == (pytest.approx(8), None)


def test_an_undecided_launch_does_not_count_as_a_repeat() -> None:
    found = launches(((8, 459, 0), (9, 459, 100)), ((8, 100, 0),))
    assert found is not None
    assert (found.value, found.high, found.launches) == (8, 9, 1)


def test_a_sweep_with_few_requests_per_launch_is_decided_by_all_launches() -> None:
    few = ((1, 230, 0), (2, 3, 1))
    found = launches(few, few, scenario="sweep")
    assert found is not None
    assert (found.value, found.high) == (1, 2)
    found = launches(few, few)
    assert found is not None
    assert found.value is None


# --- found again ---


def drawn(rng: np.random.Generator, count: int, level: float = 100.0) -> rate_search.Bracket:
    """Launches 3 % apart, each bracketed to 5 %."""
    true = level * np.exp(0.03 * rng.standard_normal(count))
    passed = [float(each) for each in true * np.exp(-0.05 * rng.random(count))]
    return rate_search.Bracket(*rate_search.combined([(low, low * math.exp(0.05)) for low in passed]), count)


@pytest.mark.parametrize(("first", "second"), [(2, 2), (2, 3), (3, 2), (3, 3)])
def test_noise_between_launches_is_rarely_called_a_change(first: int, second: int) -> None:
    rng, changed, fell = np.random.default_rng(7), 0, 0
    for _ in range(300):
        same = rate_search.ratio(drawn(rng, second), drawn(rng, first))
        lower = rate_search.ratio(drawn(rng, second, level=70.0), drawn(rng, first))
        assert same is not None
        assert lower is not None
        changed += verdict_of(same, HIGHER)[0] in (BETTER, WORSE)
        fell += verdict_of(lower, HIGHER)[0] == WORSE
    assert changed <= 15
    assert fell >= (270 if (first, second) == (3, 3) else 100)


def found_thrice(passed: float, failed: float | None) -> rate_search.Bracket:
    """The same in three launches."""
    return rate_search.Bracket(passed, passed, failed, 3)


@pytest.mark.parametrize(
    ("over", "under", "excludes_1"),
    [
        # What failed now had passed before: however wide the bracket before was, it fell.
        ((4, 4.4), (5, 50), True),
        ((4, 4.4), (5, None), True),
        ((4, 6), (5, 5.5), False),
        ((8, 9), (5, 5.5), True),
        ((8, 9), (5, None), False),
    ],
)
def test_a_rate_that_failed_below_one_that_passed_before_is_lower(
    over: tuple[float, float], under: tuple[float, float | None], excludes_1: bool
) -> None:
    found = rate_search.ratio(found_thrice(*over), found_thrice(*under))
    assert found is not None
    assert found.low <= found.value <= found.high
    assert (not found.low <= 1 <= found.high) == excludes_1
    assert (verdict_of(found, HIGHER)[0] != INCONCLUSIVE) == excludes_1


def test_distances_to_the_bounds_add_up_as_independent_errors_do() -> None:
    found = rate_search.ratio(found_thrice(6.0, 6.3), found_thrice(8.0, 8.4))
    assert found is not None
    assert found.value == 0.75
    # A passed at 8 itself and B at 6 itself, so each bracket reaches to one side only.
    assert (found.low, found.high) == pytest.approx((0.75 / 1.05, 0.75 * 1.05))
    wide = rate_search.Bracket(6.0, 5.7, 6.3, 3)
    found = rate_search.ratio(wide, wide)
    assert found is not None
    distances = math.log(6.3 / 6.0), math.log(6.0 / 5.7)
    assert math.log(found.high) == pytest.approx(math.hypot(*distances))
    days = found._replace(common=0.01)
    assert math.log(days.high) == pytest.approx(math.hypot(*distances) + 1.95996 * 0.01, rel=1e-5)


def test_a_rate_that_nothing_bounds_has_no_ratio() -> None:
    assert rate_search.ratio(found_thrice(4, None), found_thrice(8, 9)) is None
    assert rate_search.ratio(found_thrice(8, 9), rate_search.Bracket(4, None, 5, 2)) is None
