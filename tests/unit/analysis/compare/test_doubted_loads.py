"""Loads that are not believed: shown with their numbers and why, marked, and part of nothing else."""

from __future__ import annotations

import csv as csv_format
import io
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from rich.console import Console
from served_records import CLIENT, in_turns, record, request, stage

from paceline.analysis.compare import comparable, history
from paceline.analysis.compare.comparable import status_of
from paceline.analysis.findings import Report
from paceline.analysis.report import build
from paceline.analysis.served import measurements
from paceline.report.answer import answer
from paceline.report.charts import charts
from paceline.report.charts.chart import JOINED, RING
from paceline.report.exporters import csv, html, markdown, prometheus
from paceline.report.sections import served_tables
from paceline.report.tables.table import Table
from paceline.report.terminal import Fitted
from paceline.results.records import RunRecord, Status
from paceline.wording import MISSING

LATE = "client: used 95% of a core (at most 80%)"
BUSY = {"cpu_s": 0.95}


def swept(*doubted: int, failing: int | None = None, **more: Any) -> RunRecord:
    """1, 2 and 4 in flight: 10, 20 and 40 tokens a second, 8 requests of 10 tokens each. Of a load that fails half of
    the requests have no answer."""
    stages, clients, asked = [], [], []
    for number, size in enumerate((1, 2, 4)):
        for turn in range(size):
            asked += in_turns(0, 8 // size, 1.0, first=turn * 8 // size, stage=number)
        stages.append(stage(number, concurrency=size, planned=8))
        clients.append(replace(CLIENT, stage=number, **(BUSY if size in doubted else {})))
        if size == failing:
            asked[-4:] = [replace(r, error="http_429", tokens=None, pieces=0) for r in asked[-4:]]
    values: dict[str, Any] = {"scenario": "sweep", "loads": "1+2+4"}
    return record(asked, stages=stages, clients=clients, **{**values, **more})


def report_of(*records: RunRecord) -> Report:
    return build(records, "served")


def table(report: Report) -> Table:
    return next(each for each in served_tables(report) if each.title.startswith("Served model"))


def rows(report: Report) -> list[tuple[str, ...]]:
    """Name, verdict, what failed, and tokens a second."""
    return [tuple(cell.text for cell in row[:4]) for row in table(report).rows]


# --- every load is shown ---


def test_each_load_of_a_sweep_has_a_named_row_with_its_verdict_and_its_numbers() -> None:
    report = report_of(swept(2, 4))
    assert rows(report) == [
        ("sweep, 1 in flight", "VALID", "0", "10.0"),
        ("sweep, 2 in flight", "INVALID(client)", "0", "20.0"),
        ("sweep, 4 in flight", "INVALID(client)", "0", "40.0"),
    ]
    tones = [{cell.tone for cell in row[2:8] if cell.text != MISSING} for row in table(report).rows]
    assert tones == [{""}, {"quiet"}, {"quiet"}]
    for text in (markdown.text(report), html.text(report)):
        assert all(f"sweep, {size} in flight" in text for size in (1, 2, 4))


def test_rejected_loads_are_marked_in_metrics_csv() -> None:
    found = list(csv_format.DictReader(io.StringIO(csv.text(report_of(swept(2, 4))))))
    told = [(r["concurrency"], r["value"], r["believed"]) for r in found if r["metric"] == "output_tokens_per_s"]
    assert told == [("1", "10.0", "true"), ("2", "20.0", "false"), ("4", "40.0", "false")]


def test_the_headline_names_the_load_and_those_it_is_without(golden: object) -> None:
    first = answer(report_of(swept(2, 4)))[0]
    assert first == golden
    assert "10.0" in first
    words = f"2 of 3 loads are unreliable (INVALID(client): {LATE.removeprefix('client: ')})."
    assert words in " ".join(answer(report_of(swept(2, 4))))


def test_a_rejected_run_shows_what_was_measured(golden: object) -> None:
    report = report_of(record(in_turns(0, 8, 1.0), clients=(replace(CLIENT, **BUSY),)))
    (run,) = report.runs
    assert (run.status, run.reason) == ("invalid", LATE)
    assert rows(report) == [("offline", "INVALID(client)", "0", "10.0")]
    assert report.measurements == ()
    assert {m.value for m in report.doubted if m.metric == "output_tokens_per_s"} == {10.0}
    text = answer(report)[0]
    assert text == golden
    assert "INVALID" in text
    assert "95%" in text
    assert "80%" in text
    assert "client): client:" not in markdown.text(report) + html.text(report)
    assert "Unreliable, excluded from comparisons:" in html.text(report)
    assert "output_tokens_per_s" not in prometheus.text(report)


@pytest.mark.parametrize("width", [80, 120])
def test_in_a_narrow_terminal_the_verdict_and_what_failed_stay(width: int) -> None:
    screen = Console(file=io.StringIO(), width=width, record=True)
    screen.print(Fitted(table(report_of(swept(2)))))
    shown = screen.export_text()
    assert max(map(len, shown.splitlines())) <= width
    if width == 80:  # a column for each load
        lines = {line.split()[0]: line.split()[1:] for line in shown.splitlines() if line.strip()}
        assert lines["result"] == ["VALID", "INVALID(client)", "VALID"]
        assert lines["failed,"] == ["%", "0", "0", "0"]
        return
    above, heading = next((a, b) for a, b in pairwise(shown.splitlines()) if "scenario" in b)
    assert (above.split()[0], heading.split()[:3]) == ("failed", ["scenario", "result", "%"])


# --- marked in charts ---


def test_charts_draw_them_hollow_and_join_them_to_none(golden: object) -> None:
    drawn = {chart.name: chart for chart in charts(report_of(swept(4)))}
    curve = drawn["served_curve"]
    assert {(p.text, p.drawn) for p in curve.points if p.text} == {("1", JOINED), ("2", JOINED), ("4", RING)}
    assert curve.subtitle == golden
    names = {p.series for p in drawn["served_distributions"].points}
    assert names == golden


# --- part of nothing else ---


def test_they_are_in_no_comparison_and_no_history() -> None:
    found = comparable.quantities_of([swept(2, 4)])
    assert {quantity.row for quantity in found} == {"concurrency 1"}
    days = [replace(swept(2, 4), started_at=float(n)) for n in range(8)]
    followed = history.analyse((), 1, [replace(day, path=f"{n}/x") for n, day in enumerate(days)])
    assert {series.axes.get("concurrency") for series in followed} == {1}
    assert [load.concurrency for load in measurements.reliable_loads([swept(2, failing=4)])] == [1]


# --- what the status and the exit code say ---


@pytest.mark.parametrize(
    ("asked", "status", "fails"),
    [
        (swept(), Status.OK, []),
        (swept(2, 4), Status.OK, [2, 4]),
        (swept(1, 2, 4), Status.INVALID, [1, 2, 4]),
        (swept(failing=4), Status.OK, [4]),
        (swept(failing=4, ttft_limit_s=5.0), Status.OK, []),
    ],
)
def test_a_sweep_with_one_reliable_load_is_ok_and_lists_the_others(
    asked: RunRecord, status: Status, fails: list[int]
) -> None:
    assert status_of(asked, None)[0] is status
    assert [load.axes["concurrency"] for load in report_of(asked).served if load.fails] == fails


def test_a_search_ends_where_its_client_does_and_has_not_failed() -> None:
    stages = [stage(n, scenario="server", rate_per_s=2.0 + n) for n in (0, 1)]
    clients = (CLIENT, replace(CLIENT, stage=1, **BUSY))
    asked = [request(0), request(1, stage=1)]
    for more in ({"scenario": "search"}, {"scenario": "sweep"}):
        (first, second) = report_of(record(asked, stages=stages, clients=clients, rate_per_s=2.0, **more)).served
        assert (first.is_believed, second.is_believed, second.fails) == (True, False, False)


def test_failed_requests_of_a_load_without_limits_make_the_run_invalid() -> None:
    half = [replace(r, error="http_429") if r.number % 2 else r for r in in_turns(0, 16, 1.0)]
    why = "8 of 16 requests failed (http_429 8 times)"
    assert status_of(record(half), None) == (Status.INVALID, why)
    report = report_of(record(half))
    assert rows(report)[0][:3] == ("offline", "INVALID", "50.0")
    assert answer(report)[0] == f"INVALID: {why}."
    # With limits a failed request is a late one, and that they were not kept is what the run found out.
    limited = record(half, scenario="server", rate_per_s=1.0)
    assert status_of(limited, None)[0] is Status.OK
    assert [(load.verdict, load.fails) for load in report_of(limited).served] == [("INVALID", False)]
