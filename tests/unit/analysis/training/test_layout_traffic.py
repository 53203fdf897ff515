"""Bytes by mesh dimension and the bubble of a pipeline, on samples whose every number is known."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from paceline.analysis.report import build
from paceline.analysis.training import layouts
from paceline.analysis.training.certificate import certify
from paceline.experiment.layout import layout_of
from paceline.models import parallel
from paceline.report.tables import layouts as tables
from paceline.results.records import ExposureSample, PipelineSample, RunRecord, WireSample


def wire(dimension: str | None, operation: str, payload: int, rank: int = 0, step: int = 0) -> WireSample:
    return WireSample(
        rank=rank,
        step=step,
        operation=operation,
        dtype="fp32",
        group_size=2,
        calls=1,
        payload_bytes=payload,
        dimension=dimension,
    )


@pytest.fixture
def record(make_spec: Any, make_record: Any) -> RunRecord:
    """Two ranks of a pipeline; rank 1 sends more, and two of its four seconds are idle."""
    spec = make_spec("mesh:pp=2", 2, accumulation=4)
    samples = (wire("pp", "send", 300), wire("pp", "send", 500, rank=1), wire(None, "all_reduce", 4))
    times = tuple(PipelineSample(rank=rank, step=9, wall_s=4.0, busy_s=3.0 - rank) for rank in (0, 1))
    found: RunRecord = dataclasses.replace(make_record(spec), wire=samples, pipelines=times)
    return found


def test_the_busiest_rank_and_the_idle_share(record: RunRecord) -> None:
    (row,) = layouts.analyse([record])
    assert (row.dimension, row.size, row.counted_bytes) == ("pp", 2, 500)
    layout = layout_of(record.spec)
    sent = [parallel.sent_bytes(record.shape, layout, record.spec.training, rank) for rank in (0, 1)]
    assert row.formula_bytes == max(each["pp"] for each in sent if each)
    assert row.idle_ratio == pytest.approx((1 / 4 + 2 / 4) / 2)
    assert row.idle_formula_ratio == pytest.approx(1 / 5)


def test_nothing_is_concluded_from_some_of_the_ranks(record: RunRecord) -> None:
    (row,) = layouts.analyse([dataclasses.replace(record, pipelines=record.pipelines[:1])])
    assert row.idle_ratio is None
    unknown = (*record.wire, wire("pp", "teleport", 8))
    (row,) = layouts.analyse([dataclasses.replace(record, wire=unknown)])
    assert row.counted_bytes is None, "the rest is not the total"


def exposure(rank: int, exposed_s: float, dimension: str = "pp") -> ExposureSample:
    return ExposureSample(rank=rank, steps=2, dimension=dimension, wall_s=4.0, communication_s=3.0, exposed_s=exposed_s)


def test_exposed_time_is_the_mean_over_ranks(record: RunRecord) -> None:
    seen = dataclasses.replace(record, exposures=(exposure(0, 1.0), exposure(1, 2.0), exposure(1, 4.0, "tp")))
    (row,) = layouts.analyse([seen])
    assert row.exposed_ratio == pytest.approx((1 / 4 + 2 / 4) / 2)
    assert layouts.terms([seen]) == "pipeline 0.000500 MB and 37.5% exposed and 37.5% idle"
    (row,) = layouts.analyse([dataclasses.replace(record, exposures=(exposure(0, 1.0),))])
    assert row.exposed_ratio is None, "one of two ranks"


def test_a_slow_head_moves_layers_to_the_first_stage(make_spec: Any, make_record: Any) -> None:
    spec = make_spec("mesh:pp=2", 2, accumulation=4, model="small")
    first = PipelineSample(rank=0, step=9, wall_s=4.0, busy_s=3.0, embedding_s=0.0, block_s=1.0)
    last = PipelineSample(rank=1, step=9, wall_s=4.0, busy_s=3.0, block_s=1.0, head_s=2.0)
    found = dataclasses.replace(make_record(spec), wire=(wire("pp", "send", 300),), pipelines=(first, last))
    (row,) = layouts.analyse([found])
    assert (row.split, row.balance_ratio) == ("2+2", pytest.approx(4 / 3))
    assert (row.best_split, row.best_balance_ratio) == ("3+1", pytest.approx(1.0))
    (table,) = tables.tables(dataclasses.replace(build([found], "x"), layouts=(row,)))
    assert any("with layers=3+1 it would take 1 times" in note for note in table.notes)


def test_strategies_without_a_layout_have_no_row(make_spec: Any, make_record: Any) -> None:
    assert layouts.analyse([make_record(make_spec("ddp", 2))]) == ()


def test_ranks_of_a_replica_that_saw_other_samples_are_not_certified(make_spec: Any, make_record: Any) -> None:
    spec = make_spec("mesh:tp=2", 2, accumulation=4)
    base: RunRecord = make_record(spec)

    def verdict(**of_rank_1: Any) -> str | None:
        """What the check observed if rank 1 recorded this."""
        steps = [
            dataclasses.replace(s, loss=2.0, data_digest=7, leader=None)
            if s.rank == 0
            else dataclasses.replace(s, **{"loss": 2.0, "data_digest": 7, "leader": 0, "tokens": 0} | of_rank_1)
            for s in base.steps
        ]
        checks = certify(dataclasses.replace(base, steps=tuple(steps)), None, []).checks
        found = next(check for check in checks if check.name == "ranks of one replica")
        return None if found.ok else found.observed

    assert verdict() is None
    assert "other samples on rank 1 than on rank 0" in (verdict(data_digest=8) or "")
    assert "a loss of 2.1 on rank 1" in (verdict(loss=2.1) or "")
    assert "rank 1 counts the samples of another replica" in (verdict(leader=None) or "")


def test_the_table_has_formula_beside_count(record: RunRecord) -> None:
    report = dataclasses.replace(build([], title="x"), layouts=layouts.analyse([record]))
    (table,) = tables.tables(report)
    names = ["dimension", "ranks", "counted, MiB/step", "formula, MiB/step"]
    assert [column.heading for column in table.columns][1:5] == names
