"""Undecided nodes: they do not pass, in no text and not in the exit code, and the advice is a number."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import node_records as synthetic
import numpy as np
import pytest

from paceline.analysis.cost.training import Costing
from paceline.analysis.findings import Report
from paceline.analysis.findings.machine import FAIL, PASS, SUSPECT, UNDECIDED, WORST_FIRST
from paceline.analysis.machine import nodes
from paceline.analysis.machine.peers import (
    EDGE,
    PAIR,
    SCATTER,
    Band,
    PeerResult,
    among_peers,
    beside_baseline,
    repeats_for,
)
from paceline.analysis.report import build
from paceline.cli.results import conclude
from paceline.cli.verbs import console
from paceline.errors import RequestError
from paceline.report import answer, charts
from paceline.report.tables import nodes as shown
from paceline.results.records import RunRecord

SPEED = Band(math.log(0.95), None)
# Deviations of five repeats over their largest; the median of their sizes is a half.
REPEATS = np.array([-1.0, -0.5, 0.0, 0.5, 1.0])
# Half interval of five such repeats over the largest: t(4) sqrt(pi / 2) 1.4826 1.206 / sqrt(5), of the half.
HALF = 2.776 * 1.2533 * 1.4826 * 1.206 / math.sqrt(5) * 0.5


def scattered(effects: list[float], scatter: float) -> np.ndarray[Any, Any]:
    """Every second rank scatters the other way, so that a repeat's median stays 0."""
    return np.array(effects)[:, None] + scatter * REPEATS * ((-1.0) ** np.arange(len(effects)))[:, None]


def verdicts(values: np.ndarray[Any, Any]) -> list[str]:
    return [s.verdict for s in among_peers(values, SPEED)]


def restless(rank: int, repeat: int) -> float:
    """Repeats from half to one and a half of the usual rate: no node of a few can be told."""
    return 1 + 0.5 * float(REPEATS[repeat]) * (-1) ** rank


# --- the rule ---


@pytest.mark.parametrize(("scatter", "verdict"), [(0.0, PASS), (0.03, PASS), (0.04, UNDECIDED), (0.5, UNDECIDED)])
def test_who_passes_could_have_been_seen_outside_the_band(scatter: float, verdict: str) -> None:
    """The half interval is 1.391 times the scatter: 4.2 % and 5.6 % beside a band of 5.1 % in logarithms."""
    found = among_peers(scattered([0.0] * 4, scatter), SPEED)
    assert [s.verdict for s in found] == [verdict] * 4
    assert [s.half for s in found] == pytest.approx([HALF * scatter] * 4, rel=1e-3)


def test_a_slow_node_fails_as_ever_and_is_found_in_any_scatter_that_it_exceeds() -> None:
    assert verdicts(scattered([0.0, -0.1, 0.0, 0.0], 0.005)) == [PASS, FAIL, PASS, PASS]
    assert verdicts(scattered([0.0, -0.5, 0.0, 0.0], 0.1)) == [UNDECIDED, FAIL, UNDECIDED, UNDECIDED]


@pytest.mark.parametrize(
    ("scatter", "healthy", "slower"),
    [(0.005, PASS, FAIL), (0.03, PASS, FAIL), (0.04, UNDECIDED, SUSPECT), (0.1, UNDECIDED, SUSPECT)],
)
def test_the_table_of_the_documentation_holds(scatter: float, healthy: str, slower: str) -> None:
    found = beside_baseline(scattered([0.0, math.log(0.9)], scatter), np.zeros(4), SPEED)
    assert [s.verdict for s in found] == [healthy, slower]
    assert [s.half for s in found] == pytest.approx([HALF * scatter] * 2, rel=1e-3)


def test_noise_beyond_the_band_lets_few_pass() -> None:
    """100 trials of eight healthy nodes with 10 % of noise: a tenth passes at most, and a twentieth is accused."""
    found = [v for seed in range(100) for v in verdicts(np.random.default_rng(seed).normal(0, 0.1, (8, 5)))]
    assert found.count(PASS) <= 80
    assert found.count(UNDECIDED) >= 680


@pytest.mark.parametrize(("scatter", "verdict"), [(0.07, PASS), (0.08, UNDECIDED)])
def test_one_restless_node_among_calm_ones_is_undecided_beyond_two_bands(scatter: float, verdict: str) -> None:
    """9.7 % and 11.1 % of half interval; the others' is 0."""
    values = np.zeros((4, 5))
    values[2] = scatter * REPEATS
    assert verdicts(values) == [PASS, PASS, verdict, PASS]


