from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import fabric_records as made
import pytest

from paceline.analysis.compare import scaling
from paceline.analysis.compare.scaling import grade, karp_flatt
from paceline.analysis.findings import ScalingExplanation
from paceline.analysis.machine import fabric
from paceline.analysis.training import metrics
from paceline.analysis.training.window import open_window
from paceline.results.records import RunRecord, TraceSample, WireSample

Builder = Callable[..., Any]
STEP = {"rank": 0, "step": 30, "group_size": 4, "dtype": "fp32"}


def traced(records: list[RunRecord], exposed: float | None) -> list[RunRecord]:
    """Every rank profiled two steps of 1 s each, of which `exposed` were communication alone."""
    traces = (
        ()
        if exposed is None
        else (TraceSample(rank=0, steps=2, wall_s=2.0, compute_s=1.0, communication_s=1.0, exposed_s=2 * exposed),)
    )
    return [dataclasses.replace(r, traces=traces) for r in records]


def explained(*groups: list[RunRecord], sweeps: tuple[RunRecord, ...] = ()) -> list[ScalingExplanation]:
    records = [r for group in groups for r in group]
    cells = metrics.gather(open_window(r) for r in records)
    fits = fabric.analyse(sweeps).fits
    return list(scaling.explain(scaling.analyse(cells).points, cells, fits, [*records, *sweeps]))


@pytest.fixture
def weak(make_cell: Builder) -> tuple[list[RunRecord], list[RunRecord]]:
    """1 s per step on one process, 1.25 s on four: 80 %, 0.25 s lost; 12 % of the step, 0.15 s, is exposed."""
    one = traced(make_cell(1.0, world_size=1, spread=0.001), 0.0)
    return one, traced(make_cell(1.25, world_size=4, spread=0.001), 0.12)


def test_the_loss_is_split_by_hand(weak: tuple[list[RunRecord], list[RunRecord]], golden: object) -> None:
    (found,) = explained(*weak)
    assert found.ideal_s == pytest.approx(1.0, rel=0.01)
    assert found.loss_s == pytest.approx(0.25, rel=0.02)
    assert found.exposed_loss_s == pytest.approx(0.15, rel=0.01)
    assert found.rest_s == pytest.approx(0.10, rel=0.05)
    assert found.exposed_share_ratio == pytest.approx(0.6, rel=0.02)
    assert found.exposed_loss_s is not None
    assert found.rest_s is not None
    assert found.step_s == pytest.approx(found.ideal_s + found.exposed_loss_s + found.rest_s)
    assert found.text == golden
    assert "1,250" in found.text
    assert "1,000" in found.text
    assert "80.0" in found.text
    assert "60" in found.text
    assert found.karp_flatt_ratio is None
    assert found.network_share_ratio is None


def test_what_the_baseline_exposes_already_explains_no_loss(make_cell: Builder) -> None:
    """From two processes on: 10 % exposed at both sizes is no reason for a loss of 20 %."""
    two, four = make_cell(1.0, world_size=2, spread=0.001), make_cell(1.25, world_size=4, spread=0.001)
    (found,) = explained(traced(two, 0.1), traced(four, 0.1))
    assert found.exposed_s == pytest.approx(0.125, rel=0.01)
    assert found.exposed_loss_s == pytest.approx(0.025, rel=0.02)
    assert found.exposed_share_ratio == pytest.approx(0.1, rel=0.05)


def test_not_profiled_is_not_measured_and_never_a_guess(
    weak: tuple[list[RunRecord], list[RunRecord]], golden: object
) -> None:
    one, four = weak
    (found,) = explained(one, traced(four, None))
    assert (found.exposed_s, found.exposed_loss_s, found.rest_s, found.exposed_share_ratio) == (None,) * 4
    assert found.text == golden
    assert found.loss_s > 0


def test_a_single_process_exposes_nothing_even_unprofiled(weak: tuple[list[RunRecord], list[RunRecord]]) -> None:
    one, four = weak
    (found,) = explained(traced(one, None), four)
    assert found.exposed_share_ratio == pytest.approx(0.6, rel=0.02)


