"""Precisions beyond fp32, bf16 and fp16: TF32 products, and 8-bit linear layers in the decoder's blocks: our own for
`float8` (see `training.float8`), of torchao for the others and for float8 weights that FSDP2 gathers.

The head and attention are never converted. Weights are rounded to the dtype of the activations first, as in every other
linear layer of the decoder, so that strategies with fp32 and with 16-bit weights multiply the same numbers.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import logging
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import MissingPackageError, UnsupportedError
from paceline.experiment.spec import Precision
from paceline.training.decoder import MLP, Attention, Linear

# Precision -> torchao's recipe, and the lowest compute capability of a GPU that multiplies so.
FLOAT8 = {
    "float8": ("tensorwise", (8, 9)),
    "float8_rowwise": ("rowwise", (9, 0)),
    "float8_rowwise_gw_hp": ("rowwise_with_gw_hp", (9, 0)),
}
MXFP8_CAPABILITY = (10, 0)


@contextlib.contextmanager
def matrix_products(precision: Precision) -> Iterator[None]:
    """torch's switches for products: TF32 for those of fp32 if that is requested, else real fp32, and whole sums."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision.compute == "tf32" else "highest")
    try:
        with whole_sums():
            yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextlib.contextmanager
def whole_sums() -> Iterator[None]:
    """Keep the parts of a sum in fp32. By default cuBLAS may round those of a long one to 16 bit.

    Which products it splits depends on shapes, so layouts of one model would differ by more than rounding: where the
    parts of a gradient cancel, as in that of the output layer's input, its mean over tokens was off by 9 % on an H200.
    """
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_bf16_reduced_precision_reduction, matmul.allow_fp16_reduced_precision_reduction
    matmul.allow_bf16_reduced_precision_reduction = matmul.allow_fp16_reduced_precision_reduction = False
    try:
        yield
    finally:
        matmul.allow_bf16_reduced_precision_reduction, matmul.allow_fp16_reduced_precision_reduction = before


def convert(blocks: nn.Module, precision: Precision, device: str, *, float8_all_gather: bool = False) -> None:
    """Replace the linear layers of the blocks if the precision has 8 bit; otherwise do nothing.

    float8_all_gather: weights that FSDP2 shards are rounded before they are gathered. UnsupportedError if a package is
    missing or this device has no such products: nothing is emulated.
    """
    if not precision.is_8bit:
        return
    require_products(precision.compute, device)
    if precision.compute == "mxfp8":
        for layer in [layer for layer in blocks.modules() if isinstance(layer, Linear)]:
            layer.__class__ = MXLinear
        return
    if precision.compute == "float8" and not float8_all_gather:
        convert_tensorwise(blocks)
        return
    config = torchao("torchao.float8", precision.compute).Float8LinearConfig
    if float8_all_gather:
        _round_before_gathering()
        convert_by_torchao(blocks, precision.compute, config(enable_fsdp_float8_all_gather=True))
    else:
        convert_by_torchao(blocks, precision.compute, config.from_recipe_name(FLOAT8[precision.compute][0]))


def convert_by_torchao(blocks: nn.Module, name: str, config: Any) -> None:
    """Every linear layer becomes one of torchao, which casts its weight to the dtype of its input first."""
    torchao("torchao.float8", name).convert_to_float8_training(blocks, config=config)
    kind = _float8_layer()
    for layer in [layer for layer in blocks.modules() if isinstance(layer, kind.__base__)]:
        layer.__class__, layer.precision = kind, name


def convert_tensorwise(blocks: nn.Module) -> None:
    """torchao's recipe with one scale per tensor, by operators of our own that read and write less."""
    from paceline.training import float8

    for part in blocks.modules():
        if isinstance(part, Linear):
            part.__class__ = float8.Float8Linear
        elif type(part) is MLP and part.gated and part.inputs.bias is None and part.output.bias is None:
            part.__class__ = float8.GatedMLP
        # A tile of the kernel is one head, and its sides are powers of two.
        elif type(part) is Attention and part.inputs.bias is None and part.head_dim.bit_count() == 1:
            part.__class__ = float8.Float8Attention


def round_as_plain_code() -> None:
    """Let compiled code round to 16 bit wherever plain code does. By default it leaves out casts of fused operators.

    That is more exact, but different work. The weights of a norm begin at 1 and move together, so that their rounding
    is the same for a whole layer: a compiled gpt2-124m whose last norm was not rounded learned ahead of the reference,
    1.6 % in the loss after 35 steps. Adapters, whose first updates are smaller than the last digit of a bf16 sum, learn
    faster. After rounding to 8 bit some values differ by 6 %. The casts happen in registers.
    """
    import torch._inductor.config

    torch._inductor.config.emulate_precision_casts = True


def require_products(name: str, device: str) -> None:
    """UnsupportedError unless this device multiplies in this 8-bit format."""
    needed = MXFP8_CAPABILITY if name == "mxfp8" else FLOAT8[name][1]
    if device == "cuda":
        capability = torch.cuda.get_device_capability()
        if capability < needed:
            here = f"{torch.cuda.get_device_name()} has {'.'.join(map(str, capability))}"
            raise UnsupportedError(
                f"precision {name} needs a GPU of compute capability {'.'.join(map(str, needed))} or later; {here}"
            )
    elif name == "mxfp8":
        raise UnsupportedError("precision mxfp8 needs a GPU of compute capability 10.0 or later, and this is a CPU")
    if name != "float8":
        torchao("torchao.float8", name)
    elif device == "cuda" and importlib.util.find_spec("triton") is None:
        raise MissingPackageError("triton", f"precision {name}", "triton")


