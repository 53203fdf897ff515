"""Charts as data, before anyone draws them."""

from __future__ import annotations

import dataclasses

import pytest

from paceline.analysis.findings import (
    CollectiveFit,
    CollectiveRow,
    FrontierPoint,
    Measurement,
    MemoryRow,
    Pair,
    Probe,
    Report,
    ScalingExplanation,
)
from paceline.report.charts import BUILDERS, Chart, charts
from paceline.report.charts.chart import CURVE, LOG, RING
from paceline.report.charts.training import FEWEST_SAMPLES

GIB = 2**30


def named(report: Report, name: str) -> Chart:
    return {chart.name: chart for chart in charts(report)}[name]


def test_a_report_without_runs_has_no_chart(empty_report: Report) -> None:
    assert charts(empty_report) == ()


def test_charts_of_a_campaign(report: Report) -> None:
    training = ["throughput", "step_time", "memory", "wire", "scaling_weak"]
    assert [chart.name for chart in charts(report)] == ["scaling_rate_weak", "pareto", *training]


def test_a_builder_is_one_line(report: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    throughput = named(report, "throughput")
    cost = dataclasses.replace(throughput, name="cost")
    monkeypatch.setattr("paceline.report.charts.BUILDERS", (*BUILDERS, lambda _: [cost]))
    assert charts(report)[-1] is cost


def test_throughput_is_the_ranking_with_its_intervals(report: Report, golden: object) -> None:
    first, second, *_ = named(report, "throughput").points
    assert (first.label, second.label) == ("ddp", "fsdp2")
    assert first.low is not None
    assert first.high is not None
    assert first.low < first.y == 12345.0 < first.high
    assert first.text == "12,345"
    assert first.detail == golden
    assert "12,345" in first.detail
    assert "12,289" in first.detail
    assert "12,401" in first.detail
    assert len(first.runs) == 3


def test_what_is_not_certified_is_not_drawn(report: Report) -> None:
    for chart in charts(report):
        assert not any("stage3" in cell for point in chart.points for cell in point.cells)


def test_one_strategy_has_one_colour_everywhere(report: Report) -> None:
    found = {(s.name, s.colour) for chart in charts(report) for s in chart.series}
    assert len({name for name, _ in found}) == len(found)


def test_step_times_are_all_drawn_until_they_are_too_many(report: Report) -> None:
    point = named(report, "step_time").points[0]
    assert len(point.samples) == 30
    cell = point.cells[0]
    many = dataclasses.replace(report, distributions={cell: tuple(i / 1e6 for i in range(1, 90_001))})
    (thinned,) = named(many, "step_time").points
    assert FEWEST_SAMPLES <= len(thinned.samples) <= 20_000
    assert (thinned.samples[0], thinned.samples[-1]) == (0.001, 90.0)


def phased(report: Report, seconds: dict[str, float | None]) -> Report:
    step = next(m for m in report.measurements if m.metric == "step_time_s" and m.axes["strategy"] == "ddp")
    more = tuple(
        dataclasses.replace(step, metric=name, value=value, low=None, high=None) for name, value in seconds.items()
    )
    return dataclasses.replace(report, measurements=(*report.measurements, *more))


def test_phases_and_their_rest_add_up_to_the_step(report: Report) -> None:
    parts = named(phased(report, {"forward_s": 0.2, "backward_s": 0.4, "h2d_s": None}), "phases").points
    assert [p.series for p in parts] == ["forward", "backward", "rest of the step"]
    assert sum(p.y for p in parts) == pytest.approx(663.6)
    assert [p.text for p in parts] == ["", "", "664 ms"]


def test_phases_longer_than_the_step_leave_no_rest(report: Report) -> None:
    parts = named(phased(report, {"forward_s": 0.5, "backward_s": 0.4}), "phases").points
    assert [p.series for p in parts] == ["forward", "backward"]


@pytest.mark.parametrize(("memory_bytes", "drawn"), [(GIB, True), (80 * GIB, False)])
def test_capacity_is_a_line_where_it_is_near_and_a_word_where_it_is_far(
    report: Report, memory_bytes: int, drawn: bool
) -> None:
    chart = named(dataclasses.replace(report, machines=({"gpus": [{"memory_bytes": memory_bytes}]},)), "memory")
    assert bool(chart.rules) == drawn
    assert ("beyond this axis" in chart.subtitle) != drawn


def test_scaling_names_its_measured_baseline(report: Report, golden: object) -> None:
    chart = named(report, "scaling_weak")
    assert chart.title == golden
    assert [(p.x, round(p.y, 1)) for p in chart.points] == [(1, 100.0), (2, 91.1)]
    assert [rule.label for rule in chart.rules] == ["ideal"]


def explanation(report: Report, exposed: float | None) -> Report:
    point = report.scaling[1]
    found = ScalingExplanation(
        kind="weak",
        series=point.series,
        cell=point.cell,
        baseline=point.baseline,
        world_size=2,
        baseline_world_size=1,
        step_s=0.66,
        ideal_s=0.60,
        loss_s=0.06,
        exposed_s=exposed,
        exposed_loss_s=exposed,
        rest_s=None,
        predicted_s=None,
        exposed_share_ratio=None,
        network_share_ratio=None,
        karp_flatt_ratio=None,
        grade="good",
        traffic=(),
        text="why",
        notes=(),
        runs=(),
    )
    return dataclasses.replace(report, explanations=(found,))


@pytest.mark.parametrize(
    ("exposed", "parts"),
    [
        (0.04, {"ideal": 600.0, "exposed communication": 40.0, "rest": 20.0}),
        (0.50, {"ideal": 600.0, "exposed communication": 60.0}),
        (None, {"ideal": 600.0, "not measured": 60.0}),
    ],
)
def test_parts_of_the_loss_never_reach_beyond_the_step(
    report: Report, exposed: float | None, parts: dict[str, float]
) -> None:
    chart = named(explanation(report, exposed), "scaling_loss")
    assert {p.series: round(p.y, 6) for p in chart.points} == parts
    assert chart.points[-1].text == "91% efficient"


def test_components_are_cut_at_their_peak(report: Report, golden: object) -> None:
    sizes = {"parameters": 2 * GIB, "activations": 3 * GIB, "peak": 4 * GIB}
    row = MemoryRow(
        cell="m",
        axes={"strategy": "ddp"},
        predicted=sizes,
        measured=sizes,
        error_ratio=-1e-5,
        capacity_bytes=8 * GIB,
        runs=("a",),
    )
    chart = named(dataclasses.replace(report, memory=(row,)), "memory_components")
    assert [(p.series, p.y, p.faint) for p in chart.points] == [
        ("parameters", 2.0, False),
        ("activations", 2.0, False),
        ("parameters", 2.0, True),
        ("activations", 2.0, True),
    ]
    assert chart.points[-1].text == golden
    assert "0.0 %" in chart.points[-1].text
    assert [rule.y for rule in chart.rules] == [8.0]


def test_the_frontier_is_proved_by_probes_and_rings_what_was_predicted(report: Report) -> None:
    run = report.runs[1]
    probes = (Probe(run=run.run, micro_batch=12, status="ok", peak_bytes=1),)
    point = FrontierPoint(
        series="ddp",
        sequence_length=512,
        largest_fitting=12,
        smallest_failing=13,
        predicted=14,
        settled=True,
        probes=probes,
        axes={},
    )
    proved, ring = named(dataclasses.replace(report, frontier=(point,)), "frontier").points
    assert (proved.y, ring.y, ring.drawn) == (12.0, 14.0, RING)
    assert proved.cells == (run.cell,)


def row(size: int, seconds: float, operation: str = "all_reduce") -> CollectiveRow:
    return CollectiveRow(
        run="r",
        cell="c" * 16,
        operation=operation,
        dtype="fp32",
        world_size=2,
        size_bytes=size,
        count=size // 4,
        in_place=False,
        mode="single",
        iterations=20,
        time_s=seconds,
        p50_s=None,
        p95_s=None,
        p99_s=None,
        algbw_bytes_per_s=size / seconds if size else None,
        busbw_bytes_per_s=size / seconds if size else None,
        wrong=0,
        skew_ratio=None,
        early_rank=None,
        late_rank=None,
        status="ok",
        error=None,
        axes={"world_size": 2},
    )


def test_collectives_stand_beside_their_fit(report: Report) -> None:
    fit = CollectiveFit(
        operation="all_reduce",
        dtype="fp32",
        world_size=2,
        in_place=False,
        alpha_s=1e-5,
        beta_bytes_per_s=1e9,
        residual_ratio=0.02,
        sizes=2,
        axes={"world_size": 2},
        runs=("r",),
    )
    rows = (row(1024, 2e-5), row(2**20, 1e-3), row(0, 1e-5, "barrier"))
    found = dataclasses.replace(report, collectives=rows, fits=(fit,))
    time = named(found, "collective_time_cccccccc")
    assert (time.y.scale, time.x and time.x.ticks) == (LOG, "bytes")
    assert {p.group for p in time.points} == {"all_reduce"}, "a barrier has no size"
    fitted = [p.y for p in time.points if p.drawn == CURVE]
    assert fitted == pytest.approx([10 + 1.024, 10 + 1048.576])
    assert named(found, "collective_bandwidth_cccccccc").points


def test_a_pair_is_shown_from_both_sides(report: Report) -> None:
    pair = Pair(
        run="r", ranks=(0, 1), hosts=("a", "b"), size_bytes=2**20, bandwidth_bytes_per_s=5e9, ratio=0.5, turns=2
    )
    points = named(dataclasses.replace(report, pairs=(pair,)), "pairs").points
    assert [(p.label, p.x, p.y) for p in points] == [("0", 1, 50.0), ("1", 0, 50.0)]


def kernel(size: int, rate: float) -> Measurement:
    axes = {"kernel": "matmul", "dtype": "bf16", "size": size, "variant": "", "label": str(size), "rank": None}
    return Measurement(
        metric="matmul_flops_per_s",
        unit="FLOP/s",
        better="higher",
        cell="k",
        value=rate,
        low=None,
        high=None,
        n=20,
        launches=1,
        axes=axes,
        runs=("k",),
    )


@pytest.mark.parametrize(("slowest", "scale"), [(3e14, "linear"), (1e12, "log")])
def test_rates_far_apart_stand_on_a_logarithmic_axis(report: Report, slowest: float, scale: str) -> None:
    found = dataclasses.replace(report, measurements=(kernel(1024, slowest), kernel(8192, 7e14)))
    chart = named(found, "ceilings_products")
    assert chart.y.scale == scale
    assert [p.x for p in chart.points] == [1024.0, 8192.0]


def test_every_point_belongs_to_a_cell_of_the_report(report: Report) -> None:
    known = {run.cell for run in report.runs}
    for chart in charts(report):
        assert {cell for point in chart.points for cell in point.cells} <= known
