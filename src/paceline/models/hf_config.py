"""The shape of a Hugging Face model directory, read from its config.json alone: no package, no weights.

Known are architectures that a `Shape` can say: llama, mistral, qwen2, qwen3, gemma and gpt2. Another one is refused,
because every number computed from a wrong shape would be wrong; a server that knows it can be asked all the same. A
sliding window is not in the shape: sequences longer than the window have fewer attention FLOPs than are counted.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.errors import RequestError
from paceline.models.shape import FAMILIES, Shape

# Whether the head is the embedding where the configuration is silent: transformers' default of each.
_TIED = {"llama": False, "mistral": False, "qwen2": False, "qwen3": False, "gemma": True, "gpt2": True}


def read_shape(directory: str | Path) -> Shape:
    """Of the checkpoint in the directory; the shape carries the directory as its name."""
    folder = Path(directory)
    config = _read(folder)
    kind = config.get("model_type")
    if config.get("quantization_config"):
        raise RequestError(f"model: {folder} holds quantised weights; accepted are unquantised ones")
    if not isinstance(kind, str) or kind not in _TIED:
        known = ", ".join(_TIED)
        raise RequestError(f"model: {folder} is of the architecture {kind!r}; accepted is one of {known}")
    try:
        fields = _gpt2(config) if kind == "gpt2" else _llama(config, kind)
    except KeyError as missing:
        raise RequestError(f"model: {folder}/config.json has no {missing.args[0]}, which {kind} needs") from None
    tied = config.get("tie_word_embeddings", _TIED[kind])
    return Shape(**{**FAMILIES[fields["family"]], **fields, "tied": tied, "name": str(directory)})


def read_vocabulary(directory: str | Path) -> int:
    """How many token ids the checkpoint has, of whatever architecture: where a model reads more than text, those of its
    text."""
    config = _read(Path(directory))
    nested = config.get("text_config")
    found = config if "vocab_size" in config or not isinstance(nested, dict) else nested
    if "vocab_size" not in found:
        raise RequestError(f"model: {directory}/config.json has no vocab_size; accepted is a model of text")
    return _count(found, "vocab_size")


def unknown_shape(directory: str | Path) -> str | None:
    """Why no `Shape` says what this checkpoint is; None where one does."""
    _read(Path(directory))
    try:
        read_shape(directory)
    except RequestError as refused:
        return str(refused)
    return None


def _read(folder: Path) -> dict[str, Any]:
    file = folder / "config.json"
    if not file.is_file():
        raise RequestError(f"model: {str(folder)!r} was given; accepted is a directory with a model's config.json")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        raise RequestError(f"model: {file} is no JSON; accepted is a model's configuration") from None
    if not isinstance(config, dict):
        raise RequestError(f"model: {file} is no object; accepted is a model's configuration")
    return config


def _llama(config: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """llama's forward pass and its near relatives', which differ in biases, norms of q and k, and the head's width."""
    heads, hidden = _count(config, "num_attention_heads"), _count(config, "hidden_size")
    attention_bias, mlp_bias = bool(config.get("attention_bias")), bool(config.get("mlp_bias"))
    if kind != "qwen2" and (attention_bias or mlp_bias) and not (attention_bias and mlp_bias and kind == "llama"):
        raise RequestError(
            f"model: a {kind} with attention_bias {attention_bias} and mlp_bias {mlp_bias} was given; accepted is both "
            "or none, as a shape has a bias on every projection or on none"
        )
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
        "rope_theta": _rope_theta(config),
        "norm_eps": config.get("rms_norm_eps", 1e-6),
    }


def _count(config: Mapping[str, Any], key: str) -> int:
    """One that is divided by before the shape can check it."""
    value = config[key]
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise RequestError(f"model: {key} is {value!r}; accepted is a whole number from 1")
    return value


def _rope_theta(config: Mapping[str, Any]) -> float:
    """At the top in configurations of transformers 4, under rope_parameters in those of 5."""
    nested = config.get("rope_parameters")
    value = nested.get("rope_theta") if isinstance(nested, dict) else None
    found = value or config.get("rope_theta") or 10_000.0
    if not isinstance(found, int | float) or isinstance(found, bool) or found <= 0:
        raise RequestError(f"model: rope_theta is {found!r}; accepted is a positive number")
    return float(found)


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
