"""A causal language model of transformers prepared for fine-tuning, in full or with LoRA adapters.

Weights are a function of (seed, parameter name, position) for a named shape, or read from a local directory. They are
created, rounded and (for qlora) quantised one parameter at a time on the rank's device, so that a 4-bit model never
needs memory for all weights in 16 bit. Every strategy wraps the same module, which does its own casts: frozen weights
are stored in the compute dtype or in 4 bit, adapters in fp32, and autocast multiplies both in the compute dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from paceline.errors import UnsupportedError
from paceline.experiment.spec import RunSpec, Tuning
from paceline.models.arithmetic import load as load_shape
from paceline.models.shape import Shape
from paceline.training.data.corpus import is_packed
from paceline.training.data.packing import IGNORED_LABEL
from paceline.training.decoder import (
    DTYPES,
    INIT_STD,
    balance_loss,
    block_runner,
    change_rounding,
    initial_values,
    rounded,
)
from paceline.training.frozen_4bit import GroupedProduct4bit, package, product_4bit
from paceline.training.mixture import Experts, Mixture, Router, recomputes
from paceline.training.nf4 import has_kernel

PROJECTIONS = {
    "q": "q_proj",
    "k": "k_proj",
    "v": "v_proj",
    "o": "o_proj",
    "gate": "gate_proj",
    "up": "up_proj",
    "down": "down_proj",
}
# The values of a parameter by its name: generated from the seed, or read from a file.
Values = Callable[[str, Tensor], Tensor]


class TunedMixture(Mixture):
    """A mixture of experts as the layers of transformers call it; `term` is the balance term of the last call."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        outputs, balance = super().forward(x)
        if not recomputes():
            self.term = balance
        return outputs


