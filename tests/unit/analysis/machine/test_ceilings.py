"""Ceilings from synthetic durations: rates to the digit, the best product, what devices and launches say apart."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from paceline.analysis.compare import comparable
from paceline.analysis.findings import Measurement
from paceline.analysis.machine import ceilings
from paceline.analysis.report import build
from paceline.experiment.choices import Choice
from paceline.models import arithmetic
from paceline.results.machine_samples import KernelSample
from paceline.results.records import RunRecord

Builder = Callable[..., Any]
GIB = 2**30
FULL_H200 = {"name": "NVIDIA H200", "peak_flops": {"bf16": 989e12}, "memory_bytes_per_s": 4.8e12}


def kernel(kernel: str = "matmul", seconds: Any = 1.0, **more: Any) -> KernelSample:
    usual: dict[str, Any] = {
        "rank": 0,
        "dtype": "bf16" if kernel == "matmul" else "bytes",
        "label": "1 x 1 x 1",
        "variant": "",
        "flops": 2_000_000_000_000 if kernel == "matmul" else None,
        "moved_bytes": None if kernel == "matmul" else GIB,
        "durations_s": (seconds,) * 9 if isinstance(seconds, float) else tuple(seconds),
        "size": 1,
        "wrong": 0,
    }
    return KernelSample(kernel=kernel, **usual | more)


@pytest.fixture
def ceiling_run(make_spec: Builder, make_record: Builder) -> Builder:
    def make(*kernels: KernelSample, **more: Any) -> RunRecord:
        ranks = 1 + max(k.rank for k in kernels)
        spec = {name: more.pop(name) for name in ("device", "repeat", "model") if name in more}
        spec = make_spec(None, world_size=ranks, workload="compute", **spec)
        empty: dict[str, Any] = {"steps": (), "memory": (), "wire": (), "traces": ()}
        found: RunRecord = make_record(spec, kernels=kernels, **empty | more)
        return found

    return make


def named(measured: tuple[Measurement, ...], metric: str, **axes: Any) -> list[Measurement]:
    wanted = {"rank": None, **axes}
    return [m for m in measured if m.metric == metric and all(m.axes[k] == v for k, v in wanted.items())]


def test_a_rate_is_work_over_the_median_iteration(ceiling_run: Builder, golden: object) -> None:
    """One iteration of nine took a hundred times as long: a ceiling is what the device does, undisturbed."""
    found = ceilings.analyse([ceiling_run(kernel(seconds=[2.0] * 8 + [200.0]))])
    (m,) = named(found, "matmul_flops_per_s")
    assert (m.value, m.unit, m.better, m.n, m.launches) == (1e12, "FLOP/s", "higher", 9, 1)
    assert m.axes["kernel"] == "matmul"
    assert m.axes["workload"] == "compute"
    assert m.note == golden


@pytest.mark.parametrize(
    ("kind", "metric"), [("copy", "copy_bytes_per_s"), ("h2d", "h2d_bytes_per_s"), ("d2h", "d2h_bytes_per_s")]
)
def test_copies_are_bytes_over_time(kind: str, metric: str, ceiling_run: Builder) -> None:
    (m,) = named(ceilings.analyse([ceiling_run(kernel(kind, 0.5, variant="pinned"))]), metric)
    assert (m.value, m.unit, m.axes["variant"]) == (2 * GIB, "bytes/s", "pinned")


def test_the_interval_holds_the_value_and_widens_with_the_spread(ceiling_run: Builder) -> None:
    widths = []
    for spread in (0.001, 0.1):
        times = [1.0 + spread * ((i * 7) % 11 - 5) / 5 for i in range(44)]
        (m,) = named(ceilings.analyse([ceiling_run(kernel(seconds=times))]), "matmul_flops_per_s")
        assert m.value is not None
        assert m.low is not None
        assert m.high is not None
        assert m.low <= m.value <= m.high
        widths.append(m.high / m.low - 1)
    assert 0 < widths[0] < widths[1]


def test_one_iteration_has_no_interval(ceiling_run: Builder) -> None:
    (m,) = named(ceilings.analyse([ceiling_run(kernel(seconds=[1.0]))]), "matmul_flops_per_s")
    assert (m.value, m.low, m.high) == (2e12, None, None)


def test_achievable_is_the_best_product_of_each_dtype_with_its_shape(ceiling_run: Builder) -> None:
    found = ceilings.analyse(
        [
            ceiling_run(
                kernel(seconds=2.0, label="small"),
                kernel(seconds=1.0, label="large"),
                kernel(seconds=4.0, label="qkv", size=None),
                kernel(seconds=8.0, dtype="fp32", label="large"),
                kernel("attention_forward", 0.1, dtype="bf16", flops=10**15, moved_bytes=None),
            )
        ]
    )
    best = {m.axes["dtype"]: (m.value, m.axes["label"]) for m in named(found, "achievable_flops_per_s")}
    assert best == {"bf16": (2e12, "large"), "fp32": (0.25e12, "large")}


def test_the_share_of_the_datasheet_and_the_ridge(ceiling_run: Builder) -> None:
    """The memory is what the largest copy shows: the smaller one is a cache's speed."""
    run = ceiling_run(
        kernel(seconds=1.0, flops=494_500_000_000_000),
        kernel("copy", 1.0, moved_bytes=10 * 10**12, label="1 MiB", size=2**20),
        kernel("copy", 1.0, moved_bytes=24 * 10**11, label="1 GiB", size=2**30),
        device="cuda",
        gpus=[FULL_H200],
    )
    found = ceilings.analyse([run])
    shares = {m.axes["kernel"]: m.value for m in named(found, "datasheet_share_ratio")}
    assert shares == {"matmul": pytest.approx(0.5), "copy": pytest.approx(0.5)}
    (ridge,) = named(found, "ridge_flops_per_byte")
    assert ridge.value == pytest.approx(494.5 / 2.4)


