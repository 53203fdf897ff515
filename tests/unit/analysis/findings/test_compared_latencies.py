"""Latencies of two served loads beside each other: servers of one known law, and of another."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import cache
from itertools import combinations

import numpy as np
import pytest
from answered_records import NS, build_record, build_request, build_spec
from numpy.typing import NDArray

from paceline.analysis.compare import folders
from paceline.analysis.findings import LOWER, TIE, WORSE, Between, Change
from paceline.analysis.served import equal_work, estimates, measurements
from paceline.analysis.statistics import intervals
from paceline.analysis.statistics.verdict import verdict_of
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


def on_schedule(ttft_s: float, seed: int, answers: int = 460, engine: str = ENGINE) -> RunRecord:
    """50 requests a second, each answered after a second or so, whenever its first token comes: some 50 in flight, so
    that 460 are four blocks, and as many tokens a second with any TTFT."""
    rng = np.random.default_rng(seed)
    asked = []
    for n, noise in enumerate(rng.lognormal(0, 0.05, answers)):
        first_ns = round((n / 50 + ttft_s * noise) * NS)
        asked.append(build_request(n, n / 50, noise, first_ns=first_ns))
    spec = build_spec(engine, scenario="constant", concurrency=None, rate_per_s=50.0)
    return build_record(spec, asked, started_at=1e6 + seed)


def by_metric(a: Sequence[RunRecord], b: Sequence[RunRecord]) -> tuple[Between, dict[str, Change]]:
    found = folders.compare_experiments(a, b)
    return found, {c.metric: c for c in found.changes}


# --- one launch against one launch ---


@pytest.mark.parametrize(("metric", "slots"), [("ttft_p50_s", SLOTS), ("tpot_p50_s", IN_FLIGHT)])
def test_equal_servers_are_seldom_told_to_differ(metric: str, slots: int) -> None:
    """Every two of 16 launches of one law, at 95 %. Blocks of sqrt(n) = 35 answers, which `compare` drew before, are
    shorter than the 96 in flight: their intervals leave 1 out in 27 (TTFT) and 21 % (TPOT) of these pairs, and 8 and
    7 % have a verdict. Of all pairs of 50 launches they are 22 and 29 %, and 9 and 16 %; of blocks of 192 answers 8 and
    7 %, and 2 and 2 %."""
    found = []
    for seed in range(16):
        (load,) = measurements.gather([queued(seed, slots=slots)])
        estimate = estimates.estimate(load, metric)
        assert estimate is not None
        found.append(estimate)
    pairs = [intervals.ratio_between([b.redrawn()], [a]) for a, b in combinations(found, 2)]
    ratios = [ratio for ratio in pairs if ratio is not None]
    assert len(ratios) == 120
    assert sum(not ratio.low <= 1 <= ratio.high for ratio in ratios) <= 0.08 * len(ratios)
    assert sum(verdict_of(ratio, LOWER)[0] != TIE for ratio in ratios) <= 0.05 * len(ratios)


def test_twice_the_time_is_found(golden: object) -> None:
    found, changes = by_metric([queued(1)], [queued(2, slower=2.0)])
    for metric in ("ttft_p50_s", "tpot_p50_s"):
        change = changes[metric]
        assert change.verdict == WORSE
        assert change.reason == golden
        assert change.low is not None
        assert change.high is not None
        assert 1.5 < change.low < 2 < change.high < 2.7
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
    assert equal["ttft_p50_s"].verdict == TIE
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


def test_what_few_blocks_cannot_tell_is_said_with_its_ratio(golden: object) -> None:
    found, changes = by_metric([on_schedule(0.1, 1)], [on_schedule(0.3, 2)])
    change = changes["ttft_p50_s"]
    assert (change.verdict, change.low, change.detectable_ratio) == (None, None, None)
    assert change.ratio == pytest.approx(3, rel=0.05)
    assert change.reason == golden
    assert changes["output_tokens_per_s"].verdict == TIE
    text = told.sentence(found)
    assert text == golden
    assert "TTFT" in text
    assert "p50" in text


def test_a_gate_does_not_pass_latencies_it_cannot_see() -> None:
    """The rate ties, which says nothing about the first tokens of a load that comes by a schedule."""
    found, changes = by_metric([on_schedule(0.1, 1)], [on_schedule(0.3, 2)])
    assert gate.regressions(found, 5) == ()
    assert gate.unseen_losses(found, 5)[0].metric.startswith("ttft")
    assert {c.metric for c in gate.unseen_losses(found, 5)} == {"ttft_p50_s", "ttft_p99_s"}
    faster, _ = by_metric([on_schedule(0.3, 1)], [on_schedule(0.1, 2)])
    assert {c.metric for c in gate.unseen_losses(faster, 5)} <= {"tpot_p50_s", "tpot_p99_s"}
    # Where the median was judged, a tail without a verdict is told and stops nothing.
    judged = dataclasses.replace(changes["ttft_p50_s"], verdict=TIE)
    rest = [c for c in found.changes if c.metric != "ttft_p50_s"]
    seen = dataclasses.replace(found, changes=(judged, *rest))
    assert gate.unseen_losses(seen, 5) == ()
    assert [c.metric for c in gate.undecided_losses(seen, 5)] == ["ttft_p99_s"]


def test_engines_beside_each_other_say_what_has_no_interval() -> None:
    (pair,) = equal_work.analyse([on_schedule(0.3, 1), on_schedule(0.1, 2, engine="vllm")])
    assert [c.metric for c in pair.comparisons] == ["output_tokens_per_s"]
    undecided = {u.metric: u for u in pair.undecided}
    assert undecided["ttft_p50_s"].ratio == pytest.approx(3, rel=0.05)
    assert undecided["ttft_p50_s"].reason.count("one launch, with fewer than 5 blocks") == 2
    rows = [[cell.text for cell in row] for row in present._rows(pair)]
    assert any(row[3] == "ttft_p50_s" and "no verdict" in row[4] for row in rows)
