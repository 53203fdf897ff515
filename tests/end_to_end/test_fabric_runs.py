"""`paceline run` of collectives on gloo: rows and payloads, what cannot be measured, faults, a peer that dies."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.results.machine_samples import CollectiveSample
from paceline.results.records import RunRecord
from paceline.workloads.collectives.operations import OPERATIONS

pytestmark = pytest.mark.slow

QUICK = "warmup=1,iters=6,budget_s=0.2"


@pytest.fixture(scope="module")
def swept(campaign: Callable[..., Any]) -> RunRecord:
    """Three ranks, so that sizes do not divide; all operations and dtypes at two sizes, one beyond any memory."""
    options = f"{QUICK},min_bytes=256KiB,max_bytes=1TiB,factor=4194304,pair_bytes=64KiB,pair_iters=5"
    done = campaign("fabric", {"workload": [f"collectives:{options}"]}, processes=3, global_batch=3)
    assert done.code == 0, done.stdout + done.stderr
    (record,) = done.records
    return record  # type: ignore[no-any-return]


def rows(record: RunRecord, status: str = "ok") -> list[CollectiveSample]:
    return [s for s in record.collectives if s.status == status and s.operation != "pair"]


def test_every_row_is_on_every_rank_and_its_payload_is_right(swept: RunRecord) -> None:
    assert swept.status == "ok"
    measured = rows(swept)
    by_rank = [
        {(s.operation, s.dtype, s.size_bytes, s.in_place, len(s.durations_s)) for s in measured if s.rank == rank}
        for rank in range(3)
    ]
    one_to_one = {row for row in by_rank[0] if row[0] == "send_recv"}
    assert by_rank[0] == by_rank[1] == by_rank[2] | one_to_one
    assert not by_rank[2] & one_to_one, "rank 2 has no part in it"
    assert {s.operation for s in measured} == set(OPERATIONS)
    assert {s.wrong for s in measured if s.operation != "barrier"} == {0}
    assert all(5 <= len(s.durations_s) <= 6 and min(s.durations_s) > 0 for s in measured)


def test_sizes_are_what_was_really_sent(swept: RunRecord) -> None:
    gathered = {(s.size_bytes, s.count) for s in rows(swept) if (s.operation, s.dtype) == ("all_gather", "bf16")}
    # A third of 256 KiB is 43690 elements, cut to a multiple of 8 (16 bytes) for alignment.
    assert gathered == {(262128, 131064)}
    reduced = {(s.size_bytes, s.count) for s in rows(swept) if (s.operation, s.dtype) == ("all_reduce", "fp32")}
    assert reduced == {(256 << 10, 64 << 10)}
    assert {(s.size_bytes, s.wrong) for s in rows(swept) if s.operation == "barrier"} == {(0, None)}


def test_both_ways_where_torch_has_both(swept: RunRecord) -> None:
    ways = {name: {s.in_place for s in rows(swept) if s.operation == name} for name in OPERATIONS}
    assert ways["all_gather"] == ways["reduce_scatter"] == {False, True}
    assert ways["all_reduce"] == ways["broadcast"] == ways["reduce"] == {True}
    assert ways["all_to_all"] == ways["send_recv"] == ways["ring"] == {False}


def test_what_the_backend_lacks_is_a_row_with_its_words(swept: RunRecord) -> None:
    refused = {s.operation: s.error for s in rows(swept, "unsupported") if s.rank == 0}
    assert {s.dtype for s in rows(swept, "unsupported")} == {"fp8"}
    assert refused["all_gather"] == "RuntimeError: Invalid scalar type"
    assert "cannot be verified" in refused["all_reduce"]
    assert "ring" not in refused, "gloo sends fp8 as bytes"
    assert all(not s.durations_s for s in rows(swept, "unsupported"))


def test_a_size_beyond_memory_is_a_row_and_the_sweep_goes_on(swept: RunRecord) -> None:
    exhausted = rows(swept, "oom")
    assert {s.rank for s in exhausted} == {0, 1, 2}
    assert all(s.size_bytes > 1 << 39 and not s.durations_s and s.wrong is None for s in exhausted)
    assert all("a buffer needs" in str(s.error) for s in exhausted)
    assert {s.operation for s in exhausted} == set(OPERATIONS) - {"barrier"}


def test_pairs_meet_twice_and_overlap_is_measured_each_alone_and_together(swept: RunRecord) -> None:
    met = sorted((s.turn, s.rank, s.peer) for s in swept.collectives if s.operation == "pair")
    assert met == sorted((t, a, b) for t in (0, 1) for a in range(3) for b in range(3) if a != b)
    assert {s.wrong for s in swept.collectives if s.operation == "pair"} == {0}
    assert {(o.rank, o.dtype) for o in swept.overlaps} == {(r, d) for r in range(3) for d in ("fp32", "bf16", "fp16")}
    assert all(len(o.collective_s) == len(o.compute_s) == len(o.together_s) >= 5 for o in swept.overlaps)


def test_nothing_that_was_trained_is_claimed(swept: RunRecord) -> None:
    assert swept.evidence is not None
    assert swept.evidence.window_wall_s > 0
    assert "shared_gpu" not in swept.evidence.settings


def test_warmup_and_iters_are_flags(paceline: Any, tmp_path: Path) -> None:
    done = paceline("plan", "fabric", "--warmup", "5", "--iters", "20", "--set", "device=cpu", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    wrong = paceline("run", "fabric", "--iters", "0", "--set", "device=cpu", "--out", str(tmp_path))
    assert wrong.returncode == 2
    assert "collectives.iters: got 0" in wrong.stderr.replace("\n", " ")


# --- faults --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def faulty(campaign: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """The sweep with the faulty plugin in the place of ours, as an installed package could put one there."""
    installed = tmp_path_factory.mktemp("installed")
    info = installed / "faulty-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: faulty\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[paceline.workloads]\ncollectives = faulty.collectives\n")

    def run(how: str, options: str) -> Any:
        workload = f"collectives:{options},dtypes=fp32,tournament=false,overlap=false,min_bytes=64KiB,max_bytes=128KiB"
        return campaign(
            how,
            {"workload": [workload]},
            {"PYTHONPATH": str(installed), "FAULTY_HOW": how},
            stall_s=60.0,
        )

    return run


def test_one_wrong_element_makes_the_row_and_the_run_invalid(faulty: Callable[..., Any]) -> None:
    done = faulty("corrupt", f"operations=all_reduce+reduce_scatter,{QUICK}")
    (record,) = done.records
    assert done.code == 1
    assert record.status == "invalid"
    assert "reduce_scatter of 65536 bytes in fp32: 1 wrong elements on rank 1" in record.error
    assert {s.wrong for s in rows(record) if s.operation == "all_reduce"} == {0}
    assert {(s.rank, s.wrong) for s in rows(record) if s.operation == "reduce_scatter"} == {(0, 0), (1, 1)}


def test_a_peer_that_dies_is_named_and_nothing_hangs(
    faulty: Callable[..., Any], living: Callable[[Path], list[str]]
) -> None:
    done = faulty("kill", "operations=all_reduce+reduce_scatter,iters=100")
    (record,) = done.records
    assert done.code == 1
    assert record.status == "failed"
    assert "rank 1 was killed by signal 9" in record.error
    assert {s.operation for s in record.collectives} >= {"all_reduce"}, "rows before the death are kept"
    assert living(done.out) == []
