"""fp16 with loss scaling: where a CPU cannot do it, the record says so; a traceback is never the answer."""

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
