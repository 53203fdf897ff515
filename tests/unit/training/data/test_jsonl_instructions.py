"""A JSONL file of instructions: its three forms, what of them is learned, and what is refused with a line number."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.errors import RequestError, UnsupportedError
from paceline.experiment.choices import Choice
from paceline.training.data.corpus import check_data, open_rows
from paceline.training.data.jsonl_instructions import Dialogues
from paceline.training.data.packing import IGNORED_LABEL

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def write(path: Path, *lines: Any) -> Path:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


def opened(path: Path, length: int = 64, **options: Any) -> Dialogues:
    found = open_rows(Choice("jsonl", {"path": str(path), **options}), 512, length, 0)
    assert isinstance(found, Dialogues)
    return found


def learned_text(corpus: Dialogues, index: int = 0) -> bytes:
    labels = corpus.row(index).array[2]
    return bytes(labels[labels != IGNORED_LABEL].tolist())


@pytest.mark.parametrize(
    ("line", "learned"),
    [
        ({"prompt": "2+2=", "response": "4"}, b"4\0"),
        ({"instruction": "add", "input": "2 2", "output": "four"}, b"four\0"),
        ({"instruction": "wave", "output": "hi"}, b"hi\0"),
        (
            {
                "messages": [
                    {"role": "user", "content": "a"},
                    {"role": "assistant", "content": "b"},
                    {"role": "user", "content": "c"},
                    {"role": "assistant", "content": "d"},
                ]
            },
            b"b\nd\n\0",
        ),
    ],
)
def test_only_the_response_is_learned(tmp_path: Path, line: Any, learned: bytes) -> None:
    corpus = opened(write(tmp_path / "a.jsonl", line), length=200)
    assert learned_text(corpus) == learned
    assert corpus.label_tokens(0) == len(learned)
    assert corpus.facts["data.tokenizer"] == "bytes"


def test_bytes_are_the_text(tmp_path: Path) -> None:
    row = opened(write(tmp_path / "a.jsonl", {"prompt": "é", "response": "x"}), length=6).row(0)
    assert row.array[0].tolist() == [0xC3, 0xA9, ord("x"), 0, 0, 0]
    assert row.amounts.tokens == 4


def test_the_file_is_read_again_and_every_document_once(tmp_path: Path) -> None:
    lines = [{"prompt": "p", "response": letter} for letter in "abcde"]
    corpus = opened(write(tmp_path / "a.jsonl", *lines, ""), length=16)
    assert [learned_text(corpus, i)[:1] for i in range(7)] == [b"a", b"b", b"c", b"d", b"e", b"a", b"b"]
    packed = opened(tmp_path / "a.jsonl", length=6, packed=True)
    assert [learned_text(packed, i) for i in range(4)] == [b"a\0b\0", b"c\0d\0", b"e\0", b"a\0b\0"]


def test_long_documents_are_cut_and_those_without_a_response_left_out(tmp_path: Path, golden: object) -> None:
    path = write(tmp_path / "a.jsonl", {"prompt": "p" * 20, "response": "r"}, {"prompt": "pp", "response": "r" * 20})
    corpus = opened(path, length=8)
    assert learned_text(corpus) == b"r" * 6
    assert corpus.facts | {"data.tokenizer": ""} == {
        "data.tokenizer": "",
        "data.documents": 1,
        "data.cut_documents": 2,
        "data.left_out_documents": 1,
    }
    with pytest.raises(RequestError) as caught:
        opened(path, length=2)
    assert str(caught.value) == golden


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[1]",
        '{"text": "a"}',
        '{"prompt": "a", "response": 3}',
        '{"instruction": "a"}',
        '{"messages": [{"role": "user", "content": "a"}]}',
        '{"messages": "a"}',
    ],
)
def test_a_bad_line_is_one_sentence_with_its_number(tmp_path: Path, line: str, golden: object) -> None:
    path = write(tmp_path / "a.jsonl", {"prompt": "a", "response": "b"}, line)
    with pytest.raises(RequestError) as caught:
        check_data(Choice("jsonl", {"path": str(path)}), 32, rows=True)
    assert str(caught.value) == golden
    assert "\n" not in str(caught.value)


def test_what_cannot_be_opened_is_refused_before_the_run(tmp_path: Path, golden: object) -> None:
    path = write(tmp_path / "a.jsonl", {"prompt": "a", "response": "b"})
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for options in (
        {"path": str(tmp_path / "absent")},
        {"path": str(path), "colour": 1},
        {"path": str(path), "packed": "yes"},
        {"path": str(path), "tokenizer": str(tmp_path)},
        {"path": str(write(tmp_path / "empty", ""))},
        {"path": str(tmp_path / "binary")},
    ):
        with pytest.raises(RequestError) as caught:
            check_data(Choice("jsonl", options), 32, rows=True)
        assert str(caught.value) == golden


@pytest.mark.parametrize("answer", ["", " \n"])
def test_a_file_without_a_response_is_refused_before_the_run(tmp_path: Path, answer: str, golden: object) -> None:
    """Each document has an end to learn, so that a run on such a file would go through."""
    silent: list[Any] = [{"prompt": "a", "response": answer}, {"instruction": "a", "output": answer}]
    silent.append({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": answer}]})
    path = write(tmp_path / "a.jsonl", *silent * 50)
    with pytest.raises(RequestError) as caught:
        check_data(Choice("jsonl", {"path": str(path)}), 32, rows=True)
    assert str(caught.value) == golden
    write(path, *silent * 50, {"prompt": "a", "response": "b"})
    check_data(Choice("jsonl", {"path": str(path)}), 32, rows=True)


def test_tokens_beyond_the_vocabulary_are_refused(tmp_path: Path, golden: object) -> None:
    path = write(tmp_path / "a.jsonl", {"prompt": "z", "response": "z"})
    with pytest.raises(UnsupportedError) as caught:
        open_rows(Choice("jsonl", {"path": str(path)}), 100, 32, 0)
    assert str(caught.value) == golden
    assert "122" in str(caught.value)
    assert "100" in str(caught.value)


@pytest.fixture
def tokenizer(tmp_path: Path) -> Any:
    """A real tokenizer of whole words and single marks, saved as a model's directory has it."""
    tokenizers, transformers = pytest.importorskip("tokenizers"), pytest.importorskip("transformers")
    words = ["<unk>", "<s>", "</s>", "<user>", "<assistant>", "user", "assistant", ":", "why", "because", "so", "what"]
    built = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>")
    )
    built.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    built.add_special_tokens(words[1:5])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=built, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def read(corpus: Dialogues, tokenizer: Any) -> tuple[list[str], list[str]]:
    row = corpus.row(0)
    labels = row.array[2][row.array[2] != IGNORED_LABEL]
    return (
        tokenizer.convert_ids_to_tokens(row.array[0][: row.amounts.tokens].tolist()),
        tokenizer.convert_ids_to_tokens(labels.tolist()),
    )