class Tuned(nn.Module):
    """Maps rows to the sum of their losses over learned labels divided by `normaliser`.

    inputs (b, 2, L) are token ids and positions, which restart at 0 with each document of a packed row.
    """

    def __init__(self, model: Any, spec: RunSpec, facts: Mapping[str, Any]) -> None:
        super().__init__()
        assert spec.tuning is not None
        self.model, self.facts, self.shape = model, dict(facts), load_shape(spec.model)
        self.dtype = DTYPES[spec.training.precision.base]
        # Without adapters every weight has the compute dtype already.
        self.autocasts = spec.tuning.has_adapters and self.dtype != torch.float32
        self.packed = is_packed(spec.training.data)
        self.checkpointing = spec.training.checkpointing
        self.run_block = block_runner(self.checkpointing)
        if spec.training.compile and self.checkpointing == "full":
            self.run_block = self._run_compiled_block
        # Read now: a strategy may replace weights by shards.
        names = {dtype: name for name, dtype in DTYPES.items()}
        trainable = {names[p.dtype] for p in self.parameters() if p.requires_grad}
        # A router's weight is small and never in 4 bit.
        products = [part for part in self.blocks.modules() if not isinstance(part, Router)]
        weights = [p for part in products for p in part.parameters(recurse=False) if p.dim() > 1]
        frozen = {names.get(p.dtype, "nf4") for p in weights if not p.requires_grad}
        self.dtypes = {
            "parameters": "+".join(sorted(trainable)),
            "frozen_weights": "+".join(sorted(frozen)) or "none",
        }

    @property
    def blocks(self) -> Any:
        """The decoder layers: the units of sharding, checkpointing and compilation."""
        return self.model.model.layers

    def forward(self, inputs: Tensor, labels: Tensor, normaliser: Tensor) -> Tensor:
        tokens, positions = inputs[:, 0], inputs[:, 1]
        body = self.model.model
        with torch.autocast(tokens.device.type, self.dtype, enabled=self.autocasts):
            x = body.embed_tokens(tokens)
            turn = body.rotary_emb(x, position_ids=positions)
            # Without a mask the fused kernels are causal; padding is on the right, where no token sees it.
            mask = document_mask(positions) if self.packed else None
            for block in self.blocks:
                x = self.run_block(block, x, attention_mask=mask, position_ids=positions, position_embeddings=turn)
            loss = self._loss(body.norm(x), labels, normaliser)
        if not self.shape.experts:
            return loss
        return loss + balance_loss(self.shape, torch.stack([block.mlp.term for block in self.blocks]).sum())

    def _run_compiled_block(self, block: nn.Module, *arguments: Any, **named: Any) -> Tensor:
        """A compiled block saves only its input and recomputes the rest itself (see `prepare_compiler`). While a mode
        watches operators, torch runs the plain code of compiled blocks, which needs the usual checkpointing."""
        checkpointing = "full" if is_in_torch_dispatch_mode() else "none"
        return block_runner(checkpointing)(block, *arguments, **named)

    def compile_loss(self, mode: str) -> None:
        """Compile the loss; its logits are kept for backward, as without compilation."""
        from torch._functorch import config

        compiled: Any = torch.compile(self._loss, mode=mode)

        def loss(x: Tensor, labels: Tensor, normaliser: Tensor) -> Tensor:
            with config.patch(activation_memory_budget=1.0):
                return compiled(x, labels, normaliser)  # type: ignore[no-any-return]

        self._loss = loss  # type: ignore[method-assign]

    def compile_layers(self, mode: str) -> bool:
        """Let `tuned_blocks` compute the blocks, compiled, where it can: layers in 4 bit on a GPU. Returns whether it
        does. With full checkpointing, the inputs of attention and of the MLP are kept, and all else is recomputed."""
        from paceline.training import tuned_blocks

        if self.shape.experts or self.checkpointing == "selective" or not has_kernel(next(self.parameters()).device):
            return False
        halves = tuned_blocks.halves_of(self.blocks)
        if halves is None:
            return False
        tuned_blocks.prepare_compiler()
        compiled: Any = torch.compile(tuned_blocks.block, mode=mode)
        plain, recomputed = block_runner(self.checkpointing), self.checkpointing == "full"

        def run(block: nn.Module, x: Tensor, **named: Any) -> Tensor:
            if is_in_torch_dispatch_mode():
                return plain(block, x, **named)
            if torch.is_grad_enabled() and not x.requires_grad:
                x.requires_grad_()  # of the embedding: the first block would be compiled once more for it
            turn, mask = named["position_embeddings"], named["attention_mask"]
            return compiled(x, halves[block], *turn, mask, self.shape.head_dim, recomputed)  # type: ignore[no-any-return]

        self.run_block = run
        return True

    def _loss(self, x: Tensor, labels: Tensor, normaliser: Tensor) -> Tensor:
        """The cross entropy in fp32 of logits in the compute dtype."""
        logits = self.model.lm_head(x).flatten(0, 1).float()
        losses = F.cross_entropy(logits, labels.flatten(), reduction="sum", ignore_index=IGNORED_LABEL)
        return losses / normaliser

    def scales(self) -> Iterator[tuple[str, Tensor]]:
        """Scales of 4-bit weights, which are not parameters and are whole on every rank."""
        for name, module in self.named_modules():
            state = getattr(module, "quant_state", None)
            if state is not None:
                parts = {"absmax": state.absmax, "code": state.code, "offset": state.offset}
                parts |= {"absmax2": state.state2.absmax, "code2": state.state2.code}
                yield from ((f"{name}.weight.{part}", value) for part, value in parts.items())

    def hold_codes_as_floats(self) -> frozenset[str]:
        """Store 4-bit weights as bf16 numbers with the same bits, and return their names: FSDP2 of torch 2.11 does not
        shard integers. Copies and gathers within one dtype preserve the bits."""
        quantised = {
            name: part for name, part in self.named_modules() if getattr(part, "quant_state", None) is not None
        }
        for part in quantised.values():
            part.weight = nn.Parameter(part.weight.data.flatten().view(torch.bfloat16), requires_grad=False)
        return frozenset(f"{name}.weight" for name in quantised)


