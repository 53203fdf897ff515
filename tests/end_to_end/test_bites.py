"""The certificate bites: strategies that cheat in the ways the original projects did end `invalid`, with the reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from testbed import EXHAUSTIVE

pytestmark = pytest.mark.slow

# strategy, workload, the check that must refuse, what it must have seen
CHEATS = [
    ("faulty.skips_accumulation", "pretrain", "optimizer steps", "2 updates at 4 steps"),
    ("faulty.wrong_reduction_dtype", "pretrain", "reduction dtype on the wire", "gradients crossed in bf16"),
    ("faulty.other_init", "pretrain", "initial weights", "on rank 0"),
    ("faulty.shifted_tokens", "pretrain", "loss trajectory", "the closest to its limit of 4 compared steps"),
    ("ddp", "faulty.other_data", "data", "other token ids than the reference at 4 steps"),
]
if not EXHAUSTIVE:  # tests/adversary has these and more; here their words reach the report
    CHEATS = CHEATS[:2]
IDS = [f"{strategy}-{workload}" for strategy, workload, *_ in CHEATS]


@pytest.fixture(scope="module")
def cheated(campaign: Callable[..., Any]) -> Any:
    matrix = [{"strategy": [strategy], "workload": [workload]} for strategy, workload, *_ in CHEATS]
    return campaign("cheats", matrix, profiled=False, micro_batch=2)


@pytest.mark.parametrize(("strategy", "workload", "check", "seen"), CHEATS, ids=IDS)
def test_a_cheat_is_invalid_with_its_reason(cheated: Any, strategy: str, workload: str, check: str, seen: str) -> None:
    record = cheated.record(strategy, workload=workload)
    assert record.status == "invalid", (record.status, record.error)
    reason = next((part for part in record.error.split("; ") if part.startswith(f"{check}: ")), "")
    assert f"{check}: " in record.error
    assert seen in record.error
    assert reason

    finding = cheated.finding(record)
    assert finding["status"] == "invalid"
    assert seen in finding["reason"]
    for name in ("report.md", "report.html"):
        assert seen in (cheated.directory / name).read_text(), name
    certificate = next(c for c in cheated.report["certificates"] if c["run"] == record.spec.run_id)
    assert check in [c["name"] for c in certificate["checks"] if not c["ok"]]


def test_the_exit_code_says_so_and_nothing_is_measured(cheated: Any) -> None:
    assert cheated.code == 1
    assert cheated.report["measurements"] == []
    assert cheated.report["comparisons"] == []
    assert cheated.report["recommendations"] == []


def test_only_the_cheat_is_blamed(cheated: Any) -> None:
    """A certificate that refused everything would pass the tests above: what was right is still said to be right."""
    for strategy, workload, check, _ in CHEATS:
        run = cheated.record(strategy, workload=workload).spec.run_id
        checks = {
            c["name"]: c["ok"] for c in next(c for c in cheated.report["certificates"] if c["run"] == run)["checks"]
        }
        for other in ("reference", "parameters", "tokens per optimizer step", "micro batches per step", "dtypes"):
            assert checks[other], (strategy, other)
        assert not checks[check]
    assert cheated.record(None).status == "ok"
