"""Compressed gradients under real ranks: certified as what they declare, their bytes counted, their loss compared."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest

from paceline.launchers import _network
from paceline.results.records import RunRecord

pytestmark = pytest.mark.slow

EVERY = 3
METHODS = ("fp16", "powersgd,rank=1", "signsgd", f"diloco,every={EVERY}")


@pytest.fixture(scope="module")
def traded(campaign: Callable[..., Any], smaller: dict[str, Any]) -> Any:
    strategies = ["ddp", *(f"compressed:method={method}" for method in METHODS)]
    return campaign(
        "traded", {"strategy": strategies}, formats=("json", "markdown"), profiled=False, **smaller | {"steps": 9}
    )


def sent(record: RunRecord) -> dict[str, float]:
    """Mean payload per step of rank 0, by dtype, without scalars."""
    found: defaultdict[str, float] = defaultdict(float)
    steps = {w.step for w in record.wire}
    for w in record.wire:
        found[w.dtype] += w.payload_bytes / len(steps) if w.rank == 0 and w.payload_bytes > 64 else 0
    return dict(found)


def test_every_method_is_certified_as_what_it_declares(traded: Any) -> None:
    assert traded.code == 0, traded.stdout + traded.stderr
    certificates = {c["run"]: c for c in traded.report["certificates"]}
    for method in METHODS:
        record = traded.record(f"compressed:method={method}")
        checks = {check["name"]: check for check in certificates[record.spec.run_id]["checks"]}
        assert "not equal work" in checks["approximation"]["expected"]
        assert checks["data"]["ok"]
        assert checks["loss of the first step"]["ok"]
        assert checks["weights after the window"]["ok"], "nine steps end with an average"
        assert checks["matrix products"]["ok"]
        assert "loss trajectory" not in checks
    exact = {c["name"] for c in certificates[traded.record("ddp").spec.run_id]["checks"]}
    assert {"loss trajectory", "reduction dtype on the wire"} <= exact


def test_bytes_are_those_of_the_method(traded: Any) -> None:
    whole = 4 * traded.record("ddp").evidence.parameters
    assert sent(traded.record("ddp")) == {"fp32": whole}
    assert sent(traded.record("compressed:method=fp16"))["fp16"] == whole / 2
    # Both ranks' bits, and one scale per tensor.
    bits = sent(traded.record("compressed:method=signsgd"))["uint8"]
    assert whole / 32 * 2 < bits < 1.2 * whole / 32 * 2
    assert sent(traded.record(f"compressed:method=diloco,every={EVERY}"))["fp32"] == pytest.approx(whole / EVERY)
    assert sent(traded.record("compressed:method=powersgd,rank=1"))["fp32"] < whole / 2


def test_they_are_compared_but_not_ranked(traded: Any) -> None:
    rows = {row["strategy"]: row for row in traded.report["tradeoffs"]}
    assert set(rows) == {f"compressed:method={method}" for method in METHODS}
    assert rows["compressed:method=fp16"]["loss"]["value"] == pytest.approx(1.0, abs=1e-3)
    assert rows["compressed:method=fp16"]["loss"]["verdict"] == "inconclusive", "one seed"
    assert not traded.report["comparisons"]
    assert "Speed, bytes and loss" in (traded.directory / "report.md").read_text()


@pytest.mark.skipif(not os.environ.get("PACELINE_EXHAUSTIVE"), reason="starts a warm process of its own")
@pytest.mark.skipif(_network.why_not() is not None, reason=str(_network.why_not()))
def test_a_slow_network_slows_what_it_carries(campaign: Callable[..., Any], smaller: dict[str, Any]) -> None:
    """At 4 Mbit/s, 2 x 37 kB of gradients take at least 0.07 s per step; a limit cannot be exceeded."""
    base = smaller | {"steps": 8, "launcher": "local:network_mbit=4"}
    slow = campaign("slow", {"strategy": ["ddp", "compressed:method=signsgd"]}, formats=("json",), **base)
    assert slow.code == 0, slow.stdout + slow.stderr
    record = slow.record("ddp")
    least_s = 4 * record.evidence.parameters / (4e6 / 8)
    taken_s = [s.duration_s for s in record.steps if s.rank == 0]
    # The bucket of a limited link is full at the start.
    assert sum(taken_s) > least_s * len(taken_s) - _network.SMALLEST_BURST / (4e6 / 8)
    assert [row["axes"]["network_mbit"] for row in slow.report["tradeoffs"]] == [4]
