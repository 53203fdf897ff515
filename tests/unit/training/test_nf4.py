"""Weights in NF4 as numbers: those of bitsandbytes, for several layers in one matrix."""

from __future__ import annotations

from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from paceline.training import nf4  # noqa: E402

pytestmark = pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="pip install 'paceline[finetune]'")


def layer(outputs: int, inputs: int, nested: bool = True) -> Any:
    """As much of a 4-bit layer as is read."""
    import bitsandbytes as bnb

    weight = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(outputs)) * 0.02
    packed, state = bnb.functional.quantize_4bit(
        weight.to(torch.bfloat16), blocksize=64, compress_statistics=nested, quant_type="nf4"
    )
    return SimpleNamespace(weight=packed, quant_state=state, out_features=outputs, in_features=inputs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_numbers_are_those_of_bitsandbytes(dtype: Any) -> None:
    """96 x 320 numbers have 480 scales: not a multiple of the 256 that share a scale of their own."""
    import bitsandbytes as bnb

    layers, wanted = [layer(outputs, 320) for outputs in (96, 40, 200)], []
    for each in layers:
        each.quant_state.dtype = dtype
        wanted.append(bnb.functional.dequantize_4bit(each.weight, each.quant_state))
    found = [nf4.codes_of_layer(each) for each in layers]
    codes = [each for each in found if each is not None]
    columns = [[part[i] for part in codes] for i in range(4)]
    for again in (False, True):
        got = nf4.numbers(*columns, codes[0].levels, codes[0].table, 320, dtype, again)
        assert torch.equal(got, torch.cat(wanted))


def test_layers_in_another_format_are_not_recognised() -> None:
    assert nf4.codes_of_layer(layer(64, 64)) is not None
    assert nf4.codes_of_layer(layer(64, 64, nested=False)) is None
    assert nf4.codes_of_layer(torch.nn.Linear(64, 64)) is None
