"""Requests to an OpenAI-compatible endpoint, as bytes."""

from __future__ import annotations

import json
from typing import Any


def request(tokens: int = 8, model: str = "mock", path: str = "/v1/completions", **more: Any) -> bytes:
    body = json.dumps({"model": model, "prompt": "x", "max_tokens": tokens, "stream": True, **more}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: replica\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body
