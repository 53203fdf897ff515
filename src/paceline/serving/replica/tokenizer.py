"""Text and tokens of a replica: the tokenizer beside its weights, or a placeholder."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# A text that ends in the middle of a character; the next tokens may complete it.
_BROKEN = "\ufffd"


class NoTokenizer(Exception):
    """Text for a model without a tokenizer, or messages for one without a chat template."""


class PlaceholderTokenizer:
    """Tokens of random weights mean nothing: token 123 becomes " t123"."""

    ends: frozenset[int] = frozenset()

    def encode(self, text: str) -> list[int]:
        raise NoTokenizer("this model has no tokenizer: send the prompt as token ids")

    def encode_messages(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        raise NoTokenizer("this model has no chat template: send token ids to /v1/completions")

    def decoder(self) -> PlaceholderTextDecoder:
        return PlaceholderTextDecoder()


class PlaceholderTextDecoder:
    def add(self, token: int) -> str:
        return f" t{token}"

    def rest(self) -> str:
        return ""


class Tokenizer:
    """The tokenizer of a local directory; no code in that directory is run."""

    def __init__(self, directory: str) -> None:
        from transformers import AutoTokenizer

        self._inner: Any = AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
        self.ends = ends_of(Path(directory))

    def encode(self, text: str) -> list[int]:
        return list(self._inner(text)["input_ids"])

    def encode_messages(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        if not self._inner.chat_template:
            raise NoTokenizer("this model has no chat template: use /v1/completions")
        text = self._inner.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
        return list(self._inner(text, add_special_tokens=False)["input_ids"])

    def decoder(self) -> TextDecoder:
        return TextDecoder(self._inner)


class TextDecoder:
    """The text of one answer, piece by piece: each token returns what it adds. An incomplete character waits for the
    token that completes it."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        # Texts of tokens before `_returned` are out; tokens from `_known` on give the context for the next.
        self._known = self._returned = 0

    def add(self, token: int) -> str:
        self._tokens.append(token)
        return self._new_text(final=False)

    def rest(self) -> str:
        return self._new_text(final=True)

    def _new_text(self, final: bool) -> str:
        before = self._text(self._tokens[self._known : self._returned])
        after = self._text(self._tokens[self._known :])
        if after.endswith(_BROKEN) and not final:
            return ""
        self._known, self._returned = self._returned, len(self._tokens)
        return after[len(before) :]

    def _text(self, tokens: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=True)
        return text


def tokenizer_of(directory: str | None) -> PlaceholderTokenizer | Tokenizer:
    """The tokenizer of a directory that has one; random weights of a named shape have none."""
    names = ("tokenizer.json", "tokenizer.model", "vocab.json")
    if directory is None or not any((Path(directory) / name).is_file() for name in names):
        return PlaceholderTokenizer()
    return Tokenizer(directory)


def ends_of(directory: Path) -> frozenset[int]:
    """Tokens that end an answer, from the model's generation_config.json or else its config.json."""
    for name in ("generation_config.json", "config.json"):
        file = directory / name
        ends = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id") if file.is_file() else None
        if ends is not None:
            return frozenset(ends if isinstance(ends, list) else [ends])
    return frozenset()