def test_who_is_certainly_inside_passes_in_any_scatter() -> None:
    """A rate has no upper end: 50 % more than the median with a half interval of 14 %."""
    assert verdicts(scattered([0.0, 0.0, 0.5, 0.0], 0.1)) == [UNDECIDED, UNDECIDED, PASS, UNDECIDED]


def test_an_effect_outside_the_band_does_not_pass_because_its_interval_is_not() -> None:
    """7 % under the median of peers that are spread as far: nobody is odd, and the interval ends at 4.6 %."""
    found = among_peers(scattered([0.09, 0.045, 0.0, 0.0, -0.04, -0.07], 0.0175), SPEED)
    assert [(s.verdict, s.reason) for s in found] == [(PASS, "")] * 5 + [(UNDECIDED, EDGE)]


@pytest.mark.parametrize(
    ("apart", "scatter", "expected"),
    [
        (0.04, 0.015, (PASS, "")),
        (0.00, 0.020, (UNDECIDED, SCATTER)),
        (0.06, 0.015, (UNDECIDED, EDGE)),
        (0.12, 0.015, (SUSPECT, PAIR)),
        (0.12, 0.100, (UNDECIDED, SCATTER)),
    ],
)
def test_two_nodes_are_decided_or_inconclusive(apart: float, scatter: float, expected: tuple[str, str]) -> None:
    """The doubt of a difference is that of both: 2.782 times the scatter, 4.2 % of 0.015."""
    found = among_peers(scattered([apart / 2, -apart / 2], scatter), SPEED)
    assert [(s.verdict, s.reason) for s in found] == [expected] * 2
    assert [s.doubt for s in found] == pytest.approx([2 * HALF * scatter] * 2, rel=1e-3)


def test_a_baseline_decides_no_node_whose_repeats_scatter() -> None:
    """Two repeats of two nodes: 93.5 % [24, 366] and 101 % [1.5, 6600] of the baseline, which both passed once."""
    middles, deviations = np.log([[0.935], [1.01]]), np.array([[0.0683], [0.209]])
    found = beside_baseline(middles + deviations * np.array([-1.0, 1.0]), np.zeros(4), SPEED)
    assert [(s.verdict, s.reason) for s in found] == [(SUSPECT, "odd"), (UNDECIDED, SCATTER)]
    calm = beside_baseline(middles + 0.0001 * np.array([-1.0, 1.0]), np.zeros(4), SPEED)
    assert [s.verdict for s in calm] == [FAIL, PASS]


@pytest.mark.parametrize(
    ("doubt", "repeats"), [(0.01, 10), (0.0867, 10), (0.088, 11), (0.5, None)], ids=["edge", "ten", "eleven", "never"]
)
def test_the_repeats_that_tell_follow_from_the_scatter(doubt: float, repeats: int | None) -> None:
    """Of five repeats: the doubt shrinks by t(n - 1) / sqrt(n), from 1.241 to 0.715 at ten; never to fewer than ten."""
    assert repeats_for(PeerResult(0.0, doubt, 0.0, doubt=doubt), 5, Band(-0.05, None)) == repeats


# --- nodes ---


def test_the_evidence_says_why_and_how_many_repeats_tell(golden: object) -> None:
    (verdict, *_) = nodes.judge(
        synthetic.healthy(4, pace=lambda r, i: math.exp(scattered([0.0] * 4, 0.05)[r][i]))
    ).verdicts
    assert verdict.verdict == UNDECIDED
    training = next(e for e in verdict.evidence if e.kind == "training undecided")
    assert training.verdict == UNDECIDED
    assert training.text == golden
    assert "NVIDIA" in training.text
    assert "H200" in training.text
    assert "0.0 %" in training.text
    assert training.next_command == "paceline run nodes --set workload.repeats=10"


def test_scatter_that_no_repeats_tell_says_so(golden: object) -> None:
    (verdict, _) = nodes.judge(synthetic.healthy(2, pace=restless)).verdicts
    assert verdict.evidence[0].text == golden
    assert "100" in verdict.evidence[0].text
    assert verdict.evidence[0].next_command.startswith("nvidia-smi -q -d CLOCK")


