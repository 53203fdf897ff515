"""The shape of a model directory: counted against what transformers builds from the same configuration."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import RequestError
from paceline.experiment.choices import Choice
from paceline.models import arithmetic
from paceline.models.hf_config import read_shape
from paceline.workloads import pretrain

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 120,
    "max_position_embeddings": 50,
}
GPT2 = {"model_type": "gpt2", "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 50, "vocab_size": 120}


def write(folder: Path, **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    "config",
    [
        LLAMA,
        {**LLAMA, "tie_word_embeddings": True},
        {**LLAMA, "attention_bias": True, "mlp_bias": True},
        {**LLAMA, "model_type": "mistral", "head_dim": 24},
        {**LLAMA, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
        {**LLAMA, "model_type": "qwen2"},
        {**LLAMA, "model_type": "qwen3", "head_dim": 32},
        {**LLAMA, "model_type": "gemma", "head_dim": 32},
        GPT2,
        {**GPT2, "n_inner": 96},
    ],
    ids=lambda config: "-".join(map(str, (config["model_type"], *list(config.values())[6:]))),
)
def test_the_shape_has_the_parameters_that_transformers_builds(tmp_path: Path, config: dict[str, Any]) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    settings = transformers.AutoConfig.for_model(**config)
    with torch.device("meta"):
        built = transformers.AutoModelForCausalLM.from_config(settings)
    built.config.save_pretrained(tmp_path)
    for folder in (tmp_path, write(tmp_path / "as_given", **config)):
        shape = read_shape(folder)
        assert arithmetic.parameters(shape) == sum(p.numel() for p in built.parameters())
        assert shape.name == str(folder)


def test_rope_theta_is_found_in_old_and_new_configurations(tmp_path: Path) -> None:
    old, new = {**LLAMA, "rope_theta": 5e5}, {**LLAMA, "rope_parameters": {"rope_theta": 5e5}}
    assert [read_shape(write(tmp_path, **config)).rope_theta for config in (old, new, LLAMA)] == [5e5, 5e5, 1e4]


def test_a_directory_is_a_model_like_a_named_one(tmp_path: Path, golden: object) -> None:
    folder = write(tmp_path / "model", **LLAMA)
    assert arithmetic.load(Choice(str(folder))) == read_shape(str(folder))
    first = arithmetic.load(Choice(str(folder), {"layers": 1}))
    assert first == replace(read_shape(str(folder)), layers=1)
    for options in ({"layers": 99}, {"layers": True}, {"hidden": 8}):
        with pytest.raises(RequestError) as caught:
            arithmetic.load(Choice(str(folder), options))
        assert str(caught.value) == golden
    with pytest.raises(RequestError) as caught:
        arithmetic.load(Choice("no/such"))
    assert str(caught.value) == golden


@pytest.mark.parametrize(
    "config",
    [
        {**LLAMA, "model_type": "mamba"},
        {"hidden_size": 1},
        {"model_type": "llama", "hidden_size": 64},
        {**LLAMA, "attention_bias": True},
        {**LLAMA, "vocab_size": "many"},
        {**LLAMA, "num_attention_heads": 0},
        {**GPT2, "n_embd": "64"},
    ],
)
def test_what_a_shape_cannot_say_is_refused(tmp_path: Path, config: dict[str, Any], golden: object) -> None:
    with pytest.raises(RequestError) as caught:
        read_shape(write(tmp_path, **config))
    assert str(caught.value) == golden
    assert "\n" not in str(caught.value)


def test_a_file_that_is_no_configuration_is_refused(tmp_path: Path, golden: object) -> None:
    for text in ("{", "[]"):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(RequestError) as caught:
            read_shape(tmp_path)
        assert str(caught.value) == golden


def test_the_reference_decoder_is_not_used_for_what_it_lacks(tmp_path: Path, make_spec: Any) -> None:
    import dataclasses

    for kind, words in (("qwen2", "bias on q, k and v alone"), ("qwen3", "norm of q and k")):
        folder = write(tmp_path / kind, **{**LLAMA, "model_type": kind})
        spec = dataclasses.replace(make_spec("ddp", 2), model=Choice(str(folder)))
        assert words in (pretrain.check(spec) or "")


@pytest.mark.parametrize(
    "changed",
    [
        {"quantization_config": {"load_in_4bit": True}},
        {"model_type": ["llama"]},
        {"rope_parameters": {"rope_theta": [1]}},
        {"rope_theta": "abc"},
    ],
    ids=["quantised already", "a list of types", "a list of angles", "words for a number"],
)
def test_what_cannot_be_a_shape_is_a_sentence(tmp_path: Path, changed: dict[str, Any], golden: object) -> None:
    with pytest.raises(RequestError) as caught:
        read_shape(write(tmp_path / "model", **{**LLAMA, **changed}))
    assert str(caught.value) == golden
