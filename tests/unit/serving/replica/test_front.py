"""The HTTP side of a replica, without a model: what is asked, what is refused, and what a stream looks like."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from paceline.serving.client.http_stream import Response, understand
from paceline.serving.replica import front
from paceline.serving.replica.completions import PlaceholderTokenizer, TextDecoder
from paceline.serving.replica.front import Connection, Front
from paceline.serving.replica.settings import Settings

KEY = "a-key"
SETTINGS = Settings(engine="transformers", model="tiny-llama", max_length=32)


class Transport:
    """What was written, and whether the connection was closed."""

    def __init__(self) -> None:
        self.written = bytearray()
        self.closed = False
        self.reads = True

    def write(self, data: bytes) -> None:
        self.written += data

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None:
        self.reads = False

    def resume_reading(self) -> None:
        self.reads = True


class Talk:
    """One connection to a front whose model is this test."""

    def __init__(self, words: Any = None) -> None:
        self.told: list[dict[str, Any]] = []
        self.front = Front(SETTINGS, KEY, words or PlaceholderTokenizer(), self.told.append)
        self.transport = Transport()
        self.connection = Connection(self.front)
        self.connection.connection_made(self.transport)  # type: ignore[arg-type]

    def send(self, path: str = "/v1/completions", key: str = KEY, method: str = "POST", **body: Any) -> None:
        asked = json.dumps({"model": "tiny-llama", "prompt": [1, 2], "max_tokens": 3, **body}).encode()
        head = f"{method} {path} HTTP/1.1\r\nAuthorization: Bearer {key}\r\nContent-Length: {len(asked)}\r\n\r\n"
        self.connection.data_received(head.encode() + asked)

    def answers(self) -> list[tuple[int, bytes]]:
        """Status and body of every whole answer so far, read by the client's own parser."""
        found, rest = [], bytes(self.transport.written)
        while rest:
            response = Response()
            size = next(n for n in range(1, len(rest) + 1) if response.feed(rest[n - 1 : n], 0, 0))
            found.append((response.status, response.body()))
            rest = rest[size:]
        return found


def test_a_stream_has_one_event_a_token_then_usage_then_the_end() -> None:
    talk = Talk()
    talk.send(stream=True, stream_options={"include_usage": True})
    assert talk.told == [{"ask": 1, "prompt": [1, 2], "most": 3, "ends": []}]
    for token, finish in ((7, None), (8, None), (9, "length")):
        talk.front.pass_on([(1, token, finish)])
    response = Response()
    assert response.feed(bytes(talk.transport.written), 0, 0)
    events = list(response.events())
    answer = understand(iter(events))
    assert events[-1].data == b"[DONE]"
    assert (answer.pieces, answer.reported_tokens, answer.prompt_tokens, answer.finish) == (3, 3, 2, "length")
    texts = [json.loads(event.data)["choices"][0]["text"] for event in events[:3]]
    assert texts == [" t7", " t8", " t9"]


def test_a_whole_answer_and_the_next_request_on_the_same_connection() -> None:
    talk = Talk()
    talk.send()
    # Sent before the first one has ended: it waits its turn.
    talk.send(max_tokens=1)
    assert len(talk.told) == 1
    talk.front.pass_on([(1, 7, None), (1, 8, None), (1, 9, "length")])
    talk.front.pass_on([(2, 5, "length")])
    (first, second) = [json.loads(body) for _, body in talk.answers()]
    assert first["choices"][0] == {"index": 0, "text": " t7 t8 t9", "finish_reason": "length"}
    assert first["usage"] == {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}
    assert second["choices"][0]["text"] == " t5"
    assert not talk.transport.closed


def test_the_model_stops_for_a_client_that_left_and_its_tokens_are_dropped() -> None:
    talk = Talk()
    talk.send(stream=True)
    talk.front.pass_on([(1, 7, None)])
    size = len(talk.transport.written)
    talk.connection.connection_lost(None)
    assert talk.told[-1] == {"drop": 1}
    talk.front.pass_on([(1, 8, None)])
    assert len(talk.transport.written) == size


@pytest.mark.parametrize(
    ("asked", "status"),
    [
        ({"key": "another"}, 401),
        ({"model": "other"}, 404),
        ({"path": "/v1/embeddings"}, 404),
        ({"method": "GET"}, 405),
        ({"prompt": [1] * 30}, 400),
        ({"prompt": "text"}, 400),
        ({"prompt": [256]}, 400),
        ({"prompt": []}, 400),
        ({"max_tokens": 0}, 400),
        ({"temperature": 0.7}, 400),
        ({"n": 2}, 400),
        ({"path": "/v1/chat/completions"}, 400),
        ({"path": "/v1/chat/completions", "messages": [{"role": "user", "content": "x"}]}, 400),
    ],
)
def test_what_cannot_be_is_refused_with_a_sentence_and_the_connection_stays(
    asked: dict[str, Any], status: int, golden: object
) -> None:
    talk = Talk()
    talk.send(**asked)
    ((found, body),) = talk.answers()
    assert found == status
    assert json.loads(body)["error"]["message"] == golden
    assert not talk.told
    assert not talk.transport.closed


@pytest.mark.parametrize("bytes_sent", [b"nonsense\r\n\r\n", b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"])
def test_what_is_no_request_ends_the_connection(bytes_sent: bytes) -> None:
    talk = Talk()
    talk.connection.data_received(bytes_sent)
    assert talk.answers()[0][0] == 400
    assert talk.transport.closed


def test_health_needs_no_key_and_models_does() -> None:
    talk = Talk()
    talk.send("/health", key="none", method="GET")
    talk.send("/v1/models", key="none", method="GET")
    talk.send("/v1/models", method="GET")
    statuses = [status for status, _ in talk.answers()]
    assert statuses == [200, 401, 200]
    assert json.loads(talk.answers()[2][1])["data"][0] == {"id": "tiny-llama", "object": "model", "max_model_len": 32}


class Bytes:
    """A tokenizer of bytes."""

    def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
        return bytes(tokens).decode(errors="replace")


def test_half_a_character_waits_for_the_token_that_completes_it() -> None:
    speech = TextDecoder(Bytes())
    assert [speech.add(token) for token in "aé!".encode()] == ["a", "", "é", "!"]
    assert speech.add("é".encode()[0]) == ""
    # An answer may end within a character: what is there is told then.
    assert speech.rest() == "\ufffd"


def test_nobody_without_the_key_may_send_a_large_body() -> None:
    for more in (b"", b"Authorization: Bearer x\r\n"):
        talk = Talk()
        talk.connection.data_received(b"POST /v1/completions HTTP/1.1\r\n%sContent-Length: 1000000\r\n\r\n" % more)
        assert [status for status, _ in talk.answers()] == [413]
        assert talk.transport.closed


def test_requests_that_come_during_an_answer_wait_at_the_client() -> None:
    talk = Talk()
    talk.send()
    assert not talk.transport.reads
    talk.front.pass_on([(1, 7, "stop")])
    assert talk.transport.reads


def test_a_slow_client_is_closed_and_one_too_many_is_not_let_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front, "SLOWEST_REQUEST_S", 0.05)

    async def dribble() -> tuple[bool, bool]:
        slow, quick = Talk(), Talk()
        slow.connection.data_received(b"POST /v1/compl")
        quick.send()
        await asyncio.sleep(0.2)
        return slow.transport.closed, quick.transport.closed

    assert asyncio.run(dribble()) == (True, False)
    monkeypatch.setattr(front, "MOST_CONNECTIONS", 0)
    assert Talk().transport.closed
