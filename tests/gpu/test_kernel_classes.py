"""Kernels of a real GPU in their classes: what ran is found under its name, and nothing is counted twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from paceline.results.records import TraceSample
from paceline.training.instruments import clock_for
from paceline.training.step_profile import Profile


@pytest.fixture
def profiled() -> Callable[[Callable[[], Any]], TraceSample]:
    def make(work: Callable[[], Any]) -> TraceSample:
        work()  # libraries choose and load their kernels at the first call
        profile = Profile("cuda", clock_for("cuda"))
        with profile.recording():
            work()
        return profile.sample(0, 1)

    return make


def shares(sample: TraceSample) -> dict[str, float]:
    classes = ("products", "attention", "dequantisation", "elementwise", "copies")
    found = {name: getattr(sample, f"{name}_s") for name in classes}
    assert sum(found.values()) == pytest.approx(sample.compute_s)
    assert sample.compute_s > 0
    return {name: seconds / sample.compute_s for name, seconds in found.items()}


def test_products(profiled: Any) -> None:
    import torch

    a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    assert shares(profiled(lambda: a @ a))["products"] > 0.9


@pytest.mark.parametrize("backend", ["CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION"])
def test_fused_attention(profiled: Any, backend: str) -> None:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    q = torch.randn(4, 16, 2048, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def work() -> None:
        with sdpa_kernel(getattr(SDPBackend, backend)):
            scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()

    assert shares(profiled(work))["attention"] > 0.5


def test_elementwise_kernels_and_copies(profiled: Any) -> None:
    import torch

    a = torch.randn(1 << 26, device="cuda")
    pinned = torch.empty(1 << 26, pin_memory=True)
    assert shares(profiled(lambda: a.mul(2).add_(1)))["elementwise"] > 0.9
    assert shares(profiled(lambda: a.copy_(pinned, non_blocking=True)))["copies"] > 0.9


def test_dequantisation_of_four_bits(profiled: Any) -> None:
    """Few tokens: a layer spends most of its time on its weights."""
    torch = pytest.importorskip("torch")
    bnb = pytest.importorskip("bitsandbytes")

    layer = bnb.nn.Linear4bit(4096, 4096, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4").cuda()
    layer.weight.requires_grad_(False)
    layer.train()
    x = torch.randn(1, 512, 4096, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    found = shares(profiled(lambda: layer(x).sum().backward()))
    assert found["dequantisation"] > 0.1
    assert found["products"] > 0.05
