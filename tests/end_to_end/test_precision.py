"""bf16 compute, and bf16 reduction: the same certificate, and the dtype that was asked for seen on the wire."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from testbed import EXHAUSTIVE

pytestmark = pytest.mark.slow

# tests/adversary certifies DDP in bf16, too.
STRATEGIES = ("ddp", "fsdp2", "zero:stage=3") if EXHAUSTIVE else ("fsdp2",)


@pytest.fixture(scope="module")
def bf16(campaign: Callable[..., Any], smaller: dict[str, Any]) -> Any:
    return campaign("bf16", {"strategy": list(STRATEGIES)}, profiled=False, **smaller, precision="bf16")


@pytest.fixture(scope="module")
def short_reduction(campaign: Callable[..., Any], smaller: dict[str, Any]) -> Any:
    matrix = {"strategy": ["ddp", "fsdp2", "zero:stage=2"]}
    return campaign("short", matrix, **smaller, precision="bf16", reduce_dtype="bf16")


def gathered_dtypes(record: Any) -> set[str]:
    return {w.dtype for w in record.wire if w.operation == "all_gather" and w.payload_bytes > 64}


def test_bf16_is_certified_and_reduces_in_fp32(bf16: Any, reduced_dtypes: Any) -> None:
    assert bf16.code == 0, bf16.stdout + bf16.stderr
    for strategy in STRATEGIES:
        record = bf16.record(strategy)
        assert record.status == "ok", record.error
        assert reduced_dtypes(record) == {"fp32"}
        assert gathered_dtypes(record) <= {"bf16"}
        assert record.evidence.dtypes["compute"] == "bf16"
        assert record.evidence.dtypes["master_weights"] == record.evidence.dtypes["optimizer_state"] == "fp32"


def test_the_tolerance_of_bf16_comes_from_re_ordered_references(bf16: Any) -> None:
    reference = bf16.record(None)
    assert {s.variant for s in reference.steps} == {0, 1, 2, 3}
    first = {s.variant: s.data_digest for s in reference.steps if s.step == 0}
    assert len(set(first.values())) == 1, "a variant re-orders the batch; it is still the same batch"
    texts = [
        c["expected"] for cert in bf16.report["certificates"] for c in cert["checks"] if c["name"] == "loss trajectory"
    ]
    assert texts
    assert all("re-seeded references" in text for text in texts)


@pytest.mark.exhaustive
def test_bf16_reduction_is_certified_and_seen_on_the_wire(short_reduction: Any, reduced_dtypes: Any) -> None:
    assert short_reduction.code == 0, short_reduction.stdout + short_reduction.stderr
    for strategy in ("ddp", "fsdp2", "zero:stage=2"):
        record = short_reduction.record(strategy)
        assert record.status == "ok", record.error
        assert reduced_dtypes(record) == {"bf16"}
        assert record.evidence.dtypes["gradient_reduction"] == "bf16"
        assert record.evidence.dtypes["master_weights"] == "fp32"
