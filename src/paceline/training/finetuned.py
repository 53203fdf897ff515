"""A causal language model of transformers, made ready for fine-tuning: all of it learns, or LoRA adapters on it do.

Its weights are a function of (seed, parameter name, position) for a named shape, or read from a local directory. They
are made, rounded and (for qlora) quantised one parameter at a time on the device of the rank, so a model never stands
there whole in 16 bit. Every strategy wraps the same module, which does its own casts: frozen weights are held in the
compute dtype or in 4 bit, adapters in fp32, and autocast multiplies both in the compute dtype.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.errors import MissingPackageError, UnsupportedError
from paceline.experiment.spec import RunSpec, Tuning
from paceline.models.arithmetic import load as load_shape
from paceline.models.shape import Shape
from paceline.training.data.corpus import is_packed
from paceline.training.data.packing import IGNORED_LABEL
from paceline.training.decoder import DTYPES, INIT_STD, block_runner, initial_values, rounded

PROJECTIONS = {
    "q": "q_proj",
    "k": "k_proj",
    "v": "v_proj",
    "o": "o_proj",
    "gate": "gate_proj",
    "up": "up_proj",
    "down": "down_proj",
}
# Values of one parameter by its name: made from the seed, or read from a file.
Values = Callable[[str, Tensor], Tensor]


class Tuned(nn.Module):
    """Maps rows to the sum of their losses over learned labels divided by `normaliser`.

    inputs (b, 2, L) are token ids and positions, which begin at 0 with each document of a packed row.
    """

    def __init__(self, model: Any, spec: RunSpec, facts: Mapping[str, Any]) -> None:
        super().__init__()
        assert spec.tuning is not None
        self.model, self.facts = model, dict(facts)
        self.dtype = DTYPES[spec.training.precision.compute]
        # Without adapters every weight has the compute dtype already.
        self.autocasts = spec.tuning.has_adapters and self.dtype != torch.float32
        self.packed = is_packed(spec.training.data)
        self.checkpointing = spec.training.checkpointing
        # A compiled block keeps its input alone and computes the rest again by itself: see `prepare_compiler`.
        compiled = spec.training.compile and self.checkpointing == "full"
        self.run_block = block_runner("none" if compiled else self.checkpointing)
        # Read now: a strategy may leave nothing but shards in the place of weights.
        self.dtypes = self._dtypes()

    def _dtypes(self) -> dict[str, str]:
        """In what weights are held: those that learn, and the frozen products of the blocks."""
        names = {dtype: name for name, dtype in DTYPES.items()}
        held = {names[p.dtype] for p in self.parameters() if p.requires_grad}
        frozen = {names.get(p.dtype, "nf4") for p in self.blocks.parameters() if p.dim() > 1 and not p.requires_grad}
        return {"parameters": "+".join(sorted(held)), "frozen_weights": "+".join(sorted(frozen)) or "none"}

    @property
    def blocks(self) -> Any:
        """The decoder layers: units of sharding, of checkpointing and of compilation."""
        return self.model.model.layers

    def forward(self, inputs: Tensor, labels: Tensor, normaliser: Tensor) -> Tensor:
        tokens, positions = inputs[:, 0], inputs[:, 1]
        body = self.model.model
        with torch.autocast(tokens.device.type, self.dtype, enabled=self.autocasts):
            x = body.embed_tokens(tokens)
            turn = body.rotary_emb(x, position_ids=positions)
            # Without a mask the fused kernels are causal by themselves; padding stands on the right, out of sight.
            mask = document_mask(positions) if self.packed else None
            for block in self.blocks:
                x = self.run_block(block, x, attention_mask=mask, position_ids=positions, position_embeddings=turn)
            return self._loss(body.norm(x), labels, normaliser)

    def _loss(self, x: Tensor, labels: Tensor, normaliser: Tensor) -> Tensor:
        """Logits in the compute dtype, their cross entropy in fp32."""
        logits = self.model.lm_head(x).flatten(0, 1).float()
        losses = F.cross_entropy(logits, labels.flatten(), reduction="sum", ignore_index=IGNORED_LABEL)
        return losses / normaliser

    def scales(self) -> Iterator[tuple[str, Tensor]]:
        """What 4-bit weights need besides their own bits: it is no parameter, and stands whole on every rank."""
        for name, module in self.named_modules():
            state = getattr(module, "quant_state", None)
            if state is not None:
                parts = {"absmax": state.absmax, "code": state.code, "offset": state.offset}
                parts |= {"absmax2": state.state2.absmax, "code2": state.state2.code}
                yield from ((f"{name}.weight.{part}", value) for part, value in parts.items())

    def hold_codes_as_floats(self) -> frozenset[str]:
        """Keep 4-bit weights as bf16 numbers of the same bits, and tell their names: FSDP2 of torch 2.11 shards no
        whole numbers. Copies and gathers within one dtype move bits, whatever number they make."""
        found = {name: part for name, part in self.named_modules() if getattr(part, "quant_state", None) is not None}
        for part in found.values():
            part.weight = nn.Parameter(part.weight.data.flatten().view(torch.bfloat16), requires_grad=False)
        return frozenset(f"{name}.weight" for name in found)


def document_mask(positions: Tensor) -> Tensor:
    """(b, 1, L, L), true where a place may look: at itself and before, within its own document."""
    document = (positions == 0).cumsum(dim=1)
    same = document[:, None, :, None] == document[:, None, None, :]
    return same & torch.ones_like(same[0, 0]).tril()


def prepare_compiler(checkpointing: str) -> None:
    """Settings of torch's compiler for this process, made before anything is compiled.

    Compiled code rounds wherever the plain code does. Left alone it keeps fused sums in fp32, and adapters, whose first
    updates are smaller than the last place of a bf16 sum, then learn measurably faster: better, but other work.
    Full checkpointing is left to the partitioner, with no room for anything but a block's input. Around compiled blocks
    it would run each a third time from Python, and inside them bitsandbytes' products escape it.
    """
    import torch._functorch.config
    import torch._inductor.config

    torch._inductor.config.emulate_precision_casts = True
    if checkpointing == "full":
        torch._functorch.config.activation_memory_budget = 0.0


def is_trainable(name: str, tuning: Tuning) -> bool:
    """Whether the parameter of this name learns."""
    return not tuning.has_adapters or ".lora_" in name


# --- building ------------------------------------------------------------------------------------------------------


def build(spec: RunSpec, device: str, reseed: int = 0) -> Tuned:
    """The module of a spec, whole, on `device`, ready to train (see `decoder.fill` for `reseed`)."""
    assert spec.tuning is not None
    tuning, precision = spec.tuning, spec.training.precision
    model, values, facts = _open_model(spec, device, reseed)
    dtype = DTYPES[precision.compute]
    _fill(model, lambda name, parameter: values(name, parameter).to(device, dtype), tuning, dtype)
    model.model.rotary_emb = type(model.model.rotary_emb)(config=model.config).to(device)
    if model.config.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight
    if tuning.has_adapters:
        _add_adapters(model, tuning, device)
        _fill_adapters(model, spec, reseed)
    tuned = Tuned(model, spec, facts)
    # Before any forward: in eval mode bitsandbytes repacks 4-bit weights for a CPU, and trains on them wrongly.
    return tuned.train()


def package(name: str, needed_by: str) -> Any:
    """An optional package, or the sentence that says how to install it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingPackageError(error.name or name, needed_by, "'paceline[finetune]'") from None


