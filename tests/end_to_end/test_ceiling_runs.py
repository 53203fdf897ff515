"""The machine's ceilings through the command line: real processes, tiny sizes, and the share that training has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.slow

TINY = (
    "compute:iters=5,warmup=1,budget_s=0.05,dtypes=fp32,largest_matmul=64,largest_copy_bytes=4194304,"
    "longest_sequence=32,tokens=32"
)


@pytest.fixture(scope="module")
def done(campaign: Callable[..., Any]) -> Any:
    """Ceilings on one and on two processes, and training beside them."""
    matrix = [{"workload": [TINY], "processes": [1, 2]}, {"strategy": ["ddp"]}]
    return campaign("ceilings", matrix, formats=("json", "plots"))


def test_all_runs_end_ok(done: Any) -> None:
    assert done.code == 0, done.stdout + done.stderr
    assert {r.status for r in done.records} == {"ok"}


def test_every_rank_measures_its_own_device(done: Any) -> None:
    for processes in (1, 2):
        record = done.record(None, workload=TINY, world_size=processes)
        assert {s.rank for s in record.kernels} == set(range(processes))
        assert {s.kernel for s in record.kernels if s.status == "ok"} == {
            "matmul",
            "copy",
            "attention_forward",
            "attention_backward",
        }
        assert {s.status for s in record.kernels if s.kernel in ("h2d", "d2h")} == {"unsupported"}
        assert all(s.wrong == 0 for s in record.kernels if s.status == "ok")


def test_the_report_holds_ceilings_and_the_share_of_achievable(done: Any) -> None:
    found: dict[str, list[Any]] = {}
    for m in done.report["measurements"]:
        found.setdefault(m["metric"], []).append(m)
    assert all(m["value"] > 0 for m in found["achievable_flops_per_s"])
    assert {m["rank"] for m in found["achievable_flops_per_s"]} == {None, 0, 1}
    (share,) = found["achievable_ratio"]
    assert share["value"] > 0
    assert "measured here in fp32" in share["note"]
    assert "Ceilings: matrix products" in done.stdout
    assert "of achievable" in done.stdout
    assert {p.name for p in (done.directory / "plots").glob("*.png")} >= {"ceilings_copies.png", "throughput.png"}
