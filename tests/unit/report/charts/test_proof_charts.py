"""Losses over the reference with their band, and one profiled step rank by rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from paceline.analysis.findings import Report
from paceline.analysis.findings.training import LossCurve, RankStep
from paceline.analysis.report import build
from paceline.report.charts import charts
from paceline.report.charts.chart import AREA, COLOURS
from paceline.report.charts.proof import BAND, COMPUTE, EXPOSED, IDLE
from paceline.results.records import ExposureSample, TimelineSample, TraceSample

Builder = Callable[..., Any]


def named(report: Report, name: str) -> Any:
    return next((chart for chart in charts(report) if chart.name == name), None)


def test_a_loss_is_drawn_over_that_of_the_reference_with_its_band(report: Report) -> None:
    curve = LossCurve(steps=(0, 1), losses=(2.0, 1.01), reference=(2.0, 1.0), limits=(0.001, 0.02))
    first, *rest = report.certificates
    chart = named(dataclasses.replace(report, certificates=(dataclasses.replace(first, loss=curve), *rest)), "loss")
    lines = [p for p in chart.points if p.drawn != AREA]
    assert [(p.x, p.y) for p in lines] == [(0, 0.0), (1, pytest.approx(1.0))]
    assert lines[0].series == "ddp"
    band = [(p.x, p.low, p.high) for p in chart.points if p.series == BAND]
    assert band == [(0, pytest.approx(-0.1), pytest.approx(0.1)), (1, pytest.approx(-2.0), pytest.approx(2.0))]
    colours = {s.name: s.colour for s in chart.series}
    assert colours["ddp"] < COLOURS <= colours[BAND], "the band has no colour of a strategy"


def test_measured_runs_carry_their_losses(make_cell: Builder, make_reference: Builder) -> None:
    runs = make_cell(1.0, strategy="ddp", repeats=1)
    report = build([make_reference(runs[0].spec), *runs], "t")
    (certificate,) = report.certificates
    assert certificate.loss is not None
    assert len(certificate.loss.steps) == len(certificate.loss.losses) == len(certificate.loss.limits) > 0
    assert all(limit > 0 for limit in certificate.loss.limits)


def test_a_step_is_drawn_rank_by_rank_if_there_are_several(report: Report) -> None:
    assert named(report, "ranks") is None
    steps = tuple(RankStep(rank=r, compute_s=0.2, exposed_s=0.05, hidden_s=0.01, idle_s=0.05 * r) for r in range(2))
    i, run = next((i, r) for i, r in enumerate(report.runs) if r.status == "ok" and not r.is_reference)
    runs = (*report.runs[:i], dataclasses.replace(run, rank_steps=steps), *report.runs[i + 1 :])
    chart = named(dataclasses.replace(report, runs=runs), "ranks")
    assert [(p.label, p.series, round(p.y)) for p in chart.points] == [
        ("rank 0", COMPUTE, 200),
        ("rank 0", EXPOSED, 50),
        ("rank 1", COMPUTE, 200),
        ("rank 1", EXPOSED, 50),
        ("rank 1", IDLE, 50),
    ]


def test_communication_of_a_layout_is_divided_by_dimension(make_cell: Builder, make_reference: Builder) -> None:
    """In the shares of the observed steps, which take longer: 30 and 10 ms of exposed time divide 20 ms by 3 to 1."""
    trace: dict[str, Any] = {"steps": 1, "wall_s": 0.1, "compute_s": 0.07, "communication_s": 0.03, "exposed_s": 0.02}
    observed: dict[str, Any] = {"steps": 1, "wall_s": 0.2, "communication_s": 0.05}
    (run,) = make_cell(1.0, strategy="ddp", repeats=1)
    record = dataclasses.replace(
        run,
        traces=tuple(TraceSample(rank=rank, **trace) for rank in range(2)),
        exposures=tuple(
            ExposureSample(rank=rank, dimension=name, exposed_s=exposed_s, **observed)
            for rank in range(2)
            for name, exposed_s in (("tp", 0.03), ("replicate", 0.01), ("pp", 0.0))
        ),
    )
    chart = named(build([make_reference(run.spec), record], "t"), "ranks")
    assert [(p.series, round(p.y, 6)) for p in chart.points if p.label == "rank 1"] == [
        (COMPUTE, 70),
        ("communication, tensor parallel", 15),
        ("communication, replicas", 5),
        (IDLE, 10),
    ]
    assert "by dimension" in chart.subtitle


def test_steps_are_drawn_in_the_order_of_time_where_it_was_recorded(
    make_cell: Builder, make_reference: Builder
) -> None:
    """The timeline by dimension is preferred to the one without; stretches of one kind are one part."""
    trace: dict[str, Any] = {"steps": 1, "wall_s": 0.1, "compute_s": 0.07, "communication_s": 0.03, "exposed_s": 0.02}
    (run,) = make_cell(1.0, strategy="ddp", repeats=1)
    plain = {"kinds": ("compute", "communication"), "slots": (0, 1, 2, 0), "steps": 2, "wall_s": 0.4}
    divided = {"kinds": ("compute", "tp", "replicate"), "slots": (0, 0, 1, 0, 2, 3), "steps": 1, "wall_s": 0.6}
    record = dataclasses.replace(
        run,
        traces=tuple(TraceSample(rank=rank, **trace) for rank in range(2)),
        timelines=(*(TimelineSample(rank=r, **d) for r in range(2) for d in (plain, divided)),),
    )
    chart = named(build([make_reference(run.spec), record], "t"), "ranks")
    assert [(p.series, round(p.y)) for p in chart.points if p.label == "rank 1"] == [
        (COMPUTE, 200),
        ("communication, tensor parallel", 100),
        (COMPUTE, 100),
        ("communication, replicas", 100),
        (IDLE, 100),
    ]
    assert chart.title == "The timeline of 1 step under the profiler, rank by rank"
    assert chart.points[2].detail == "compute: 300 to 400 ms\n50% of the time in all"
    only = dataclasses.replace(record, timelines=record.timelines[::2])
    plainly = named(build([make_reference(run.spec), only], "t"), "ranks")
    assert [p.series for p in plainly.points if p.label == "rank 0"] == [COMPUTE, EXPOSED, IDLE, COMPUTE]


def test_every_dimension_has_a_colour_of_its_own(make_cell: Builder, make_reference: Builder) -> None:
    """Five are more than there are colours for parts: tensor and context parallelism had that of idle time."""
    (run,) = make_cell(1.0, strategy="ddp", repeats=1)
    kinds = ("compute", "shard", "replicate", "tp", "cp", "pp")
    divided = {"kinds": kinds, "slots": (*range(len(kinds) + 1),), "steps": 1, "wall_s": 0.6}
    trace: dict[str, Any] = {"steps": 1, "wall_s": 0.1, "compute_s": 0.07, "communication_s": 0.03, "exposed_s": 0.02}
    record = dataclasses.replace(
        run,
        traces=tuple(TraceSample(rank=rank, **trace) for rank in range(2)),
        timelines=tuple(TimelineSample(rank=rank, **divided) for rank in range(2)),
    )
    chart = named(build([make_reference(run.spec), record], "t"), "ranks")
    assert {series.name for series in chart.series} == {point.series for point in chart.points}
    assert len({series.colour for series in chart.series}) == len(chart.series) == 7