def test_no_loss_has_no_share(make_cell: Builder, golden: object) -> None:
    one, four = make_cell(1.0, world_size=1), make_cell(1.0, world_size=4)
    (found,) = explained(traced(one, 0.0), traced(four, 0.05))
    assert found.exposed_share_ratio is None
    assert found.text == golden


def test_more_exposed_than_lost_is_all_of_it(weak: tuple[list[RunRecord], list[RunRecord]], golden: object) -> None:
    one, four = weak
    (found,) = explained(one, traced(four, 0.4))
    assert found.exposed_share_ratio == 1.0
    assert found.rest_s is not None
    assert found.rest_s < 0
    assert found.text == golden


# --- prediction ---


def wired(records: list[RunRecord], *wire: WireSample) -> list[RunRecord]:
    return [dataclasses.replace(r, wire=wire) for r in records]


def sweep_of(alpha: float, beta: float, operation: str = "all_reduce", factor: float = 1.5, **more: Any) -> RunRecord:
    samples = made.sweep(lambda s: alpha + s * factor / beta, operation=operation)
    return made.build_record(made.build_spec(4, **more), samples)


def test_prediction_is_calls_times_alpha_plus_bytes_over_beta(
    weak: tuple[list[RunRecord], list[RunRecord]], golden: object
) -> None:
    """Ten all-reduces of 20 MB each over 1 GB/s, 1 ms to start: 10 * 1 ms + 300 MB / 1 GB/s = 310 ms."""
    one, four = weak
    four = wired(four, WireSample(operation="all_reduce", calls=10, payload_bytes=200_000_000, **STEP))
    (found,) = explained(one, four, sweeps=(sweep_of(1e-3, 1e9),))
    assert found.predicted_s == pytest.approx(0.31)
    (traffic,) = found.traffic
    assert (traffic.calls, traffic.payload_bytes, traffic.sent_bytes) == (10, 200_000_000, 300_000_000)
    assert found.text == golden
    assert "310" in found.text
    assert "160" in found.text


def test_exposed_beyond_the_prediction_is_waiting(
    weak: tuple[list[RunRecord], list[RunRecord]], golden: object
) -> None:
    one, four = weak
    four = wired(four, WireSample(operation="all_reduce", calls=1, payload_bytes=20_000_000, **STEP))
    (found,) = explained(one, four, sweeps=(sweep_of(1e-3, 1e9),))
    assert found.predicted_s == pytest.approx(0.031)
    assert found.network_share_ratio == pytest.approx(0.031 / 0.249, rel=0.02)
    assert found.text == golden
    assert "12" in found.text


@pytest.mark.parametrize(
    "sweeps",
    [
        (),
        (sweep_of(1e-3, 1e9, device="cuda"),),
        (sweep_of(1e-3, 1e9, nodes=2),),
        (sweep_of(1e-3, 1e9, workload="collectives:backend=mpi"),),
        (sweep_of(1e-3, 1e9, "all_gather", 0.75),),
        (made.build_record(made.build_spec(2), made.sweep(lambda s: 1e-3 + s / 1e9, ranks=2)),),
        (dataclasses.replace(sweep_of(1e-3, 1e9), machines=({"host": "node-a", "cpu": "EPYC", "gpus": []},)),),
    ],
    ids=["none", "other device", "other nodes", "other back end", "other operation", "other size", "other processor"],
)
def test_a_fit_of_another_fabric_predicts_nothing(
    weak: tuple[list[RunRecord], list[RunRecord]], sweeps: tuple[RunRecord, ...]
) -> None:
    one, four = weak
    (found,) = explained(one, four, sweeps=sweeps)
    assert found.predicted_s is None
    assert {t.predicted_s for t in found.traffic} == {None}


def test_one_operation_without_a_fit_leaves_no_sum(
    weak: tuple[list[RunRecord], list[RunRecord]], golden: object
) -> None:
    one, four = weak
    two = [WireSample(operation=o, calls=1, payload_bytes=1000, **STEP) for o in ("all_reduce", "reduce_scatter")]
    (found,) = explained(one, wired(four, *two), sweeps=(sweep_of(1e-3, 1e9),))
    assert found.predicted_s is None
    assert [t.predicted_s is None for t in found.traffic] == [False, True]
    assert found.notes == golden
    assert any("all_reduce" in note for note in found.notes)