def test_a_device_without_a_datasheet_has_no_share(ceiling_run: Builder) -> None:
    for gpus in ([], [{"name": "Unheard-of", "peak_flops": None}], [FULL_H200, {"name": "Other"}]):
        run = ceiling_run(kernel(), device="cuda", gpus=gpus)
        assert named(ceilings.analyse([run]), "datasheet_share_ratio") == []


def test_several_ranks_give_the_median_and_each_its_own(ceiling_run: Builder, golden: object) -> None:
    run = ceiling_run(*(kernel(seconds=s, rank=rank) for rank, s in enumerate((1.0, 2.0, 1.0))))
    found = ceilings.analyse([run])
    (m,) = named(found, "matmul_flops_per_s")
    assert m.value == 2e12
    assert m.note == golden
    assert "12" in m.note
    own = {rank: [x.value for x in named(found, "achievable_flops_per_s", rank=rank)] for rank in (0, 1, 2)}
    assert own == {0: [2e12], 1: [1e12], 2: [2e12]}


def test_launches_are_averaged_and_bound_the_interval(ceiling_run: Builder) -> None:
    runs = [ceiling_run(kernel(seconds=s), repeat=i) for i, s in enumerate((1.0, 1.0, 1.3))]
    (m,) = named(ceilings.analyse(runs), "matmul_flops_per_s")
    assert m.value == pytest.approx(2e12 / 1.1)
    assert m.launches == 3
    assert len(m.runs) == 3
    assert m.low is not None
    assert m.low < 2e12 / 1.2


def test_a_row_that_was_not_measured_is_missing_with_its_reason(ceiling_run: Builder, golden: object) -> None:
    refused = kernel(seconds=[], status="oom", error="2.00 GiB are needed, 1.00 GiB are free", wrong=None)
    (m,) = named(ceilings.analyse([ceiling_run(refused)]), "matmul_flops_per_s")
    assert (m.value, m.low, m.high, m.n) == (None, None, None, 0)
    assert m.note == golden
    assert "2.00" in m.note
    assert "1.00" in m.note
    assert named(ceilings.analyse([ceiling_run(refused)]), "achievable_flops_per_s") == []


def test_one_rank_without_memory_does_not_hide_the_others(ceiling_run: Builder, golden: object) -> None:
    refused = kernel(seconds=[], rank=1, status="oom", error="no room", wrong=None)
    (m,) = named(ceilings.analyse([ceiling_run(kernel(), refused)]), "matmul_flops_per_s")
    assert m.value == 2e12
    assert m.note == golden


def test_the_same_records_give_the_same_numbers(ceiling_run: Builder) -> None:
    run = ceiling_run(kernel(seconds=[1.0, 1.1, 1.2, 0.9, 1.05]))
    assert ceilings.analyse([run]) == ceilings.analyse([run])


# --- the share of achievable ---


def ratio_of(report: Any) -> Measurement:
    (m,) = [m for m in report.measurements if m.metric == "achievable_ratio"]
    return m  # type: ignore[no-any-return]


