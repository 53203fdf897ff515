"""Ceilings on a real GPU: every dtype and attention backend is measured and right, or says why it cannot be."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.analysis.report import build
from paceline.campaign.run.controller import campaign
from paceline.experiment import expansion
from paceline.results import store
from paceline.results.records import RunRecord, Status

EXPERIMENT = """
name: ceilings
base: {workload: "compute:iters=20,warmup=3,budget_s=0.5,largest_matmul=2048,largest_copy_bytes=16777216,
  longest_sequence=1024,tokens=1024", model: tiny-llama, processes: 1, timeout_s: 300, stall_s: 120}
"""


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory, remember: Any) -> RunRecord:
    folder = tmp_path_factory.mktemp("ceilings")
    (folder / "ceilings.yaml").write_text(EXPERIMENT)
    campaign(expansion.load(str(folder / "ceilings.yaml")), folder, remember)
    (found,), skipped = store.read_runs(folder / "ceilings")
    assert not skipped
    return found


def test_the_run_is_ok_and_every_row_ran_or_says_why_not(record: RunRecord) -> None:
    assert (record.status, record.error) == (Status.OK, None)
    strange = [s for s in record.kernels if s.status not in ("ok", "unsupported")]
    assert not strange
    assert all(s.error for s in record.kernels if s.status == "unsupported")


@pytest.mark.parametrize("dtype", ["fp32", "tf32", "bf16", "fp16", "fp8"])
def test_products_of_every_dtype_are_right(dtype: str, record: RunRecord) -> None:
    import torch

    ours = [s for s in record.kernels if s.kernel == "matmul" and s.dtype == dtype]
    least = {"fp8": (8, 9), "fp32": (0, 0), "fp16": (0, 0)}.get(dtype, (8, 0))
    if torch.cuda.get_device_capability() < least:
        assert {s.status for s in ours} == {"unsupported"}
        return
    squares = [s for s in ours if s.size]
    assert {s.status for s in squares} == {"ok"}, {s.error for s in squares}
    assert all(s.wrong == 0 and min(s.durations_s) > 0 for s in ours if s.status == "ok")


@pytest.mark.parametrize("backend", ["flash", "cudnn", "efficient"])
@pytest.mark.parametrize("way", ["forward", "backward"])
def test_attention_by_every_backend(backend: str, way: str, record: RunRecord) -> None:
    ours = [s for s in record.kernels if s.kernel == f"attention_{way}" and s.variant == backend]
    assert [s.size for s in ours] == [512, 1024]
    assert all(s.wrong == 0 for s in ours if s.status == "ok")


def test_some_fused_backend_runs(record: RunRecord) -> None:
    assert [s for s in record.kernels if s.kernel == "attention_backward" and s.status == "ok"]


@pytest.mark.parametrize("variant", ["pinned", "pageable"])
@pytest.mark.parametrize("way", ["h2d", "d2h"])
def test_copies_over_the_bus(way: str, variant: str, record: RunRecord) -> None:
    ours = [s for s in record.kernels if (s.kernel, s.variant) == (way, variant)]
    assert {s.status for s in ours} == {"ok"}, {s.error for s in ours}
    assert all(s.wrong == 0 for s in ours)


def test_the_report_holds_the_achievable_peaks(record: RunRecord) -> None:
    report = build([record], title="ceilings")
    peaks = {m.axes["dtype"]: m.value for m in report.measurements if m.metric == "achievable_flops_per_s"}
    assert {"fp32", "bf16", "fp16"} <= set(peaks)
    assert all(value and value > 0 for value in peaks.values())
    assert next(m.value for m in report.measurements if m.metric == "copy_bytes_per_s")
