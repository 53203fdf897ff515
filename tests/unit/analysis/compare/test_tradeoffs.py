"""Strategies that change the arithmetic: never ranked, but compared by bytes, speed and loss over seeds."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from training_records import build_record, build_spec, build_steps

from paceline.analysis.compare import tradeoffs
from paceline.analysis.findings import BETTER, EQUAL, INCONCLUSIVE, WORSE, Report
from paceline.analysis.report import build
from paceline.analysis.statistics.intervals import Ratio
from paceline.experiment.choices import Choice
from paceline.report.charts.tradeoffs import loss, speed_by_rate
from paceline.report.sections import sections
from paceline.report.tables import tradeoffs as tables
from paceline.report.text.cells import groups
from paceline.results.records import RunRecord

SIGNS = "compressed:method=signsgd"


def run(strategy: str | None, seed: int, seconds: float, off: float = 0.0, mbit: float | None = None) -> RunRecord:
    launcher = Choice("local", {"network_mbit": mbit} if mbit else {})
    reference: dict[str, Any] = {"world_size": 1, "workload": "reference", "accumulation": 4}
    spec = build_spec(strategy, seed=seed, launcher=launcher, **({} if strategy else reference))
    # Before the first update there is nothing to be off.
    exact = [step for step in build_steps(spec, seconds) if step.step == 0]
    return build_record(spec, steps=(*exact, *(s for s in build_steps(spec, seconds, off=off) if s.step)))


def reported(offs: dict[int, float], mbit: float | None = None, seconds: float = 0.5) -> Report:
    runs = [run(None, seed, 1.0) for seed in offs]
    runs += [run("ddp", seed, 1.0, mbit=mbit) for seed in offs]
    runs += [run(SIGNS, seed, seconds + 0.001 * seed, off, mbit) for seed, off in offs.items()]
    return build(runs, "test")


def test_a_loss_beyond_the_tolerance_is_no_fault_but_a_price() -> None:
    report = reported({1: 0.10, 2: 0.11, 3: 0.12})
    assert {finding.status for finding in report.runs} == {"ok"}
    (row,) = report.tradeoffs
    assert (row.strategy, row.baseline, row.seeds, row.pairs) == (SIGNS, "ddp", 3, 3)
    assert row.loss.value == pytest.approx(1.11, abs=1e-3)
    assert row.loss.verdict == WORSE
    assert row.speed is not None
    assert row.speed.value == pytest.approx(2.0, rel=0.01)
    assert row.speed.verdict == BETTER
    # Half the time: ddp had done 15 of 30 steps, whose last five losses average 4.88; 4.73 * 1.11 is higher.
    assert row.loss_in_time is not None
    assert row.loss_in_time.value == pytest.approx(4.73 * 1.11 / 4.88, rel=0.005)
    assert "99 % faster, loss +11.0 % after 15.36K tokens (higher)" in row.text
    assert not report.comparisons
    assert not report.recommendations


def test_the_trade_leads_where_no_speed_is_compared_alone() -> None:
    report = reported({1: 0.10, 2: 0.11, 3: 0.12})
    names = [section.name for section in sections(report)]
    assert names.index("tradeoffs") < names.index("ranking")
    # fsdp2 computes what ddp does: their ranking is the first answer.
    exact = [run("fsdp2", seed, 0.5 + 0.001 * seed) for seed in (1, 2, 3)]
    others = [run(name, seed, 1.0 + 0.001 * seed) for name in (None, "ddp", SIGNS) for seed in (1, 2, 3)]
    report = build([*exact, *others], "test")
    assert report.comparisons
    assert report.tradeoffs
    names = [section.name for section in sections(report)]
    assert names.index("ranking") < names.index("tradeoffs")


def in_precision(compute: str, seed: int, seconds: float, off: float = 0.0) -> list[RunRecord]:
    """A run and the reference of its own precision, which has the same losses."""
    spec = build_spec("ddp", seed=seed, precision=compute)
    own = build_record(spec, steps=build_steps(spec, seconds, off=off))
    alone = build_spec(None, seed=seed, precision=compute, world_size=1, workload="reference", accumulation=4)
    return [own, build_record(alone, steps=build_steps(alone, 1.0, off=off))]


def test_another_precision_is_compared_by_speed_together_with_loss() -> None:
    runs = [r for seed in (1, 2, 3) for r in in_precision("bf16", seed, 1.0)]
    runs += [r for seed, off in ((1, 0.0), (2, 0.007), (3, 0.002)) for r in in_precision("float8", seed, 0.8, off)]
    report = build(runs, "test")
    assert {finding.status for finding in report.runs} == {"ok"}
    (row,) = report.tradeoffs
    assert (row.axis, row.strategy, row.baseline, row.seeds) == ("precision", "float8", "bf16", 3)
    assert row.text.startswith("float8: 25 % faster than bf16, loss +0.3 % after 15.36K tokens (inconclusive)")
    assert not report.comparisons, "not equal work"
    assert not report.recommendations
    (table,) = tables.tables(report)
    assert table.columns[0].heading == "precision"
    assert "float8: 25 % faster than bf16" in tables.headline(report)
    (listed,) = groups(report)
    assert listed.is_listed
    assert sorted(row.label for row in listed.rows) == [f"{p}, seed {n}" for p in ("bf16", "float8") for n in (1, 2, 3)]
    assert {row.rank for row in listed.rows} == {None}, "another precision is other work"


@pytest.mark.parametrize(
    ("offs", "verdict"),
    [({1: 0.004}, INCONCLUSIVE), ({1: 0.0, 2: 0.012, 3: -0.008}, INCONCLUSIVE), ({1: 0.0, 2: 0.0, 3: 1e-4}, EQUAL)],
)
def test_a_loss_is_judged_by_the_spread_over_seeds(offs: dict[int, float], verdict: str) -> None:
    (row,) = reported(offs).tradeoffs
    assert row.loss.verdict == verdict


def test_the_verdict_of_a_loss_needs_two_seeds() -> None:
    assert tradeoffs.loss_verdict(Ratio(1.2, 0.0, 1, 1))[0] == INCONCLUSIVE
    assert tradeoffs.loss_verdict(Ratio(0.9, 0.01, 10, 11))[0] == BETTER


def test_an_exact_strategy_with_such_a_loss_is_still_invalid() -> None:
    runs = [run(None, 1, 1.0), run("ddp", 1, 1.0, off=0.1)]
    assert [finding.status for finding in build(runs, "test").runs if not finding.is_reference] == ["invalid"]


def test_rates_of_an_emulated_network_show_where_it_pays() -> None:
    seeds = {1: 0.0, 2: 1e-4, 3: 0.0}
    records = [run(None, seed, 1.0) for seed in seeds]
    for mbit, seconds in ((100.0, 0.5), (1000.0, 1.5)):
        records += [run("ddp", seed, 1.0 + 0.001 * seed, mbit=mbit) for seed in seeds]
        records += [run(SIGNS, seed, seconds + 0.002 * seed, off, mbit) for seed, off in seeds.items()]
    report = build(records, "test")
    assert [row.axes["network_mbit"] for row in report.tradeoffs] == [100.0, 1000.0]
    assert not report.recommendations, "the rate of a network is a setting, not a choice"
    assert tables.pays(report, SIGNS) == "up to 100 Mbit/s"
    assert [table.title for table in tables.tables(report)] == ["Compared with ddp", "Where it begins to pay"]
    (chart,) = speed_by_rate(report)
    assert [(point.x, round(point.y, 1)) for point in chart.points] == [(100.0, 2.0), (1000.0, 0.7)]


def test_the_loss_of_an_unstable_training_is_no_verdict() -> None:
    """References that differ only in rounding disagree by 30 %."""
    runs = [r for seed in (1, 2, 3) for r in in_precision("bf16", seed, 1.0)]
    runs += [r for seed in (1, 2, 3) for r in in_precision("float8", seed, 0.8, off=0.2)]
    assert [row.loss.verdict for row in build(runs, "test").tradeoffs] == [WORSE]
    shaky = []
    for record in runs:
        copies = (
            [dataclasses.replace(s, variant=1, loss=s.loss * 1.3) for s in record.steps] if record.is_reference else []
        )
        shaky.append(dataclasses.replace(record, steps=(*record.steps, *copies)))
    (row,) = build(shaky, "test").tradeoffs
    assert row.loss.verdict == INCONCLUSIVE
    assert "loss +20.0 % after 15.36K tokens (training is unstable)" in row.text


def test_compiling_does_not_count_as_time_of_training() -> None:
    runs = [r for seed in (1, 2, 3) for r in in_precision("bf16", seed, 1.0)]
    faster = [r for seed in (1, 2, 3) for r in in_precision("float8", seed, 0.5)]
    compiled = [
        dataclasses.replace(
            record, steps=tuple(dataclasses.replace(s, duration_s=60.0) if s.step == 0 else s for s in record.steps)
        )
        for record in faster
    ]
    (plain,), (after_compiling,) = (build([*runs, *own], "test").tradeoffs for own in (faster, compiled))
    assert plain.loss_in_time is not None
    assert plain.loss_in_time.value < 0.99, "30 steps of 0.5 s, where bf16 did 15"
    assert after_compiling.loss_in_time == plain.loss_in_time


def test_the_baseline_of_several_rows_is_drawn_once() -> None:
    records = [run(None, 1, 1.0), run("ddp", 1, 1.0), run(SIGNS, 1, 0.5), run("compressed:method=fp16", 1, 0.7)]
    by_tokens, by_seconds = loss(build(records, "test"))
    for chart in (by_tokens, by_seconds):
        drawn = [point.x for point in chart.points if point.series == "ddp"]
        assert drawn == sorted(drawn)
        assert len(drawn) == 30
