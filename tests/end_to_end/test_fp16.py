"""fp16 with loss scaling, and 8 bit in a pipeline: what a CPU cannot do, the record says; no traceback is an answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from testbed import EXHAUSTIVE

pytestmark = pytest.mark.slow

# Loss scaling is torch's or DeepSpeed's.
STRATEGIES = ("ddp", "fsdp2", "zero:stage=2") if EXHAUSTIVE else ("zero:stage=2",)


def test_fp16_ends_as_a_record(campaign: Callable[..., Any], smaller: dict[str, Any], reduced_dtypes: Any) -> None:
    done = campaign("fp16", {"strategy": list(STRATEGIES)}, profiled=False, **smaller, precision="fp16")
    assert "Traceback" not in done.stdout + done.stderr
    for strategy in STRATEGIES:
        record = done.record(strategy)
        assert record.status in ("ok", "unsupported", "failed"), record.error
        if record.status == "ok":
            assert reduced_dtypes(record) == {"fp32"}
            assert record.evidence.dtypes["compute"] == "fp16"
        else:
            assert record.error


@pytest.mark.parametrize("precision", ["fp16", "float8"])
def test_a_pipeline_is_certified(campaign: Callable[..., Any], smaller: dict[str, Any], precision: str) -> None:
    """Its stages scale the loss by one number, and each rounds its own matrices to 8 bit."""
    settings = {**smaller, "model": "tiny:layers=2,hidden=32", "precision": precision}
    settings |= {"micro_batch": 2, "accumulation": 2, "global_batch": None}
    done = campaign(f"pipeline-{precision}", {"strategy": ["mesh:pp=2"]}, profiled=False, **settings)
    assert done.code == 0, done.stdout + done.stderr
    record = done.record("mesh:pp=2")
    assert (record.status, record.evidence.dtypes["compute"]) == ("ok", precision)
