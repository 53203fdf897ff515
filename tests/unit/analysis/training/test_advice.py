"""Advice after out-of-memory on known numbers: what fits is what leaves room, and the report says it with numbers."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.analysis.report import build
from paceline.analysis.training import memory
from paceline.experiment.choices import Choice
from paceline.experiment.spec import RunSpec, Topology, Training
from paceline.report.exporters import html, markdown
from paceline.report.tables.advice import lines, sentence, tables
from paceline.results import store
from paceline.results.memory_components import goal_bytes, room_bytes
from paceline.results.records import AlternativeSample, ComponentSample, RunRecord, Status

GIB = 2**30
SPEC = RunSpec(
    experiment="test",
    workload=Choice("pretrain"),
    model=Choice("tiny"),
    topology=Topology(device="cuda", processes_per_node=2),
    training=Training(sequence_length=512, micro_batch=8),
    strategy=Choice("ddp"),
    steps=3,
)


def held(component: str, size: float, rank: int = 0) -> ComponentSample:
    return ComponentSample(rank=rank, component=component, source="held", bytes=int(size * GIB), micro_batch=8)


def told(change: str, settings: str, size: float | None, keeps_work: bool = True, **more: Any) -> AlternativeSample:
    peak = None if size is None else int(size * GIB)
    return AlternativeSample(rank=0, change=change, settings=settings, keeps_work=keeps_work, bytes=peak, **more)


TOLD = (
    told("", "", 100.0),
    told("micro batch 4 with accumulation 2", "micro_batch=4 accumulation=2", 61.2),
    told("checkpointing selective", "checkpointing=selective", 76.0),
    told("checkpointing full", "checkpointing=full", 40.0),
    told("zero:stage=1", "strategy=zero:stage=1", None, note="ValueError: made up"),
    told("sequence length 256", "sequence_length=256", 55.0, keeps_work=False),
)


def record(*samples: AlternativeSample, room: float = 79.1, status: Status = Status.OOM) -> RunRecord:
    return RunRecord(
        spec=SPEC,
        status=status,
        error="out of memory",
        started_at=0.0,
        ended_at=1.0,
        path="",
        components=(held("room", room), held("room", room + 2, 1)),
        alternatives=samples or TOLD,
    )


def test_what_fits_leaves_a_twentieth_free() -> None:
    """76.0 GiB would fit into 79.1, but not with 5 % to spare: 75.1 GiB."""
    found = memory.advice(record())
    assert found is not None
    assert found.room_bytes == int(79.1 * GIB)
    assert found.goal_bytes == pytest.approx(0.95 * 79.1 * GIB, abs=1)
    assert [each.change for each in found.fitting] == [
        "micro batch 4 with accumulation 2",
        "checkpointing full",
        "sequence length 256",
    ]
    assert [each.fits for each in found.alternatives] == [True, False, True, None, True]


def test_a_run_that_was_predicted_to_fit_asks_for_less_than_its_own_peak() -> None:
    own, room = 70 * GIB, 79 * GIB
    assert goal_bytes(room, own) == int(0.95 * own)
    assert goal_bytes(room, 90 * GIB) == goal_bytes(room, None) == int(0.95 * room)
    found = memory.advice(record(told("", "", 70.0), told("checkpointing full", "checkpointing=full", 68.0)))
    assert found is not None
    assert not found.fitting


def test_how_its_own_peak_was_predicted_is_said(golden: object) -> None:
    note = "rehearsed without compilation"
    found = memory.advice(record(told("", "", 70.0, note=note), told("checkpointing full", "checkpointing=full", 40.0)))
    assert found is not None
    assert found.own_note == note
    text = sentence(found)
    assert text == golden
    assert f"{note}" in text
    assert "70.0" in text
    plain = memory.advice(record())
    assert plain is not None
    assert plain.own_note is None


def test_the_smallest_limit_counts() -> None:
    assert room_bytes([held("room", 20), held("capacity", 8), held("parameters", 1)]) == 8 * GIB
    assert room_bytes([held("parameters", 1)]) is None


@pytest.mark.parametrize("status", [Status.OK, Status.FAILED])
def test_only_out_of_memory_is_advised(status: Status) -> None:
    assert memory.advice(record(status=status)) is None


def test_the_sentence_says_every_number(golden: object) -> None:
    found = memory.advice(record())
    assert found is not None
    text = sentence(found)
    assert text == golden
    assert "512" in text
    assert "100" in text
    assert "79.1" in text
    assert list(lines(found))[1] == (
        "to apply micro batch 4 with accumulation 2: paceline run ... --set micro_batch=4 --set accumulation=2"
    )


def test_a_prediction_without_compilation_says_so_with_its_number(golden: object) -> None:
    note = "rehearsed without compilation"
    fitting = memory.advice(record(told("checkpointing full", "checkpointing=full", 40.0, note=note)))
    assert fitting is not None
    text = sentence(fitting)
    assert text == golden
    assert f"{note}" in text
    assert "40.0" in text
    changed = told("sequence length 256", "sequence_length=256", 60.0, keeps_work=False, note=note)
    nearest = memory.advice(record(changed, room=30.0))
    assert nearest is not None
    text = sentence(nearest)
    assert text == golden
    assert f"{note}" in text
    assert "256" in text
    assert "60.0" in text


def test_where_nothing_fits_the_nearest_is_named(golden: object) -> None:
    found = memory.advice(record(*TOLD, room=30.0))
    assert found is not None
    text = sentence(found)
    assert text == golden
    assert "40.0" in text
    assert len(list(lines(found))) == 1


def test_every_form_of_the_report_has_a_line_of_it() -> None:
    report = build([record()], "test")
    (table,) = tables(report)
    assert "Not predicted: zero:stage=1 (ValueError: made up)." in table.notes
    for text in (markdown.text(report), html.text(report)):
        assert "micro batch 4 with accumulation 2 (61.2 GiB)" in text
        assert "in 79.1 GiB" in text


def test_a_prediction_survives_the_store() -> None:
    import json

    from paceline.results.samples import _sample

    for sample in TOLD:
        assert _sample(json.loads(store.sample_line(sample))) == sample
