"""HTTP/1.1 as far as a replica speaks it: whole requests in, answers and server-sent events out."""

from __future__ import annotations

import json
from dataclasses import dataclass

LARGEST_HEAD = 65_536
LARGEST_BODY = 64 << 20
REASONS = {200: "OK", 400: "Bad Request", 401: "Unauthorized", 404: "Not Found", 405: "Method Not Allowed"}
REASONS |= {413: "Content Too Large", 503: "Service Unavailable"}
STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nCache-Control: no-cache\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
)
LAST_CHUNK = b"0\r\n\r\n"
DONE = b"data: [DONE]\n\n"


class Refused(Exception):
    """A request that is answered with an error, and why."""

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


def take_request(received: bytearray) -> Request | None:
    """Cut the request at the beginning out of what was received; None while it is not whole."""
    head_end = received.find(b"\r\n\r\n")
    if head_end < 0:
        if len(received) > LARGEST_HEAD:
            raise Refused(413, "the head of the request has no end")
        return None
    first, *lines = bytes(received[:head_end]).decode("latin-1").split("\r\n")
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    size = _length(headers)
    if len(received) < head_end + 4 + size:
        return None
    words = first.split(" ")
    if len(words) != 3 or not words[2].startswith("HTTP/1."):
        raise Refused(400, "the first line is no HTTP request")
    body = bytes(received[head_end + 4 : head_end + 4 + size])
    del received[: head_end + 4 + size]
    return Request(words[0], words[1].partition("?")[0], headers, body)


def _length(headers: dict[str, str]) -> int:
    told = headers.get("content-length", "0")
    if "transfer-encoding" in headers or not told.isdigit():
        raise Refused(400, "a body needs a Content-Length")
    if int(told) > LARGEST_BODY:
        raise Refused(413, f"a body of {told} bytes was given; accepted are {LARGEST_BODY}")
    return int(told)


def answer(status: int, value: object) -> bytes:
    body = json.dumps(value).encode()
    head = (
        f"HTTP/1.1 {status} {REASONS[status]}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def refusal(refused: Refused) -> bytes:
    kind = "invalid_request_error" if refused.status < 500 else "server_error"
    return answer(refused.status, {"error": {"message": str(refused), "type": kind, "code": refused.status}})


def event(value: object) -> bytes:
    return b"data: " + json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"
