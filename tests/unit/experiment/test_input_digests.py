"""What a run reads from the disk is known by what it holds: changed data under the same path is other work."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import pytest

from paceline.experiment import expansion, input_digests
from paceline.experiment.choices import Choice
from paceline.experiment.expansion import load
from paceline.experiment.input_digests import digests
from paceline.experiment.spec import RunSpec

CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "vocab_size": 300,
    "max_position_embeddings": 50,
}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home with a model, a file of instructions and an experiment on both."""
    monkeypatch.setenv("HOME", str(tmp_path))
    model = tmp_path / "models" / "mine"
    model.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps(CONFIG))
    (model / "model.safetensors").write_bytes(bytes(1000))
    (tmp_path / "train.jsonl").write_text('{"prompt": "a", "response": "b"}\n')
    return tmp_path


def specs(home: Path, *settings: str) -> list[RunSpec]:
    file = home / "mine.yaml"
    base = "workload: finetune, precision: fp32, sequence_length: 16, processes: 1, strategy: single"
    file.write_text(f"name: mine\nbase: {{{base}, model: ~/models/mine, data: 'jsonl:path=~/train.jsonl'}}\n")
    return load(str(file), ["device=cpu", *settings])


def only(home: Path, *settings: str) -> RunSpec:
    (spec,) = specs(home, *settings)
    return spec


def test_a_tilde_is_the_home(home: Path) -> None:
    spec = only(home)
    assert spec.model.name == str(home / "models" / "mine")
    assert spec.training.data.options["path"] == str(home / "train.jsonl")


@pytest.mark.parametrize("file", ["train.jsonl", "models/mine/model.safetensors", "models/mine/config.json"])
def test_changed_contents_are_another_run(home: Path, file: str) -> None:
    before, path = only(home), home / file
    assert only(home).run_id == before.run_id
    content = path.read_bytes()
    path.write_bytes(b"{" + content[1:].replace(b"b", b"c").replace(b"\0", b"\1").replace(b"50", b"60"))
    after = only(home)
    for identity in ("run_id", "cell", "work"):
        assert getattr(after, identity) != getattr(before, identity), identity
    path.write_bytes(content)
    os.utime(path, (1, 1))
    assert only(home).run_id == before.run_id, "a date is no content"


def test_tables_name_no_folder(home: Path) -> None:
    spec = only(home)
    axes = spec.axes()
    assert axes["model"] == f"mine@{spec.contents['model'][:8]}"
    assert axes["data"] == f"jsonl:path=train.jsonl@{spec.contents['data'][:8]}"
    assert str(home) not in json.dumps(axes)
    # A record from before contents were known, too; two folders of one name stay apart.
    old = dataclasses.replace(spec, contents={})
    other = dataclasses.replace(old, model=Choice(str(home / "mine")))
    assert str(home) not in json.dumps(old.axes())
    assert old.axes()["model"] != other.axes()["model"]


def test_contents_are_kept_with_the_run(home: Path) -> None:
    spec = only(home)
    assert RunSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec
    bare = {key: value for key, value in spec.to_dict().items() if key != "contents"}
    assert RunSpec.from_dict(bare).contents == {}


def test_a_run_that_reads_no_file_keeps_its_identity(home: Path) -> None:
    spec = only(home, "model=tiny-llama", "data=instructions")
    assert spec.contents == {}
    assert spec.axes()["model"] == "tiny-llama"
    assert expansion.load("quick", ["device=cpu"])[0].contents == {}


def test_a_tokenizer_is_part_of_the_data(home: Path) -> None:
    (home / "words").mkdir()
    data = Choice("jsonl", {"path": str(home / "train.jsonl"), "tokenizer": str(home / "words")})
    found = []
    for text in ("{}", "[]"):
        (home / "words" / "tokenizer.json").write_text(text)
        found.append(digests(Choice("tiny"), data))
    assert found[0] != found[1]


def test_of_a_large_file_blocks_from_start_to_end_are_read(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(input_digests, "WHOLE_BYTES", 100)
    monkeypatch.setattr(input_digests, "BLOCK_BYTES", 8)
    monkeypatch.setattr(input_digests, "BLOCKS", 4)
    file, found = home / "tokens.bin", set()
    for number, place in enumerate((None, 0, 999, 333)):
        content = bytearray(1000)
        if place is not None:
            content[place] = 1
        file.write_bytes(content)
        os.utime(file, (1, number))
        found.add(digests(Choice("tiny"), Choice("file", {"path": str(file)}))["data"])
    assert len(found) == 4


def test_what_is_not_there_has_no_digest(home: Path) -> None:
    assert digests(Choice("no/where"), Choice("jsonl", {"path": str(home / "absent")})) == {}
