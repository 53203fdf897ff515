"""Launches of one cell over days whose every number is known."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any
from xml.etree import ElementTree

import pytest
from training_records import build_steps, build_supplement

from paceline.analysis.compare import history
from paceline.analysis.findings import HistorySeries
from paceline.analysis.report import build
from paceline.report.charts import charts
from paceline.report.exporters import plots
from paceline.report.tables import history as present
from paceline.results.records import RunRecord, Status

Builder = Callable[..., Any]


@pytest.fixture
def days(make_cell: Builder, make_reference: Builder) -> Builder:
    """A campaign of two launches per day, at so many seconds per step; only the first has the reference."""

    def make(seconds: Sequence[float], **facts: Sequence[str]) -> list[RunRecord]:
        found = []
        for day, mean in enumerate(seconds):
            runs = make_cell(mean, repeats=2, strategy="ddp")
            runs = [make_reference(runs[0].spec), *runs] if day == 0 else runs
            told = {name: values[day] for name, values in facts.items()}
            for r in runs:
                where = {"path": f"/results/day-{day}/{r.spec.run_id}", "started_at": r.started_at + 86400 * day}
                found.append(dataclasses.replace(r, machines=({**r.machines[0], **told},), **where))
        return found

    return make


def speed(records: list[RunRecord]) -> HistorySeries:
    found = history.analyse(history.judge(records).windows)
    return next(s for s in found if s.metric == "tokens_per_s")


def test_launches_stand_in_order_and_a_lent_reference_certifies_them(days: Builder) -> None:
    series = speed(days([1.0] * 7)[::-1])
    assert len(series.points) == 14
    assert [p.started_at for p in series.points] == sorted(p.started_at for p in series.points)
    assert series.points[0].campaign == "/results/day-0"
    assert series.changes == ()
    assert series.note is None
    assert speed(days([1.0] * 7, driver=["1"] * 7)).points == series.points


def test_a_change_is_shown_with_what_differs_between_its_sides(days: Builder) -> None:
    """The CUDA version came and went on both sides, so it explains nothing; the driver does."""
    seconds = [1.0, 1.0, 1.0, 1.0, 0.9, 0.9, 0.9, 0.9]
    drivers, cudas = ["580"] * 4 + ["590"] * 4, ["13.0", "13.1", "13.0", "13.0", "13.1", "13.1", "13.0", "13.1"]
    (change,) = speed(days(seconds, driver=drivers, cuda=cudas)).changes
    assert (change.index, change.verdict, change.throughout) == (8, "better", True)
    assert change.low < 1 / 0.9 < change.high
    assert [(d.path, d.first, d.second) for d in change.differences] == [("driver", "580", "590")]


def test_where_nothing_separates_it_says_so(days: Builder, golden: object) -> None:
    found = [speed(days([1.0] * 4 + [1.1] * 4))]
    assert found[0].changes[0].differences == ()
    assert present.NOTHING_SEPARATES in present.sentence(found)
    assert present.sentence(found) == golden


def test_a_fault_that_was_fixed_is_reported_in_the_past_tense(days: Builder, golden: object) -> None:
    mended = present.sentence([speed(days([1.0] * 4 + [1.1] * 4 + [1.0] * 4))])
    assert mended == golden
    assert "tokens/s" in mended
    assert "9.1 %" in mended
    assert "lower" in mended
    assert " is " not in mended
    in_part = present.sentence([speed(days([1.0] * 4 + [1.25] * 4 + [1.1] * 4))])
    assert in_part == golden
    assert "9.1 %" in in_part
    assert "lower" in in_part


def test_a_fault_that_lasts_comes_before_a_newer_one_that_was_fixed(days: Builder, golden: object) -> None:
    lasting = speed(days([1.0] * 3 + [1.3] * 9))
    mended = dataclasses.replace(speed(days([1.0] * 5 + [1.1] * 3 + [1.0] * 4)), label="another")
    text = present.sentence([mended, lasting])
    assert text == golden
    assert f"{lasting.label}" in text
    assert "tokens/s" in text
    assert "23.1 %" in text
    assert "lower" in text


def test_a_failed_reference_does_not_stand_in_for_one_that_ended_ok(days: Builder) -> None:
    """Neither as the newest that could be lent, nor as its campaign's own."""
    records = days([1.0] * 4)
    failed = dataclasses.replace(
        records[0], status=Status.FAILED, steps=(), outcomes=(), started_at=9e9, path="/results/day-2/reference"
    )
    assert len(speed([*records, failed]).points) == 8


