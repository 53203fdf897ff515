"""The grouped kernel for products of experts computes what one product per expert does."""

from __future__ import annotations

import pytest
import torch

from paceline.training import mixture


def product(counts: list[int], monkeypatch: pytest.MonkeyPatch, kind: str) -> list[torch.Tensor]:
    """The outputs and the gradients of rows and weights, as fp32."""
    generator = torch.Generator("cuda").manual_seed(1)
    numbers = {"device": "cuda", "dtype": torch.bfloat16, "generator": generator}
    rows = torch.randn(sum(counts), 64, **numbers).requires_grad_()  # type: ignore[arg-type]
    weights = torch.randn(len(counts), 48, 64, **numbers).requires_grad_()  # type: ignore[arg-type]
    monkeypatch.setattr(mixture, "product_kind", lambda *_: kind)
    made = mixture.grouped_product(rows, weights, torch.tensor(counts, device="cuda"))
    made.backward(torch.randn(made.shape, **numbers))  # type: ignore[arg-type, no-untyped-call]
    assert rows.grad is not None
    assert weights.grad is not None
    return [each.detach().float() for each in (made, rows.grad, weights.grad)]


@pytest.mark.parametrize("counts", [[16, 16, 16], [1, 30, 7], [0, 13, 0, 3]])
def test_the_grouped_kernel_agrees_with_single_products(counts: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    grouped, single = product(counts, monkeypatch, "grouped_mm"), product(counts, monkeypatch, "loop")
    for a, b in zip(grouped, single, strict=True):
        assert torch.allclose(a, b, rtol=2e-2, atol=2e-2)


def test_which_products_use_the_kernel() -> None:
    device, has = torch.device("cuda"), torch.cuda.get_device_capability() >= mixture.GROUPED_CAPABILITY
    assert mixture.product_kind(device, torch.bfloat16, torch.Size((64, 32))) == ("grouped_mm" if has else "loop")
    assert mixture.product_kind(device, torch.bfloat16, torch.Size((64, 30))) == "loop"
    assert mixture.product_kind(device, torch.float32, torch.Size((64, 32))) == "loop"
