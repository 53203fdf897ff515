"""Runs whose rank 1 is killed: they go on from their checkpoints, and nothing of what they computed shows it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from testbed import EXHAUSTIVE

from paceline.analysis.training.goodput import goodput
from paceline.results.records import RunRecord

pytestmark = pytest.mark.slow

# State in shards, of torch and of DeepSpeed.
FEW = ("fsdp2", "zero:stage=3")
ALL = ("ddp", *FEW, "zero:stage=1", "zero:stage=2")
STRATEGIES = ALL if EXHAUSTIVE else FEW
EVERY, KILLED_AT, STEPS = 3, 5, 8
# Its checkpoints are also written beside the steps.
BACKGROUND = "fsdp2"


@pytest.fixture(scope="module")
def killed(campaign: Callable[..., Any], smaller: dict[str, Any]) -> Any:
    """Every strategy twice: in one piece, and with checkpoints, after which rank 1 is killed once. One also writes them
    in the background."""
    background = {"strategy": [BACKGROUND], "checkpoint_every": [EVERY], "checkpoint_async": [True]}
    return campaign(
        "killed",
        [{"strategy": list(STRATEGIES), "checkpoint_every": [None, EVERY]}, background],
        {"MORTAL_AT": f"1:{KILLED_AT}"},
        formats=("json", "markdown"),
        profiled=False,
        **smaller | {"steps": STEPS, "max_restarts": 1},
    )


def pair(found: Any, strategy: str) -> tuple[RunRecord, RunRecord]:
    runs = [r for r in found.records if str(r.spec.strategy) == strategy and not r.spec.checkpoint_async]
    whole, broken = sorted(runs, key=lambda r: r.spec.checkpoint_every is not None)
    return whole, broken


def trajectory(record: RunRecord) -> dict[tuple[int, int], Any]:
    return {(s.rank, s.step): (s.loss, s.grad_norm, s.data_digest, s.updates) for s in record.steps}


def test_every_killed_run_went_on_and_is_certified(killed: Any) -> None:
    assert killed.code == 0, killed.stdout + killed.stderr
    assert killed.stdout.count("restarting: ") == len(STRATEGIES) + 1
    assert all(check["ok"] for c in killed.report["certificates"] for check in c["checks"])
    assert len(killed.report["certificates"]) == 2 * len(STRATEGIES) + 1


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_run_that_went_on_computed_what_an_uninterrupted_one_did(killed: Any, strategy: str) -> None:
    whole, broken = pair(killed, strategy)
    assert trajectory(broken) == trajectory(whole), "to the last bit"
    assert len(broken.steps) == 2 * STEPS
    assert {(s.attempt, s.step) for s in broken.starts} == {(1, 0), (2, EVERY)}
    assert {s.step for s in broken.redone} <= set(range(EVERY, KILLED_AT))
    assert {(c.attempt, c.step) for c in broken.checkpoints} == {(1, EVERY), (2, 2 * EVERY)}


def test_checkpoints_written_in_the_background_lead_to_the_same_end(killed: Any) -> None:
    whole, _ = pair(killed, BACKGROUND)
    (broken,) = (r for r in killed.records if r.spec.checkpoint_async)
    assert trajectory(broken) == trajectory(whole), "to the last bit"
    # The first checkpoint may not be complete when the rank is killed.
    assert {(s.attempt, s.step) for s in broken.starts} <= {(1, 0), (2, 0), (2, EVERY)}
    assert {c.bytes for c in broken.checkpoints} == {None}
    assert not (Path(broken.path) / "checkpoints").exists()


def test_goodput_at_a_failure_rate_rests_on_the_measured_costs(killed: Any, paceline: Any) -> None:
    costs = killed.report["checkpoints"]
    assert [(c["is_async"], c["is_beside_none"]) for c in costs].count((True, True)) == 1
    assert all(c["restarts"] == 1 and c["restart_s"] > 0 and c["pause_s"] > 0 for c in costs)
    spot = ("--price", "10", "--spot-price", "4", "--interruptions", "0.2")
    found = json.loads(paceline("goodput", killed.directory, "--mtbf", "12h", *spot, "--format", "json").stdout)
    assert len(found["goodput"]) == len(found["spot"]) == len(costs)
    for row in found["goodput"]:
        assert row["restart_s"] == row["cost"]["restart_s"]
        assert row["chosen_ratio"] <= row["daly_ratio"] < 1
        assert row["chosen_s"] == pytest.approx(EVERY * row["cost"]["step_s"])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_report_shows_the_cost_of_a_restart(killed: Any, strategy: str) -> None:
    whole, broken = pair(killed, strategy)
    assert goodput(whole) is None
    held = goodput(broken)
    assert held is not None
    parts = (held.start_s, held.counted_s, held.redone_s, held.checkpoint_s, held.down_s)
    assert sum(parts) == pytest.approx(held.span_s, abs=2.0), (
        "the controller looks ten times a second, on a busy machine less often"
    )
    assert held.down_s > 0
    assert killed.finding(broken)["goodput"]["restarts"] == 1
    assert "restarted 1 time; " in (killed.directory / "report.md").read_text()


def test_nothing_is_left_of_checkpoints_and_the_cause_is_kept(killed: Any, living: Callable[[Path], list[str]]) -> None:
    for strategy in STRATEGIES:
        _, broken = pair(killed, strategy)
        assert not (Path(broken.path) / "checkpoints").exists()
        assert "exitcode  : -9" in (Path(broken.path) / "restarts" / "1" / "log.txt").read_text()
    assert living(killed.out) == []


def test_show_lists_the_attempts(killed: Any, paceline: Any) -> None:
    _, broken = pair(killed, STRATEGIES[0])
    shown = paceline("show", broken.path).stdout
    assert "attempt 1: failed after" in shown
    assert "restarted 1 time; " in shown


@pytest.mark.exhaustive
def test_adapters_with_8bit_moments_go_on_too(campaign: Callable[..., Any], smaller: dict[str, Any]) -> None:
    strategies = ("ddp", "fsdp2", "zero:stage=2")
    found = campaign(
        "tuned-on",
        {"strategy": list(strategies), "checkpoint_every": [None, EVERY]},
        {"MORTAL_AT": f"1:{KILLED_AT}"},
        formats=("json",),
        workload="finetune",
        method="qlora",
        rank=64,
        data="instructions:mean=8,packed=true",
        **smaller | {"model": "tiny-llama:layers=1,hidden=64", "steps": STEPS, "max_restarts": 1},
    )
    assert found.code == 0, found.stdout + found.stderr
    for strategy in strategies:
        whole, broken = pair(found, strategy)
        assert trajectory(broken) == trajectory(whole)
        assert goodput(broken) is not None
