"""Ranks that each hold a replica, from the command line to a report: rank 0 asks them all, and one of them dies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from paceline.results.records import Status
from paceline.results.served_samples import RequestSample

SERVED: dict[str, Any] = {
    "workload": "inference",
    "engine": "testbed.replicas",
    "requests": 60,
    "concurrency": 6,
    "max_tokens": 8,
    "data": "synthetic:prompt=fixed,prompt_mean=4,answer_mean=8",
    "request_timeout_s": 60.0,
    "warmup_requests": 1,
}


@pytest.fixture(scope="module")
def ranks(campaign: Callable[..., Any]) -> Any:
    """Three ranks by forked processes; the replica of rank 1 is killed while it answers."""
    return campaign(
        "ranks", {}, **SERVED | {"processes": 3, "global_batch": 3, "engine": "testbed.replicas:dies_after=8"}
    )


def test_ranks_end_well_though_the_replica_of_one_was_killed(ranks: Any) -> None:
    (record,) = ranks.records
    # On a busy machine the client may say against itself that it was late.
    assert record.status is Status.OK or str(record.error).startswith("client: "), ranks.stdout
    assert [outcome.status for outcome in record.outcomes] == [Status.OK] * 3
    assert [(replica.rank, replica.replica, replica.engine) for replica in record.replicas] == [
        (rank, rank, "testbed.replicas") for rank in range(3)
    ]
    assert [replica.died_ns is not None for replica in record.replicas] == [False, True, False]
    assert record.replicas[1].reassigned >= 1
    assert [replica.settings for replica in record.replicas] == [{"rank": rank} for rank in range(3)]


def test_every_sample_is_answered_once_by_those_left(ranks: Any) -> None:
    (record,) = ranks.records
    assert sorted(request.sample for request in record.requests) == list(range(60))
    assert Counter(request.error for request in record.requests) == {None: 60}
    assert {request.rank for request in record.requests} == {0}
    assert {request.replica for request in record.requests} == {0, 1, 2}
    assert any(request.attempt for request in record.requests)


def test_percentiles_are_those_of_all_requests_together(ranks: Any) -> None:
    (record,) = ranks.records
    finding = ranks.finding(record)
    if finding["status"] != "ok":
        # Then nothing is measured.
        assert "client: " in finding["reason"]
        return
    measured = {m["metric"]: m["value"] for m in ranks.report["measurements"] if m["cell"] == record.spec.cell}
    for name, value in (("ttft", _ttft_s), ("latency", _latency_s)):
        whole = [value(request) for request in record.requests]
        for percent in (50, 90):
            assert measured[f"{name}_p{percent}_s"] == pytest.approx(np.percentile(whole, percent), rel=1e-9)


def _ttft_s(request: RequestSample) -> float:
    assert request.first_ns is not None
    return (request.first_ns - request.due_ns) / 1e9


def _latency_s(request: RequestSample) -> float:
    assert request.ended_ns is not None
    return (request.ended_ns - request.due_ns) / 1e9


def test_no_key_of_a_replica_is_written_down(ranks: Any) -> None:
    kept = [path for path in ranks.out.rglob("*") if path.is_file()]
    assert len(kept) > 5
    assert not [path for path in kept if b"key-of-" in path.read_bytes()]