def _open_model(spec: RunSpec, device: str, reseed: int) -> tuple[Any, Values, dict[str, Any]]:
    """A model, its values and where they are from. Re-seeding re-rounds what learns and nothing else."""
    assert spec.tuning is not None
    rounding = 0 if spec.tuning.has_adapters else reseed
    if "/" in spec.model.name:
        return _directory_model(spec, device, rounding)
    return _seeded_model(spec, device, rounding)


def _seeded_model(spec: RunSpec, device: str, rounding: int) -> tuple[Any, Values, dict[str, Any]]:
    """A model of the named shape without memory, and its values."""
    shape, compute = load_shape(spec.model), spec.training.precision.compute

    def values(name: str, parameter: Tensor) -> Tensor:
        value = initial_values(name, parameter.shape, shape.layers, spec.seed, torch.device(device))
        return rounded(name, value, compute, rounding)

    with torch.device("meta"):
        model = architecture(shape, "fine-tuning")
    return model, values, {"weights": "random"}


def architecture(shape: Shape, needed_by: str) -> Any:
    """Llama's and Mistral's arithmetic is one; only Llama knows biases."""
    transformers = package("transformers", needed_by)
    fields: dict[str, Any] = {
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.ffn,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.context,
        "rms_norm_eps": shape.norm_eps,
        "tie_word_embeddings": shape.tied,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "pad_token_id": None,
        "attn_implementation": "sdpa",
    }
    if shape.bias:
        config = transformers.LlamaConfig(attention_bias=True, mlp_bias=True, **fields)
        return transformers.LlamaForCausalLM(config)
    return transformers.MistralForCausalLM(transformers.MistralConfig(sliding_window=None, **fields))


