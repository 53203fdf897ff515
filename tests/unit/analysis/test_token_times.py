"""Times of tokens and the steady part of a load, against hand-computed ones."""

from __future__ import annotations

import numpy as np
import pytest
from served_records import MS, record, request, streamed

from paceline.analysis import served, token_times


def test_an_arrival_holds_all_tokens_of_its_time() -> None:
    """Four events, the second and third in one read, of eight tokens by the server's count; then four of four."""
    pairs = request(tokens=8, token_ns=(10 * MS, 0, 10 * MS))
    found = token_times.arrivals([pairs, request(first_ns=5 * MS)])
    assert (found.times / MS).tolist() == [102, 112, 122, 5, 15, 25, 35]
    assert found.tokens.tolist() == [2, 4, 2, 1, 1, 1, 1]
    assert np.flatnonzero(found.first).tolist() == [0, 3]


def test_times_that_were_not_kept_are_not_made_up() -> None:
    assert token_times.arrivals([request(token_ns=()), request(pieces=0, token_ns=())]).unknown == 1
    whole = token_times.steady([request(token_ns=())], 1)
    assert whole.reason == "the times of the tokens of 1 answers were not kept"
    assert len(token_times.gaps_between_tokens([]).seconds) == 0


def test_gaps_of_one_read_are_shares_of_the_gap_before_it() -> None:
    found = token_times.gaps_between_tokens([request(token_ns=(10 * MS, 0, 30 * MS))])
    assert sorted(found.seconds) == pytest.approx([0.005, 0.005, 0.03])
    assert found.split == 2


def test_requests_in_flight_are_counted_over_time() -> None:
    asked = [streamed(0, 0, 2), streamed(1, 1, 3), streamed(2, 5, 6)]
    assert token_times.most_in_flight(asked) == 2
    spans = token_times.spans_of_at_least(asked, 1)
    assert (spans.starts / 1e9).tolist() == [0, 5]
    assert (spans.ends / 1e9).tolist() == [3, 6]
    assert token_times.spans_of_at_least(asked, 2).seconds == 1
    assert token_times.spans_of_at_least(asked, 3).seconds == 0
    assert spans.elapsed_before(np.array([-1.0, 1e9, 4e9, 5.5e9])).tolist() == [0, 1e9, 3e9, 3.5e9]


def test_one_that_follows_another_leaves_no_gap() -> None:
    assert len(token_times.spans_of_at_least([streamed(0, 0, 1), streamed(1, 1, 2)], 1).starts) == 1


def test_the_steady_part_leaves_ramp_and_end_out() -> None:
    """Two in flight from 1 s to 4 s; each brings 10 tokens in 4 s, so 7.5 in those 3 s: the tokens at 1 s count."""
    found = token_times.steady([streamed(0, 0, 4), streamed(1, 1, 5)], 2)
    assert found.level == 2
    assert found.seconds == 3
    # The first one's at 1.2, 1.6, ... 4.0 s, the second one's at 1.4, 1.8, ... 3.8 s.
    assert found.total == 8 + 7
    rows = found.slices(3)
    assert rows[:, 0].sum() == 15
    assert rows[:, 1].tolist() == [1, 1, 1]


def test_a_load_that_was_never_full_has_no_steady_part() -> None:
    found = token_times.steady([streamed(0, 0, 1), streamed(1, 1, 2)], 4)
    assert found.reason == "4 requests were never in flight at once, 95% of 4"


def by_name(scenario: str, count: int, **serving: object) -> dict[str, object]:
    asked = [streamed(n, 0, 1) for n in range(count)]
    (load,) = served.gather([record(asked, scenario=scenario, **serving)])
    return {m.metric: m for m in served.measure(load)}


def test_the_steady_rate_stands_beside_the_whole() -> None:
    """Three at once for 1 s, and one more for another: 30 tokens in the steady second of two."""
    asked = [*(streamed(n, 0, 1) for n in range(3)), streamed(3, 1, 2)]
    (load,) = served.gather([record(asked)])
    found = {m.metric: m for m in served.measure(load)}
    assert found["output_tokens_per_s"].value == pytest.approx(20)
    assert found["steady_output_tokens_per_s"].value == pytest.approx(30)
    assert found["steady_ratio"].value == pytest.approx(0.5)


def test_where_there_is_no_steady_rate_the_reason_stands() -> None:
    rate = by_name("server", 2, rate_per_s=1.0)["steady_output_tokens_per_s"]
    assert (rate.value, rate.note) == (None, served.OPEN_LOAD)
    rate = by_name("concurrency", 2, concurrency=40)["steady_output_tokens_per_s"]
    assert (rate.value, rate.note) == (None, "38 requests were never in flight at once, 95% of 40")