def torchao(module: str, needed_by: str) -> Any:
    """Import a part of torchao; if it is missing, the error says how to install it."""
    with warnings.catch_warnings():
        # It warns about CUDA libraries of other versions of torch, which these layers do not need, and torch about it.
        warnings.simplefilter("ignore")
        for name in ("torchao", "torch.utils._pytree"):
            logging.getLogger(name).setLevel(logging.ERROR)
        try:
            return importlib.import_module(module)
        except ImportError as error:
            raise MissingPackageError(error.name or "torchao", f"precision {needed_by}", "'paceline[float8]'") from None


@functools.cache
def _float8_layer() -> Any:
    """torchao's float8 layer, with the weight cast to the dtype of its input first."""
    layers = torchao("torchao.float8.float8_linear", "float8")

    class Float8Layer(layers.Float8Linear):  # type: ignore[misc, name-defined]
        precision: str

        def forward(self, x: Tensor) -> Tensor:
            product = layers.matmul_with_hp_or_float8_args.apply
            output: Tensor = product(x, rounded_weight(self.weight, x.dtype).t(), self.linear_mm_config, self.config)
            return output if self.bias is None else output + self.bias.to(output.dtype)

    return Float8Layer


def rounded_weight(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight in `dtype`, also in compiled code.

    A compiler that fuses two casts leaves out the first: fp32 would become 8 bit without being rounded to bf16 in
    between, which is other arithmetic than that of every strategy which keeps or gathers weights in bf16. The initial
    weights are bf16 numbers, and a first update is less than half of their spacing. Rounded to bf16 it has no effect
    on most of them; without, llama-1b's second loss was 11 % lower. Arithmetic on the bits is not left out.
    """
    if torch.compiler.is_compiling() and weight.dtype == torch.float32 and dtype == torch.bfloat16:
        bits = weight.detach().view(torch.int32)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & ~0xFFFF
        # The value is that of the bits, exactly; the gradient is that of the weight.
        weight = weight + (bits.view(torch.float32) - weight).detach()
    return weight.to(dtype)


class MXLinear(Linear):
    """A linear layer whose three products are MXFP8: e4m3 with one power of two as scale per 32 values."""

    precision = "mxfp8"
    kernels = "AUTO"

    def forward(self, x: Tensor) -> Tensor:
        products = torchao("torchao.prototype.moe_training.mxfp8_linear", "mxfp8")
        rows = x.reshape(-1, x.shape[-1])
        output: Tensor = products._to_mxfp8_then_scaled_mm(
            rows,
            rounded_weight(self.weight, x.dtype),
            products.KernelPreference[self.kernels],
            products.ScaleCalculationMode.RCEIL,
        )
        output = output.view(*x.shape[:-1], output.shape[-1])
        return output if self.bias is None else output + self.bias.to(output.dtype)


@functools.cache
def _round_before_gathering() -> None:
    """Let torchao round sharded fp32 weights to bf16 before 8 bit, as every other layer does (see `rounded_weight`)."""
    kind: Any = torchao("torchao.float8.fsdp_utils", "float8").WeightWithDynamicFloat8CastTensor
    gather = kind.fsdp_pre_all_gather

    @functools.wraps(gather)
    def rounded(self: Any, *args: Any, **kwargs: Any) -> Any:
        whole = self._tensor
        self._tensor = whole.to(torch.bfloat16)
        try:
            return gather(self, *args, **kwargs)
        finally:
            self._tensor = whole

    kind.fsdp_pre_all_gather = rounded


def rescale(module: nn.Module) -> None:
    """After an optimizer step, the scales of all weights that are gathered in float8, with one collective for all.

    They are those of the weights rounded to bf16, whose largest value is the largest value rounded.
    """
    torchao("torchao.float8", "float8").precompute_float8_dynamic_scale_for_fsdp(module)
    parts: Iterator[Any] = (getattr(parameter, "_local_tensor", None) for parameter in module.parameters())
    held = [part for part in parts if getattr(part, "_precomputed_scale", None) is not None]
    if not held:
        return
    largest = torch.finfo(held[0]._dtype).max / torch.stack([part._precomputed_scale for part in held]).double()
    scale = torchao("torchao.float8.float8_utils", "float8").amax_to_scale
    for part, value in zip(held, scale(largest.to(torch.bfloat16), held[0]._dtype).unbind(), strict=True):
        part._precomputed_scale = value


def compute_name(module: nn.Module, base: str) -> str:
    """The precision of the matrix products as this process has it: of its 8-bit layers, or by torch's switch."""
    for layer in module.modules():
        if isinstance(layer, nn.Linear) and isinstance(name := getattr(layer, "precision", None), str):
            return name
    return "tf32" if base == "fp32" and torch.get_float32_matmul_precision() != "highest" else base