def test_another_dtypes_fit_is_used_and_named(weak: tuple[list[RunRecord], list[RunRecord]], golden: object) -> None:
    one, four = weak
    (found,) = explained(
        one,
        wired(four, WireSample(operation="all_reduce", calls=1, payload_bytes=8, **STEP | {"dtype": "bf16"})),
        sweeps=(sweep_of(1e-3, 1e9),),
    )
    assert found.predicted_s is not None
    assert found.notes == golden


def test_the_busiest_rank_counts_per_step(weak: tuple[list[RunRecord], list[RunRecord]]) -> None:
    one, four = weak
    wire = [
        WireSample(
            rank=r, step=s, operation="all_reduce", dtype="fp32", group_size=4, calls=2, payload_bytes=100 * (r + 1)
        )
        for r in range(2)
        for s in (30, 31)
    ]
    (found,) = explained(one, wired(four, *wire))
    assert [(t.calls, t.payload_bytes) for t in found.traffic] == [(2, 200)]


# --- Karp and Flatt, grades ---


def test_karp_flatt_by_hand(make_cell: Builder) -> None:
    """Amdahl with 10 % serial: 1 s becomes 0.1 + 0.9/4 = 0.325 s on four processes; the metric gives the 10 % back."""
    one = make_cell(1.0, world_size=1, micro_batch=4, accumulation=2, spread=0.0)
    four = make_cell(0.325, world_size=4, micro_batch=2, accumulation=1, spread=0.0)
    (found,) = explained(one, four)
    assert found.kind == "strong"
    assert found.karp_flatt_ratio == pytest.approx(0.1)


@pytest.mark.parametrize(("speedup", "growth", "serial"), [(4.0, 4.0, 0.0), (1.0, 4.0, 1.0), (2.0, 4.0, 1 / 3)])
def test_karp_flatt_at_its_ends(speedup: float, growth: float, serial: float) -> None:
    assert karp_flatt(speedup, growth) == pytest.approx(serial)


def test_karp_flatt_is_relative_to_the_baseline(make_cell: Builder) -> None:
    """From two to four processes p is 2, not 4: 1.6 times as fast leaves 0.25 serial."""
    two = make_cell(1.0, world_size=2, micro_batch=2, accumulation=2, spread=0.0)
    four = make_cell(0.625, world_size=4, micro_batch=2, accumulation=1, spread=0.0)
    (found,) = explained(two, four)
    assert found.karp_flatt_ratio == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("value", "low", "high", "word"),
    [
        (0.95, 0.92, 0.97, "excellent"),
        (0.85, 0.82, 0.88, "good"),
        (0.7, 0.6, 0.75, "poor"),
        (0.91, 0.88, 0.94, "between good and excellent"),
        (0.85, 0.7, 0.95, "between poor and excellent"),
        (0.9, None, None, "good"),
        (0.8, None, None, "poor"),
    ],
)
def test_grades_by_the_interval(value: float, low: float | None, high: float | None, word: str) -> None:
    assert grade(value, low, high) == word


def test_a_baseline_that_was_not_profiled_leaves_a_sentence_and_no_share(golden: object) -> None:
    split = scaling._Split(1.0, 0.8, 0.3, None, True)
    said = scaling._prediction(split, 0.1, 0.1)
    assert said == golden
    assert "100" in said
    assert split.share(split.transfer_s(0.1)) is None


def test_transfer_the_baseline_already_needed_explains_no_loss() -> None:
    """The baseline transfers 100 ms, so do the more: the 50 ms newly exposed are waiting."""
    split = scaling._Split(1.0, 0.8, 0.15, 0.05, True)
    assert split.share(split.transfer_s(0.0)) == 0.0
    assert split.share(split.transfer_s(0.1)) == pytest.approx(0.25)
