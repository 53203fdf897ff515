"""What is recorded of an answer: never the key it was asked with, and in time by the same first token as in reports."""

from __future__ import annotations

import json

import pytest

from paceline.serving.client.http_stream import Response
from paceline.serving.client.schedule import Limits, RequestResult, Target
from paceline.serving.client.shard import DETAIL_BYTES, AnswerParser

KEY = "sk-verysecret"
HEAD = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nAccept: */*\r\n".encode()
TARGET = Target(host="x", port=1, head=HEAD)


def read(status: int, body: bytes, head: bytes = b"") -> RequestResult:
    response = Response()
    response.feed(b"HTTP/1.1 %d X\r\n%sContent-Length: %d\r\n\r\n" % (status, head, len(body)) + body, 1, 1)
    parser = AnswerParser(RequestResult(number=0, replica=0, due_ns=0), response, True, TARGET.secret)
    assert parser.parse_some(keeps_text=True)
    return parser.result


def said(**fields: object) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def test_the_key_is_known_from_the_head() -> None:
    assert TARGET.secret == KEY.encode()
    assert Target(host="x", port=1, head=b"POST / HTTP/1.1\r\nHost: x\r\n").secret is None


@pytest.mark.parametrize("before", [0, DETAIL_BYTES - 5], ids=["whole", "cut"])
def test_a_refusal_that_sends_the_request_back(before: int) -> None:
    handled = read(400, b"x" * before + HEAD, b"Retry-After: " + b"y" * 36 + KEY.encode() + b"\r\n")
    assert handled.error == "http_400"
    assert "sk-" not in str(handled.detail)


@pytest.mark.parametrize(
    "body",
    [
        said(error={"message": HEAD.decode()}),
        said(error="x" * (DETAIL_BYTES - 5) + KEY),
        said(choices=[{"text": f"your key is {KEY[:6]}"}]) + said(choices=[{"text": KEY[6:]}]),
        said(choices=[{"text": "a", "finish_reason": KEY}]),
    ],
    ids=["error", "cut", "text", "finish"],
)
def test_an_answer_that_says_the_key(body: bytes) -> None:
    handled = read(200, body)
    assert "sk-" not in f"{handled.detail} {handled.text} {handled.finish}"


@pytest.mark.parametrize(
    ("times", "late"),
    [
        # 100 ms of reasoning first, the answer after 900 ms: TTFT is 100 ms.
        ({"first_reasoning_ns": 100, "first_ns": 900, "last_ns": 1000}, False),
        ({"first_reasoning_ns": 600, "first_ns": 900, "last_ns": 1000}, True),
        ({"first_reasoning_ns": 600, "first_ns": None, "last_ns": 1000}, True),
        ({"first_reasoning_ns": None, "first_ns": 100, "last_ns": 1000}, False),
    ],
)
def test_time_to_the_first_token_of_either_kind(times: dict[str, int | None], late: bool) -> None:
    handled = RequestResult(number=0, replica=0, due_ns=0, ended_ns=1000, pieces=9, **times)
    assert handled.is_late(Limits(ttft_ns=500)) is late
