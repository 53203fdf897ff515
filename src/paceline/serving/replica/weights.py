"""The model of a replica: random weights of a named shape or those of a local directory, split for tensor parallelism.

Random weights are a function of (seed, parameter name, position), the same on every device and for every split. They
are generated one parameter at a time, so a model that is split never needs to fit on one device.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.errors import MissingPackageError, UnsupportedError
from paceline.models.shape import Shape
from paceline.serving.replica.settings import Settings
from paceline.training.decoder import DTYPES, initial_values
from paceline.training.finetuned import architecture
from paceline.training.frozen_4bit import package

# transformers' name for a split -> the dimension of the weight that is split (0: outputs, 1: inputs).
SIDES = {"colwise": 0, "rowwise": 1}
Values = Callable[[str, nn.Parameter], Tensor]


def open_model(settings: Settings, rank: int, device: torch.device) -> Any:
    """The model, ready for use. With tensor parallelism it is the part of this rank, including the sums over ranks."""
    build = _directory_model if settings.is_directory else _seeded_model
    model, values = build(settings, device, DTYPES[settings.precision])
    sides = sides_of(model) if settings.tensor_parallel > 1 else {}
    with torch.no_grad():
        for path, module in list(model.named_modules()):
            for key, parameter in list(module.named_parameters(recurse=False)):
                # GPT-2 calls its norms ln, which `initial_values` does not know.
                kind = "norm." if isinstance(module, nn.LayerNorm) else ""
                value = values(f"{path}.{kind}{key}", parameter)
                side = sides.get(path)
                if key == "bias" and side == 1:
                    # The product is summed over ranks, so only rank 0 adds the bias.
                    value = value if rank == 0 else torch.zeros_like(value)
                elif side is not None:
                    parts = value.tensor_split(settings.tensor_parallel, dim=0 if key == "bias" else side)
                    value = parts[rank].clone()
                setattr(module, key, nn.Parameter(value, requires_grad=False))
    body = model.get_decoder()
    if hasattr(body, "rotary_emb"):
        # Its frequencies are not parameters. A model on the meta device does not have them yet.
        body.rotary_emb = type(body.rotary_emb)(config=model.config)
    if model.config.tie_word_embeddings:
        model.lm_head.weight = model.get_input_embeddings().weight
    for path, side in sides.items():
        if path == "lm_head":
            model.lm_head.register_forward_hook(_gather)
        elif side == 1:
            model.get_submodule(path).register_forward_hook(_sum)
    return model.to(device).eval().requires_grad_(False)


def _seeded_model(settings: Settings, device: torch.device, dtype: torch.dtype) -> tuple[Any, Values]:
    shape = settings.shape
    with torch.device("meta"):
        model = _gpt2(shape) if shape.positions == "learned" else architecture(shape, f"the engine {settings.engine}")
    return model, lambda name, value: initial_values(name, value.shape, shape.layers, settings.seed, device).to(dtype)


def _gpt2(shape: Shape) -> Any:
    transformers = package("transformers", "a replica")
    config = transformers.GPT2Config(
        vocab_size=shape.vocab,
        n_positions=shape.context,
        n_embd=shape.hidden,
        n_layer=shape.layers,
        n_head=shape.heads,
        n_inner=shape.ffn,
        layer_norm_epsilon=shape.norm_eps,
        tie_word_embeddings=shape.tied,
        bos_token_id=None,
        eos_token_id=None,
    )
    return transformers.GPT2LMHeadModel(config)


def _directory_model(settings: Settings, device: torch.device, dtype: torch.dtype) -> tuple[Any, Values]:
    """A directory in Hugging Face's layout with safetensors. No code in that directory is run."""
    transformers = package("transformers", f"the engine {settings.engine}")
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        settings.model,
        local_files_only=True,
        trust_remote_code=False,
        use_safetensors=True,
        dtype=dtype,
        output_loading_info=True,
    )
    # transformers would fill missing weights with random values.
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    if missing := sorted({*report["missing_keys"]} - tied):
        raise UnsupportedError(f"{settings.model} lacks {len(missing)} weights, {missing[0]} first")
    window = getattr(model.config, "sliding_window", None)
    if window is not None and window < settings.max_length:
        raise UnsupportedError(
            f"{settings.model} attends to {window} tokens, and this engine to all: set max_length to {window} at most"
        )
    return model, lambda _name, parameter: parameter.detach().to(device)


def open_deepspeed_model(settings: Settings, device: torch.device) -> Any:
    """The model inside DeepSpeed's inference engine. Every rank builds all of it, in host memory if it will be split.

    `deepspeed.init_inference` casts the model and, over several devices, splits it with AutoTP: linear layers are
    replaced by DeepSpeed's, which sum over ranks. On one device it changes no arithmetic, so its speed is that of eager
    transformers. Kernel injection is not used: it needs batches that begin and end together, but requests here come and
    go by slot.
    """
    # Otherwise DeepSpeed guesses its accelerator and compiles operators that are not used here.
    os.environ.setdefault("DS_ACCELERATOR", settings.device)
    os.environ.setdefault("DS_SKIP_CUDA_CHECK", "1")
    try:
        import deepspeed
    except ImportError as error:
        raise MissingPackageError(error.name or "deepspeed", "the engine deepspeed", "'paceline[zero]'") from None
    deepspeed.utils.logger.setLevel("ERROR")
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    size = settings.tensor_parallel
    whole = open_model(replace(settings, tensor_parallel=1), 0, device if size == 1 else torch.device("cpu"))
    if size > 1:
        deepspeed.init_distributed(dist_backend="nccl" if settings.device == "cuda" else "gloo", verbose=False)
    engine = deepspeed.init_inference(
        whole, dtype=DTYPES[settings.precision], tensor_parallel={"tp_size": size}, replace_with_kernel_inject=False
    )
    return engine.module.eval().requires_grad_(False)


# --- tensor parallelism ---


def sides_of(model: Any) -> dict[str, int]:
    """Path of each linear layer that is split -> the dimension, by transformers' plan for the architecture. The head is
    split along the vocabulary, unless it is the embedding."""
    plan = getattr(model.config, "base_model_tp_plan", None) or {}
    sides = {}
    for path, module in model.named_modules():
        style = plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", path.removeprefix(f"{model.base_model_prefix}.")))
        if isinstance(module, nn.Linear) and style is not None:
            if style not in SIDES:
                raise UnsupportedError(f"{type(model).__name__} splits {path} {style}; expected {' or '.join(SIDES)}")
            sides[path] = SIDES[style]
    if not sides:
        raise UnsupportedError(f"transformers has no tensor-parallel plan for {type(model).__name__}")
    if not model.config.tie_word_embeddings:
        sides["lm_head"] = 0
    return sides


def _sum(_module: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
    dist.all_reduce(output)
    return output


def _gather(_module: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
    parts = [torch.empty_like(output) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, output)
    return torch.cat(parts, dim=-1)
