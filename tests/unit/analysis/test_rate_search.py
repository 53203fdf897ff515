"""The highest rate within the limits, from loads whose late requests are known."""

from __future__ import annotations

import pytest
from served_records import S, record, request, stage

from paceline import stopping
from paceline.analysis import rate_search, served
from paceline.findings import Measurement


def searched(*loads: tuple[float, int, int], scenario: str = "search") -> Measurement | None:
    """Each load: its rate, its requests, and how many came after 3 s, where 2 s are allowed."""
    requests, stages = [], []
    for number, (rate, count, late) in enumerate(loads):
        stages.append(stage(number, scenario="server", rate_per_s=rate))
        slow = {"first_ns": 3 * S, "last_ns": 3 * S}
        requests += [request(n, stage=number, **(slow if n < late else {})) for n in range(count)]
    return rate_search.max_rate(served.gather([record(requests, stages=stages, scenario=scenario, rate_per_s=1.0)]))


def test_the_highest_that_passed_below_the_lowest_that_failed() -> None:
    found = searched((1, 459, 0), (4, 459, 100), (2, 662, 1), (8, 459, 400))
    assert found is not None
    assert (found.value, found.low, found.high) == (2, 2, 4)
    assert found.n == 459 + 459 + 662 + 459
    assert found.note == "2/s passed (662 requests, 1 late); 4/s failed (459 requests, 100 late)"
    assert "stage" not in found.axes


def test_too_few_requests_bound_nothing() -> None:
    found = searched((1, 459, 0), (2, 100, 0), (4, 459, 100))
    assert found is not None
    assert (found.value, found.high) == (1, 4)
    assert found.note
    assert "2/s: too few requests to tell" in found.note


def test_one_that_passes_above_one_that_failed_is_told_not_taken() -> None:
    found = searched((1, 459, 0), (2, 459, 100), (4, 459, 0))
    assert found is not None
    assert (found.value, found.high) == (1, 2)
    assert found.note
    assert "4/s passed all the same" in found.note


@pytest.mark.parametrize(("load", "bounds"), [((1, 459, 0), (1, None)), ((1, 459, 100), (None, 1))])
def test_an_end_that_was_not_seen_is_none(load: tuple[float, int, int], bounds: tuple[float | None, ...]) -> None:
    found = searched(load, load)
    assert found is not None
    assert (found.value, found.high) == bounds


def test_a_plain_run_is_no_search() -> None:
    assert searched((1, 459, 0), scenario="server") is None


def test_failing_is_as_sure_as_passing() -> None:
    """Of 24 requests two may be late by chance at 1 %: P(2 or more) is 2.4 %, P(3 or more) 0.2 %."""
    assert not stopping.too_many_late(24, 2, 0.99)
    assert stopping.too_many_late(24, 3, 0.99)
    assert not stopping.too_many_late(24, 0, 0.99)


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
def test_the_interval_of_two_found_rates_is_that_of_all_their_ratios(
    over: tuple[float, float], under: tuple[float, float | None], excludes_1: bool
) -> None:
    found = rate_search.ratio(rate_search.Bracket(*over), rate_search.Bracket(*under))
    assert found is not None
    assert found.low <= found.value <= found.high
    assert (not found.low <= 1 <= found.high) == excludes_1
    assert (max(found.value, 1 / found.value) - 1 > found.detectable) >= excludes_1


def test_a_rate_that_nothing_bounds_has_no_ratio() -> None:
    assert rate_search.ratio(rate_search.Bracket(4, None), rate_search.Bracket(8, 9)) is None
