"""Products in 8 bit on a real GPU."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from paceline.experiment.choices import Choice  # noqa: E402
from paceline.experiment.spec import Precision  # noqa: E402
from paceline.models.arithmetic import load  # noqa: E402
from paceline.training import float8, precision  # noqa: E402
from paceline.training.decoder import MLP, Linear  # noqa: E402


def between(*size: int) -> Any:
    """fp32 weights between the numbers of bf16, as they are after an update."""
    return torch.randn(*size, device="cuda").to(torch.bfloat16).float() * 0.02 + 3e-5


def same(left: Any, right: Any) -> bool:
    return torch.equal(left.view(torch.uint8), right.view(torch.uint8))


def outputs_and_gradients(layer: Any, x: Any, incoming: Any) -> list[Any]:
    x = x.clone().requires_grad_()
    layer.zero_grad()
    y = layer(x)
    y.backward(incoming)
    return [y.detach(), x.grad, *(parameter.grad.clone() for parameter in layer.parameters())]


def by_torchao(layers: Any) -> None:
    precision.convert_by_torchao(layers, "float8", precision.torchao("torchao.float8", "float8").Float8LinearConfig())


def test_compiled_layers_use_the_same_8_bit_weights() -> None:
    """Bit by bit, with weights between the numbers of bf16, as they are after an update."""
    torch.manual_seed(0)
    layers: Any = torch.nn.Sequential(Linear(256, 512, bias=False)).cuda()
    precision.convert(layers, Precision(compute="float8"), "cuda")
    with torch.no_grad():
        layers[0].weight.copy_(between(512, 256))
        x = torch.randn(1, 128, 256, device="cuda", dtype=torch.bfloat16)
        assert torch.equal(torch.compile(layers[0].forward)(x), layers(x))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("size", [(256, 512), (208, 80)])
def test_the_kernel_rounds_as_plain_torch_does(dtype: Any, size: Any) -> None:
    """Also values beyond the largest number of the format, infinite ones, and NaN."""
    torch.manual_seed(0)
    for x in (between(*size), torch.randn(size, device="cuda", dtype=torch.bfloat16)):
        x[3, 4] = float("inf")
        scale, _ = float8.scales(x[:3].abs().max() / 1.1, dtype)
        observed, expected = float8.cast(x, scale, dtype), float8.both(x.to(torch.bfloat16), scale, dtype)
        assert all(map(same, observed, expected))
        x[3, 5] = float("nan")
        rows, columns = float8.cast(x, scale, dtype)
        assert rows[3, 5].float().isnan()
        assert columns[5, 3].float().isnan()


@pytest.mark.parametrize("rows", [256, 208])
def test_gated_kernels_round_as_plain_torch_does(rows: int) -> None:
    """But for one value in a thousand: exponentials differ in their last bit."""
    torch.manual_seed(0)
    joined = 4 * torch.randn(rows, 2 * 1040, device="cuda", dtype=torch.bfloat16)
    incoming = torch.randn(rows, 1040, device="cuda", dtype=torch.bfloat16)
    inner, gradients = float8.plain_gated(joined), float8.plain_gated_backward(joined, incoming)
    forward, backward = float8.gated_maxima(joined), float8.gated_backward_maxima(joined, incoming)
    torch.testing.assert_close(forward, inner.abs().amax(1).float(), rtol=0.01, atol=0)
    torch.testing.assert_close(backward, gradients.abs().amax(1).float(), rtol=0.01, atol=0)
    scale, _ = float8.scales(forward.max(), float8.E4M3)
    gradient_scale, _ = float8.scales(backward.max(), float8.E5M2)
    pairs = [
        (float8.gated(joined, scale), float8.both(inner, scale, float8.E4M3)),
        (float8.gated_backward(joined, incoming, gradient_scale), float8.both(gradients, gradient_scale, float8.E5M2)),
    ]
    for observed, expected in pairs:
        for one, other in zip(observed, expected, strict=True):
            assert (one.view(torch.uint8) != other.view(torch.uint8)).float().mean() < 1e-3
    joined[3, 5] = float("nan")
    assert float8.gated_maxima(joined)[3].isnan()
    assert float8.gated_backward_maxima(joined, incoming)[3].isnan()


def test_layers_agree_with_those_of_torchao() -> None:
    pytest.importorskip("torchao")
    torch.manual_seed(0)
    weight, x = between(512, 256), torch.randn(2, 128, 256, device="cuda", dtype=torch.bfloat16)
    incoming = torch.randn(2, 128, 512, device="cuda", dtype=torch.bfloat16)
    results = []
    for convert in (by_torchao, precision.convert_tensorwise):
        layers: Any = torch.nn.Sequential(Linear(256, 512, bias=False)).cuda()
        layers[0].weight.data.copy_(weight)
        convert(layers)
        results.append(outputs_and_gradients(layers, x, incoming))
    assert all(map(torch.equal, *results))


def test_a_gated_layer_agrees_with_one_of_torchao() -> None:
    """But for single roundings: exponentials differ in their last bit."""
    pytest.importorskip("torchao")
    shape = load(Choice.parse("tiny-llama:hidden=256,ffn=512"))
    torch.manual_seed(0)
    weights = [between(1024, 256), between(256, 512)]
    x, incoming = (torch.randn(2, 128, 256, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    results = []
    for convert in (by_torchao, precision.convert_tensorwise):
        layers: Any = torch.nn.Sequential(MLP(shape)).cuda()
        for parameter, weight in zip(layers.parameters(), weights, strict=True):
            parameter.data.copy_(weight)
        convert(layers)
        results.append(outputs_and_gradients(layers, x, incoming))
    assert isinstance(layers[0], float8.GatedMLP)
    for observed, expected in zip(results[1], results[0], strict=True):
        assert (observed.float() - expected.float()).norm() / expected.float().norm() < 0.005
