"""The shape of a Hugging Face model directory, read from its config.json only.

Supported are llama, mistral, mixtral, qwen2, qwen3, gemma and gpt2. Others are rejected, because numbers computed from
a wrong shape would be wrong; they can still be load-tested on a server. A sliding window is not part of the shape:
sequences longer than the window have fewer attention FLOPs than counted.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.errors import RequestError
from paceline.models.shape import FAMILIES, Shape

# Whether the head is tied to the embedding by default, as in transformers.
_TIED = {
    "llama": False,
    "mistral": False,
    "mixtral": False,
    "qwen2": False,
    "qwen3": False,
    "gemma": True,
    "gpt2": True,
}


def read_shape(directory: str | Path) -> Shape:
    """The shape of the checkpoint in the directory, named after the directory."""
    folder = Path(directory)
    config = _read(folder)
    kind = config.get("model_type")
    if config.get("quantization_config"):
        raise RequestError(f"model: {folder} has quantised weights, expected unquantised ones.")
    if not isinstance(kind, str) or kind not in _TIED:
        known = ", ".join(_TIED)
        raise RequestError(f"model: {folder} has the architecture {kind!r}, expected one of {known}.")
    try:
        fields = _gpt2(config) if kind == "gpt2" else _llama(config, kind)
    except KeyError as missing:
        raise RequestError(f"model: {folder}/config.json has no {missing.args[0]}, which {kind} needs") from None
    tied = config.get("tie_word_embeddings", _TIED[kind])
    return Shape(**{**FAMILIES[fields["family"]], **fields, "tied": tied, "name": str(directory)})


def read_vocabulary(directory: str | Path) -> int:
    """Number of token ids of a checkpoint of any architecture; of a multimodal model, those of its text part."""
    config = _read(Path(directory))
    nested = config.get("text_config")
    text = config if "vocab_size" in config or not isinstance(nested, dict) else nested
    if "vocab_size" not in text:
        raise RequestError(f"model: {directory}/config.json has no vocab_size, expected a text model.")
    return _count(text, "vocab_size")


def unknown_shape(directory: str | Path) -> str | None:
    """Why this checkpoint has no `Shape`; None if it has one."""
    _read(Path(directory))
    try:
        read_shape(directory)
    except RequestError as refused:
        return str(refused)
    return None


def _read(folder: Path) -> dict[str, Any]:
    file = folder / "config.json"
    if not file.is_file():
        raise RequestError(f"model: got {str(folder)!r}, expected a directory with a model's config.json.")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        raise RequestError(f"model: {file} is not JSON, expected a model configuration.") from None
    if not isinstance(config, dict):
        raise RequestError(f"model: {file} is not an object, expected a model configuration.")
    return config


def _llama(config: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Fields of llama and similar models, which differ in biases, norms of q and k, and head size."""
    heads, hidden = _count(config, "num_attention_heads"), _count(config, "hidden_size")
    attention_bias, mlp_bias = bool(config.get("attention_bias")), bool(config.get("mlp_bias"))
    if kind != "qwen2" and (attention_bias or mlp_bias) and not (attention_bias and mlp_bias and kind == "llama"):
        raise RequestError(
            f"model: got a {kind} with attention_bias {attention_bias} and mlp_bias {mlp_bias}, expected both or "
            "neither: a shape has a bias on every projection or on none."
        )
    # At the top level in transformers 4, under rope_parameters in 5.
    nested = config.get("rope_parameters")
    theta = (isinstance(nested, dict) and nested.get("rope_theta")) or config.get("rope_theta") or 10_000.0
    if not isinstance(theta, int | float) or isinstance(theta, bool) or theta <= 0:
        raise RequestError(f"model, rope_theta: got {theta!r}, expected a positive number.")
    return {
        "family": "llama",
        "layers": config["num_hidden_layers"],
        "hidden": hidden,
        "heads": heads,
        "kv_heads": config.get("num_key_value_heads") or heads,
        "head_dim": config.get("head_dim") or hidden // heads,
        "ffn": config["intermediate_size"],
        "vocab": config["vocab_size"],
        "context": config["max_position_embeddings"],
        "bias": attention_bias and mlp_bias,
        "qkv_bias": kind == "qwen2",
        "qk_norm": kind == "qwen3",
        "rope_theta": float(theta),
        "norm_eps": config.get("rms_norm_eps", 1e-6),
        **(_mixture(config) if kind == "mixtral" else {}),
    }


def _mixture(config: Mapping[str, Any]) -> dict[str, Any]:
    """The experts of a mixtral. transformers' default weight of the auxiliary loss is 0.001."""
    if config.get("router_jitter_noise"):
        raise RequestError("model, router_jitter_noise: got noise, expected 0: routers would choose at random.")
    return {
        "experts": _count(config, "num_local_experts"),
        "experts_per_token": _count(config, "num_experts_per_tok"),
        "aux_loss": config.get("router_aux_loss_coef", 0.001),
    }


def _count(config: Mapping[str, Any], key: str) -> int:
    """A positive whole number; checked here because it is used as a divisor before the shape checks it."""
    value = config[key]
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise RequestError(f"model, {key}: got {value!r}, expected a whole number from 1.")
    return value


def _gpt2(config: Mapping[str, Any]) -> dict[str, Any]:
    hidden, heads = _count(config, "n_embd"), _count(config, "n_head")
    return {
        "family": "gpt",
        "layers": config["n_layer"],
        "hidden": hidden,
        "heads": heads,
        "kv_heads": heads,
        "head_dim": hidden // heads,
        "ffn": config.get("n_inner") or 4 * hidden,
        "vocab": config["vocab_size"],
        "context": config["n_positions"],
        "norm_eps": config.get("layer_norm_epsilon", 1e-5),
    }
