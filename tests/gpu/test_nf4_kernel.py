"""The kernel that converts NF4 weights: bit for bit the numbers of bitsandbytes."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from paceline.training import nf4  # noqa: E402

pytestmark = pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="pip install 'paceline[finetune]'")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(1024, 4096), (1000, 448)])
def test_numbers_are_those_of_bitsandbytes(shape: tuple[int, int], dtype: Any) -> None:
    import bitsandbytes as bnb

    weight = torch.randn(shape, device="cuda", dtype=torch.bfloat16) * 0.02
    packed, state = bnb.functional.quantize_4bit(weight, blocksize=64, compress_statistics=True, quant_type="nf4")
    state.dtype = dtype
    wanted = bnb.functional.dequantize_4bit(packed, state)
    nested = state.state2
    columns = [[part, part] for part in (packed, state.absmax, nested.absmax, state.offset)]
    got = nf4.numbers(*columns, nested.code, state.code, shape[1], dtype, False)
    assert torch.equal(got, torch.cat([wanted, wanted]))
