"""Products with frozen weights in NF4: those of one layer, and those of all experts of a mixture.

Codes are in blocks of 64 with one scale each, and scales are quantised to 8 bit in blocks of 256, as in QLoRA.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import MissingPackageError
from paceline.training.mixture import grouped_product


def package(name: str, needed_by: str) -> Any:
    """Import an optional package; if it is missing, the error says how to install it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingPackageError(error.name or name, needed_by, "'paceline[finetune]'") from None


def product_4bit(weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> nn.Module:
    """A layer with this weight, (outputs, inputs), in 4 bit; it multiplies in `dtype`."""
    outputs, inputs = weight.shape
    module = _layer()(inputs, outputs, bias is not None, dtype)
    module.hold(weight)
    if bias is not None:
        module.bias = nn.Parameter(bias, requires_grad=False)
    return module  # type: ignore[no-any-return]


@functools.cache
def _layer() -> Any:
    """The class of 4-bit layers; needs bitsandbytes."""
    bnb = _bitsandbytes()

    class Product4bit(bnb.nn.Linear4bit):  # type: ignore[misc, name-defined]
        """bitsandbytes' layer that stores its scales itself, because sharding strategies replace the weight by a plain
        tensor without them."""

        def __init__(self, inputs: int, outputs: int, bias: bool, dtype: torch.dtype) -> None:
            super().__init__(inputs, outputs, bias, dtype, True, "nf4", torch.uint8, "meta")

        def hold(self, weight: Tensor) -> None:
            self.weight, self.quant_state = _stored(weight)

        def forward(self, x: Tensor) -> Tensor:
            codes = codes_of(self.weight)
            return bnb.matmul_4bit(x.to(self.compute_dtype), codes, self.quant_state, bias=self.bias)  # type: ignore[no-any-return]

    return Product4bit


class GroupedProduct4bit(nn.Module):
    """The rows of each expert times its frozen weight, (experts, outputs, inputs), in 4 bit."""

    def __init__(self, weights: Tensor) -> None:
        super().__init__()
        self.shape = weights.shape
        self.weight, self.quant_state = _stored(weights)

    @property
    def device(self) -> torch.device:
        return self.weight.device  # type: ignore[no-any-return]

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        return _FrozenProduct.apply(rows, counts, codes_of(self.weight), self.quant_state)  # type: ignore[no-untyped-call, no-any-return]


class _FrozenProduct(torch.autograd.Function):
    """A grouped product that expands its weights again for the backward pass: the expanded ones of all layers would
    need four times the memory of the codes."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, counts: Tensor, codes: Tensor, state: Any) -> Tensor:
        ctx.save_for_backward(counts, codes)
        ctx.state = state
        return grouped_product(rows, _expanded(codes, state, rows.dtype), counts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        counts, codes = ctx.saved_tensors
        weights = _expanded(codes, ctx.state, gradients[0].dtype)
        return grouped_product(gradients[0], weights.transpose(-2, -1), counts), None, None, None


def codes_of(stored: Tensor) -> Tensor:
    """The 4-bit codes as bitsandbytes packs them: a column of bytes with two codes each."""
    return stored if stored.dtype == torch.uint8 else stored.view(torch.uint8).view(-1, 1)


def _stored(weight: Tensor) -> tuple[Any, Any]:
    """The parameter that holds a weight's codes, and their scales."""
    bnb = _bitsandbytes()
    packed, scales = bnb.functional.quantize_4bit(
        weight, blocksize=64, compress_statistics=True, quant_type="nf4", quant_storage=torch.uint8
    )
    stored = bnb.nn.Params4bit(packed, requires_grad=False, quant_state=scales, quant_type="nf4", bnb_quantized=True)
    return stored, scales


def _expanded(codes: Tensor, state: Any, dtype: torch.dtype) -> Tensor:
    return _bitsandbytes().functional.dequantize_4bit(codes, state).to(dtype)  # type: ignore[no-any-return]


def _bitsandbytes() -> Any:
    return package("bitsandbytes", "the method qlora")
