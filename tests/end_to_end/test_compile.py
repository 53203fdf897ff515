"""torch.compile on a CPU: other kernels, the same trajectory."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.slow


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile on a CPU needs a C++ compiler")
@pytest.mark.exhaustive
def test_compiled_ddp_follows_the_reference(campaign: Callable[..., Any], smaller: dict[str, Any]) -> None:
    fields = smaller | {"global_batch": 2, "precision": "fp32", "compile": True}
    done = campaign("compiled", {"strategy": ["ddp"]}, **fields)
    record = done.record("ddp")
    assert record.status == "ok", record.error
    assert done.code == 0
    assert record.spec.training.compile
    assert not done.record(None).spec.training.compile, "the reference is the plain loop"
