"""Which loads a run puts on, against replicas that are a rule: what passes, what fails, when it ends."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from paceline.errors import RequestError
from paceline.experiment.serving import Serving
from paceline.serving.client.schedule import ANY_REPLICA, NS, WHEN_FREE
from paceline.serving.early_stopping import Verdict
from paceline.serving.prompts import Prompt
from paceline.workloads.inference.loads import (
    OFFLINE_CAP,
    Load,
    Loads,
    Outcome,
    is_lost,
    loads_of,
    most_in,
    plan_of,
    seed_of,
    trial_s,
)

Rule = Callable[[Load], Outcome]


def ample() -> float:
    return math.inf


def drive(sequence: Loads, rule: Rule) -> list[tuple[Load, Outcome]]:
    seen: list[tuple[Load, Outcome]] = []
    try:
        load = next(sequence)
        while True:
            seen.append((load, rule(load)))
            load = sequence.send(seen[-1][1])
    except StopIteration:
        return seen


def in_time(load: Load) -> Outcome:
    return Outcome(requests=load.requests, late=0, wall_s=1.0)


def able_to(rate: float) -> Rule:
    """Replicas that keep the limits up to a rate, and none of them beyond it."""

    def rule(load: Load) -> Outcome:
        asked = load.rate_per_s if load.rate_per_s is not None else math.inf
        served = min(asked, rate)
        late = 0 if asked <= rate else load.requests
        return Outcome(requests=load.requests, late=late, wall_s=load.requests / served)

    return rule


def loads(samples: int = 10, replicas: int = 2, left_s: Callable[[], float] = ample, **asked: Any) -> Loads:
    return loads_of(Serving(**asked), samples, replicas, 7, left_s, answer_tokens=1)


def test_plain_scenarios_are_one_load() -> None:
    ((offline, _),) = drive(loads(), in_time)
    assert (offline.scenario, offline.concurrency, offline.rate_per_s) == ("offline", OFFLINE_CAP, None)
    ((single, _),) = drive(loads(scenario="single_stream", concurrency=9), in_time)
    assert single.concurrency == 1
    ((server, _),) = drive(loads(scenario="server", rate_per_s=4.0, least_s=600.0), in_time)
    assert (server.rate_per_s, server.concurrency, server.least_s) == (4.0, None, 600.0)


def test_a_paired_run_goes_there_and_back_with_the_same_requests() -> None:
    seen = [load for load, _ in drive(loads(replicas=3, partition="paired"), in_time)]
    assert [load.replica for load in seen] == [0, 1, 2, 2, 1, 0]
    assert len({load.seed for load in seen}) == 1
    assert {load.concurrency for load in seen} == {171}, "its share of 512, as beside the others"


@pytest.mark.parametrize(
    ("asked", "sizes"),
    [
        ({"loads": "1+2+16"}, [1, 2, 16]),
        ({"concurrency": 6}, [1, 2, 4, 6]),
        ({"concurrency": 8}, [1, 2, 4, 8]),
        ({}, [1, 2, 4, 8, 16, 32, 64]),
    ],
)
def test_a_sweep_goes_through_what_is_given_or_doubles(asked: dict[str, Any], sizes: list[int]) -> None:
    seen = [load for load, _ in drive(loads(scenario="sweep", **asked), in_time)]
    assert [load.concurrency for load in seen] == sizes
    assert {load.scenario for load in seen} == {"concurrency"}
    # Each load has its own plan.
    assert len({load.seed for load in seen}) == len(seen)


def test_a_sweep_of_rates_ends_where_the_replicas_do_not_keep_up() -> None:
    seen = drive(loads(scenario="sweep", rate_per_s=1.0), able_to(5.0))
    assert [load.rate_per_s for load, _ in seen] == [1, 2, 4, 8]
    given = drive(loads(scenario="sweep", rate_per_s=1.0, loads="0.5+20+40"), able_to(5.0))
    assert [load.rate_per_s for load, _ in given] == [0.5, 20, 40]


@pytest.mark.parametrize("text", ["", "1+", "a", "0+1", "1.5", "inf", "nan", "-1"])
def test_loads_that_are_none_are_one_sentence(text: str, golden: object) -> None:
    with pytest.raises(RequestError) as caught:
        next(loads(scenario="sweep", loads=text))
    assert str(caught.value) == golden


@pytest.mark.parametrize("capacity", [0.05, 1.0, 3.3, 7.9, 250.0])
@pytest.mark.parametrize("begin", [None, 1.0, 40.0])
def test_a_search_comes_within_a_twentieth_of_what_the_replicas_can_do(capacity: float, begin: float | None) -> None:
    seen = drive(loads(scenario="search", rate_per_s=begin), able_to(capacity))
    rated = [(load, outcome) for load, outcome in seen if load.rate_per_s is not None]
    passed = max(load.rate_per_s or 0.0 for load, outcome in rated if outcome.verdict is Verdict.PASSED)
    failed = min(load.rate_per_s or 0.0 for load, outcome in rated if outcome.verdict is Verdict.FAILED)
    assert passed <= capacity < failed
    assert failed / passed <= 1.05
    # Whoever gives no rate has one guessed first, by a closed loop.
    assert (seen[0][0].scenario == "concurrency") == (begin is None)
    # Ten samples tell nothing about the 99th percentile: they are used again.
    assert {load.requests for load, _ in rated} == {459}


def end_of(sequence: Loads, rule: Rule) -> str | None:
    try:
        load = next(sequence)
        while True:
            load = sequence.send(rule(load))
    except StopIteration as end:
        return str(end.value)


def client_able_to(rate: float, rule: Rule) -> Rule:
    """A client that is late above a rate, whatever the replicas do."""

    def asked(load: Load) -> Outcome:
        late = load.rate_per_s is not None and load.rate_per_s > rate
        return dataclasses.replace(rule(load), doubt="at lunch" if late else None)

    return asked


@pytest.mark.parametrize("capacity", [math.inf, 12.0])
def test_nothing_is_learned_of_a_load_whose_client_is_doubted(capacity: float, golden: object) -> None:
    """At 16 a second replicas without end pass and those of 12 a second fail: neither is believed."""
    rule = client_able_to(10.0, able_to(capacity))
    seen = drive(loads(scenario="search", rate_per_s=2.0), rule)
    assert [load.rate_per_s for load, _ in seen] == [2, 4, 8, 16]
    why = end_of(loads(scenario="search", rate_per_s=2.0), rule)
    assert why == golden
    assert "16" in why


def test_a_client_that_is_late_once_a_rate_failed_leaves_the_bracket_wider(golden: object) -> None:
    """Between 8 and 16 a second the next is 11.31, their geometric mean to four digits."""

    def rule(load: Load) -> Outcome:
        return dataclasses.replace(able_to(12.0)(load), doubt="at lunch" if load.rate_per_s == 11.31 else None)

    why = end_of(loads(scenario="search", rate_per_s=2.0), rule)
    assert why == golden
    assert "16" in why
    assert "11.31" in why


def test_a_client_that_is_late_at_once_leaves_no_bound(golden: object) -> None:
    why = end_of(loads(scenario="search", rate_per_s=2.0), client_able_to(1.0, able_to(5.0)))
    assert why == golden


def test_a_rate_that_was_not_sent_is_not_passed(golden: object) -> None:
    def slow_to_send(load: Load) -> Outcome:
        assert load.rate_per_s is not None
        return dataclasses.replace(in_time(load), paced=min(1.0, 30.0 / load.rate_per_s))

    why = end_of(loads(scenario="search", rate_per_s=10.0), slow_to_send)
    assert why == golden
    assert "20" in why
    assert "40" in why
    assert "75" in why


def test_the_rate_of_a_search_is_bounded_even_where_everything_passes(golden: object) -> None:
    """A trial of 50 s at 20,480 a second is of 1,024,000 requests."""
    seen = drive(loads(scenario="search", rate_per_s=10.0), in_time)
    assert [load.rate_per_s for load, _ in seen] == [10 * 2**power for power in range(11)]
    why = end_of(loads(scenario="search", rate_per_s=10.0), in_time)
    assert why == golden
    assert "1.024" in why
    assert "04" in why
    assert "2.048" in why


# --- how long a trial lasts ---


def in_line(capacity: float, limit_s: float) -> Rule:
    """One line before replicas that answer so many a second: whoever comes at t s of a rate above that waits for
    t * (rate / capacity - 1) s."""

    def rule(load: Load) -> Outcome:
        assert load.rate_per_s is not None
        due_s = np.arange(max(load.requests, math.ceil(load.rate_per_s * load.least_s))) / load.rate_per_s
        late = int((due_s * max(load.rate_per_s / capacity - 1, 0.0) > limit_s).sum())
        return Outcome(requests=len(due_s), late=late, wall_s=float(due_s[-1]))

    return rule


def test_a_burst_does_not_pass() -> None:
    """100 a second with a limit of 2 s: of 662 requests at 143 a second the last comes after 4.62 s and waits for
    1.99 s, so that none is late. In 50 s those from 4.65 s on are: 6,484 of 7,150."""
    load = Load(scenario="server", requests=662, seed=0, rate_per_s=143.0)
    rule = in_line(100.0, 2.0)
    assert rule(load).verdict is Verdict.PASSED
    lasting = rule(dataclasses.replace(load, least_s=trial_s(Serving(scenario="search"), answer_tokens=1)))
    assert (lasting.requests, lasting.late, lasting.verdict) == (7150, 6484, Verdict.FAILED)
    # 5 % above what they can do, those from 40 s on: a fifth.
    barely = rule(dataclasses.replace(load, rate_per_s=105.0, least_s=50.0))
    assert (barely.requests, barely.late, barely.verdict) == (5250, 1050, Verdict.FAILED)


def test_a_search_finds_the_capacity_of_a_line_and_not_what_a_burst_passes() -> None:
    seen = drive(loads(662, scenario="search", rate_per_s=10.0), in_line(100.0, 2.0))
    passed = [load.rate_per_s for load, outcome in seen if outcome.verdict is Verdict.PASSED]
    assert max(rate or 0.0 for rate in passed) <= 105.0
    assert [load.least_s for load, _ in seen] == pytest.approx([50.0] * len(seen))


@pytest.mark.parametrize(
    ("asked", "tokens", "seconds"),
    [
        ({}, 1, 50.0),
        # 127 further tokens of 100 ms each may take 12.7 s.
        ({}, 128, 317.5),
        ({"ttft_limit_s": 0.4, "tpot_limit_s": 0.01}, 8, 10.0),
        ({"latency_limit_s": 20.0}, 128, 500.0),
        ({"least_s": 600.0}, 128, 600.0),
    ],
)
def test_a_trial_lasts_25_times_the_longest_wait_in_time(asked: dict[str, Any], tokens: int, seconds: float) -> None:
    assert trial_s(Serving(scenario="search", **asked), tokens) == pytest.approx(seconds)


def test_a_search_says_why_it_ended(golden: object) -> None:
    def why(rule: Rule, left_s: float = math.inf) -> str | None:
        return end_of(loads(scenario="search", rate_per_s=2.0, left_s=lambda: left_s), rule)

    assert why(able_to(5.0)) == golden
    assert why(able_to(1e-9)) == golden
    text = why(able_to(1.1), 300.0)
    assert text == golden
    assert "459" in text
    assert "timeout_s" in text


def test_a_search_ends_where_nothing_passes_or_time_does_not_suffice() -> None:
    hopeless = drive(loads(scenario="search", rate_per_s=64.0), able_to(1e-9))
    assert len(hopeless) == 11
    hurried = drive(loads(scenario="search", rate_per_s=1.0, left_s=lambda: 300.0), able_to(100.0))
    # 459 requests at 2 a second take 230 s, at 1 a second too long.
    assert hurried == []
    begun = drive(loads(scenario="search", rate_per_s=2.0, left_s=lambda: 300.0), able_to(3.0))
    assert [load.rate_per_s for load, _ in begun][:2] == [2.0, 4.0]


def with_late(*late: int) -> Rule:
    """Of the first loads so many requests are late; of those after them none up to 4 a second, and all above."""
    given = iter(late)

    def rule(load: Load) -> Outcome:
        known = next(given, None)
        return able_to(4.0)(load) if known is None else dataclasses.replace(in_time(load), late=known)

    return rule


def test_an_undecided_rate_gets_more_requests() -> None:
    """Of 459 requests 1 to 10 late ones are too many to pass and too few to fail."""
    seen = drive(loads(scenario="search", rate_per_s=4.0), with_late(1, 5))
    first = [(load.rate_per_s, load.requests, outcome.verdict) for load, outcome in seen[:4]]
    assert first == [
        (4.0, 459, Verdict.TOO_FEW),
        (4.0, 918, Verdict.TOO_FEW),
        (4.0, 1836, Verdict.PASSED),
        (8.0, 459, Verdict.FAILED),
    ]
    # Each is asked by another plan.
    assert len({load.seed for load, _ in seen}) == len(seen)


def test_an_undecided_rate_is_no_failure_and_the_search_goes_on_below(golden: object) -> None:
    late = (5, 10, 18, 37)
    seen = drive(loads(scenario="search", rate_per_s=4.0), with_late(*late))
    assert [load.rate_per_s for load, _ in seen[:5]] == [4, 4, 4, 4, 2]
    assert {outcome.verdict for _, outcome in seen[:4]} == {Verdict.TOO_FEW}
    why = end_of(loads(scenario="search", rate_per_s=4.0), with_late(*late))
    assert why == golden


def test_more_requests_than_there_is_time_for_are_not_asked() -> None:
    seen = drive(loads(scenario="search", rate_per_s=4.0, left_s=lambda: 200.0), with_late(1))
    assert [load.requests for load, _ in seen] == [459]


@pytest.mark.parametrize(
    ("requests", "late", "told"),
    [
        (458, 0, Verdict.TOO_FEW),
        (459, 0, Verdict.PASSED),
        (459, 1, Verdict.TOO_FEW),
        (459, 10, Verdict.TOO_FEW),
        (459, 11, Verdict.FAILED),
        (661, 1, Verdict.TOO_FEW),
        (662, 1, Verdict.PASSED),
    ],
)
def test_early_stopping_decides_a_load(requests: int, late: int, told: Verdict) -> None:
    assert Outcome(requests=requests, late=late, wall_s=1.0).verdict is told


def test_a_trial_is_lost_once_its_plan_and_chance_say_so() -> None:
    # One late of the first ten is more than a plan of 459 allows, but nothing rare.
    assert not is_lost(459, 10, 1)
    assert is_lost(459, 10, 4)
    # A plan of 13,368 allows 107.
    assert not is_lost(13_368, 300, 40)
    assert is_lost(13_368, 300, 108)
    assert not is_lost(100, 100, 100)
    # What ended early has failed; what was cut short for another reason says nothing.
    assert Outcome(requests=10, late=4, wall_s=1.0).verdict is Verdict.FAILED
    assert Outcome(requests=300, late=0, wall_s=1.0).verdict is Verdict.TOO_FEW


# --- plans ---

PROMPTS = [Prompt(token_ids=(number,), max_tokens=4) for number in range(12)]


def plan_with(partition: str = "static", replicas: int = 3, fastest_s: float | None = None, **load: Any) -> Any:
    made = Load(**{"scenario": "offline", "requests": len(PROMPTS), "seed": 3, **load})
    return plan_of(made, PROMPTS, range(replicas), partition, fastest_s)


def test_every_sample_once_over_all_replicas_by_plan_or_by_whoever_is_free() -> None:
    static, dynamic = plan_with(), plan_with("dynamic")
    assert sorted(static.samples) == sorted(dynamic.samples) == list(range(12))
    assert np.bincount(static.replicas).tolist() == [4, 4, 4]
    assert set(dynamic.replicas) == {ANY_REPLICA}
    # One replica alone is not chosen, but known.
    assert set(plan_with("dynamic", replicas=1).replicas) == {0}


@pytest.mark.parametrize("scenario", ["server", "constant"])
def test_an_open_load_lasts_as_long_as_asked_in_whole_rounds_of_samples(scenario: str) -> None:
    plan = plan_with(scenario=scenario, rate_per_s=10.0, least_s=20.0)
    assert plan.due_ns[-1] >= 20 * NS
    assert plan.due_ns[-2] < 20 * NS
    first, second = plan.samples[:12], plan.samples[12:24]
    assert sorted(first) == sorted(second) == list(range(12))
    assert list(first) != list(second)
    short = plan_with(scenario=scenario, rate_per_s=10.0, least_s=0.1)
    assert len(short) == 12
    # The same seed gives the same arrivals, however many are needed.
    assert (short.due_ns == plan.due_ns[:12]).all()


def test_a_closed_load_is_planned_beyond_what_it_can_reach() -> None:
    plan = plan_with(scenario="concurrency", concurrency=4, least_s=2.0, fastest_s=0.1)
    assert set(plan.due_ns) == {WHEN_FREE}
    assert len(plan) >= 2.0 * 4 / 0.1
    assert most_in(Load(scenario="concurrency", requests=5, seed=0, concurrency=4), None) == 5


def test_a_trace_keeps_its_own_order() -> None:
    prompts = [Prompt(token_ids=(1,), max_tokens=1, due_s=due) for due in (3.0, 1.0, 2.0)]
    plan = plan_of(Load(scenario="trace", requests=3, seed=0), prompts, range(2), "static", None)
    assert plan.samples.tolist() == [1, 2, 0]
    assert plan.due_ns.tolist() == [0, NS, 2 * NS]


def test_the_first_load_has_the_seed_itself() -> None:
    assert seed_of(7, 0) == 7
    assert len({seed_of(7, stage) for stage in range(50)}) == 50
