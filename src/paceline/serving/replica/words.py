"""Text and tokens of a replica: the tokenizer that lies beside its weights, or a stated stand-in."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# Where a text breaks off in the middle of a character; the next tokens may complete it.
_BROKEN = "\ufffd"


class UnknownWords(Exception):
    """Text was given to a model that has no tokenizer, or messages to one without a chat template."""


class StandIn:
    """Tokens of random weights mean nothing: token 123 reads " t123"."""

    ends: frozenset[int] = frozenset()

    def encode(self, text: str) -> list[int]:
        raise UnknownWords("this model has no tokenizer: give the prompt as token ids")

    def encode_messages(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        raise UnknownWords("this model has no tokenizer with a chat template: ask /v1/completions with token ids")

    def speech(self) -> StandInSpeech:
        return StandInSpeech()


class StandInSpeech:
    def add(self, token: int) -> str:
        return f" t{token}"

    def rest(self) -> str:
        return ""


class Tokenizer:
    """The tokenizer of a local directory; no code that lies beside it is run."""

    def __init__(self, directory: str) -> None:
        from transformers import AutoTokenizer

        self._inner: Any = AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
        self.ends = ends_of(Path(directory))

    def encode(self, text: str) -> list[int]:
        return list(self._inner(text)["input_ids"])

    def encode_messages(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        if not self._inner.chat_template:
            raise UnknownWords("this model's tokenizer has no chat template: ask /v1/completions")
        told = self._inner.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
        return list(self._inner(told, add_special_tokens=False)["input_ids"])

    def speech(self) -> Speech:
        return Speech(self._inner)


class Speech:
    """The text of one answer, piece by piece: a token says what it adds to those before it. Half a character waits for
    the token that completes it."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        # Texts of tokens before `_told` are out; one from `_known` on is enough to read the next in its context.
        self._known = self._told = 0

    def add(self, token: int) -> str:
        self._tokens.append(token)
        return self._new_text(final=False)

    def rest(self) -> str:
        return self._new_text(final=True)

    def _new_text(self, final: bool) -> str:
        before = self._text(self._tokens[self._known : self._told])
        after = self._text(self._tokens[self._known :])
        if after.endswith(_BROKEN) and not final:
            return ""
        self._known, self._told = self._told, len(self._tokens)
        return after[len(before) :]

    def _text(self, tokens: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=True)
        return text


def words_of(directory: str | None) -> StandIn | Tokenizer:
    """Of a directory that has one; random weights of a named shape have none."""
    names = ("tokenizer.json", "tokenizer.model", "vocab.json")
    if directory is None or not any((Path(directory) / name).is_file() for name in names):
        return StandIn()
    return Tokenizer(directory)


def ends_of(directory: Path) -> frozenset[int]:
    """Tokens that end an answer, as the model's generation_config.json says, else its config.json."""
    for name in ("generation_config.json", "config.json"):
        file = directory / name
        told = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id") if file.is_file() else None
        if told is not None:
            return frozenset(told if isinstance(told, list) else [told])
    return frozenset()