def document_mask(positions: Tensor) -> Tensor:
    """(b, 1, L, L), true where attention is allowed: to earlier positions of the same document and itself."""
    document = (positions == 0).cumsum(dim=1)
    same = document[:, None, :, None] == document[:, None, None, :]
    return same & torch.ones_like(same[0, 0]).tril()


def prepare_compiler(checkpointing: str) -> None:
    """Configure torch's compiler for this process, before anything is compiled.

    Full checkpointing is left to the partitioner, with a memory budget for a block's input only. Around compiled blocks
    it would run each a third time from Python, and inside them it would miss bitsandbytes' products.
    """
    import torch._functorch.config

    torch._functorch.config.activation_memory_budget = 0.0 if checkpointing == "full" else 1.0


def is_trainable(name: str, tuning: Tuning) -> bool:
    """Whether the parameter of this name is trained."""
    return not tuning.has_adapters or ".lora_" in name


def build(spec: RunSpec, device: str, reseed: int = 0) -> Tuned:
    """The whole module of a spec on `device`, ready to train (see `decoder.fill` for `reseed`)."""
    assert spec.tuning is not None
    tuning, precision = spec.tuning, spec.training.precision
    # The frozen weights are the same in every reference: their rounding is part of the checkpoint.
    rounding = 0 if tuning.has_adapters else reseed
    open_model = _directory_model if "/" in spec.model.name else _seeded_model
    model, values, facts = open_model(spec, device, rounding)
    dtype = DTYPES[precision.base]
    _replace_mixtures(model, load_shape(spec.model))
    _fill(model, lambda name, parameter: values(name, parameter).to(device, dtype), tuning, dtype)
    model.model.rotary_emb = type(model.model.rotary_emb)(config=model.config).to(device)
    if model.config.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight
    if tuning.has_adapters:
        _add_adapters(model, spec, device, reseed)
        if reseed:
            # Another rounding of the adapters alone would not show in the first step, where their product is zero, and
            # little later.
            change_rounding(model.model.layers, reseed)
    tuned = Tuned(model, spec, facts)
    # Before any forward: in eval mode bitsandbytes repacks 4-bit weights for a CPU, and then trains incorrectly.
    return tuned.train()


def _replace_mixtures(model: Any, shape: Shape) -> None:
    """Let Paceline's own mixture compute the experts, with the weights of the model: its choices are observed, and its
    auxiliary loss is the same for all strategies."""
    for layer, block in enumerate(model.model.layers if shape.experts else ()):
        with torch.device("meta"):
            mixture = TunedMixture(shape, layer)
        theirs = block.mlp
        mixture.router.weight = theirs.gate.weight
        mixture.experts.inputs, mixture.experts.output = theirs.experts.gate_up_proj, theirs.experts.down_proj
        block.mlp = mixture


def _seeded_model(spec: RunSpec, device: str, rounding: int) -> tuple[Any, Values, dict[str, Any]]:
    """A model of the named shape on the meta device, and its values."""
    shape, compute = load_shape(spec.model), spec.training.precision.base

    def values(name: str, parameter: Tensor) -> Tensor:
        value = initial_values(name, parameter.shape, shape.layers, spec.seed, torch.device(device))
        return rounded(name, value, compute, rounding)

    with torch.device("meta"):
        model = architecture(shape, "fine-tuning")
    return model, values, {"weights": "random"}


def architecture(shape: Shape, needed_by: str) -> Any:
    """A transformers model of this shape. Llama and Mistral compute the same; only Llama has biases."""
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
    if shape.experts:
        fields |= {"num_local_experts": shape.experts, "num_experts_per_tok": shape.experts_per_token}
        return transformers.MixtralForCausalLM(transformers.MixtralConfig(sliding_window=None, **fields))
    return transformers.MistralForCausalLM(transformers.MistralConfig(sliding_window=None, **fields))


