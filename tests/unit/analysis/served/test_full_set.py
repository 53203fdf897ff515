"""The time for the whole set, from parts whose law is known."""

from __future__ import annotations

import numpy as np
import pytest
from served_records import in_turns, record, replica, streamed

from paceline.analysis.findings import FullSet
from paceline.analysis.served import extrapolation, measurements
from paceline.results.records import RunRecord

TWO = (replica(0), replica(1))


def told(*records: RunRecord) -> FullSet:
    (load,) = measurements.gather(records)
    found = extrapolation.full_set(load)
    assert found is not None
    return found


def test_what_is_added_goes_at_the_steady_rate() -> None:
    """Ten requests of 1 s, one after the other, 10 tokens each: 10 tokens/s; ninety more take 90 s."""
    found = told(record(in_turns(0, 10, 1.0), full_set=100))
    assert found.time is not None
    assert found.time.value == pytest.approx(100, rel=0.02)
    assert found.time.low is not None
    assert found.time.high is not None
    assert found.time.low <= found.time.value <= found.time.high
    assert (found.samples, found.asked, found.law) == (100, 10, extrapolation.FORMULA)


def test_answers_of_different_lengths_widen_the_interval() -> None:
    def width(least: int, most: int) -> float:
        tokens = np.random.default_rng(0).integers(least, most + 1, 40).tolist()
        asked = [streamed(n, n, n + 1, tokens[n]) for n in range(40)]
        time = told(record(asked, full_set=4000)).time
        assert time is not None
        assert time.low is not None
        assert time.high is not None
        return time.high - time.low

    assert width(2, 38) > 2 * width(20, 20)


def test_a_static_partition_ends_with_its_slowest_replica() -> None:
    """Replica 1 takes 2 s for one: half of 120 are 60 of its, so 120 s; together at the steady rate would say 80."""
    asked = [*in_turns(0, 6, 1.0), *in_turns(1, 6, 2.0, first=6)]
    found = told(record(asked, replicas=TWO, full_set=120))
    assert found.time is not None
    assert found.time.value == pytest.approx(120, rel=0.02)
    assert found.law == extrapolation.STATIC_FORMULA


def test_launches_are_drawn_first() -> None:
    launches = [
        record(in_turns(0, 10, seconds), repeat, full_set=100) for repeat, seconds in enumerate((1.0, 1.2, 0.9))
    ]
    time = told(*launches).time
    assert time is not None
    assert time.launches == 3
    assert time.low is not None
    assert time.high is not None
    assert time.low < time.value < time.high  # type: ignore[operator]


@pytest.mark.parametrize(
    "asked",
    [
        record([streamed(n, 0, 1) for n in range(8)], full_set=100),
        record([*in_turns(0, 5, 1.0), streamed(5, 0.0, 1.0)], full_set=100),
        record([*in_turns(0, 5, 1.0), streamed(5, 5, 6, error="reset")], full_set=100),
        record(in_turns(0, 5, 1.0), full_set=100, scenario="server", rate_per_s=1.0),
        record(in_turns(0, 5, 1.0), full_set=100, replicas=(replica(0, died_ns=1),)),
    ],
)
def test_an_unsound_extrapolation_is_replaced_by_its_reason(asked: RunRecord, golden: object) -> None:
    found = told(asked)
    assert found.time is None
    assert found.reason
    assert found.reason == golden


def test_nothing_is_extrapolated_if_the_size_is_unknown_or_all_was_asked() -> None:
    def of(**serving: int | str) -> FullSet | None:
        (load,) = measurements.gather([record(in_turns(0, 5, 1.0), **serving)])  # type: ignore[arg-type]
        return extrapolation.full_set(load)

    assert of() is None
    assert of(full_set=5) is None
    summaries = of(data="summaries")
    assert summaries is not None
    assert summaries.samples == 13_368
