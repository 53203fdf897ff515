"""Stored runs beside their replay: each test changes one thing about the replay and reads the verdict."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from training_records import build_steps, build_supplement

from paceline.analysis.findings.reproduction import CellReproduction, ReplayVerdict
from paceline.analysis.reproduction import reproduce
from paceline.report.replay import metrics_table, reproduction_lines, verdict_sentence
from paceline.results.records import RunRecord, Status

Builder = Callable[..., Any]
LATER_S = 10_000.0


def again(records: list[RunRecord], **more: Any) -> list[RunRecord]:
    """The same launches, made later."""
    return [dataclasses.replace(r, started_at=r.started_at + LATER_S, **more) for r in records]


def replay(stored: list[RunRecord], replayed: list[RunRecord]) -> CellReproduction:
    cell = next(r.spec.cell for r in stored if not r.is_reference)
    (found,) = reproduce(stored, replayed, {cell: cell}).cells
    return found


@pytest.fixture
def stored(make_cell: Builder, make_reference: Builder) -> list[RunRecord]:
    runs: list[RunRecord] = make_cell(1.0, repeats=5)
    return [*runs, make_reference(runs[0].spec)]


def slower(stored: list[RunRecord], factor: float) -> list[RunRecord]:
    found = []
    for record in stored:
        steps = tuple(dataclasses.replace(s, duration_s=s.duration_s * factor) for s in record.steps)
        found.append(dataclasses.replace(record, steps=steps, started_at=record.started_at + LATER_S))
    return found


def test_the_same_numbers_reproduce(stored: list[RunRecord]) -> None:
    found = replay(stored, again(stored))
    assert found.verdict is ReplayVerdict.REPRODUCED
    assert {m.metric: m.within for m in found.metrics} == {
        "tokens_per_s": True,
        "step_time_s": True,
        "peak_memory_bytes": True,
    }
    assert found.trajectory is not None
    assert found.trajectory.equal_steps == found.trajectory.steps == 5 * 30
    assert not found.differences


@pytest.mark.parametrize("factor", [0.8, 1.25])
def test_faster_is_as_little_a_reproduction_as_slower(stored: list[RunRecord], factor: float) -> None:
    found = replay(stored, slower(stored, factor))
    assert found.verdict is ReplayVerdict.DIFFERS
    speed = next(m for m in found.metrics if m.metric == "step_time_s")
    assert speed.ratio == pytest.approx(factor)
    assert speed.within is False
    assert next(m for m in found.metrics if m.metric == "peak_memory_bytes").within


def test_noise_that_could_hide_a_doubling_proves_nothing(
    make_cell: Builder, make_reference: Builder, golden: object
) -> None:
    runs = make_cell(1.0, repeats=2, spread=0.3)
    stored = [*runs, make_reference(runs[0].spec)]
    found = replay(stored, again(stored))
    assert found.verdict is ReplayVerdict.UNDECIDED
    assert found.reason == golden


def test_other_weights_are_not_the_stored_work(stored: list[RunRecord], make_cell: Builder, golden: object) -> None:
    """All replayed runs agree with their own reference; only the stored one knows better."""

    def other(record: RunRecord) -> RunRecord:
        evidence = dataclasses.replace(record.outcomes[0].evidence, init_digest="another")  # type: ignore[type-var]
        return dataclasses.replace(
            record, outcomes=tuple(dataclasses.replace(o, evidence=evidence) for o in record.outcomes)
        )

    found = replay(stored, [other(r) for r in again(stored)])
    assert found.verdict is ReplayVerdict.DIFFERS
    assert found.reason == golden


def test_replayed_runs_are_judged_with_all_stored_copies(make_cell: Builder, make_reference: Builder) -> None:
    runs = make_cell(1.0, repeats=5, precision="bf16")
    reference = make_reference(runs[0].spec, variants=(0.0, 0.001))
    off = [dataclasses.replace(r, steps=build_steps(r.spec, 1.0, off=0.003)) for r in runs]
    own = make_reference(runs[0].spec, variants=(0.0, 0.002))
    found = replay([*runs, reference], again([*off, own]))
    assert found.verdict is ReplayVerdict.DIFFERS
    assert "of 1 re-seeded references" in found.reason
    more = build_supplement(reference, (0.002,))
    found = replay([*runs, more, reference], again([*off, own]))
    assert found.certificate is not None
    assert found.certificate.valid


def test_other_data_beyond_the_reference_is_seen(stored: list[RunRecord]) -> None:
    """The reference has 10 steps; token ids of step 20 are held against the stored runs."""

    def shifted(record: RunRecord) -> RunRecord:
        steps = (dataclasses.replace(s, data_digest=s.data_digest + (s.step == 20)) for s in record.steps)
        return dataclasses.replace(record, steps=tuple(steps))

    found = replay(stored, [shifted(r) for r in again(stored)])
    assert found.verdict is ReplayVerdict.DIFFERS
    assert "data" in found.reason


def test_losses_that_drifted_are_reported(stored: list[RunRecord]) -> None:
    def drifted(record: RunRecord) -> RunRecord:
        steps = (dataclasses.replace(s, loss=s.loss * (1 + 1e-6 * (s.step > 3))) for s in record.steps)
        return dataclasses.replace(record, steps=tuple(steps))

    found = replay(stored, [drifted(r) for r in again(stored)])
    assert found.verdict is ReplayVerdict.REPRODUCED
    assert found.trajectory is not None
    assert found.trajectory.equal_steps == 5 * 4
    assert found.trajectory.largest_ratio == pytest.approx(1e-6, rel=1e-3)


def test_another_kind_of_device_is_undecided_and_named(stored: list[RunRecord], golden: object) -> None:
    facts = {"host": "node-b", "cpu": "EPYC", "gpus": []}
    found = replay(stored, again(stored, machines=(facts,)))
    assert found.verdict is ReplayVerdict.UNDECIDED
    assert found.reason == golden
    assert "EPYC" in found.reason
    assert found.differences == {"host": ("node-a", "node-b"), "cpu": ("Xeon", "EPYC")}
    assert not found.metrics


def test_a_difference_on_any_host_is_reported(stored: list[RunRecord]) -> None:
    """The first host is the same as ever; the second got another driver."""

    def on(driver: str) -> list[RunRecord]:
        hosts = tuple({**stored[0].machines[0], "host": name} for name in ("node-a", "node-b"))
        return again(stored, machines=({**hosts[0], "driver": "580"}, {**hosts[1], "driver": driver}))

    assert replay(on("580"), on("590")).differences == {"driver": ("580", "580, 590")}
    assert not replay(on("580"), again(stored, machines=())).differences, "nothing recorded is no difference"


@pytest.mark.parametrize(
    ("before", "after", "verdict"),
    [
        (Status.OOM, Status.OOM, ReplayVerdict.REPRODUCED),
        (Status.OOM, Status.OK, ReplayVerdict.DIFFERS),
        (Status.OK, Status.OOM, ReplayVerdict.DIFFERS),
        (Status.OK, Status.FAILED, ReplayVerdict.DIFFERS),
        (Status.OK, Status.UNSUPPORTED, ReplayVerdict.UNSUPPORTED),
    ],
)
def test_how_runs_end_decides_where_it_can(
    stored: list[RunRecord], before: Status, after: Status, verdict: ReplayVerdict
) -> None:
    def ended(records: list[RunRecord], status: Status) -> list[RunRecord]:
        return [r if r.is_reference else dataclasses.replace(r, status=status, error="why") for r in records]

    assert replay(ended(stored, before), ended(again(stored), after)).verdict is verdict


def test_memory_of_one_launch_is_equal_or_undecided(make_cell: Builder, make_reference: Builder) -> None:
    runs = make_cell(1.0, repeats=1)
    stored = [*runs, make_reference(runs[0].spec)]
    more = [
        dataclasses.replace(r, memory=tuple(dataclasses.replace(m, resident_bytes=2**30) for m in r.memory))
        for r in again(stored)
    ]
    for replayed, within in ((again(stored), True), (more, None)):
        found = replay(stored, replayed)
        assert found.verdict is ReplayVerdict.REPRODUCED
        assert next(m for m in found.metrics if m.metric == "peak_memory_bytes").within is within


def test_sentences_follow_the_verdicts(stored: list[RunRecord], golden: object) -> None:
    cell = stored[0].spec.cell
    good = reproduce(stored, again(stored), {cell: cell})
    bad = reproduce(stored, slower(stored, 1.25), {cell: cell})
    refused = reproduce(stored, again(stored, status=Status.UNSUPPORTED), {cell: cell})
    both = dataclasses.replace(good, cells=good.cells + bad.cells)
    assert verdict_sentence(good) == golden
    assert verdict_sentence(bad) == golden
    assert verdict_sentence(both) == golden
    assert verdict_sentence(refused) == golden
    assert (good.reproduced, bad.reproduced, both.reproduced, refused.reproduced) == (True, False, False, False)
    lines = list(reproduction_lines(good))
    assert lines == golden
    table = metrics_table(bad)
    assert table is not None
    assert [row[5].text for row in table.rows] == ["✗ beyond", "✗ beyond", "✓ within"]