def test_a_tokenizer_marks_beginning_and_end(tmp_path: Path, tokenizer: Any) -> None:
    tokenizer.save_pretrained(tmp_path / "model")
    path = write(tmp_path / "a.jsonl", {"prompt": "why so", "response": "because"})
    corpus = opened(path, tokenizer=str(tmp_path / "model"))
    assert read(corpus, tokenizer) == (["<s>", "why", "so", "because", "</s>"], ["because", "</s>"])
    assert corpus.facts["data.tokenizer"] == "model"


def test_a_chat_template_lays_messages_out_and_every_answer_is_learned(tmp_path: Path, tokenizer: Any) -> None:
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tmp_path / "model")
    said = [("user", "why"), ("assistant", "because"), ("user", "so what"), ("assistant", "so")]
    path = write(tmp_path / "a.jsonl", {"messages": [{"role": r, "content": c} for r, c in said]})
    tokens, learned = read(opened(path, tokenizer=str(tmp_path / "model")), tokenizer)
    turns = "<s> <user> why </s> <assistant> because </s> <user> so what </s> <assistant> so </s>"
    assert tokens == turns.split()
    assert learned == ["because", "</s>", "so", "</s>"]


def test_a_template_that_rewrites_what_was_said_is_refused(tmp_path: Path, tokenizer: Any, golden: object) -> None:
    tokenizer.chat_template = "{{ messages | length }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    tokenizer.save_pretrained(tmp_path / "model")
    said = [{"role": "user", "content": "why"}, {"role": "assistant", "content": "so"}]
    with pytest.raises(UnsupportedError) as caught:
        opened(write(tmp_path / "a.jsonl", {"messages": said}), tokenizer=str(tmp_path / "model"))
    assert str(caught.value) == golden


def test_rows_are_arrays_of_whole_numbers(tmp_path: Path) -> None:
    row = opened(write(tmp_path / "a.jsonl", {"prompt": "a", "response": "b"})).row(0)
    assert row.array.dtype == np.int64
    assert row.array.shape == (3, 64)
