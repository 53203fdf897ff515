"""What the server of known law says, as bytes: HTTP heads and chunks, server-sent events, and requests taken apart."""

from __future__ import annotations

import json
import time
from functools import cache, lru_cache
from typing import Any

WORDS = ("pace", "line", "über", "node", "rank", "wire", "clock", "tie ")
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"
_CLOCK_DIGITS = 20


def whole_request(received: bytearray) -> tuple[str, bytes, int] | None:
    """Path, body and size of the request at the beginning; None while it is not whole."""
    head_end = received.find(b"\r\n\r\n")
    if head_end < 0:
        return None
    head = bytes(received[:head_end]).decode("latin-1")
    length = 0
    for line in head.split("\r\n")[1:]:
        name, _, value = line.partition(":")
        if name.strip().lower() == "content-length" and value.strip().isdigit():
            length = int(value)
    size = head_end + 4 + length
    if len(received) < size:
        return None
    words = head.split(" ", 2)
    return (words[1] if len(words) > 1 else "/"), bytes(received[head_end + 4 : size]), size


@cache
def event(chat: bool, text: str, role: str | None = None) -> bytes:
    delta = {"role": role, "content": text} if role else {"content": text}
    choice: dict[str, Any] = {"index": 0, "delta": delta} if chat else {"index": 0, "text": text}
    chunk = json.dumps({"id": "mock", "choices": [choice]}, ensure_ascii=False)
    return b"data: " + chunk.encode() + b"\n\n"


def frame(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def prompt_tokens(asked: dict[str, Any]) -> int:
    """Of token ids their number, of text its words between white space, of messages the words of all of them."""
    prompt = asked.get("prompt")
    if isinstance(prompt, list):
        return len(prompt)
    messages = asked.get("messages")
    said = [m.get("content") for m in messages if isinstance(m, dict)] if isinstance(messages, list) else [prompt]
    return sum(len(text.split()) for text in said if isinstance(text, str))


@lru_cache(maxsize=4096)
def goodbye(tokens: int, prompt: int) -> bytes:
    usage = {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": tokens + prompt}
    told = json.dumps({"id": "mock", "choices": [], "usage": usage}).encode()
    return frame(b"data: " + told + b"\n\ndata: [DONE]\n\n") + END


@cache
def token(chat: bool, text: str) -> bytes:
    return frame(event(chat, text))


@cache
def _around_clock(chat: bool) -> tuple[bytes, bytes]:
    before, _, after = token(chat, "#" * _CLOCK_DIGITS + " ").partition(b"#" * _CLOCK_DIGITS)
    return before, after


def timed_token(chat: bool) -> bytes:
    before, after = _around_clock(chat)
    return before + b"%020d" % time.monotonic_ns() + after


def json_answer(status: int, value: object, headers: str = "") -> bytes:
    body = json.dumps(value).encode()
    head = f"HTTP/1.1 {status} -\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n{headers}\r\n"
    return head.encode() + body
