"""One parser for the requests of both servers: whole requests out of any pieces, and hostile ones refused."""

from __future__ import annotations

import pytest

from paceline.serving import http_server
from paceline.serving.http_server import LARGEST_BODY, LARGEST_HEAD, Refused, Request, take_request

WHOLE = b"POST /v1/completions?x=1 HTTP/1.1\r\nContent-Length: 4\r\nConnection: close\r\n\r\nbody"


def test_a_request_comes_byte_by_byte_and_the_next_one_stays() -> None:
    received = bytearray()
    for byte in WHOLE[:-1]:
        received.append(byte)
        assert take_request(received) is None
    received += WHOLE[-1:] + b"GET /health HTTP/1.1\r\n\r\n"
    first = take_request(received)
    assert first == Request("POST", "/v1/completions", {"content-length": "4", "connection": "close"}, b"body")
    assert not first.keeps_alive
    assert take_request(received) == Request("GET", "/health", {}, b"")
    assert not received


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"x" * (LARGEST_HEAD + 1), 413),
        (b"GET / HTTP/1.1\r\nA: " + b"x" * LARGEST_HEAD + b"\r\n\r\n", 413),
        (b"GET / HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % (LARGEST_BODY + 1), 413),
        (b"GET / HTTP/1.1\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n", 413),
        (b"GET / HTTP/1.1\r\nContent-Length: \xb2\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nContent-Length: -1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (b"GET /\r\n\r\n", 400),
        (b"\x16\x03\x01\x00\r\n\r\n", 400),
        (b"GET / HTTP/2\r\n\r\n", 400),
    ],
)
def test_hostile_requests_are_refused(data: bytes, status: int) -> None:
    with pytest.raises(Refused) as refused:
        take_request(bytearray(data))
    assert refused.value.status == status
    assert http_server.refusal(refused.value).startswith(f"HTTP/1.1 {status} ".encode())
