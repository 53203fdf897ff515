"""One request as its body says it: understood whole, or refused with the sentence that its sender gets."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from paceline.serving.replica.settings import Settings
from paceline.serving.replica.wire import Refused
from paceline.serving.replica.words import StandIn, Tokenizer, UnknownWords

# OpenAI's default where a request does not say how long its answer may be.
MOST_UNLESS_TOLD = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    prompt: list[int]
    most: int
    ends: frozenset[int]
    chat: bool
    streams: bool
    wants_usage: bool


def understand(body: bytes, chat: bool, settings: Settings, words: StandIn | Tokenizer) -> Asked:
    try:
        told = json.loads(body)
    except (ValueError, RecursionError):
        told = None
    if not isinstance(told, dict):
        raise Refused(400, "the body is no JSON object")
    if told.get("model") != settings.served:
        raise Refused(404, f"the model {told.get('model')!r} does not exist; it is {settings.served!r}")
    _refuse_what_is_not_done(told)
    prompt = _messages(told, words) if chat else _prompt(told, settings, words)
    most = told.get("max_completion_tokens", told.get("max_tokens", MOST_UNLESS_TOLD))
    if type(most) is not int or most < 1:
        raise Refused(400, f"max_tokens: {most!r} was given; accepted is a whole number from 1")
    if len(prompt) + most > settings.max_length:
        raise Refused(
            400,
            f"a prompt of {len(prompt)} tokens and an answer of {most} were asked for; accepted are "
            f"{settings.max_length} together (max_length)",
        )
    options = told.get("stream_options")
    return Asked(
        prompt=prompt,
        most=most,
        ends=frozenset() if told.get("ignore_eos") else words.ends,
        chat=chat,
        streams=bool(told.get("stream")),
        wants_usage=isinstance(options, dict) and bool(options.get("include_usage")),
    )


def _refuse_what_is_not_done(told: dict[str, Any]) -> None:
    """Answers are greedy and one a request; what asks for another answer must not get this one."""
    if told.get("temperature"):
        raise Refused(400, f"temperature: {told['temperature']!r} was given; accepted is 0, as this server is greedy")
    for name, accepted in (("n", 1), ("best_of", 1), ("logprobs", 0), ("echo", 0), ("stop", 0), ("tools", 0)):
        value = told.get(name)
        if value and value != accepted:
            raise Refused(400, f"{name}: {value!r} was given, which this server does not do")


def _prompt(told: dict[str, Any], settings: Settings, words: StandIn | Tokenizer) -> list[int]:
    prompt = told.get("prompt")
    if isinstance(prompt, str):
        prompt = _encoded(lambda: words.encode(prompt))
    vocabulary = settings.shape.vocab
    sound = isinstance(prompt, list) and prompt and all(type(t) is int and 0 <= t < vocabulary for t in prompt)
    if not sound:
        raise Refused(400, f"prompt: accepted is text, or token ids from 0 to {vocabulary - 1}, at least one")
    return list(prompt or [])


def _messages(told: dict[str, Any], words: StandIn | Tokenizer) -> list[int]:
    messages = told.get("messages")
    if not isinstance(messages, list) or not messages or not all(map(_is_message, messages)):
        raise Refused(400, "messages: accepted is a list of {role, content}, both text")
    return _encoded(lambda: words.encode_messages(messages))


def _is_message(each: object) -> bool:
    return isinstance(each, dict) and all(isinstance(each.get(key), str) for key in ("role", "content"))


def _encoded(encode: Any) -> list[int]:
    try:
        tokens: list[int] = encode()
    except UnknownWords as error:
        raise Refused(400, str(error)) from None
    return tokens
