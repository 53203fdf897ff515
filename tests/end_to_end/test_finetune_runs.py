"""A tiny Mistral, really quantised to 4 bit, fine-tuned by two processes: equal work proved and only adapters sent."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
from testbed import EXHAUSTIVE

from paceline.experiment.choices import Choice
from paceline.models.adapters import adapter_parameters
from paceline.models.arithmetic import load

PACKAGES = ("transformers", "peft", "bitsandbytes")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not all(map(find_spec, PACKAGES)), reason="pip install 'paceline[finetune]'"),
]

MODEL = "tiny-llama:layers=1,hidden=64"
STRATEGIES = ("ddp", "fsdp2", *(("zero:stage=2",) if EXHAUSTIVE else ()))
RANK, TARGETS = 64, "q+o"


@pytest.fixture(scope="module")
def tuned(campaign: Callable[..., Any]) -> Any:
    """Adapters of 4,096 elements and more have 8-bit moments. Rows are packed: attention stops between documents."""
    return campaign(
        "tuned",
        {"strategy": list(STRATEGIES)},
        formats=("json",),
        profiled=False,
        workload="finetune",
        model=MODEL,
        method="qlora",
        rank=RANK,
        targets=TARGETS,
        optimizer="paged_adamw_8bit",
        data="instructions:mean=8,packed=true",
        sequence_length=16,
        learning_rate=1e-3,
        checkpointing="full",
    )


def test_every_strategy_is_certified(tuned: Any) -> None:
    assert tuned.code == 0, tuned.stdout + tuned.stderr
    statuses = {str(r.spec.strategy): (r.status, r.error) for r in tuned.records}
    assert statuses == dict.fromkeys(("None", *STRATEGIES), ("ok", None))
    for certificate in tuned.report["certificates"]:
        names = {check["name"] for check in certificate["checks"]}
        assert {"frozen weights", "learned tokens per step", "only adapters reduced"} <= names
        assert all(check["ok"] for check in certificate["checks"])


def test_what_was_trained_is_declared(tuned: Any) -> None:
    for record in tuned.records:
        assert record.evidence is not None
        assert record.evidence.settings["weights"] == "random"
        assert record.evidence.parameters == adapter_parameters(load(Choice.parse(MODEL)), RANK, TARGETS)
        assert record.evidence.dtypes["frozen_weights"] == "nf4"
        assert record.evidence.dtypes["optimizer_state"] == "8bit"
        assert record.evidence.optimizer["paged"] is True


def test_only_what_shards_frozen_weights_gathers_them(tuned: Any) -> None:
    gathered = {
        strategy: max((w.payload_bytes for w in tuned.record(strategy).wire if w.dtype == "uint8"), default=0)
        for strategy in STRATEGIES
    }
    assert gathered.pop("fsdp2") > 0
    assert set(gathered.values()) == {0}


def test_labels_are_fewer_than_tokens(tuned: Any) -> None:
    for step in tuned.record("ddp").steps:
        assert step.label_tokens is not None
        assert step.positions is not None
        assert 0 < step.label_tokens < step.tokens <= step.positions
