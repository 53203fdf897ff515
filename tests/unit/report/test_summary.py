"""The first screen: a short headline, four tiles, the trust light and one chart."""

from __future__ import annotations

import dataclasses

import pytest

from paceline.analysis.findings import SHARED_GPU, LaunchTrust, Report
from paceline.report import answer as sentences
from paceline.report.charts import charts
from paceline.report.charts.chart import CURVE, MARK, Point, Series
from paceline.report.charts.fabric import link_limit
from paceline.report.charts.front import FRONT, front_of
from paceline.report.summary import MOST_WORDS, brief, headline, light, main_chart, summarise
from paceline.report.text.cells import trusted_runs
from paceline.report.tiles import BARS


def test_the_headline_names_the_leaders_and_their_margin(report: Report) -> None:
    assert headline(report) == "ddp is 12 % faster than zero:stage=1 on 2 processes; equal to fsdp2"


@pytest.mark.parametrize(
    "sentence",
    [
        "a " * 40,
        "Served 3,960 tokens/s at most with a model (offline, engine x:max_batch=128), the first token after 7 ms.",
        "one; two, three (four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen) end",
    ],
)
def test_no_headline_is_longer_than_fifteen_words(sentence: str) -> None:
    assert 0 < len(brief(sentence).split()) <= MOST_WORDS


def test_a_report_without_runs_has_a_headline_and_nothing_else(empty_report: Report) -> None:
    found = summarise(empty_report, charts(empty_report))
    assert found.headline.startswith("No recommendation")
    assert (found.tiles, found.chart) == ((), None)


def test_one_cell_is_named_with_its_speed(report: Report) -> None:
    """Nothing can be recommended, but a newcomer who ran one strategy asked how fast it is."""
    kept = next(run for run in report.runs if run.axes.get("world_size") == 1 and not run.is_reference)
    runs = tuple(run for run in report.runs if run.cell == kept.cell)
    measured = tuple(m for m in report.measurements if m.cell == kept.cell)
    alone = dataclasses.replace(
        report, runs=runs, measurements=measured, recommendations=(), comparisons=(), scaling=()
    )
    assert headline(alone).endswith("1 process: 6,780 tokens/s; one cell, nothing to compare it with")
    shared = tuple(dataclasses.replace(run, health=(*run.health, SHARED_GPU)) for run in runs)
    assert "tokens/s" not in headline(dataclasses.replace(alone, runs=shared)), "not a speed"


def test_the_tiles_are_about_the_leader_with_its_intervals(report: Report) -> None:
    found = {tile.name: tile for tile in summarise(report, ()).tiles}
    assert list(found) == ["Throughput", "Step time", "Peak memory"], "no MFU, price or samples on these processes"
    assert (found["Throughput"].value, found["Throughput"].unit) == ("12,345", "tokens/s")
    assert found["Throughput"].interval == "[12,289, 12,401]"
    beside = found["Peak memory"].trend
    assert beside is not None
    assert beside.kind == BARS
    assert len(beside.values) == len(set(beside.colours)) == 4, "one bar and one colour for each ranked strategy"


def test_the_main_chart_is_the_scaling_line_if_it_has_all_strategies(report: Report) -> None:
    found = {chart.name: chart for chart in charts(report)}
    assert len(found["pareto"].series) == 5, "four strategies and the front"
    assert len(found["scaling_rate_weak"].series) == 2, "ddp and the ideal"
    assert main_chart(found.values()) == "pareto"
    four = tuple(Series(name=str(i), colour=i) for i in range(5))
    found["scaling_rate_weak"] = dataclasses.replace(found["scaling_rate_weak"], series=four)
    assert main_chart(found.values()) == "scaling_rate_weak"


def test_a_headline_never_hides_who_may_be_as_good(report: Report) -> None:
    """Three names are too long for 15 words, so they are counted."""
    leading = sentences.headline(report)
    assert leading is not None
    assert leading.decisive is not None
    winner, names = leading.decisive.label, ("zero:stage=1", "zero:stage=2", "zero:stage=3")
    several = dataclasses.replace(leading, choose=(winner, *names))
    others = tuple(several if r is leading else r for r in report.recommendations)
    found = headline(dataclasses.replace(report, recommendations=others))
    assert found.endswith("; inconclusive against 3 others")
    assert len(found.split()) <= MOST_WORDS


def test_the_front_keeps_what_no_other_beats_in_both() -> None:
    points = [Point(x=x, y=y, cells=(str(x),), drawn=MARK) for x, y in ((1, 5), (2, 4), (3, 9), (4, 9), (5, 11))]
    front = front_of(points)
    assert [(p.x, p.y) for p in front] == [(1, 5), (3, 9), (5, 11)]
    assert {(p.series, p.drawn) for p in front} == {(FRONT, CURVE)}
    # Where more of both is better, nothing but the last point is left, which is no line.
    assert front_of(points, larger_x=True) == []


def lit(report: Report, *levels: str | None) -> Report:
    given = iter(levels)
    runs = [
        run if run.is_reference else dataclasses.replace(run, status="ok", trust=level and LaunchTrust(level=level))
        for run in report.runs
        for level in (None if run.is_reference else next(given, "green"),)
    ]
    return dataclasses.replace(report, runs=tuple(runs))


@pytest.mark.parametrize(
    ("levels", "level", "words"),
    [
        ((), "green", "no launch disturbed"),
        (("amber",), "amber", "1 of 21 launches disturbed"),
        (("amber", "red"), "red", "1 of 21 launches badly disturbed"),
        ((None,) * 30, "unknown", "load of the hosts not recorded"),
    ],
)
def test_the_light_is_that_of_the_worst_launch(
    report: Report, levels: tuple[str | None, ...], level: str, words: str
) -> None:
    found = light(lit(report, *levels))
    assert found.level == level
    assert words in found.text


def test_an_invalid_run_turns_the_light_red(report: Report) -> None:
    assert light(report).level == "red"
    assert "3 of 20 runs invalid" in light(report).text


@pytest.mark.parametrize(
    ("gpu", "links", "rate"),
    [
        ({"nvlink_links": 18, "capability": "9.0"}, "nvlink", 450e9),
        ({"nvlink_links": 18, "capability": "10.0"}, "nvlink", 900e9),
        ({"pcie_generation": 4, "pcie_width": 16}, "pcie", 31.5e9),
        ({"pcie_generation": 4, "pcie_width": 16}, None, None),
    ],
)
def test_the_link_carries_what_its_datasheet_says(
    empty_report: Report, gpu: dict[str, object], links: str | None, rate: float | None
) -> None:
    machine = {"host": "a", "gpus": [gpu, gpu], "links": links}
    found = link_limit(dataclasses.replace(empty_report, machines=(machine,)))
    assert found is None if rate is None else found is not None and found[0] == pytest.approx(rate, rel=0.001)
    two = dataclasses.replace(empty_report, machines=(machine, {**machine, "host": "b"}))
    assert link_limit(two) is None, "the network between hosts is unknown"


def test_what_a_report_keeps_is_not_kept_by_a_changed_one(report: Report) -> None:
    trusted_runs(report)
    changed = dataclasses.replace(report, certificates=())
    assert trusted_runs(report)
    assert trusted_runs(changed) == frozenset()
    assert report == dataclasses.replace(report)