def test_copies_are_lent_with_their_reference_and_prove_nothing_alone(
    make_cell: Builder, make_reference: Builder
) -> None:
    """The runs are further off than the first copies allow, and within what all of them do."""
    runs = [
        dataclasses.replace(r, path=f"/results/day-1/{r.spec.run_id}", steps=build_steps(r.spec, 1.0, off=0.003))
        for r in make_cell(1.0, repeats=2, precision="bf16")
    ]
    reference = make_reference(runs[0].spec, variants=(0.0, 0.001), path="/results/day-0/reference")
    more = build_supplement(reference, (0.002,))
    assert history.judge([reference, *runs]).windows == []
    assert history.judge([more, *runs]).windows == []
    assert len(history.judge([reference, more, *runs]).windows) == 2
    newer = dataclasses.replace(reference, started_at=9e9, path="/results/day-2/reference")
    assert history.judge([reference, more, *runs, newer]).windows == [], "copies of another reference are not lent"


def test_launches_that_do_not_count_are_listed_with_the_reason(days: Builder, golden: object) -> None:
    records = days([1.0] * 2)
    broken = dataclasses.replace(records[-1], status=Status.OOM, error="no room")
    assert history.judge([*records[:-1], broken]).dropped == {"oom: no room": 1}
    ((reason, count),) = history.judge(records[1:]).dropped.items()
    assert reason.startswith("invalid: ")
    assert reason == golden
    assert count == 4


def test_few_launches_are_shown_and_not_judged(days: Builder, golden: object) -> None:
    series = speed(days([1.0, 2.0]))
    assert series.changes == ()
    assert series.note == golden
    assert "11" in series.note
    assert history.analyse(history.judge(days([1.0])).windows) == ()


def test_failed_invalid_and_copied_launches_do_not_count(days: Builder) -> None:
    records = days([1.0] * 3)
    broken = dataclasses.replace(records[-1], status=Status.OOM)
    copies = [dataclasses.replace(r, path=r.path.replace("results", "copy")) for r in records[:3]]
    assert len(speed([*records[:-1], broken, *copies]).points) == 5
    assert history.judge(records[1:]).windows == [], "no reference anywhere"


def test_another_device_is_another_series(days: Builder) -> None:
    records = days([1.0] * 4, cpu=["Xeon", "Xeon", "EPYC", "EPYC"])
    found = history.analyse(history.judge(records).windows)
    assert [len(s.points) for s in found if s.metric == "tokens_per_s"] == [4, 4]


def test_the_report_counts_earlier_launches_in_histories_only(days: Builder, golden: object) -> None:
    records = days([1.0] * 3)
    newest = [records[0], *records[-2:]]
    report = build(newest, title="t", earlier=records[1:-2])
    assert {len(s.points) for s in report.histories} == {6}
    assert len(report.runs) == 3
    assert report.notes == golden
    assert build(newest, title="t").histories == ()
    (chart,) = [c for c in charts(report) if c.name == "history_tokens_per_s"]
    assert [p.series for p in chart.points] == ["launch"] * 6 + ["level"] * 2


def test_the_chart_names_the_change(days: Builder) -> None:
    records = days([1.0] * 4 + [1.1] * 4, driver=["580"] * 4 + ["590"] * 4)
    report = build([records[0], *records[-2:]], title="t", earlier=records[1:-2])
    assert len(report.histories) == 2, "a panel for each: throughput and memory"
    text = " ".join(ElementTree.fromstring(plots.image(report, "history_tokens_per_s", "svg")).itertext())
    assert "driver 580 -> 590" in text
    assert "tokens/s" in text


def test_the_page_draws_shares_of_the_first_level(days: Builder) -> None:
    records = days([1.0] * 4 + [1.25] * 4, driver=["580"] * 4 + ["590"] * 4)
    report = build([records[0], *records[-2:]], title="t", earlier=records[1:-2])
    (chart,) = [c for c in charts(report) if c.name == "history_tokens_per_s"]
    launches = [p for p in chart.points if p.series == "launch"]
    levels = [p for p in chart.points if p.series == "level"]
    assert len(launches) == 16
    assert [round(p.y, 1) for p in levels] == [100.0, 100.0, 80.0, 80.0]
    assert "driver 580 -> 590" in levels[-1].detail