def test_evidence_against_a_node_comes_before_what_is_inconclusive() -> None:
    machines = tuple(synthetic.machine(r, **({"driver": "535.104.05"} if r == 3 else {})) for r in range(4))
    found = nodes.judge(synthetic.healthy(4, pace=restless, machines=machines)).verdicts
    assert [v.verdict for v in found] == [UNDECIDED] * 3 + [SUSPECT]
    assert [e.verdict for e in found[3].evidence] == [SUSPECT] + [UNDECIDED] * (len(found[3].evidence) - 1)


def test_undecided_nodes_are_no_baseline(golden: object) -> None:
    with pytest.raises(RequestError) as caught:
        nodes.baseline_of([synthetic.healthy(4, pace=restless)], "restless")
    assert str(caught.value) == golden


# --- what is told ---


def reported(record: RunRecord) -> Report:
    return build([record], "nodes", ())


def test_headline_tables_and_charts_say_undecided(golden: object) -> None:
    report = reported(synthetic.healthy(4, pace=restless))
    first, second = answer.answer(report)
    assert first == golden
    assert second == golden
    assert "node-0" in second
    assert "bf16" in second
    results, reasons = shown.tables(report)
    assert [row[1].text for row in results.rows] == ["inconclusive"] * 4
    assert {cell.tone for row in results.rows for cell in row[1:]} == {""}
    assert any(note.startswith("Inconclusive: ") for note in results.notes)
    assert reasons.title == golden
    (chart,) = charts.nodes.nodes(report)
    assert {p.series for p in chart.points if p.group == "training"} == {"inconclusive"}
    assert {s.name for s in chart.series} == {shown.verdict_name(verdict) for verdict in WORST_FIRST}
    assert set(WORST_FIRST) == set(shown.TONES)


def test_nobody_undecided_changes_no_word(golden: object) -> None:
    report = reported(synthetic.healthy(3))
    assert answer.answer(report)[0] == golden
    assert "ndecided" not in str(shown.tables(report))


# --- the exit code ---


@pytest.fixture
def sealed(tmp_path: Path, make_run: Callable[..., Path]) -> Callable[..., str]:
    """Stores a node test as a finished run; its id."""

    def seal(seed: int, pace: synthetic.Pace, **more: Any) -> str:
        spec = dataclasses.replace(synthetic.spec_of(3), seed=seed)
        record = synthetic.healthy(3, pace=pace, spec=spec, **more)
        samples = [*record.kernels, *record.steps, *record.memory, *record.products, *record.trajectories]
        make_run(tmp_path, spec, samples=[*samples, *record.health, *record.gauges], outcomes=record.outcomes)
        return spec.run_id

    return seal


def slow(rank: int, repeat: int) -> float:
    return 0.8 if rank == 1 else 1.0


def code_of(folder: Path, asked: set[str] | None = None) -> int:
    return conclude(console(), folder / "nodes", ["json"], Costing(), requested=asked)


HOT = tuple(g for r in range(3) for g in synthetic.gauges(r, celsius=90.0 if r == 1 else 60.0))


@pytest.mark.parametrize(
    ("pace", "more", "verdict", "code"),
    [
        (lambda r, i: 1.0, {}, PASS, 0),
        (lambda r, i: 1.0, {"gauges": HOT}, SUSPECT, 0),
        (restless, {}, UNDECIDED, 1),
        (restless, {"gauges": HOT}, SUSPECT, 1),
        (slow, {}, FAIL, 1),
    ],
    ids=["pass", "suspect", "undecided", "suspect and undecided", "fail"],
)
def test_the_exit_code_lets_no_undecided_node_through(
    tmp_path: Path, sealed: Callable[..., str], pace: synthetic.Pace, more: Any, verdict: str, code: int
) -> None:
    sealed(1, pace, **more)
    assert code_of(tmp_path) == code
    told = json.loads((tmp_path / "nodes" / "report.json").read_text())["nodes"]
    assert told[1]["verdict"] == verdict


def test_more_repeats_into_the_same_folder_end_the_doubt(tmp_path: Path, sealed: Callable[..., str]) -> None:
    """The advice is followed beside the undecided test: the command that asked for the new one ends with 0."""
    undecided, passed = sealed(1, restless), sealed(2, lambda r, i: 1.0)
    assert [code_of(tmp_path, asked) for asked in ({undecided}, {passed}, None)] == [1, 0, 1]
