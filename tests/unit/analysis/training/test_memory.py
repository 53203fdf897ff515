"""Memory rows and frontier points from records whose numbers are known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from paceline.analysis.report import build
from paceline.experiment.choices import Choice
from paceline.experiment.spec import RunSpec, Topology, Training
from paceline.report.tables.memory import tables
from paceline.results.records import ComponentSample, MemorySample, RunRecord, Status

MiB = 2**20


def spec(workload: str, micro_batch: int = 2, processes: int = 1, **training: Any) -> RunSpec:
    return RunSpec(
        experiment="test",
        workload=Choice.parse(workload),
        model=Choice("tiny"),
        topology=Topology(device="cpu", processes_per_node=processes),
        training=Training(**{"sequence_length": 64, "micro_batch": micro_batch, **training}),
        strategy=Choice("ddp"),
        steps=3,
    )


def moments(rank: int, extra: int = 0) -> list[MemorySample]:
    sizes = {"begin": 130, "forward": 190, "backward": 170, "update": 130, "steps": 300 + extra}
    return [
        MemorySample(
            rank=rank,
            moment=moment,
            allocated_bytes=size * MiB,
            reserved_bytes=400 * MiB,
            device_bytes=500 * MiB,
            resident_bytes=None,
        )
        for moment, size in sizes.items()
    ]


def part(component: str, size: int, source: str = "held", micro_batch: int = 2, rank: int = 0) -> ComponentSample:
    return ComponentSample(rank=rank, component=component, source=source, bytes=size * MiB, micro_batch=micro_batch)


def held(rank: int = 0) -> list[ComponentSample]:
    sizes = {"parameters": 40, "optimizer": 80, "gradients": 40, "standing_gradients": 0}
    return [part(name, size, rank=rank) for name, size in sizes.items()]


@pytest.fixture
def record() -> Callable[..., RunRecord]:
    def make(asked: RunSpec, status: Status = Status.OK, at: float = 0.0, **more: Any) -> RunRecord:
        return RunRecord(spec=asked, status=status, error=None, started_at=at, ended_at=at + 1, path="", **more)

    return make


def test_the_error_is_of_the_peak_of_the_busiest_rank(record: Callable[..., RunRecord]) -> None:
    told = [part("peak", 330, "predicted"), part("parameters", 40, "predicted"), part("peak", 990, "predicted", 9)]
    memory = (*moments(0), *moments(1, extra=20))
    done = record(spec("memory", processes=2), memory=memory, components=(*held(0), *held(1), *told))
    (row,) = build([done], "x").memory
    assert row.measured["peak"] == 320 * MiB
    assert row.measured["activations"] == 60 * MiB
    assert row.measured["fragmentation"] == 80 * MiB
    assert row.predicted["peak"] == 330 * MiB
    assert row.error_ratio == pytest.approx(330 / 320 - 1)
    assert row.capacity_bytes is None


def test_a_run_that_did_not_end_ok_has_no_row(record: Callable[..., RunRecord]) -> None:
    report = build([record(spec("memory"), Status.OOM, memory=tuple(moments(0)))], "x")
    assert report.memory == ()
    assert report.runs[0].is_failure


def test_an_unpredicted_row_has_no_error(record: Callable[..., RunRecord]) -> None:
    report = build([record(spec("memory"), memory=tuple(moments(0)), components=tuple(held()))], "x")
    (row,) = report.memory
    assert (row.error_ratio, row.predicted["peak"]) == (None, None)
    (table,) = tables(report)
    assert table.rows[0][-1].text == "\u2013"


def probes(record: Callable[..., RunRecord], *ended: tuple[int, Status]) -> list[RunRecord]:
    """Capacity 100 MiB; the first probe predicts 20 MiB for each sequence of the micro batch."""
    asked = "frontier:limit_gib=0.1,most=8"
    told = [part("capacity", 100), part("peak", 20, "predicted", 1), part("peak", 40, "predicted", 2)]
    return [
        record(spec(asked, micro_batch=size), status, at=float(i), memory=tuple(moments(0)), components=tuple(told))
        for i, (size, status) in enumerate(ended)
    ]


def test_a_closed_bracket_is_settled(record: Callable[..., RunRecord]) -> None:
    report = build(probes(record, (1, Status.OK), (5, Status.OOM), (4, Status.OK)), "x")
    (point,) = report.frontier
    assert (point.largest_fitting, point.smallest_failing, point.predicted, point.settled) == (4, 5, 5, True)
    assert [p.micro_batch for p in point.probes] == [1, 5, 4]
    assert not any(run.is_failure for run in report.runs)
    (table,) = tables(report)
    assert "1 \u2713, 5 \u2717, 4 \u2713" in table.rows[0][-1].text


@pytest.mark.parametrize(
    ("ended", "settled"),
    [
        ([(1, Status.OK), (6, Status.OOM)], False),
        ([(8, Status.OK)], True),
        ([(1, Status.OOM)], True),
        ([(1, Status.OK), (4, Status.FAILED)], False),
    ],
)
def test_settled_means_that_nothing_is_untried(
    record: Callable[..., RunRecord], ended: list[tuple[int, Status]], settled: bool
) -> None:
    (point,) = build(probes(record, *ended), "x").frontier
    assert point.settled is settled


def test_sequence_lengths_are_points_of_one_series(record: Callable[..., RunRecord]) -> None:
    runs = [record(spec("frontier", 1, sequence_length=length), at=float(length)) for length in (128, 64)]
    found = build(runs, "x").frontier
    assert [point.sequence_length for point in found] == [64, 128]
    assert len({point.series for point in found}) == 1


def test_charts_are_drawn_from_what_was_found(record: Callable[..., RunRecord]) -> None:
    from paceline.report.exporters import plots

    told = (part("peak", 330, "predicted"), *held())
    runs = [record(spec("memory"), memory=tuple(moments(0)), components=told)]
    runs += probes(record, (1, Status.OK), (2, Status.OOM))
    report = build(runs, "x")
    for name in ("memory_components", "frontier"):
        picture = plots.image(report, name, "svg").decode()
        assert picture.startswith("<?xml")
        assert "Solid: measured" in picture or "proved by a probe" in picture
