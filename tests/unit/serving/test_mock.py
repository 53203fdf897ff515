"""The mock server counts prompt tokens by a known rule, so that prompt tokens per second can be tested."""

from __future__ import annotations

import contextlib
import json
import resource
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.serving import mock


@pytest.mark.parametrize(
    ("asked", "count"),
    [
        ({"prompt": [5, 6, 7]}, 3),
        ({"prompt": "two  words"}, 2),
        ({"messages": [{"role": "system", "content": "be short"}, {"role": "user", "content": "why"}]}, 3),
        ({"messages": ["no message"]}, 0),
        ({}, 0),
    ],
)
def test_prompts_are_counted_by_ids_or_words(asked: dict[str, Any], count: int) -> None:
    assert mock.prompt_tokens(asked) == count
    last = mock.last_events(2, count).split(b"data: ")[1].split(b"\n")[0]
    assert json.loads(last)["usage"] == {
        "prompt_tokens": count,
        "completion_tokens": 2,
        "total_tokens": count + 2,
    }


# --- hostile clients ---


@pytest.fixture
def port() -> Iterator[int]:
    """A mock in a thread, with answers at once."""
    server = mock.MockReplica(mock.Latencies(ttft_s=0.0, itl_s=0.0, tokens=2))
    stop = threading.Event()
    thread = threading.Thread(target=server.serve, args=(stop.is_set,))
    thread.start()
    yield server.port
    stop.set()
    thread.join(30)
    assert not thread.is_alive()


def talk(port: int, data: bytes) -> bytes:
    """What the mock answers before it closes, or a little later."""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as sock:
        sock.sendall(data)
        return sock.recv(65_536)


def posted(body: bytes) -> bytes:
    return b"POST /v1/completions HTTP/1.1\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (posted(b"[" * 200_000), b"400"),
        (posted(b"{"), b"400"),
        (posted(b"\xff\xfe"), b"400"),
        (posted(b'{"max_tokens": "x"}'), b"400"),
        (posted(b'{"max_tokens": [1]}'), b"400"),
        (posted(b'{"max_tokens": 1e999}'), b"400"),
        (posted(b'{"max_tokens": %s}' % (b"9" * 4000)), b"400"),
        (posted(b'{"max_tokens": -1}'), b"400"),
        (posted(b'{"model": "%s"}' % (b"x" * 100_000)), b"404"),
        (posted(b'{"model": {"a": [1]}}'), b"404"),
        (b"GET / HTTP/1.1\r\nContent-Length: \xb2\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n", b"413"),
        (b"\x16\x03\x01\x02\x00\r\n\r\n", b"400"),
    ],
)
def test_a_malformed_request_is_answered_and_the_next_client_too(port: int, data: bytes, status: bytes) -> None:
    answer = talk(port, data)
    assert answer.startswith(b"HTTP/1.1 " + status)
    assert len(answer) < 2000
    assert talk(port, posted(b'{"prompt": "a", "max_tokens": 1}')).startswith(b"HTTP/1.1 200")


def test_slow_clients_and_a_flood_of_connections_do_not_stop_it(port: int) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = [socket.create_connection(("127.0.0.1", port)) for _ in range(20)]
    for sock in held:
        sock.send(b"POST /v1/comp")
    assert talk(port, posted(b"{}")).startswith(b"HTTP/1.1 200")
    try:
        # No more descriptors: connections wait instead of ending the server.
        resource.setrlimit(resource.RLIMIT_NOFILE, (len([*Path("/proc/self/fd").iterdir()]) + 8, limits[1]))
        with contextlib.suppress(OSError):
            while True:
                held.append(socket.create_connection(("127.0.0.1", port), timeout=1))
        time.sleep(0.3)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for sock in held:
            sock.close()
    assert talk(port, posted(b"{}")).startswith(b"HTTP/1.1 200")


def test_a_client_that_reads_nothing_is_closed(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise its answers, a million tokens each, fill the memory."""
    monkeypatch.setattr(mock, "MOST_UNREAD", 1 << 16)
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", port))
        sock.sendall(posted(b'{"max_tokens": 1000000}'))
        deadline = time.monotonic() + 60
        with contextlib.suppress(ConnectionError):
            while time.monotonic() < deadline:
                sock.send(b" ")  # fails once the other end is closed
                time.sleep(0.05)
            pytest.fail("it keeps what nobody reads")
    assert talk(port, posted(b"{}")).startswith(b"HTTP/1.1 200")