@pytest.fixture
def campaign(make_cell: Builder, make_reference: Builder) -> Builder:
    """Training of the tiny model at 1 s a step and its reference; 512 tokens per step over 2 processes."""

    def make(**more: Any) -> list[RunRecord]:
        runs = make_cell(1.0, spread=0.0, **more)
        found: list[RunRecord] = [*runs, make_reference(runs[0].spec)]
        return found

    return make


def test_the_share_of_achievable_is_flops_over_the_measured_peak(
    campaign: Builder, ceiling_run: Builder, golden: object
) -> None:
    flops = arithmetic.flops_per_token(arithmetic.load(Choice("tiny")), 64)
    peak = ceiling_run(kernel(dtype="fp32", label="512 x 512 x 512", flops=10**9))
    m = ratio_of(build([*campaign(), peak], "test"))
    assert m.value == pytest.approx(flops * 256 / 1e9)
    assert m.note == golden
    assert "fp32" in m.note
    assert "512" in m.note


def test_without_a_measured_peak_it_is_missing_and_says_why(
    campaign: Builder, ceiling_run: Builder, golden: object
) -> None:
    alone = ratio_of(build(campaign(), "test"))
    other_dtype = ratio_of(build([*campaign(), ceiling_run(kernel(dtype="bf16"))], "test"))
    for m in (alone, other_dtype):
        assert m.value is None
        assert m.note == golden
        assert "fp32" in m.note


@pytest.mark.parametrize(
    "machine",
    [
        {"host": "node-b", "cpu": "EPYC", "gpus": []},
        {"host": "node-a", "cpu": "Xeon", "gpus": [], "environment": {"OMP_NUM_THREADS": "8"}},
    ],
)
def test_the_peak_of_another_device_is_never_used(
    machine: Mapping[str, Any], campaign: Builder, ceiling_run: Builder
) -> None:
    peak = ceiling_run(kernel(dtype="fp32"), machines=(machine,))
    assert ratio_of(build([*campaign(), peak], "test")).value is None


def test_a_wrong_or_shared_peak_is_never_used(campaign: Builder, ceiling_run: Builder, golden: object) -> None:
    wrong = ceiling_run(kernel(dtype="fp32", wrong=3))
    shared = ceiling_run(kernel(dtype="fp32"), evidence={"settings": {"shared_gpu": True}})
    for peak in (wrong, shared):
        assert ratio_of(build([*campaign(), peak], "test")).value is None
    assert comparable.problems(wrong) == golden


def test_the_best_of_several_runs_counts(campaign: Builder, ceiling_run: Builder) -> None:
    slow = ceiling_run(kernel(dtype="fp32", seconds=4.0), model="small")
    fast = ceiling_run(kernel(dtype="fp32", seconds=2.0))
    one, both = (ratio_of(build([*campaign(), *peaks], "test")).value for peaks in ([fast], [slow, fast]))
    assert one == both is not None


def test_a_run_of_ceilings_is_neither_ranked_nor_missed(ceiling_run: Builder) -> None:
    from paceline.report.text.cells import unranked

    report = build([ceiling_run(kernel())], "test")
    assert unranked(report) == ()
    assert not [note for note in report.notes if "nothing is measured" in note]


def test_a_shared_gpu_has_no_share_of_the_datasheet_whatever_its_ranks(ceiling_run: Builder, golden: object) -> None:
    both = (kernel(), kernel(rank=1))
    alone = ceiling_run(*both, device="cuda", gpus=[FULL_H200])
    shared = ceiling_run(*both, device="cuda", gpus=[FULL_H200], evidence={"settings": {"shared_gpu": True}})
    assert named(ceilings.analyse([alone]), "datasheet_share_ratio")
    found = ceilings.analyse([shared])
    assert not named(found, "datasheet_share_ratio")
    assert {m.note for m in found} == golden


def test_repeats_on_two_kinds_of_device_are_two_ceilings(ceiling_run: Builder) -> None:
    xeon, epyc = ({"host": cpu, "cpu": cpu, "gpus": []} for cpu in ("Xeon", "EPYC"))
    fast = ceiling_run(kernel(seconds=1.0), machines=(xeon,))
    slow = ceiling_run(kernel(seconds=4.0), machines=(epyc,), repeat=1)
    found = named(ceilings.analyse([fast, slow]), "achievable_flops_per_s")
    assert sorted(m.value or 0.0 for m in found) == [0.5e12, 2e12]
