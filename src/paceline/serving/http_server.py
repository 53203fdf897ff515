"""HTTP/1.1 for our servers (the replica and the mock): parses requests, formats answers and server-sent events."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus

LARGEST_HEAD = 65_536
LARGEST_BODY = 64 << 20
# More digits cannot be an accepted length.
_MOST_DIGITS = 19
STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nCache-Control: no-cache\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
)
LAST_CHUNK = b"0\r\n\r\n"
DONE = b"data: [DONE]\n\n"


class Refused(Exception):
    """A request that is answered with an error: its status and the reason."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


@dataclass(frozen=True, slots=True)
class Request:
    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def keeps_alive(self) -> bool:
        return self.headers.get("connection", "").lower() != "close"


def take_request(received: bytearray, largest_body: Callable[[dict[str, str]], int] | None = None) -> Request | None:
    """Remove the first request from the received bytes and return it; None while it is incomplete.

    Refused if it is not HTTP or too large. Where the next request begins is then unknown: close the connection.
    largest_body: the bytes that a request with these headers may have, asked before its body is waited for.
    """
    head_end = received.find(b"\r\n\r\n")
    if head_end > LARGEST_HEAD or (head_end < 0 and len(received) > LARGEST_HEAD):
        raise Refused(413, f"the headers are longer than {LARGEST_HEAD} bytes")
    if head_end < 0:
        return None
    first, *lines = bytes(received[:head_end]).decode("latin-1").split("\r\n")
    parts = first.split(" ")
    if len(parts) != 3 or not parts[2].startswith("HTTP/1."):
        raise Refused(400, "the first line is not an HTTP/1 request")
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    length = headers.get("content-length", "0")
    if "transfer-encoding" in headers or not (length.isascii() and length.isdigit()):
        raise Refused(400, "a body needs a Content-Length")
    most = LARGEST_BODY if largest_body is None else largest_body(headers)
    if len(length) > _MOST_DIGITS or int(length) > most:
        raise Refused(413, f"Content-Length: got {length[:_MOST_DIGITS]}, expected at most {most}")
    end = head_end + 4 + int(length)
    if len(received) < end:
        return None
    body = bytes(received[head_end + 4 : end])
    del received[:end]
    return Request(parts[0], parts[1].partition("?")[0], headers, body)


def answer(status: int, value: object, headers: str = "") -> bytes:
    """A complete JSON answer. headers: more lines, each with its line end."""
    body = json.dumps(value).encode()
    head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n{headers}\r\n".encode() + body


def refusal(refused: Refused) -> bytes:
    kind = "invalid_request_error" if refused.status < 500 else "server_error"
    return answer(refused.status, {"error": {"message": str(refused), "type": kind, "code": refused.status}})


def event(value: object) -> bytes:
    return b"data: " + json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"
