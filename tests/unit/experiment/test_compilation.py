"""The field compile: its spellings, what it means, and which strategies can do it."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.experiment.compilation import Compilation, canonical, compilation
from paceline.experiment.plugins import load


@pytest.mark.parametrize(
    ("given", "stored", "meant"),
    [
        (False, False, None),
        (True, True, Compilation("default")),
        ("default", True, Compilation("default")),
        ("reduce-overhead", "reduce-overhead", Compilation("reduce-overhead")),
        ("default: scope=block", "default:scope=block", Compilation("default", "block")),
    ],
)
def test_a_setting_has_one_spelling(given: Any, stored: Any, meant: Any) -> None:
    """`true` stays `true`, so that runs of earlier versions keep their ids."""
    assert canonical(given) == stored
    assert compilation(stored) == meant


@pytest.mark.parametrize(
    ("strategy", "device", "value", "reason"),
    [
        ("ddp", "cpu", "reduce-overhead", "which a CPU does not have"),
        ("ddp", "cuda", "reduce-overhead", None),
        ("fsdp2", "cuda", "reduce-overhead", "need weights at fixed addresses; fsdp2 moves them"),
        ("zero:stage=3", "cuda", "default:scope=model", "compiled block by block"),
        ("zero:stage=2", "cuda", "default:scope=model", None),
        ("fsdp2", "cpu", "max-autotune-no-cudagraphs:scope=block", None),
        ("mesh:dp=2", "cuda", "default:scope=model", "compiled block by block"),
        ("mesh:tp=2", "cuda", "default:scope=block", "compiled stage by stage"),
        ("mesh:pp=2,schedule=interleaved-1f1b", "cpu", "default", None),
        ("mesh:pp=2,schedule=zbv", "cuda", "default", "splits the backward pass"),
        ("compressed:method=fp16", "cuda", "reduce-overhead", "fp16 moves them"),
    ],
)
def test_what_a_strategy_cannot_compile_has_a_reason(
    make_spec: Any, strategy: str, device: str, value: str, reason: str | None
) -> None:
    spec = make_spec(strategy, 2, device=device, compile=value, model="tiny:layers=4")
    found = load("strategies", spec.strategy.name).check(spec)
    assert found is None if reason is None else reason in str(found)
