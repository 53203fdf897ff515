"""One completion request: parsed from its body, turned into tokens, and answered as events or as one body."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.host.processes import collection_paused
from paceline.serving import http_server
from paceline.serving.http_server import Refused
from paceline.serving.replica.settings import Settings

# OpenAI's default if a request does not limit its answer.
DEFAULT_MAX_TOKENS = 16
# A text that ends in the middle of a character; the next tokens may complete it.
_BROKEN = "\ufffd"


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest:
    """ends: the tokens that end the answer."""

    prompt: list[int]
    max_tokens: int
    ends: frozenset[int]
    chat: bool
    streams: bool
    wants_usage: bool


def parse(body: bytes, chat: bool, settings: Settings, tokenizer: AnyTokenizer) -> CompletionRequest:
    """The request; Refused with the message that its sender gets."""
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict):
        raise Refused(400, "the body is not a JSON object")
    if fields.get("model") != settings.served:
        raise Refused(404, f"model: got {fields.get('model')!r}, expected {settings.served!r}")
    # Answers are greedy, one per request. A request for anything else must not get such an answer.
    if fields.get("temperature"):
        raise Refused(400, f"temperature: got {fields['temperature']!r}, expected 0: this server is greedy")
    for name, supported in (("n", 1), ("best_of", 1), ("logprobs", 0), ("echo", 0), ("stop", 0), ("tools", 0)):
        value = fields.get(name)
        if value and value != supported:
            raise Refused(400, f"{name}: got {value!r}, which this server does not support")
    prompt = _prompt(fields, chat, settings.shape.vocab, tokenizer)
    max_tokens = fields.get("max_completion_tokens", fields.get("max_tokens", DEFAULT_MAX_TOKENS))
    if type(max_tokens) is not int or max_tokens < 1:
        raise Refused(400, f"max_tokens: got {max_tokens!r}, expected a whole number from 1")
    if len(prompt) + max_tokens > settings.max_length:
        raise Refused(
            400,
            f"got a prompt of {len(prompt)} tokens and an answer of {max_tokens}, expected at most "
            f"{settings.max_length} together (max_length)",
        )
    options = fields.get("stream_options")
    return CompletionRequest(
        prompt=prompt,
        max_tokens=max_tokens,
        ends=frozenset() if fields.get("ignore_eos") else tokenizer.ends,
        chat=chat,
        streams=bool(fields.get("stream")),
        wants_usage=isinstance(options, dict) and bool(options.get("include_usage")),
    )


def _prompt(fields: dict[str, Any], chat: bool, vocabulary: int, tokenizer: AnyTokenizer) -> list[int]:
    def is_message(each: object) -> bool:
        return isinstance(each, dict) and all(isinstance(each.get(key), str) for key in ("role", "content"))

    try:
        if chat:
            messages = fields.get("messages")
            if not isinstance(messages, list) or not messages or not all(map(is_message, messages)):
                raise Refused(400, "messages: expected a list of {role, content}, both text")
            return tokenizer.encode_messages(messages)
        prompt = fields.get("prompt")
        if isinstance(prompt, str):
            prompt = tokenizer.encode(prompt)
    except NoTokenizer as error:
        raise Refused(400, str(error)) from None
    if not isinstance(prompt, list) or not prompt or not all(type(t) is int and 0 <= t < vocabulary for t in prompt):
        raise Refused(400, f"prompt: expected text, or at least one token id from 0 to {vocabulary - 1}")
    return prompt


@dataclass(slots=True)
class Completion:
    """The answer to one request. `add` returns the bytes to send for a token; none while a character is incomplete."""

    number: int
    request: CompletionRequest
    model: str
    decoder: TextDecoder | PlaceholderTokenizer
    tokens: int = 0
    text: list[str] = field(default_factory=list)
    created: int = field(default_factory=lambda: int(time.time()))

    def add(self, token: int, finish: str | None) -> bytes:
        self.tokens += 1
        # The token that ends an answer is counted, but it is not text.
        piece = self.decoder.add(token) if finish != "stop" else ""
        if finish is not None:
            piece += self.decoder.rest()
        if not self.request.streams:
            self.text.append(piece)
            return http_server.answer(200, self._whole(finish)) if finish else b""
        head = http_server.STREAM_HEAD if self.tokens == 1 else b""
        if finish is None:
            return head + (http_server.chunk(self._event(piece, None)) if piece else b"")
        last = self._event(piece, finish)
        if self.request.wants_usage:
            last += http_server.event({**self._head(), "choices": [], "usage": self._usage()})
        return head + http_server.chunk(last + http_server.DONE) + http_server.LAST_CHUNK

    def _event(self, piece: str, finish: str | None) -> bytes:
        content: dict[str, Any] = {"delta": {"content": piece}} if self.request.chat else {"text": piece}
        return http_server.event({**self._head(), "choices": [{"index": 0, **content, "finish_reason": finish}]})

    def _head(self) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self.request.chat else "text_completion"
        return {"id": f"cmpl-{self.number}", "object": kind, "created": self.created, "model": self.model}

    def _whole(self, finish: str | None) -> dict[str, Any]:
        text, chat = "".join(self.text), self.request.chat
        content: dict[str, Any] = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
        head = {**self._head(), "object": "chat.completion" if chat else "text_completion"}
        return {**head, "choices": [{"index": 0, **content, "finish_reason": finish}], "usage": self._usage()}

    def _usage(self) -> dict[str, int]:
        prompt = len(self.request.prompt)
        return {"prompt_tokens": prompt, "completion_tokens": self.tokens, "total_tokens": prompt + self.tokens}


# --- text and tokens ---


class NoTokenizer(Exception):
    """Text for a model without a tokenizer, or messages for one without a chat template."""


class PlaceholderTokenizer:
    """Tokens of random weights mean nothing: token 123 becomes " t123". It decodes its own tokens."""

    ends: frozenset[int] = frozenset()

    def encode(self, text: str) -> list[int]:
        raise NoTokenizer("this model has no tokenizer: send the prompt as token ids")

    def encode_messages(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        raise NoTokenizer("this model has no chat template: send token ids to /v1/completions")

    def decoder(self) -> PlaceholderTokenizer:
        return self

    def add(self, token: int) -> str:
        return f" t{token}"

    def rest(self) -> str:
        return ""


class Tokenizer:
    """The tokenizer of a local directory; no code in that directory is run."""

    def __init__(self, directory: str) -> None:
        # Its import takes seconds, because it imports torch.
        with collection_paused():
            from transformers import AutoTokenizer

        self._inner: Any = AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
        # Tokens that end an answer, from the model's generation_config.json or else its config.json.
        files = [Path(directory, name) for name in ("generation_config.json", "config.json")]
        known = [json.loads(file.read_text(encoding="utf-8")).get("eos_token_id") for file in files if file.is_file()]
        ends: Any = next((each for each in known if each is not None), [])
        self.ends = frozenset(ends if isinstance(ends, list) else [ends])

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
    """The text that each token adds to an answer. An incomplete character waits for the token that completes it."""

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


AnyTokenizer = PlaceholderTokenizer | Tokenizer


def tokenizer_of(directory: str | None) -> AnyTokenizer:
    """The tokenizer of a directory that has one; random weights of a named shape have none."""
    names = ("tokenizer.json", "tokenizer.model", "vocab.json")
    if directory is None or not any((Path(directory) / name).is_file() for name in names):
        return PlaceholderTokenizer()
    return Tokenizer(directory)
