"""Groups of peers: the median is the measure unless two real groups stand apart, and no band goes unenforced."""

from __future__ import annotations

import math

import node_records as synthetic
import numpy as np
import pytest

from paceline.analysis.findings.machine import FAIL, PASS, SUSPECT, UNDECIDED
from paceline.analysis.machine import nodes
from paceline.analysis.machine.peers import SPLIT, SPREAD, Band, among_peers, beside_baseline

SPEED = Band(math.log(0.95), None)


def rated(paces: list[float], repeats: int = 5) -> list[str]:
    """Verdicts on nodes of these rates, each the same in every repeat."""
    values = np.log(np.repeat(np.array(paces)[:, None], repeats, axis=1))
    return [s.verdict for s in among_peers(values, SPEED)]


@pytest.mark.parametrize(
    "paces",
    [
        [1.0] * 7 + [1.07],
        [1.0, 1.0, 1.07],
        [1.0] * 6 + [1.07, 1.15],
        [1.0] * 14 + [1.07] * 2,
        [1.0, 1.0, 1.03, 1.03, 1.06, 1.06],
    ],
    ids=["one of eight", "one of three", "two singles", "fewer than a quarter", "no gap"],
)
def test_a_few_fast_nodes_make_nobody_slow(paces: list[float]) -> None:
    assert rated(paces) == [PASS] * len(paces)


@pytest.mark.parametrize(("fast", "slow"), [(2, 2), (2, 6), (4, 4), (4, 12)])
def test_a_group_ahead_by_more_than_the_band_makes_the_others_suspect(fast: int, slow: int) -> None:
    assert rated([1.0] * fast + [0.9] * slow) == [PASS] * fast + [SUSPECT] * slow


def test_one_fast_node_does_not_hide_two_groups() -> None:
    assert rated([1.2, 1.0, 1.0] + [0.86] * 5) == [PASS] * 3 + [SUSPECT] * 5


def test_a_failed_node_does_not_hide_two_groups() -> None:
    assert rated([1.0] * 4 + [0.86] * 3 + [0.3]) == [PASS] * 4 + [SUSPECT] * 3 + [FAIL]


def test_parts_that_differ_by_chance_are_no_groups() -> None:
    """200 trials of 16 nodes that differ by 1.5 %: the fastest is 5 % ahead of the slowest in most of them."""
    alarms = 0
    for seed in range(200):
        rng = np.random.default_rng(seed)
        values = rng.normal(0, 0.015, (16, 1)) + rng.normal(0, 0.002, (16, 5))
        alarms += any(s.verdict != PASS for s in among_peers(values, SPEED))
    assert alarms <= 4


def test_groups_are_found_in_noise() -> None:
    """Four nodes of eight slower by 12 %, with 1 % of noise: all four and nobody else are named in 95 of 100."""
    found = 0
    for seed in range(100):
        rng = np.random.default_rng(seed)
        values = np.where(np.arange(8) < 4, math.log(0.88), 0.0)[:, None] + rng.normal(0, 0.01, (8, 5))
        found += [s.reason for s in among_peers(values, SPEED)] == [SPLIT] * 4 + [""] * 4
    assert found >= 95


# --- peers that spread ---


@pytest.mark.parametrize(
    ("celsius", "outside"),
    [
        ([60, 75, 90], {60, 90}),
        ([60, 60, 90, 90], {60, 90}),
        ([55, 60, 65, 70, 75, 80, 85, 90], {55, 60, 85, 90}),
        ([60, 65, 70, 75], set()),
    ],
)
def test_a_temperature_outside_the_band_of_spread_peers_is_suspect(celsius: list[float], outside: set[float]) -> None:
    results = among_peers(np.array(celsius, dtype=np.float64)[:, None], Band(-10, 10))
    expected = [(SUSPECT, SPREAD) if c in outside else (PASS, "") for c in celsius]
    assert [(s.verdict, s.reason) for s in results] == expected


def test_memory_outside_the_band_of_spread_peers_is_suspect() -> None:
    values = np.log(np.repeat(np.array([40.0, 40.0, 44.0, 44.0])[:, None], 5, axis=1))
    results = among_peers(values, Band(math.log(0.98), math.log(1.02)))
    assert {(s.verdict, s.reason) for s in results} == {(SUSPECT, SPREAD)}


def test_a_rate_under_the_band_of_spread_peers_is_suspect_where_the_repeats_are_sure() -> None:
    paces = [1.0, 0.97, 0.94, 0.91, 0.88, 0.85, 0.82]
    assert rated(paces) == [PASS] * 5 + [SUSPECT] * 2
    scattered = (
        np.log(np.array(paces))[:, None] + np.array([-0.15, -0.1, 0.0, 0.1, 0.15]) * (-1) ** np.arange(7)[:, None]
    )
    assert {s.verdict for s in among_peers(scattered, SPEED)} == {UNDECIDED}


def test_a_device_outside_the_band_of_a_spread_baseline_is_suspect() -> None:
    (result,) = beside_baseline(np.array([[88.0]]), np.array([60.0, 70.0, 75.0, 80.0, 90.0]), Band(-10, 10))
    assert (result.verdict, result.reason) == (SUSPECT, SPREAD)


def test_the_evidence_says_that_peers_spread(golden: object) -> None:
    gauges = tuple(g for r, c in enumerate((60.0, 75.0, 90.0)) for g in synthetic.gauges(r, celsius=c - r % 3))
    found = {v.node: v for v in nodes.judge(synthetic.healthy(3, gauges=gauges)).verdicts}
    assert [v.verdict for v in found.values()] == [SUSPECT, PASS, SUSPECT]
    assert (found["node-2"].evidence[0].text) == golden
    assert "15" in (found["node-2"].evidence[0].text)
