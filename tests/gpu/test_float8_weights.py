"""Products in 8 bit on a real GPU."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from paceline.experiment.spec import Precision  # noqa: E402
from paceline.training import precision  # noqa: E402
from paceline.training.decoder import Linear  # noqa: E402


def test_compiled_layers_use_the_same_8_bit_weights() -> None:
    """Bit by bit, with weights between the numbers of bf16, as they are after an update."""
    pytest.importorskip("torchao")
    torch.manual_seed(0)
    layers: Any = torch.nn.Sequential(Linear(256, 512, bias=False)).cuda()
    precision.convert(layers, Precision(compute="float8"), "cuda")
    with torch.no_grad():
        layers[0].weight.copy_(torch.randn(512, 256).to(torch.bfloat16).float() * 0.02 + 3e-5)
        x = torch.randn(1, 128, 256, device="cuda", dtype=torch.bfloat16)
        assert torch.equal(torch.compile(layers[0].forward)(x), layers(x))
