"""Every collective and dtype on 2 and 4 NCCL ranks that share the GPU: payloads, statuses and modes, never a speed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.campaign.run.controller import campaign
from paceline.experiment import expansion
from paceline.results import store
from paceline.results.machine_samples import CollectiveSample
from paceline.results.records import RunRecord, Status
from paceline.workloads.collectives.operations import OPERATIONS

EXPERIMENT = """
name: collectives
base: {device: cuda, launcher: "local:shared_gpu=true", timeout_s: 300, stall_s: 120}
matrix:
  processes: [2, 4]
  workload:
    - "collectives:max_bytes=1MiB,factor=16,warmup=1,iters=5,pair_bytes=1MiB,pair_iters=3"
    - "collectives:mode=batch,batch=4,dtypes=bf16,max_bytes=64KiB,factor=64,iters=5,tournament=false,overlap=false"
    - "collectives:mode=graph,batch=4,dtypes=bf16,max_bytes=64KiB,factor=64,iters=5,tournament=false,overlap=false"
"""
DTYPES = ("fp32", "bf16", "fp16", "int8", "fp8")


@pytest.fixture(scope="session")
def records(tmp_path_factory: pytest.TempPathFactory, remember: Any) -> dict[tuple[str, int], RunRecord]:
    folder = tmp_path_factory.mktemp("collectives")
    (folder / "collectives.yaml").write_text(EXPERIMENT)
    campaign(expansion.load(str(folder / "collectives.yaml")), folder, remember)
    runs, skipped = store.read_runs(folder / "collectives")
    assert not skipped
    return {(str(r.spec.workload.options.get("mode", "single")), r.spec.topology.world_size): r for r in runs}


def rows(record: RunRecord, **fields: Any) -> list[CollectiveSample]:
    return [s for s in record.collectives if all(getattr(s, key) == value for key, value in fields.items())]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("mode", ["single", "batch", "graph"])
def test_the_run_ends_well(mode: str, ranks: int, records: dict[tuple[str, int], RunRecord]) -> None:
    record = records[mode, ranks]
    assert (record.status, record.error) == (Status.OK, None)
    assert record.evidence is not None
    assert record.evidence.settings["shared_gpu"] is True


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("operation", [name for name, found in OPERATIONS.items() if found.has_payload])
def test_payload(operation: str, dtype: str, ranks: int, records: dict[tuple[str, int], RunRecord]) -> None:
    found = rows(records["single", ranks], operation=operation, dtype=dtype)
    assert {s.rank for s in found} == set(range(OPERATIONS[operation].members(ranks)))
    if dtype == "fp8" and OPERATIONS[operation].is_sum:
        assert {s.status for s in found} == {"unsupported"}
        return
    assert {(s.status, s.error, s.wrong) for s in found} == {("ok", None, 0)}
    assert {s.in_place for s in found} == set(OPERATIONS[operation].in_place)
    assert all(len(s.durations_s) == 5 and min(s.durations_s) > 0 for s in found)


@pytest.mark.parametrize("ranks", [2, 4])
def test_barrier_pairs_and_overlap(ranks: int, records: dict[tuple[str, int], RunRecord]) -> None:
    record = records["single", ranks]
    assert {(s.size_bytes, s.wrong, s.status) for s in rows(record, operation="barrier")} == {(0, None, "ok")}
    pairs = rows(record, operation="pair")
    met = sorted((s.turn, s.rank, s.peer) for s in pairs)
    assert met == sorted((t, a, b) for t in (0, 1) for a in range(ranks) for b in range(ranks) if a != b)
    assert {s.wrong for s in pairs} == {0}
    assert {(o.rank, o.dtype) for o in record.overlaps} == {
        (r, d) for r in range(ranks) for d in ("fp32", "bf16", "fp16")
    }


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("mode", ["batch", "graph"])
def test_a_duration_covers_the_batch(mode: str, ranks: int, records: dict[tuple[str, int], RunRecord]) -> None:
    record = records[mode, ranks]
    measured = rows(record, status="ok")
    assert {(s.mode, s.batch) for s in measured} == {(mode, 4)}
    absent = {"barrier"} if mode == "graph" else set()
    assert {s.operation for s in measured} == set(OPERATIONS) - absent
    assert {s.operation for s in rows(record, status="unsupported")} == absent
    assert {s.wrong for s in measured if s.operation != "barrier"} == {0}


def test_more_ranks_than_gpus_is_unsupported(tmp_path: Path, remember: Any) -> None:
    file = tmp_path / "many.yaml"
    file.write_text("name: many\nbase: {device: cuda, processes: 64, workload: 'collectives:iters=5'}\n")
    campaign(expansion.load(str(file)), tmp_path, remember)
    (record,), _ = store.read_runs(tmp_path / "many")
    assert record.status is Status.UNSUPPORTED
    assert "64 processes need 64 GPUs" in str(record.error)


def test_a_size_beyond_the_device_is_a_row(tmp_path: Path, remember: Any) -> None:
    file = tmp_path / "large.yaml"
    options = "operations=all_reduce,dtypes=bf16,min_bytes=1MiB,max_bytes=1TiB,factor=1048576,iters=5,overlap=false"
    file.write_text(f"name: large\nbase: {{device: cuda, processes: 1, workload: 'collectives:{options}'}}\n")
    campaign(expansion.load(str(file)), tmp_path, remember)
    (record,), _ = store.read_runs(tmp_path / "large")
    assert record.status is Status.OK
    assert [(s.size_bytes, s.status) for s in record.collectives] == [(1 << 20, "ok"), (1 << 40, "oom")]
    assert "out of memory" in str(record.collectives[1].error)
