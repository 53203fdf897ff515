"""Latencies of two served loads beside each other: servers of one known law, and of another."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from functools import cache
from itertools import combinations

import numpy as np
import pytest
from answered_records import NS, build_record, build_request, build_spec
from numpy.typing import NDArray

from paceline.analysis.compare import folders
from paceline.analysis.findings import INCONCLUSIVE, LOWER, WORSE, Between, Change
from paceline.analysis.served import equal_work, estimates, measurements
from paceline.analysis.statistics import intervals
from paceline.analysis.statistics.verdict import ONE_LAUNCH, verdict_of
from paceline.report import gate
from paceline.report.tables import comparison as told
from paceline.report.tables import served_work as present
from paceline.results.records import RunRecord

IN_FLIGHT, SLOTS = 96, 24
STEP_S, PREFILL_S, PREFILLS = 0.01, 0.05, 0.15
ENGINE = "openai:url=http://x"


@cache
def schedule(answers: int, slots: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Tokens of each answer, and the step in which its first one comes: a slot that is free is filled at once."""
    sizes = np.random.default_rng(0).integers(6, 15, size=answers)
    free, begins = np.zeros(slots, dtype=np.int64), np.zeros(answers, dtype=np.int64)
    for n, size in enumerate(sizes):
        slot = int(free.argmin())
        begins[n] = free[slot]
        free[slot] += size
    return sizes, begins


def queued(
    seed: int, answers: int = 1200, slots: int = SLOTS, slower: float = 1.0, repeat: int = 0, engine: str = ENGINE
) -> RunRecord:
    """A closed loop of IN_FLIGHT requests at a server that decodes so many of them together, a token a step, while the
    others wait for a slot. Some steps hold the prefill of a long prompt: everybody in flight stalls behind it. Every
    launch asks the same; what differs is the time its steps take."""
    rng, (sizes, begins) = np.random.default_rng(seed), schedule(answers, slots)
    count = int((begins + sizes).max())
    steps = slower * (STEP_S * rng.lognormal(0, 0.3, count) + PREFILL_S * (rng.random(count) < PREFILLS))
    ends = np.cumsum(steps)
    last = ends[begins + sizes - 1]
    sent = np.concatenate((np.zeros(IN_FLIGHT), np.sort(last)))[:answers]
    # Of one that is sent as a slot is free, the first token comes with the next step.
    first = ends[begins]
    asked = []
    for n, (at, came, end, size) in enumerate(zip(sent, first, last, sizes, strict=True)):
        of_answer = {"first_ns": round(came * NS), "tokens": int(size), "pieces": int(size)}
        asked.append(build_request(n, at, end - at, **of_answer))
    return build_record(build_spec(engine, repeat, concurrency=IN_FLIGHT), asked, started_at=1e6 + seed)


def on_schedule(ttft_s: float, seed: int, answers: int = 460, engine: str = ENGINE, repeat: int = 0) -> RunRecord:
    """50 requests a second, each answered after a second or so, whenever its first token comes: some 50 in flight, so
    that 460 are four blocks, and as many tokens a second with any TTFT."""
    rng = np.random.default_rng(seed)
    asked = []
    for n, noise in enumerate(rng.lognormal(0, 0.05, answers)):
        first_ns = round((n / 50 + ttft_s * noise) * NS)
        asked.append(build_request(n, n / 50, noise, first_ns=first_ns))
    spec = build_spec(engine, repeat, scenario="constant", concurrency=None, rate_per_s=50.0)
    return build_record(spec, asked, started_at=1e6 + seed)


def by_metric(a: Sequence[RunRecord], b: Sequence[RunRecord]) -> tuple[Between, dict[str, Change]]:
    found = folders.compare_experiments(a, b)
    return found, {c.metric: c for c in found.changes}


# --- one launch against one launch ---


@pytest.mark.parametrize(("metric", "slots"), [("ttft_p50_s", SLOTS), ("tpot_p50_s", IN_FLIGHT)])
def test_intervals_of_one_launch_seldom_exclude_an_equal_server_and_give_no_verdict(metric: str, slots: int) -> None:
    """Every two of 16 launches of one law, at 95 %. Intervals of blocks of sqrt(n) = 35 answers, shorter than the 96 in
    flight, exclude 1 in 27 (TTFT) and 21 % (TPOT) of these pairs."""
    found = []
    for seed in range(16):
        (load,) = measurements.gather([queued(seed, slots=slots)])
        estimate = estimates.estimate(load, metric)
        assert estimate is not None
        found.append(estimate)
    pairs = [intervals.ratio_between([b], [a]) for a, b in combinations(found, 2)]
    ratios = [ratio for ratio in pairs if ratio is not None]
    assert len(ratios) == 120
    assert sum(not ratio.low <= 1 <= ratio.high for ratio in ratios) <= 0.08 * len(ratios)
    assert {verdict_of(ratio, LOWER) for ratio in ratios} == {(INCONCLUSIVE, ONE_LAUNCH)}


