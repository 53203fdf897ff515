"""Loads of served cells: which requests are whose, how fast, and the highest that kept its limits."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from answered_records import build_record, build_request, build_spec, in_stages, one_by_one
from served_records import CLIENT

from paceline.analysis.cost import served as served_cost
from paceline.analysis.cost.training import Costing
from paceline.analysis.served import estimates, measurements
from paceline.host.prices import Price
from paceline.results.records import RunRecord


def sweep(*seconds: float, count: int = 50, **serving: object) -> RunRecord:
    """Concurrency 1, 2, 4 ...: each load with answers that take so long."""
    at, parts = 0.0, []
    for number, each in enumerate(seconds):
        width = 2**number
        parts.append([build_request(n, at + each * (n // width), each) for n in range(count)])
        at = (parts[-1][-1].ended_ns or 0) / 1e9
    return in_stages(build_spec(**serving), parts, concurrency=[2**n for n in range(len(seconds))])


def test_a_plain_run_is_one_load_without_a_name() -> None:
    (load,) = measurements.gather([build_record(build_spec(), one_by_one(0.1))])
    assert load.name is None
    assert estimates.value(load, "output_tokens_per_s") == pytest.approx(50)
    rate = estimates.estimate(load, "output_tokens_per_s")
    assert rate is not None
    assert rate.value == pytest.approx(50)


def test_stages_are_loads_of_their_own() -> None:
    found = measurements.gather([sweep(0.1, 0.1, 0.4)])
    assert [load.name for load in found] == ["concurrency 1", "concurrency 2", "concurrency 4"]
    assert [len(load.requests) for load in found] == [50, 50, 50]
    assert [estimates.value(load, "output_tokens_per_s") for load in found] == pytest.approx([50, 100, 48.08], rel=0.01)
    assert found[1].axes()["concurrency"] == 2


def test_launches_of_a_cell_are_joined_by_load() -> None:
    first, second = sweep(0.1, 0.1), sweep(0.2, 0.2)
    again = dataclasses.replace(second, spec=dataclasses.replace(second.spec, repeat=1))
    found = measurements.gather([first, again])
    assert [len(load.launches) for load in found] == [2, 2]
    assert estimates.value(found[0], "output_tokens_per_s") == pytest.approx(500 / 15)


def in_waves(repeat: int, seconds: float) -> RunRecord:
    """Eight waves of sixteen answers: a long prefill in which no token comes, then all of them at once."""
    asked = []
    for n in range(128):
        begin = seconds * (n // 16)
        came = int((begin + 0.8 * seconds) * 1e9)
        asked.append(build_request(n, begin, seconds, first_ns=came, last_ns=came))
    found = build_record(build_spec(), asked)
    return dataclasses.replace(found, spec=dataclasses.replace(found.spec, repeat=repeat))


def test_one_rate_has_one_interval_everywhere_in_a_report() -> None:
    """Launches within 2 % of each other. Slices of time, in which prefill and decode take turns, would say 30 %."""
    records = [in_waves(repeat, seconds) for repeat, seconds in enumerate((1.0, 1.02, 1.001))]
    (load,) = measurements.gather(records)
    (told,) = (m for m in measurements.measure(load) if m.metric == "output_tokens_per_s")
    rate = estimates.estimate(load, "output_tokens_per_s")
    assert rate is not None
    assert (told.value, told.low, told.high) == (rate.value, *rate.interval)
    assert told.low is not None
    assert told.value is not None
    assert told.low > 0.9 * told.value
    (cost,) = served_cost.analyse(records, Costing((Price(name="own", usd_per_gpu_hour=3.6),)))
    priced = cost.usd_per_output_mtok
    assert priced.value * told.value == pytest.approx(priced.low * told.high) == pytest.approx(priced.high * told.low)


def test_a_percentile_with_too_few_beyond_has_a_value_and_no_spread() -> None:
    """Of 459 the five beyond the 99th are neighbours, in one block; 458 are too few for it."""
    rng = np.random.default_rng(1)
    asked = one_by_one(lambda n, at: 1.0 if n < 5 else rng.lognormal(-2, 0.2), 459)
    (load,) = measurements.gather([build_record(build_spec(), asked)])
    median, tail = (estimates.estimate(load, metric) for metric in ("ttft_p50_s", "ttft_p99_s"))
    assert median is not None
    assert tail is not None
    assert median.error is not None
    assert (tail.value, tail.error) == (estimates.value(load, "ttft_p99_s"), None)
    (few,) = measurements.gather([build_record(build_spec(), one_by_one(0.1, 458))])
    assert estimates.estimate(few, "ttft_p99_s") is None


def test_the_load_at_the_limits_is_the_fastest_that_kept_them(golden: object) -> None:
    """First tokens after 20, 20 and 80 ms; the third load is not the fastest anyway, the second is."""
    found = measurements.gather([sweep(0.1, 0.1, 0.1, 0.4, ttft_limit_s=0.05)])
    chosen = estimates.at_limits(found)
    assert chosen is not None
    assert chosen[0].name == "concurrency 4"
    assert chosen[1].ok is True
    assert not chosen[1].proved
    strict = measurements.gather([sweep(0.1, 0.05, ttft_limit_s=0.005)])
    assert estimates.at_limits(strict) is None
    broken = estimates.at_limits(measurements.gather([build_record(build_spec(ttft_limit_s=0.005), one_by_one(0.1))]))
    assert broken is not None
    assert broken[1].ok is False
    assert broken[1].text == golden
    assert "100" in broken[1].text


def searched(*rates: float | None, count: int = 50) -> RunRecord:
    """A search whose loads answer ever faster; its guess, without a rate, is a closed loop."""
    parts = [[build_request(n, 100 * k + n * 0.1 / (k + 1), 0.1) for n in range(count)] for k in range(len(rates))]
    spec = build_spec(scenario="search", concurrency=None, rate_per_s=1.0)
    scenarios = ["server" if rate else "concurrency" for rate in rates]
    caps = [None if rate else 4 for rate in rates]
    return in_stages(spec, parts, scenario=scenarios, rate_per_s=rates, concurrency=caps)


def test_a_search_is_not_priced_at_its_guess() -> None:
    chosen = estimates.at_limits(measurements.gather([searched(2.0, None)]))
    assert chosen is not None
    assert chosen[0].rate_per_s == 2.0
    assert estimates.at_limits(measurements.gather([searched(None)])) is None


def test_a_load_is_of_the_launches_in_which_it_was_put_on() -> None:
    """A search comes to other rates in each launch."""
    first, second = searched(2.0, 4.0), searched(2.0, 3.0)
    again = dataclasses.replace(second, spec=dataclasses.replace(second.spec, repeat=1))
    found = {load.rate_per_s: load.runs for load in measurements.gather([first, again])}
    both = (first.spec.run_id, again.spec.run_id)
    assert found == {2.0: both, 4.0: both[:1], 3.0: both[1:]}


def test_a_load_whose_client_was_late_is_left_out() -> None:
    late = dataclasses.replace(CLIENT, stage=1, schedule_lag_p99_ns=9e6)
    record = dataclasses.replace(searched(2.0, 4.0), clients=(CLIENT, late))
    assert [load.rate_per_s for load in measurements.reliable_loads([record])] == [2.0]


def test_of_loads_that_kept_their_limits_one_with_proof_comes_first() -> None:
    proved, faster = searched(2.0, count=459), searched(2.0, 4.0)
    spec = dataclasses.replace(faster.spec, repeat=1)
    found = measurements.gather([proved, dataclasses.replace(faster, spec=spec)])
    chosen = estimates.at_limits(found)
    assert chosen is not None
    assert (chosen[0].rate_per_s, chosen[1].proved) == (2.0, True)


def test_tokens_of_reasoning_come_when_they_came() -> None:
    """Of 10 s an answer thinks from the first on, and says its first word in the last: its rate is even."""
    asked = [build_request(n, 0.0, 10.0, first_ns=int(9e9), first_reasoning_ns=int(1e9)) for n in range(2)]
    (load,) = measurements.gather([build_record(build_spec(), asked)])
    rows = estimates._slices(load.launches[0])
    assert rows[: len(rows) // 2, 0].sum() == pytest.approx(10 * (1 / 5 + 4 / 5 * 4 / 9))


def test_enough_requests_are_judged_by_early_stopping(golden: object) -> None:
    late = [build_request(n, 0.0, 1.0 if n == 0 else 0.1) for n in range(661)]
    spec = build_spec(ttft_limit_s=0.05)
    (load,) = measurements.gather([build_record(spec, late)])
    found = estimates.kept(load)
    assert found[0] is False
    assert found[1] == golden
    assert "661" in found[1]
    assert found[2] is True
    (more,) = measurements.gather([build_record(spec, [*late, build_request(661, 0.0, 0.1)])])
    assert estimates.kept(more).ok is True
