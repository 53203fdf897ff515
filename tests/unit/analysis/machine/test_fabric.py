from __future__ import annotations

import dataclasses

import fabric_records as made
import pytest
from fabric_records import MiB

from paceline.analysis import report
from paceline.analysis.findings import CollectiveRow, Measurement
from paceline.analysis.machine import fabric
from paceline.results.machine_samples import OverlapSample


def only_row(*samples: object, **more: object) -> CollectiveRow:
    (row,) = fabric.analyse([made.build_record(samples=[s for group in samples for s in group], **more)]).rows  # type: ignore[attr-defined,arg-type]
    return row


@pytest.mark.parametrize("n", [2, 3, 8])
@pytest.mark.parametrize(
    ("operation", "factor"),
    [
        ("all_reduce", lambda n: 2 * (n - 1) / n),
        ("all_gather", lambda n: (n - 1) / n),
        ("reduce_scatter", lambda n: (n - 1) / n),
        ("all_to_all", lambda n: (n - 1) / n),
        ("broadcast", lambda n: 1),
        ("reduce", lambda n: 1),
        ("send_recv", lambda n: 1),
        ("ring", lambda n: 1),
    ],
)
def test_busbw_of_a_known_time(operation: str, factor, n: int) -> None:  # type: ignore[no-untyped-def]
    """Test (8) of method.md: 1 GB in 10 ms is 100 GB/s of algbw, times nccl-tests' factor."""
    row = only_row(made.row([[0.01] * 20] * n, operation, 10**9), spec=made.build_spec(n))
    assert row.time_s == pytest.approx(0.01)
    assert row.algbw_bytes_per_s == pytest.approx(1e11)
    assert row.busbw_bytes_per_s == pytest.approx(1e11 * factor(n))
    assert (row.world_size, row.iterations, row.status) == (n, 20, "ok")


def test_time_is_the_slowest_ranks_and_not_the_mean_of_maxima() -> None:
    """Ranks late in turns: each needs 3 s for two iterations, though every iteration shows one of 2 s."""
    row = only_row(made.row([[1.0, 2.0], [2.0, 1.0]]), spec=made.build_spec(2))
    assert row.time_s == 1.5


def test_a_batch_is_divided_by_its_launches() -> None:
    row = only_row(made.row([[0.5] * 4] * 2, batch=50, mode="batch"), spec=made.build_spec(2))
    assert row.time_s == pytest.approx(0.01)
    assert row.iterations == 200


def test_percentiles_are_of_maxima_and_only_where_the_count_supports_them() -> None:
    fast, slow = [1.0] * 100, [1.0 + i / 100 for i in range(100)]
    full = only_row(made.row([fast, slow]), spec=made.build_spec(2))
    assert full.p50_s == pytest.approx(1.495)
    assert full.p99_s == pytest.approx(1.9801)
    few = only_row(made.row([fast[:50], slow[:50]]), spec=made.build_spec(2))
    assert few.p99_s is None
    assert few.p95_s is not None


def test_barrier_has_latency_and_no_bandwidth() -> None:
    row = only_row(made.row(2e-6, "barrier", 0))
    assert row.time_s == pytest.approx(2e-6)
    assert (row.algbw_bytes_per_s, row.busbw_bytes_per_s) == (None, None)


def test_one_rank_moves_nothing_over_a_wire() -> None:
    row = only_row(made.row([[0.01] * 9]), spec=made.build_spec(1))
    assert row.time_s == pytest.approx(0.01)
    assert (row.algbw_bytes_per_s, row.busbw_bytes_per_s, row.skew_ratio) == (None, None, None)


@pytest.mark.parametrize("status", ["oom", "unsupported"])
def test_a_row_that_one_rank_could_not_measure_keeps_its_error(status: str) -> None:
    samples = made.row([[0.01] * 9] * 3)
    samples[1] = dataclasses.replace(samples[1], durations_s=(), wrong=None, status=status, error="no room on rank 1")
    found = fabric.analyse([made.build_record(made.build_spec(3), samples)])
    (row,) = found.rows
    assert (row.status, row.error, row.time_s, row.p50_s, row.busbw_bytes_per_s) == (
        status,
        "no room on rank 1",
        None,
        None,
        None,
    )
    assert found.measurements == ()


def test_skew_names_who_waits_and_who_comes_late() -> None:
    row = only_row(made.row([[2.0] * 5, [1.0] * 5, [1.6] * 5]), spec=made.build_spec(3))
    assert (row.skew_ratio, row.early_rank, row.late_rank) == (2.0, 0, 1)


# --- measurements ---


def by_metric(found: fabric.Fabric) -> dict[str, Measurement]:
    return {m.metric: m for m in found.measurements}


def test_repeats_are_launches_of_one_row() -> None:
    records = [made.build_record(made.build_spec(repeat=k), made.row(0.01 * (1 + 0.01 * k))) for k in range(3)]
    found = fabric.analyse(records)
    (row,) = found.rows
    assert (row.launches, row.iterations) == (3, 300)
    assert row.time_s == pytest.approx(0.0101)
    time = by_metric(found)["collective_time_s"]
    assert (time.n, time.launches, len(time.runs)) == (300, 3, 3)
    assert time.low is not None
    assert time.high is not None
    assert time.low < 0.0101 < time.high