def _directory_model(spec: RunSpec, device: str, rounding: int) -> tuple[Any, Values, dict[str, Any]]:
    """A Hugging Face model from a local directory, with the first layers of the spec; code in the directory is not
    run."""
    transformers = package("transformers", "fine-tuning")
    dtype, layers = DTYPES[spec.training.precision.base], load_shape(spec.model).layers
    model, loading = transformers.AutoModelForCausalLM.from_pretrained(
        spec.model.name,
        local_files_only=True,
        trust_remote_code=False,
        use_safetensors=True,
        dtype=dtype,
        attn_implementation="sdpa",
        output_loading_info=True,
        num_hidden_layers=layers,
    )
    # transformers would fill missing weights with random values that differ between ranks.
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    if missing := sorted({*loading["missing_keys"]} - tied):
        raise UnsupportedError(f"{spec.model.name} lacks {len(missing)} weights, such as {missing[0]}")
    parts = ("embed_tokens", "layers", "norm", "rotary_emb")
    if not all(hasattr(getattr(model, "model", None), part) for part in parts) or not hasattr(model, "lm_head"):
        raise UnsupportedError(
            f"{spec.model.name} contains a {type(model).__name__}, expected an architecture like Llama's"
        )
    window = getattr(model.config, "sliding_window", None)
    if window is not None and window < spec.training.sequence_length:
        length = spec.training.sequence_length
        raise UnsupportedError(f"{spec.model.name} attends to {window} tokens, fewer than the sequence length {length}")

    def values(name: str, parameter: Tensor) -> Tensor:
        value = parameter.detach().to(device, torch.float32)
        return rounded(name, value, spec.training.precision.base, rounding)

    return model, values, {"weights": "pretrained"}


def _fill(model: Any, values: Values, tuning: Tuning, dtype: torch.dtype) -> None:
    """Give every parameter its value in its final dtype, one at a time."""
    for path, module in list(model.named_modules()):
        inside = path.startswith("model.layers.")
        # A router chooses in the compute dtype: its weight is small, and its choices are part of the work.
        is_product = isinstance(module, nn.Linear) and not isinstance(module, Router)
        if tuning.method == "qlora" and inside and is_product:
            bias = None if module.bias is None else values(f"{path}.bias", module.bias)
            model.set_submodule(path, product_4bit(values(f"{path}.weight", module.weight), bias, dtype))
            continue
        for key, parameter in list(module.named_parameters(recurse=False)):
            value = values(f"{path}.{key}", parameter)
            if tuning.method == "qlora" and isinstance(module, Experts):
                delattr(module, key)
                setattr(module, key, GroupedProduct4bit(value))
            else:
                setattr(module, key, nn.Parameter(value, requires_grad=not tuning.has_adapters))


@torch.no_grad()
def _add_adapters(model: Any, spec: RunSpec, device: str, reseed: int) -> None:
    """Add PEFT's LoRA layers to the targets, in fp32; everything else is frozen.

    A is uniform within 1/sqrt(inputs), as in PEFT, but drawn by name. B is zero, so the model starts unchanged.
    """
    assert spec.tuning is not None
    tuning = spec.tuning
    peft = package("peft", f"the method {tuning.method}")
    names = [PROJECTIONS[target] for target in tuning.targets.split("+")]
    config = peft.LoraConfig(
        r=tuning.rank, lora_alpha=tuning.alpha, target_modules=names, lora_dropout=0.0, bias="none"
    )
    peft.inject_adapter_in_model(config, model)
    for name, parameter in model.named_parameters():
        if is_trainable(name, tuning):
            parameter.data = parameter.data.to(device, torch.float32)
        if ".lora_A." in name:
            value = initial_values(name, parameter.shape, 1, spec.seed, parameter.device)
            value *= 1 / (INIT_STD * math.sqrt(3) * math.sqrt(parameter.shape[1]))
            parameter.copy_(rounded(name, value, spec.training.precision.base, reseed))
        elif ".lora_B." in name:
            parameter.zero_()
