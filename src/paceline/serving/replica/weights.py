"""The model of a replica: random weights of a named shape or those of a local directory, cut for tensor parallelism.

Random weights are a function of (seed, parameter name, position), the same on every device and for every cut. They are
made one parameter at a time, so a model that is cut never stands whole on one device.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.errors import UnsupportedError
from paceline.models.shape import Shape
from paceline.serving.replica.settings import Settings
from paceline.training.decoder import DTYPES, initial_values
from paceline.training.finetuned import architecture, package

# Which side of a weight (outputs, inputs) a device has a part of, by transformers' word for it.
SIDES = {"colwise": 0, "rowwise": 1}
Values = Callable[[str, nn.Parameter], Tensor]


def open_model(settings: Settings, rank: int, device: torch.device) -> Any:
    """Ready to be asked. Under tensor parallelism the part of this rank, with its sums over ranks built in."""
    dtype = DTYPES[settings.precision]
    opened = _directory_model if settings.is_directory else _seeded_model
    model, values = opened(settings, device, dtype)
    sides = sides_of(model) if settings.tensor_parallel > 1 else {}
    _fill(model, values, sides, rank, settings.tensor_parallel)
    body = model.get_decoder()
    if hasattr(body, "rotary_emb"):
        # Its frequencies are no parameters, and those of a model made without memory are not there yet.
        body.rotary_emb = type(body.rotary_emb)(config=model.config)
    if model.config.tie_word_embeddings:
        model.lm_head.weight = model.get_input_embeddings().weight
    for path, side in sides.items():
        hook = _gathered if path == "lm_head" else _summed
        if side == 1 or path == "lm_head":
            model.get_submodule(path).register_forward_hook(hook)
    return model.to(device).eval().requires_grad_(False)


def _seeded_model(settings: Settings, device: torch.device, dtype: torch.dtype) -> tuple[Any, Values]:
    shape = settings.shape
    with torch.device("meta"):
        model = _gpt2(shape) if shape.positions == "learned" else architecture(shape, f"the engine {settings.engine}")

    def values(name: str, parameter: nn.Parameter) -> Tensor:
        value = initial_values(name, parameter.shape, shape.layers, settings.seed, device)
        return value.to(dtype)

    return model, values


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
    """Of Hugging Face's layout; no code that lies beside the weights is run, and no other format than safetensors."""
    transformers = package("transformers", f"the engine {settings.engine}")
    model, told = transformers.AutoModelForCausalLM.from_pretrained(
        settings.model,
        local_files_only=True,
        trust_remote_code=False,
        use_safetensors=True,
        dtype=dtype,
        output_loading_info=True,
    )
    # transformers would fill what is missing with chance.
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    if missing := sorted({*told["missing_keys"]} - tied):
        raise UnsupportedError(f"{settings.model} lacks {len(missing)} weights, {missing[0]} first")
    window = getattr(model.config, "sliding_window", None)
    if window is not None and window < settings.max_length:
        raise UnsupportedError(
            f"{settings.model} attends to {window} tokens, and this engine to all: set max_length to {window} at most"
        )
    return model, lambda _name, parameter: parameter.detach().to(device)


@torch.no_grad()
def _fill(model: Any, values: Values, sides: dict[str, int], rank: int, size: int) -> None:
    for path, module in list(model.named_modules()):
        for key, parameter in list(module.named_parameters(recurse=False)):
            # GPT-2 calls its norms ln, which says nothing to the law of initial values.
            kind = "norm." if isinstance(module, nn.LayerNorm) else ""
            value = values(f"{path}.{kind}{key}", parameter)
            if (side := sides.get(path)) is not None:
                value = _part(key, value, side, rank, size)
            setattr(module, key, nn.Parameter(value, requires_grad=False))


# --- tensor parallelism --------------------------------------------------------------------------------------------


def sides_of(model: Any) -> dict[str, int]:
    """Path of each product that is cut -> the side it is cut along, as transformers' own plan of the architecture says;
    the head too, along the vocabulary, where it is not the embedding."""
    plan = getattr(model.config, "base_model_tp_plan", None) or {}
    found = {}
    for path, module in model.named_modules():
        style = plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", path.removeprefix(f"{model.base_model_prefix}.")))
        if isinstance(module, nn.Linear) and style is not None:
            if style not in SIDES:
                raise UnsupportedError(f"{type(model).__name__} wants {path} {style}; known is {' and '.join(SIDES)}")
            found[path] = SIDES[style]
    if not found:
        raise UnsupportedError(f"transformers has no tensor-parallel plan for {type(model).__name__}")
    if not model.config.tie_word_embeddings:
        found["lm_head"] = 0
    return found


def _part(key: str, value: Tensor, side: int, rank: int, size: int) -> Tensor:
    """What this rank holds. The bias of a product that is summed over ranks is added by one of them."""
    if key == "bias" and side == 1:
        return value if rank == 0 else torch.zeros_like(value)
    return value.tensor_split(size, dim=0 if key == "bias" else side)[rank].clone()


def _summed(_module: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
    dist.all_reduce(output)
    return output


def _gathered(_module: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
    parts = [torch.empty_like(output) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, output)
    return torch.cat(parts, dim=-1)