def _directory_model(spec: RunSpec, device: str, rounding: int) -> tuple[Any, Values, dict[str, Any]]:
    """A model of Hugging Face's layout from a local directory; no code that lies beside its weights is run."""
    transformers = package("transformers", "fine-tuning")
    dtype = DTYPES[spec.training.precision.compute]
    model, told = transformers.AutoModelForCausalLM.from_pretrained(
        spec.model.name,
        local_files_only=True,
        trust_remote_code=False,
        use_safetensors=True,
        dtype=dtype,
        attn_implementation="sdpa",
        output_loading_info=True,
    )
    # transformers would fill what is missing with chance, another one on every rank.
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    if missing := sorted({*told["missing_keys"]} - tied):
        raise UnsupportedError(f"{spec.model.name} lacks {len(missing)} weights, {missing[0]} first")
    parts = ("embed_tokens", "layers", "norm", "rotary_emb")
    if not all(hasattr(getattr(model, "model", None), part) for part in parts) or not hasattr(model, "lm_head"):
        raise UnsupportedError(f"{spec.model.name} holds a {type(model).__name__}, which is not built as Llama is")
    window = getattr(model.config, "sliding_window", None)
    if window is not None and window < spec.training.sequence_length:
        length = spec.training.sequence_length
        raise UnsupportedError(f"{spec.model.name} attends to {window} tokens, fewer than the sequence length {length}")

    def values(name: str, parameter: Tensor) -> Tensor:
        value = parameter.detach().to(device, torch.float32)
        return rounded(name, value, spec.training.precision.compute, rounding)

    return model, values, {"weights": "pretrained"}


def _fill(model: Any, values: Values, tuning: Tuning, dtype: torch.dtype) -> None:
    """Give every parameter its value in its final form, one at a time."""
    for path, module in list(model.named_modules()):
        inside = path.startswith("model.layers.")
        if tuning.method == "qlora" and inside and isinstance(module, nn.Linear):
            model.set_submodule(path, _quantised(module, path, values, dtype))
            continue
        for key, parameter in list(module.named_parameters(recurse=False)):
            value = values(f"{path}.{key}", parameter)
            setattr(module, key, nn.Parameter(value, requires_grad=not tuning.has_adapters))


# --- 4 bit ---------------------------------------------------------------------------------------------------------


def _quantised(linear: nn.Linear, path: str, values: Values, dtype: torch.dtype) -> nn.Module:
    """The product with its weight in NF4, blocks of 64, whose scales are quantised to 8 bit in blocks of 256."""
    module = _product_4bit()(linear.in_features, linear.out_features, linear.bias is not None, dtype)
    weight = values(f"{path}.weight", linear.weight)
    module.hold(weight)
    if linear.bias is not None:
        module.bias = nn.Parameter(values(f"{path}.bias", linear.bias), requires_grad=False)
    return module  # type: ignore[no-any-return]


def codes_of(held: Tensor) -> Tensor:
    """The column of bytes, two codes each, that bitsandbytes packed, however its bits are held."""
    return held.view(torch.uint8).view(-1, 1)


@functools.cache
def _product_4bit() -> Any:
    """The class, once bitsandbytes is known to be there."""
    bnb = package("bitsandbytes", "the method qlora")

    class Product4bit(bnb.nn.Linear4bit):  # type: ignore[misc, name-defined]
        """bitsandbytes' layer without its search for lost scales: it keeps them itself, because sharding strategies put
        a plain tensor in the place of the weight."""

        def __init__(self, inputs: int, outputs: int, bias: bool, dtype: torch.dtype) -> None:
            super().__init__(inputs, outputs, bias, dtype, True, "nf4", torch.uint8, "meta")

        def hold(self, weight: Tensor) -> None:
            packed, self.quant_state = bnb.functional.quantize_4bit(
                weight, blocksize=64, compress_statistics=True, quant_type="nf4", quant_storage=torch.uint8
            )
            self.weight = bnb.nn.Params4bit(
                packed, requires_grad=False, quant_state=self.quant_state, quant_type="nf4", bnb_quantized=True
            )

        def forward(self, x: Tensor) -> Tensor:
            codes = self.weight if self.weight.dtype == torch.uint8 else codes_of(self.weight)
            return bnb.matmul_4bit(x.to(self.compute_dtype), codes, self.quant_state, bias=self.bias)  # type: ignore[no-any-return]

    return Product4bit


# --- adapters ------------------------------------------------------------------------------------------------------


def _add_adapters(model: Any, tuning: Tuning, device: str) -> None:
    """PEFT's LoRA layers around the targets, in fp32; everything else is frozen."""
    peft = package("peft", f"the method {tuning.method}")
    names = [PROJECTIONS[target] for target in tuning.targets.split("+")]
    config = peft.LoraConfig(
        r=tuning.rank, lora_alpha=tuning.alpha, target_modules=names, lora_dropout=0.0, bias="none"
    )
    peft.inject_adapter_in_model(config, model)
    for name, parameter in model.named_parameters():
        if is_trainable(name, tuning):
            parameter.data = parameter.data.to(device, torch.float32)


@torch.no_grad()
def _fill_adapters(model: Any, spec: RunSpec, reseed: int) -> None:
    """A uniform within 1/sqrt(inputs), as PEFT draws it, but by name; B zero, so the model begins as it was."""
    assert spec.tuning is not None
    for name, parameter in model.named_parameters():
        if ".lora_A." in name:
            value = initial_values(name, parameter.shape, 1, spec.seed, parameter.device)
            value *= 1 / (INIT_STD * math.sqrt(3) * math.sqrt(parameter.shape[1]))
            parameter.copy_(rounded(name, value, spec.training.precision.compute, reseed))
        elif ".lora_B." in name:
            parameter.zero_()
