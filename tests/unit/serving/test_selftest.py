"""What the self-test says of the client, from requests whose times are known."""

from __future__ import annotations

from array import array
from dataclasses import replace
from typing import Any

import pytest

from paceline.serving import selftest
from paceline.serving.client.schedule import RequestResult, ShardResult
from paceline.serving.mock import Latencies

MS = 1_000_000
LAW = Latencies(ttft_s=0.1, itl_s=0.02, tokens=5, mode="clock")


def answer(
    number: int, stamp_error_ns: int = 20_000, ttft_ns: int = 100 * MS, itl_ns: int = 20 * MS, at_ns: int = 10 * MS
) -> RequestResult:
    """Sent by the server as told, stamped so much later."""
    told = [at_ns + ttft_ns + k * itl_ns for k in range(5)]
    stamps = [each + stamp_error_ns for each in told]
    made = RequestResult(number=number, replica=0, due_ns=at_ns, sent_ns=at_ns, first_ns=stamps[0], last_ns=stamps[-1])
    return replace(
        made, pieces=5, token_ns=array("q", stamps), text=" ".join(map(str, told)), first_byte_ns=1, stamped=True
    )


def rung(handled: list[RequestResult], **more: Any) -> selftest.Rung:
    values = {"schedule_lag_ns": [1000], "read_lag_ns": [1000], "reads": 5, "cpu_s": 0.1, "wall_s": 1.0}
    values |= {
        "start_ns": 0,
        "most_in_flight": 3,
        "waited_for_cap": 0,
        "clock_doubt_ns": 1,
        "clock_drift_ns": 1,
        **more,
    }
    return selftest.Rung(250.0, LAW, [ShardResult(results=handled, **values)])


def test_a_correct_client_passes() -> None:
    good = rung([answer(n, at_ns=(10 + 2 * n) * MS) for n in range(100)])
    assert good.reasons == ()
    assert good.stamp_errors_s.tolist() == pytest.approx([2e-5] * 500)
    assert good.off == pytest.approx({"TTFT p50": 2e-4, "TTFT p99": 2e-4, "TPOT p50": 0, "TPOT p99": 0}, abs=1e-9)
    # Due from 10 to 208 ms; from 109 ms on come 49 first tokens, 39 second, 29 third, 19 fourth and 9 fifth ones.
    assert good.events_per_s == pytest.approx((49 + 39 + 29 + 19 + 9) / 0.099)
    assert "VALID" in good.text


@pytest.mark.parametrize(
    "worse",
    [
        {"stamp_error_ns": 2 * MS},
        {"ttft_ns": 102 * MS},
        {"itl_ns": 21 * MS},
    ],
)
def test_a_difference_from_the_times_of_the_server_is_reported(worse: dict[str, int], golden: object) -> None:
    found = rung([answer(n, **worse) for n in range(100)])
    assert not found.is_valid
    assert found.text == golden
    assert f"INVALID({'client' if 'stamp_error_ns' in worse else 'server'})" in found.text


def test_a_tail_may_be_off_by_five_percent() -> None:
    """Three of a hundred are 6 % late: the median keeps the law, the 99th percentile does not."""
    found = rung([answer(n, ttft_ns=106 * MS if n < 3 else 100 * MS) for n in range(100)])
    assert [reason[:8] for reason in found.reasons] == ["TTFT p99"]


def test_failures_and_the_clients_own_word_count(golden: object) -> None:
    lost = RequestResult(number=9, replica=0, due_ns=0, error="reset")
    assert rung([answer(0), lost]).reasons == golden
    (reason,) = rung([answer(0)], cpu_s=0.9).reasons
    assert reason == golden
    assert "90" in reason
    nothing = rung([lost])
    assert nothing.events_per_s == 0.0
    assert nothing.text == golden
    assert "TTFT" in nothing.text
    assert "p50" in nothing.text


def test_the_climb_ends_with_the_first_unreliable_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[float, int]] = []

    def one(events_per_s: float, streams: int, seconds: float, shards: int) -> selftest.Rung:
        asked.append((events_per_s, streams))
        return rung([answer(0)], cpu_s=0.9 if len(asked) == 3 else 0.1)

    monkeypatch.setattr(selftest, "one", one)
    assert [each.is_valid for each in selftest.climb(700, 4.0, 1)] == [True, True, False]
    assert asked == [(1000.0, 500), (1600.0, 700), (2560.0, 700)]


def test_one_real_try_stamps_every_token() -> None:
    found = selftest.one(400, 20, 1.0, 1)
    assert found.failed == 0
    assert len(found.stamp_errors_s) == sum(each.pieces for each in found.answered) > 0
    assert found.stamp_errors_s.min() > -1e-4
