"""A named shape as the directory that model servers read: its configuration, and a tokenizer for all of its ids.

There are no weights in it: a server that is told to makes random ones of its own, which compute as fast as any. Text is
read byte by byte, without merges; ids beyond the bytes are words. Every id is shown by a sign or word of its own, also
where a byte alone would be no character: the answers of random weights mean nothing, but each token must be seen.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from paceline.models.shape import Shape

BYTES = 256
_CLASSES = {
    "llama": "LlamaForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "gpt2": "GPT2LMHeadModel",
}


def unservable(shape: Shape) -> str | None:
    """Why no known architecture has this shape; None where one has."""
    llama = (shape.positions, shape.norm, shape.gated) == ("rope", "rmsnorm", True)
    gpt2 = (shape.positions, shape.norm, shape.gated) == ("learned", "layernorm", False)
    if not llama and not gpt2:
        return f"{shape.name} is built neither as Llama nor as GPT-2, which is what servers know"
    if gpt2 and (shape.experts or not shape.bias or shape.heads != shape.kv_heads):
        return f"{shape.name} is no GPT-2 as servers know it: with biases, as many kv_heads as heads and no experts"
    if gpt2 and shape.head_dim * shape.heads != shape.hidden:
        return f"{shape.name} is no GPT-2 as servers know it: heads times head_dim is the hidden size there"
    if shape.experts and shape.bias:
        return f"{shape.name} has experts and biases, which no known architecture has together"
    if shape.vocab < BYTES:
        return f"{shape.name} has {shape.vocab} token ids; a tokenizer needs {BYTES}, one for each byte"
    return None


def write(directory: Path, shape: Shape, dtype: str) -> None:
    """config.json and a tokenizer; dtype is the one that the configuration names (float32, bfloat16, float16)."""
    files = {"config.json": configuration(shape, dtype), "tokenizer.json": tokenizer(shape.vocab)}
    files["tokenizer_config.json"] = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": shape.context}
    files["tokenizer_config.json"]["chat_template"] = "{% for said in messages %}{{ said['content'] }}\n{% endfor %}"
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")


def configuration(shape: Shape, dtype: str) -> dict[str, Any]:
    """As transformers writes it. Nothing ends an answer: random weights would end one at any place."""
    assert unservable(shape) is None
    kind = "gpt2" if shape.positions == "learned" else "mixtral" if shape.experts else "llama"
    fields = _gpt2(shape) if kind == "gpt2" else _llama(shape)
    if kind == "mixtral":
        fields |= {"num_local_experts": shape.experts, "num_experts_per_tok": shape.experts_per_token}
        fields["sliding_window"] = None
    ends = {"bos_token_id": None, "eos_token_id": None, "tie_word_embeddings": shape.tied}
    return {
        "architectures": [_CLASSES[kind]],
        "model_type": kind,
        "dtype": dtype,
        "vocab_size": shape.vocab,
        **fields,
        **ends,
    }


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
    """In the format of the package tokenizers: one id for each byte, the rest are words."""
    ids = {sign: number for number, sign in enumerate(_byte_signs())}
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


def _byte_signs() -> list[str]:
    """The visible character that stands for each byte, as GPT-2 has it: itself, or one from 256 on."""
    visible = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(BYTES, 2 * BYTES))
    return [chr(byte if byte in visible else next(others)) for byte in range(BYTES)]
