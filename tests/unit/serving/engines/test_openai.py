"""An endpoint that already runs is asked who it is; its key goes to it alone, and into no sentence."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator

import pytest
from testbed.listener import listening

from paceline.errors import UnsupportedError
from paceline.serving.engines import openai, vllm

KEY = "sk-verysecret"
Answering = Callable[[bytes], tuple[str, list[bytes]]]


@pytest.fixture
def answering() -> Iterator[Answering]:
    """A port that answers whoever connects with the same bytes; its URL, and what it was asked."""
    with contextlib.ExitStack() as ports:

        def make(answer: bytes) -> tuple[str, list[bytes]]:
            asked: list[bytes] = []

            def serve(peer: socket.socket) -> None:
                asked.append(peer.recv(65_536))
                peer.sendall(answer)

            return f"http://127.0.0.1:{ports.enter_context(listening(serve))}", asked

        yield make


def json_answer(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body


@pytest.mark.parametrize("key", [f"{KEY}\n", f"{KEY}\r\nX: y", f"{KEY}\u2019"])
def test_a_key_that_no_header_carries_is_refused_unsaid(
    key: str, monkeypatch: pytest.MonkeyPatch, golden: object
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", key)
    with pytest.raises(UnsupportedError) as told:
        openai._endpoint("http://127.0.0.1:9", openai.Options())
    assert str(told.value) == golden
    assert "OPENAI_API_KEY" in str(told.value)
    assert KEY not in str(told.value)


def test_the_key_follows_no_redirect(answering: Answering, monkeypatch: pytest.MonkeyPatch, golden: object) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    other, stolen = answering(json_answer(b'{"data": [{"id": "m"}]}'))
    moved = b"HTTP/1.1 302 Found\r\nLocation: %s/v1/models\r\nContent-Length: 0\r\n\r\n" % other.encode()
    url, asked = answering(moved)
    with pytest.raises(UnsupportedError) as caught:
        openai._endpoint(url, openai.Options())
    assert str(caught.value) == golden
    assert "v1" in str(caught.value)
    assert "302" in str(caught.value)
    assert KEY.encode() in asked[0]
    assert stolen == []


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-OpenSSH_9.6\r\n",
        json_answer(b"welcome"),
        json_answer(b"[" * 200_000),
        json_answer(b'{"data": 5}'),
    ],
)
def test_ports_of_another_kind(answer: bytes, answering: Answering, golden: object) -> None:
    with pytest.raises(UnsupportedError) as caught:
        openai._endpoint(answering(answer)[0], openai.Options())
    assert str(caught.value) == golden


def test_a_version_is_no_must(answering: Answering) -> None:
    url, _ = answering(b"SSH-2.0-OpenSSH_9.6\r\n")
    assert openai._version(url, None, None) is None
    assert vllm._read(url, "/metrics") == ""


def test_a_server_that_sends_a_byte_now_and_then_is_given_up(monkeypatch: pytest.MonkeyPatch, golden: object) -> None:
    """Each byte is in time, the answer is not."""
    monkeypatch.setattr(openai, "REQUEST_S", 0.5)
    left = threading.Event()

    def drip(peer: socket.socket) -> None:
        peer.recv(65_536)
        peer.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
        with contextlib.suppress(OSError):
            while not left.wait(0.1):
                peer.sendall(b" ")

    with listening(drip) as port:
        with pytest.raises(UnsupportedError) as caught:
            openai._endpoints(openai.Options(urls=(f"http://127.0.0.1:{port}",)))
        left.set()
    assert str(caught.value).replace(str(port), "PORT") == golden
    assert "0.5 s" in str(caught.value)
