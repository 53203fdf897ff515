"""llama.cpp's own server over the weights of a tiny Llama: a real server, up in a second (package xllamacpp).

`python -m testbed.llama_cpp GGUF` serves until its input is closed; its first line tells the URL.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]
SLOTS = 4


def write(directory: Path, file: Path) -> Path:
    """The model of a directory of transformers' as one GGUF file, its numbers unchanged."""
    import gguf
    from safetensors.numpy import load_file

    config = json.loads((directory / "config.json").read_text())
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_name(directory.name)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    _add_tokenizer(writer, directory, config["eos_token_id"])
    for name, tensor in load_file(directory / "model.safetensors").items():
        writer.add_tensor(_name(name), _turned(name, tensor, config))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _add_tokenizer(writer: Any, directory: Path, end: int) -> None:
    import gguf

    told = json.loads((directory / "tokenizer.json").read_text())
    ids: dict[str, int] = dict(told["model"]["vocab"])
    kinds = dict.fromkeys(ids.values(), gguf.TokenType.NORMAL)
    for added in told["added_tokens"]:
        ids[added["content"]] = added["id"]
        kinds[added["id"]] = gguf.TokenType.CONTROL if added["special"] else gguf.TokenType.USER_DEFINED
    tokens = sorted(ids, key=lambda token: ids[token])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([kinds[ids[token]] for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in told["model"]["merges"]])
    writer.add_eos_token_id(end)
    writer.add_add_bos_token(False)
    writer.add_chat_template((directory / "chat_template.jinja").read_text())


_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
_ENDS = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def _name(name: str) -> str:
    part = name.removesuffix(".weight")
    if part in _ENDS:
        return f"{_ENDS[part]}.weight"
    _, _, layer, inside = part.split(".", 3)
    return f"blk.{layer}.{_NAMES[inside]}.weight"


def _turned(name: str, tensor: Any, config: dict[str, Any]) -> Any:
    """Rotary pairs stand side by side in llama.cpp, half a head apart in transformers."""
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for part, count in heads.items():
        if part in name:
            rows, columns = tensor.shape
            return tensor.reshape(count, 2, rows // count // 2, columns).swapaxes(1, 2).reshape(rows, columns)
    return tensor


@contextlib.contextmanager
def server(file: Path) -> Iterator[str]:
    """Its URL, for as long as the block lasts."""
    with subprocess.Popen(
        [sys.executable, "-m", "testbed.llama_cpp", str(file)],
        cwd=TESTS,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            url = process.stdout.readline().strip()
            assert url.startswith("http"), "llama.cpp's server did not start"
            yield url
        finally:
            process.stdin.close()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()


def serve(file: str) -> None:
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = file
    params.model_alias = ["tiny"]
    params.n_ctx, params.n_parallel, params.port = 512 * SLOTS, SLOTS, 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = params.n_threads_http = 2
    params.warmup = params.cache_prompt = params.ui = False
    served = xllamacpp.Server(params)
    sys.stdout.write(f"{served.listening_address}\n")
    sys.stdout.flush()
    sys.stdin.read()


if __name__ == "__main__":
    serve(sys.argv[1])