def test_twice_the_time_is_found(golden: object) -> None:
    a, b = ([queued(seed + n, 600, slower=slower, repeat=n) for n in range(3)] for seed, slower in ((1, 1.0), (4, 2.0)))
    found, changes = by_metric(a, b)
    for metric in ("ttft_p50_s", "tpot_p50_s"):
        change = changes[metric]
        assert change.verdict == WORSE
        assert change.reason == golden
        assert change.low is not None
        assert change.high is not None
        assert 1.3 < change.low < 2 < change.high < 3
    assert any("ttft_p50_s" in regression.text for regression in gate.regressions(found, 50))


# --- several launches ---


def test_several_launches_have_the_spread_of_launches() -> None:
    """Three of one law at levels of their own: what they differ by is within the interval, and no difference."""
    levels = (1.0, 1.5, 1.2)
    a, b = ([queued(seed + n, 300, slower=level, repeat=n) for n, level in enumerate(levels)] for seed in (10, 20))
    (load,) = measurements.gather(a)
    estimate = estimates.estimate(load, "ttft_p50_s")
    assert estimate is not None
    assert (estimate.launches, estimate.freedom) == (3, 2)
    low, high = estimate.interval
    assert low is not None
    assert high is not None
    assert high / low > 1.5
    _, equal = by_metric(a, b)
    assert equal["ttft_p50_s"].verdict == INCONCLUSIVE
    _, steady = by_metric(
        [queued(30 + n, 600, repeat=n) for n in range(3)],
        [queued(40 + n, 600, slower=2.0, repeat=n) for n in range(3)],
    )
    assert steady["ttft_p50_s"].verdict == WORSE


@pytest.mark.parametrize(("launches", "answers"), [(1, 1200), (2, 300)])
def test_a_comparison_knows_the_bounds_of_the_served_table(launches: int, answers: int) -> None:
    (load,) = measurements.gather([queued(n, answers, repeat=n) for n in range(launches)])
    table = {m.metric: (m.value, m.low, m.high) for m in measurements.measure(load)}
    for metric in estimates.LATENCIES:
        estimate = estimates.estimate(load, metric)
        assert estimate is not None
        assert (estimate.value, *estimate.interval) == table[metric]


# --- where the data supports no interval ---


def test_what_one_launch_cannot_tell_is_said_with_its_ratio(golden: object) -> None:
    found, changes = by_metric([on_schedule(0.1, 1)], [on_schedule(0.3, 2)])
    change = changes["ttft_p50_s"]
    assert (change.verdict, change.low, change.detectable_ratio) == (None, None, None)
    assert change.ratio == pytest.approx(3, rel=0.05)
    assert change.reason == golden
    assert changes["output_tokens_per_s"].verdict is None
    text = told.sentence(found)
    assert text == golden
    assert "TTFT" in text
    assert "p50" in text


def test_a_gate_looks_at_the_clearest_latency_of_a_load_and_not_at_its_rate() -> None:
    """Requests that come by a schedule arrive at the same rate however late their first tokens are."""
    a, b = ([on_schedule(0.1, seed + n, repeat=n) for n in range(3)] for seed in (1, 4))
    found, changes = by_metric(a, b)
    assert gate.catchable(changes["output_tokens_per_s"]) < min(gate.catchable(changes[m]) for m in estimates.LATENCIES)
    least = gate.least_visible(found)
    assert least is not None
    assert gate.catchable(least) == min(gate.catchable(changes[metric]) for metric in estimates.LATENCIES)
    blind = [
        dataclasses.replace(c, detectable_ratio=None) if c.metric in estimates.LATENCIES else c for c in found.changes
    ]
    least = gate.least_visible(dataclasses.replace(found, changes=tuple(blind)))
    assert least is not None
    assert gate.catchable(least) == math.inf
    late, _ = by_metric(a, [on_schedule(0.3, 4 + n, repeat=n) for n in range(3)])
    assert {"ttft_p50_s", "ttft_p99_s"} <= {r.text.split(": ")[1].split()[0] for r in gate.regressions(late, 5)}


def test_engines_beside_each_other_say_what_has_no_interval() -> None:
    (pair,) = equal_work.analyse([on_schedule(0.3, 1), on_schedule(0.1, 2, engine="vllm")])
    assert [c.metric for c in pair.comparisons] == ["output_tokens_per_s"]
    undecided = {u.metric: u for u in pair.undecided}
    assert undecided["ttft_p50_s"].ratio == pytest.approx(3, rel=0.05)
    assert undecided["ttft_p50_s"].reason.count("one launch, with fewer than 5 blocks") == 2
    rows = [[cell.text for cell in row] for row in present._rows(pair)]
    assert any(row[3] == "ttft_p50_s" and "no verdict" in row[4] for row in rows)
