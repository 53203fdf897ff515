"""Times of tokens and the steady part of a load, against hand-computed ones."""

from __future__ import annotations

import numpy as np
import pytest
from served_records import MS, record, request, streamed

from paceline.analysis.served import measurements, token_times
from paceline.results.served_samples import RequestSample


def test_an_arrival_holds_all_tokens_of_its_time() -> None:
    """Four events, the second and third in one read, of eight tokens by the server's count; then four of four."""
    pairs = request(tokens=8, token_ns=(10 * MS, 0, 10 * MS))
    found = token_times.arrivals([pairs, request(first_ns=5 * MS)])
    assert (found.times / MS).tolist() == [102, 112, 122, 5, 15, 25, 35]
    assert found.tokens.tolist() == [2, 4, 2, 1, 1, 1, 1]
    assert np.flatnonzero(found.first).tolist() == [0, 3]


def test_times_that_were_not_kept_are_not_made_up(golden: object) -> None:
    assert token_times.arrivals([request(token_ns=()), request(pieces=0, token_ns=())]).unknown == 1
    whole = token_times.steady([request(token_ns=())], 1)
    assert whole.reason == golden
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


def test_a_load_that_was_never_full_has_no_steady_part(golden: object) -> None:
    found = token_times.steady([streamed(0, 0, 1), streamed(1, 1, 2)], 4)
    assert found.reason == golden
    assert "95" in found.reason


def by_name(scenario: str, count: int, **serving: object) -> dict[str, object]:
    asked = [streamed(n, 0, 1) for n in range(count)]
    (load,) = measurements.gather([record(asked, scenario=scenario, **serving)])
    return {m.metric: m for m in measurements.measure(load)}


def test_the_steady_rate_is_shown_beside_the_whole() -> None:
    """Three at once for 1 s, and one more for another: 30 tokens in the steady second of two."""
    asked = [*(streamed(n, 0, 1) for n in range(3)), streamed(3, 1, 2)]
    (load,) = measurements.gather([record(asked)])
    found = {m.metric: m for m in measurements.measure(load)}
    assert found["output_tokens_per_s"].value == pytest.approx(20)
    assert found["steady_output_tokens_per_s"].value == pytest.approx(30)
    assert found["steady_ratio"].value == pytest.approx(0.5)


def test_without_a_steady_rate_the_reason_is_shown(golden: object) -> None:
    rate = by_name("server", 2, rate_per_s=1.0)["steady_output_tokens_per_s"]
    assert (rate.value, rate.note) == (None, measurements.OPEN_LOAD)
    rate = by_name("concurrency", 2, concurrency=40)["steady_output_tokens_per_s"]
    assert rate.value is None
    assert rate.note == golden
    assert "38" in rate.note
    assert "95" in rate.note
    assert "40" in rate.note


# --- a closed load: the steady part holds its refills and neither ramp nor end ---


def closed_load(
    slots: int, rounds: int, apart_ms: float, turnaround_ms: float, tokens: int = 16, ramp_ms: float = 0.0
) -> list[RequestSample]:
    """Every slot gives a token each 10 ms, and is filled again so long after its answer. Its last token comes with the
    end. Slots read a little apart from each other, and begin one ramp_ms after another."""
    found, answer_ms = [], tokens * 10.0
    for slot in range(slots):
        begin = slot * (apart_ms + ramp_ms)
        for turn in range(rounds):
            start = (begin + turn * (answer_ms + turnaround_ms)) / 1e3
            found.append(streamed(slot + slots * turn, start, start + answer_ms / 1e3, tokens))
    return found


def rates(asked: list[RequestSample], slots: int) -> tuple[float, float]:
    """Of the whole load, and of its steady part."""
    (load,) = measurements.gather([record(asked, scenario="concurrency", concurrency=slots)])
    found = {m.metric: m.value for m in measurements.measure(load)}
    return found["output_tokens_per_s"] or 0.0, found["steady_output_tokens_per_s"] or 0.0


@pytest.mark.parametrize(("slots", "apart_ms"), [(2, 0.05), (8, 0.05), (8, 0.3), (32, 0.02), (64, 0.0)])
@pytest.mark.parametrize("turnaround_ms", [0.2, 0.8])
def test_answers_that_end_in_one_step_keep_their_last_tokens(slots: int, apart_ms: float, turnaround_ms: float) -> None:
    """A sixteenth of all tokens is last ones. All slots end within 2.1 ms of each other, and are refilled at once: the
    load is full for all but its first and last moments, so that both rates are the same."""
    whole, steady = rates(closed_load(slots, 40, apart_ms, turnaround_ms), slots)
    assert steady == pytest.approx(whole, rel=0.005)


def test_slots_that_end_at_times_of_their_own_have_the_rate_of_the_full_load() -> None:
    """Eight that began 20 ms apart: 100 tokens/s of each, while it answers. The refills, 3 ms of 163, belong to it."""
    asked = closed_load(8, 60, 20.0, 3.0)
    whole, steady = rates(asked, 8)
    assert steady == pytest.approx(8 * 16 / 0.163, rel=0.005)
    assert whole < 0.99 * steady


def test_ramp_and_end_are_still_cut_off() -> None:
    """Slots begin a second apart, and end so: full from 3 s to when the first one has had its 40 answers."""
    asked = closed_load(4, 40, 0.0, 0.0, ramp_ms=1000.0)
    found = token_times.steady(asked, 4)
    assert found.seconds == pytest.approx(40 * 0.16 - 3, abs=0.01)
    assert found.total / found.seconds == pytest.approx(400, rel=0.005)
    whole, steady = rates(asked, 4)
    assert whole < 0.75 * steady


def test_a_pause_between_answers_is_no_full_load() -> None:
    """Each slot rests 40 ms after 160 ms: a fifth of the time, which nobody may call steady."""
    found = token_times.steady(closed_load(4, 20, 0.05, 40.0), 4)
    assert found.seconds == pytest.approx(20 * 0.16, rel=0.005)


def test_answers_without_times_between_tokens_are_bridged_by_their_length() -> None:
    asked = closed_load(4, 30, 0.0, 0.5, tokens=1)
    # 10 ms each, and 0.5 ms until the next: no more than a twentieth.
    assert token_times.steady(asked, 4).seconds == pytest.approx(30 * 0.01 + 29 * 0.0005)


@pytest.mark.parametrize("tokens", [10**9, 10**18, 2**190])
def test_a_server_that_claims_too_many_tokens_fills_no_memory(tokens: int) -> None:
    """Each gap then counts once, as its share of one token."""
    found = token_times.gaps_between_tokens([request(tokens=tokens, token_ns=(10 * MS, 20 * MS, 30 * MS))])
    assert found.seconds.tolist() == pytest.approx([ms / 1e3 / (tokens / 4) for ms in (10, 20, 30)])
    assert found.split == 0