def test_measurements_carry_the_axes_of_the_row_and_bandwidth_bounds_are_the_times_turned_over() -> None:
    noisy = [[0.01 + 0.001 * (i % 5) for i in range(100)]] * 4
    found = by_metric(fabric.analyse([made.build_record(samples=made.row(noisy, in_place=True))]))
    bus, time = found["busbw_bytes_per_s"], found["collective_time_s"]
    assert {k: bus.axes[k] for k in ("operation", "dtype", "size_bytes", "in_place", "mode", "world_size")} == {
        "operation": "all_reduce",
        "dtype": "fp32",
        "size_bytes": MiB,
        "in_place": True,
        "mode": "single",
        "world_size": 4,
    }
    assert bus.low is not None
    assert time.high is not None
    assert bus.low == pytest.approx(MiB * 1.5 / time.high)
    assert (bus.better, time.better, bus.unit, time.unit) == ("higher", "lower", "bytes/s", "s")


def test_shared_gpu_is_no_speed(golden: object) -> None:
    record = made.build_record(made.build_spec(device="cuda"), made.sweep(lambda s: 1e-5 + s / 1e9), shared=True)
    found = fabric.analyse([record])
    assert {r.note for r in found.rows} == golden
    assert {m.note for m in found.measurements} == golden
    assert {f.note for f in found.fits} == golden


def test_gloo_reduce_scatter_is_noted_on_a_cpu_only(golden: object) -> None:
    cpu = only_row(made.row(0.01, "reduce_scatter"))
    gpu = only_row(made.row(0.01, "reduce_scatter"), spec=made.build_spec(device="cuda"))
    assert cpu.note == golden
    assert "all_reduce" in cpu.note
    assert gpu.note is None


def test_wrong_payload_shows_its_row_but_neither_measures_nor_fits(golden: object) -> None:
    wrong = made.row(0.01, size_bytes=2 * MiB)
    wrong[2] = dataclasses.replace(wrong[2], wrong=7)
    bad = made.build_record(samples=[*made.row(0.005), *wrong])
    found = report.build([bad], "fabric")
    assert found.runs[0].status == "invalid"
    assert [(r.status, r.wrong) for r in found.collectives] == [("invalid", 0), ("invalid", 7)]
    assert found.collectives[1].error == golden
    assert found.measurements == found.fits == ()


def test_a_sweep_alone_is_a_whole_report() -> None:
    found = report.build([made.build_record(samples=made.sweep(lambda s: 1e-5 + s / 1e9))], "fabric")
    assert [r.status for r in found.runs] == ["ok"]
    assert len(found.collectives) == 28
    assert found.notes == ()


# --- overlap ---


def overlap(rank: int, collective: float, compute: float, together: float) -> OverlapSample:
    return OverlapSample(
        rank=rank,
        operation="all_reduce",
        dtype="bf16",
        size_bytes=MiB,
        group_size=2,
        collective_s=(collective,) * 4,
        compute_s=(compute,) * 4,
        together_s=(together,) * 4,
    )


@pytest.mark.parametrize(("together", "hidden"), [(10.0, 1.0), (12.0, 0.5), (14.0, 0.0), (15.0, 0.0), (9.0, 1.0)])
def test_hidden_is_the_part_of_the_collective_that_took_no_time_of_its_own(together: float, hidden: float) -> None:
    """4 s beside 10 s: all hidden in 10 s, none in 14 s, never beyond either."""
    samples = [overlap(0, 4.0, 10.0, together), overlap(1, 2.0, 9.0, together - 1)]
    (found,) = fabric.analyse([made.build_record(made.build_spec(2), samples)]).overlaps
    assert (found.collective_s, found.compute_s, found.together_s) == (4.0, 10.0, together)
    assert found.hidden_ratio == pytest.approx(hidden)


# --- stragglers ---


def skewed(late: float, operation: str = "all_reduce", rows: int = 8) -> list[object]:
    """Rank 2 of 4 spends `late` of the others' time inside."""
    times = [[1.0] * 5, [1.01] * 5, [late] * 5, [0.99] * 5]
    return [s for k in range(rows) for s in made.row(times, operation, 2**k)]


def test_a_rank_that_comes_last_throughout_is_a_suspect_by_name(golden: object) -> None:
    spec = made.build_spec(4, nodes=2, device="cuda")
    (suspect,) = fabric.analyse([made.build_record(spec, skewed(0.6))]).suspects
    assert (suspect.kind, suspect.ranks, suspect.hosts, suspect.devices) == (
        "rank",
        (2,),
        ("node-b",),
        ("cuda:0 NVIDIA H200",),
    )
    assert suspect.ratio == pytest.approx(0.6, rel=0.02)
    assert suspect.z < -3.5
    assert not suspect.confirmed
    assert suspect.text == golden


@pytest.mark.parametrize(
    "samples",
    [
        skewed(0.95),  # stands out, by too little to matter
        skewed(0.6, "reduce"),  # the root's part differs from the others'
        skewed(0.6, rows=3),
        [s for k in range(8) for s in made.row([[0.6] * 5, [1.0] * 5], size_bytes=2**k)],
    ],
)
def test_no_straggler_without_reason(samples: list[object]) -> None:
    assert fabric.analyse([made.build_record(samples=samples)]).suspects == ()


def test_a_rank_late_in_few_rows_is_none() -> None:
    samples = [*skewed(0.6)[:12], *skewed(1.0)[12:]]
    assert fabric.analyse([made.build_record(samples=samples)]).suspects == ()
