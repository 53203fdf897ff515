"""Charts of served models: as data, on the page, and as files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import simulated_serving as made
from simulated_serving import TWO, Replica

from paceline.analysis.findings import Report
from paceline.analysis.report import build
from paceline.report import text_bars
from paceline.report.charts import Chart, charts
from paceline.report.charts.chart import AREA, CURVE, LONE
from paceline.report.exporters import html, plots
from paceline.results.served_samples import StageSample

LOST = (Replica("node-a"), Replica("node-b", slowness=1.4, died_s=2.0), Replica("node-c"))
NAMES = [
    "served_per_user",
    *("served_curve", "served_distributions", "served_in_flight", "served_replicas", "served_replica_ttft"),
    "served_client",
]


@pytest.fixture(scope="module")
def served() -> Report:
    """Closed loops, everything at once, a schedule with limits that lost a node, a sweep, and a client too slow."""
    limited: dict[str, Any] = {"scenario": "server", "rate_per_s": 25.0, "ttft_limit_s": 0.2, "tpot_limit_s": 0.04}
    slow = [made.client(schedule_lag_p99_ns=2.6e6)]
    records = [
        *made.closed_loops((1, 4, 16), requests=48),
        made.record(made.asked(60, TWO), TWO, scenario="offline"),
        made.record(made.asked(150, LOST, rate_per_s=25), LOST, **limited),
        made.sweep((4.0, 32.0), requests=40),
        made.record(made.asked(20, rate_per_s=5), clients=slow, scenario="constant", rate_per_s=5.0),
    ]
    return build(records, title="served")


def named(report: Report, name: str) -> Chart:
    return {chart.name: chart for chart in charts(report)}[name]


def test_charts_of_a_served_model_in_reading_order(served: Report) -> None:
    assert [chart.name for chart in charts(served)] == NAMES
    assert {chart.section for chart in charts(served)} == {"served"}


def test_a_curve_goes_through_the_loads_of_one_scenario_in_their_order(served: Report) -> None:
    curve = named(served, "served_curve")
    first = [p for p in curve.points if p.group == "Time to first token" and p.series == "concurrency, p50"]
    assert [p.text for p in first] == ["1", "4", "16"]
    assert [p.x for p in first] == sorted(p.x for p in first)  # type: ignore[type-var]
    assert not any("offline" in p.label for p in curve.points)
    assert "Offline: " in curve.subtitle
    assert {(r.group, r.label) for r in curve.rules} >= {("Time to first token", "limit of server 200 ms")}


def test_one_load_is_no_curve() -> None:
    alone = build(made.closed_loops((4,), requests=20), title="alone")
    assert "served_curve" not in [chart.name for chart in charts(alone)]


def test_percentiles_are_dots_only_where_there_are_requests_for_them(served: Report) -> None:
    """48 requests say nothing about the 99th percentile: neither a dot nor a point of the curve over throughput."""
    points = [p for p in named(served, "served_distributions").points if p.series == "4 in flight"]
    ttft = [p for p in points if p.group == "Time to first token"]
    assert [p.x for p in ttft if p.drawn == LONE] == [50.0, 90.0]
    assert max(p.x for p in ttft if p.drawn == CURVE) == pytest.approx(100 * 47 / 48)  # type: ignore[type-var]
    assert not any(p.series.endswith("p99") for p in named(served, "served_curve").points)


def test_a_tail_of_enough_requests_is_drawn() -> None:
    report = build(made.closed_loops((2, 4), requests=460), title="enough")
    first = [p for p in named(report, "served_curve").points if p.group == "Time to first token"]
    assert [(p.series, p.text) for p in first] == [("p99", "2"), ("p50", ""), ("p99", "4"), ("p50", "")]
    dots = [p.x for p in named(report, "served_distributions").points if p.drawn == LONE and p.series == "4 in flight"]
    assert dots == [50.0, 90.0, 99.0] * 3


def test_replicas_in_flight_stand_on_each_other(served: Report) -> None:
    chart = named(served, "served_in_flight")
    ours = [p for p in chart.points if p.group == "server, 25/s" and p.drawn == AREA]
    moment = [p for p in ours if p.x == ours[40].x]
    assert [p.series for p in moment] == ["node-a", "node-b", "node-c"]
    assert [p.low for p in moment] == [0.0, moment[0].high, moment[1].high]
    assert "node-b gone" in {rule.label for rule in chart.rules if rule.upright}
    assert [rule.label for rule in chart.rules if rule.group == "sweep"] == ["4/s", "32/s"]
    assert any(p.series == "late or failed" for p in chart.points)


def test_the_line_of_a_lost_replica_ends(served: Report) -> None:
    points = named(served, "served_replicas").points
    ends = {
        name: max(p.x for p in points if p.series == name and p.group.startswith("server"))
        for name in ("node-a", "node-b")
    }  # type: ignore[type-var]
    assert ends["node-b"] <= 2.0 < ends["node-a"]


def test_a_client_beyond_its_bounds_is_shown_although_its_run_is_not(served: Report, golden: object) -> None:
    (slow,) = [p for p in named(served, "served_client").points if p.label == "constant, 5/s"]
    assert slow.series == golden
    assert slow.text == "260 %, sending"
    shown = {p.series for p in named(served, "served_distributions").points if "constant" in p.series}
    assert shown == golden


def test_what_took_no_time_does_not_spoil_a_logarithm() -> None:
    """Answers that came in one read have a time per token of 0: one of them must not empty the panel of all."""
    requests = made.asked(40, in_flight=2)
    requests[:5] = [replace(r, last_ns=r.first_ns, token_ns=(0,) * (made.TOKENS - 1)) for r in requests[:5]]
    report = build([made.record(requests, scenario="concurrency", concurrency=2)], title="t")
    drawn = [p.y for p in named(report, "served_distributions").points if p.group == "Time per further token"]
    assert len(drawn) > 20
    assert min(drawn) > 0


def test_replicas_that_were_asked_alone_are_curves_of_their_own() -> None:
    values: dict[str, Any] = {"rank": 0, "scenario": "concurrency", "rate_per_s": None, "concurrency": 2, "planned": 20}
    requests, stages = [], []
    for number in range(2):
        ours = made.asked(20, in_flight=2, start_ns=number * 30 * made.NS, stage=number)
        requests += [replace(r, replica=number) for r in ours]
        place = {"stage": number, "replica": number, "started_ns": number * 30 * made.NS}
        stages.append(StageSample(**values, **place, ended_ns=0, began_at_s=0.0))
    paired: dict[str, Any] = {"scenario": "concurrency", "concurrency": 2, "partition": "paired"}
    report = build([made.record(requests, TWO, stages=stages, **paired)], title="t")
    curve = named(report, "served_curve")
    assert {p.series for p in curve.points} == {f"concurrency, replica {n} alone, p50" for n in (0, 1)}
    labels = [rule.label for rule in named(report, "served_in_flight").rules]
    assert labels == ["node-a", "node-b"]


def test_names_have_only_what_distinguishes_cells(golden: object) -> None:
    both = [
        made.record(made.asked(20, TWO, in_flight=4), TWO, scenario="concurrency", concurrency=4, partition=partition)
        for partition in ("static", "dynamic")
    ]
    alone = made.record(made.asked(20, TWO, rate_per_s=9), TWO, scenario="server", rate_per_s=9.0)
    found = named(build([*both, alone], title="t"), "served_distributions")
    names = {one.name for one in found.series}
    assert names == golden


def test_replicas_of_one_host_have_different_names(golden: object) -> None:
    twins = (Replica("node-a"), Replica("node-a"))
    report = build([made.record(made.asked(30, twins, in_flight=4), twins, scenario="concurrency", concurrency=4)], "t")
    assert {p.series for p in named(report, "served_in_flight").points} == golden


def test_more_replicas_than_colours_share_the_last(golden: object) -> None:
    many = tuple(Replica(f"node-{i:02}") for i in range(12))
    report = build(
        [made.record(made.asked(120, many, in_flight=24), many, scenario="concurrency", concurrency=24)], "t"
    )
    series = named(report, "served_in_flight").series
    assert [one.name for one in series][-1] == golden
    assert len({one.colour for one in series}) == len(series) == 6


def test_one_section_holds_sentence_table_and_charts(served: Report) -> None:
    page = html.text(served)
    start = page.index('<section id="served">')
    section = page[start : page.index("</section>", start)]
    first, *rest = NAMES
    assert f'data-chart="{first}"' in page[:start], "the main chart is on the first screen"
    places = [section.index(text) for text in ("Served model", "<table>", *(f'data-chart="{name}"' for name in rest))]
    assert places == sorted(places)
    assert '<section id="charts">' not in page
    assert section.count("TTFT p50") == 1
    json.loads(page.partition('id="data">')[2].partition("</script>")[0])


def test_a_report_about_training_has_no_such_section(report: Report) -> None:
    page = html.text(report)
    assert 'id="served"' not in page
    data = json.loads(page.partition('id="data">')[2].partition("</script>")[0])
    assert not any({"section", "panel_px"} & set(chart) for chart in data["charts"])


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("served_curve", ("Latency over throughput", "limit of server 200 ms", "output, tokens/s")),
        ("served_in_flight", ("Requests in flight", "node-b gone", "late or failed")),
        ("served_client", ("260 %, sending", "% of the bound")),
    ],
)
def test_files_say_what_they_show(served: Report, name: str, words: tuple[str, ...]) -> None:
    text = " ".join(ElementTree.fromstring(plots.image(served, name, "svg")).itertext())
    for word in words:
        assert word in text


def test_the_smallest_run_is_drawn(tmp_path: Path) -> None:
    """One request has no distribution, and nothing to compare."""
    lone = build([made.record(made.asked(1, in_flight=1), scenario="single_stream")], title="one")
    assert [chart.name for chart in charts(lone)] == ["served_in_flight", "served_client"]
    assert len(plots.export(lone, tmp_path)) == 4


def test_the_height_of_a_strip_is_its_value() -> None:
    assert text_bars.strip([0.0, 1.0, 4.0, 8.0], top=8.0, width=4) == " ▂▅█"
    assert text_bars.strip([2.0, 6.0, 0.001, 0.0], top=8.0, width=2) == "▅▁"
    assert text_bars.strip([1.0, 2.0], top=2.0, width=30) == "▅█"
    assert text_bars.strip([], top=1.0) == text_bars.strip([0.0], top=0.0) == ""


def test_the_terminal_shows_each_replica_over_the_run(served: Report, report: Report, golden: object) -> None:
    (table,) = text_bars.tables(served)
    lost = next(row for row in table.rows if row[1].detail)
    assert lost[1].text == "node-b"
    assert lost[1].detail == golden
    assert lost[2].text[-1] == " "
    assert len(table.cells) == len(table.rows) <= text_bars.MOST_ROWS
    assert text_bars.tables(report) == ()
