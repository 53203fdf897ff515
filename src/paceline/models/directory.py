"""A named shape as a directory for model servers: its configuration, and a tokenizer for all token ids.

It has no weights: servers create random ones, which compute as fast as real ones. Text is read byte by byte, without
merges; ids beyond the bytes are words. Every id has its own visible character or word, even bytes that are not
characters: answers of random weights mean nothing, but each token must be visible.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from paceline.models.shape import Shape

BYTES = 256
_CLASSES = {"llama": "LlamaForCausalLM", "mixtral": "MixtralForCausalLM", "gpt2": "GPT2LMHeadModel"}


def unservable(shape: Shape) -> str | None:
    """Why servers cannot load this shape; None if they can."""
    llama = (shape.positions, shape.norm, shape.gated) == ("rope", "rmsnorm", True)
    gpt2 = (shape.positions, shape.norm, shape.gated) == ("learned", "layernorm", False)
    if not llama and not gpt2:
        return f"{shape.name} is neither like Llama nor like GPT-2, which servers support"
    if gpt2 and (shape.experts or not shape.bias or shape.heads != shape.kv_heads):
        return f"{shape.name} differs from GPT-2, which has biases, as many kv_heads as heads and no experts"
    if gpt2 and shape.head_dim * shape.heads != shape.hidden:
        return f"{shape.name} differs from GPT-2, where heads times head_dim is the hidden size"
    if shape.experts and shape.bias:
        return f"{shape.name} has both experts and biases, which no known architecture has"
    if shape.vocab < BYTES:
        return f"{shape.name} has {shape.vocab} token ids; a tokenizer needs {BYTES}, one for each byte"
    return None


def write(directory: Path, shape: Shape, dtype: str) -> None:
    """Write config.json and a tokenizer; dtype is that of the configuration (float32, bfloat16, float16)."""
    files = {"config.json": configuration(shape, dtype), "tokenizer.json": tokenizer(shape.vocab)}
    files["tokenizer_config.json"] = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": shape.context}
    files["tokenizer_config.json"]["chat_template"] = "{% for said in messages %}{{ said['content'] }}\n{% endfor %}"
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")


def configuration(shape: Shape, dtype: str) -> dict[str, Any]:
    """The configuration as transformers writes it, without an end token: random weights could emit it at any time."""
    assert unservable(shape) is None
    kind = "gpt2" if shape.positions == "learned" else "mixtral" if shape.experts else "llama"
    fields = _gpt2(shape) if kind == "gpt2" else _llama(shape)
    if kind == "mixtral":
        fields |= {"num_local_experts": shape.experts, "num_experts_per_tok": shape.experts_per_token}
        fields["sliding_window"] = None
    ends = {"bos_token_id": None, "eos_token_id": None, "tie_word_embeddings": shape.tied}
    about = {"architectures": [_CLASSES[kind]], "model_type": kind, "dtype": dtype, "vocab_size": shape.vocab}
    return {**about, **fields, **ends}


def _llama(shape: Shape) -> dict[str, Any]:
    return {
        "hidden_size": shape.hidden,
        "intermediate_size": shape.ffn,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": shape.context,
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.rope_theta,
        "attention_bias": shape.bias,
        "mlp_bias": shape.bias,
    }


def _gpt2(shape: Shape) -> dict[str, Any]:
    return {
        "n_embd": shape.hidden,
        "n_inner": shape.ffn,
        "n_layer": shape.layers,
        "n_head": shape.heads,
        "n_positions": shape.context,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": shape.norm_eps,
    }


def tokenizer(vocab: int) -> dict[str, Any]:
    """A tokenizer in the format of the package tokenizers: one id per byte, the rest are words."""
    # The visible character of each byte, as in GPT-2: itself, or one from 256 on.
    visible = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(BYTES, 2 * BYTES))
    ids = {chr(byte if byte in visible else next(others)): byte for byte in range(BYTES)}
    ids |= {f"Ġw{number}": number for number in range(BYTES, vocab)}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": {"type": "Fuse"},
        "model": {"type": "BPE", "vocab": ids, "merges": []},
    }
