"""Bytes that the mock server sends: server-sent events in chunks, and the prompt tokens it counts."""

from __future__ import annotations

import json
import time
from functools import cache, lru_cache
from typing import Any

from paceline.serving.http_server import LAST_CHUNK, chunk

WORDS = ("pace", "line", "über", "node", "rank", "wire", "clock", "tie ")
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
_CLOCK_DIGITS = 20


@cache
def event(chat: bool, text: str, role: str | None = None) -> bytes:
    delta = {"role": role, "content": text} if role else {"content": text}
    choice: dict[str, Any] = {"index": 0, "delta": delta} if chat else {"index": 0, "text": text}
    text = json.dumps({"id": "mock", "choices": [choice]}, ensure_ascii=False)
    return b"data: " + text.encode() + b"\n\n"


def prompt_tokens(request: dict[str, Any]) -> int:
    """The number of token ids, or the words of the text, or the words of all messages."""
    prompt = request.get("prompt")
    if isinstance(prompt, list):
        return len(prompt)
    messages = request.get("messages")
    texts = [m.get("content") for m in messages if isinstance(m, dict)] if isinstance(messages, list) else [prompt]
    return sum(len(text.split()) for text in texts if isinstance(text, str))


@lru_cache(maxsize=4096)
def goodbye(tokens: int, prompt: int) -> bytes:
    usage = {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": tokens + prompt}
    last = json.dumps({"id": "mock", "choices": [], "usage": usage}).encode()
    return chunk(b"data: " + last + b"\n\ndata: [DONE]\n\n") + LAST_CHUNK


@cache
def token(chat: bool, text: str) -> bytes:
    return chunk(event(chat, text))


@cache
def _around_clock(chat: bool) -> tuple[bytes, bytes]:
    before, _, after = token(chat, "#" * _CLOCK_DIGITS + " ").partition(b"#" * _CLOCK_DIGITS)
    return before, after


def timed_token(chat: bool) -> bytes:
    before, after = _around_clock(chat)
    return before + b"%020d" % time.monotonic_ns() + after
