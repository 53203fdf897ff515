"""The client against a server of known law and against servers that misbehave: every request ends once, by its name."""

from __future__ import annotations

import errno
import socket
import ssl
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from testbed.listener import listening
from testbed.requests import request

from paceline.serving.client import http_stream, replicas, schedule
from paceline.serving.client.schedule import ShardResult, Target
from paceline.serving.client.shard import STALE_NS
from paceline.serving.mock import MODES, WORDS, MockReplica

Send = Callable[..., ShardResult]
Make = Callable[..., MockReplica]
TEXT = "".join(WORDS)


def errors(shard: ShardResult) -> dict[str | None, int]:
    return dict(Counter(h.error for h in shard.results))


def test_every_request_is_answered_once_and_by_the_law(replica: Make, send: Send) -> None:
    shard = send(replica(ttft_s=0.05, itl_s=0.01).port, 20)
    assert sorted(h.number for h in shard.results) == list(range(20))
    assert errors(shard) == {None: 20}
    for handled in shard.results:
        assert handled.sent_ns is not None
        assert handled.first_ns is not None
        assert handled.last_ns is not None
        # The law is a lower bound on any machine; how close a quiet one comes is a benchmark's to say. A hundred
        # microseconds are for the bridges between the kernel's clock and the monotonic one.
        assert handled.first_ns - handled.sent_ns >= 49_900_000
        assert handled.last_ns - handled.first_ns >= 0
        assert handled.due_ns <= handled.sent_ns <= handled.first_ns <= handled.last_ns <= (handled.ended_ns or 0)
        assert (handled.reported_tokens, handled.pieces, handled.text) == (8, 8, TEXT)
        assert handled.stamped


def test_a_closed_loop_keeps_its_number_in_flight(replica: Make, send: Send) -> None:
    shard = send(replica().port, 30, due_ns=schedule.closed_loop(30), concurrency=4, connections=4)
    assert errors(shard) == {None: 30}
    assert shard.most_in_flight == 4


def test_a_cap_makes_requests_wait_and_says_so(replica: Make, send: Send) -> None:
    shard = send(replica().port, 20, due_ns=schedule.at_once(20), cap=2)
    assert errors(shard) == {None: 20}
    assert shard.most_in_flight == 2
    assert shard.waited_for_cap > 0
    assert max(shard.schedule_lag_ns) >= 9 * 20_000_000, "what waits in the client is late"


def test_several_replicas_each_get_their_own(replica: Make, send: Send) -> None:
    ports = [replica(model="mock").port, replica(model="mock").port]
    shard = send(0, 20, ports=ports)
    assert errors(shard) == {None: 20}
    assert Counter(h.replica for h in shard.results) == {0: 10, 1: 10}


EXPECTED: dict[str, dict[str | None, int]] = {
    **{mode: {None: 6} for mode in MODES},
    "reset": {"reset": 6},
    "short": {"incomplete": 6},
    "announced": {"truncated": 6},
    "cut": {"truncated": 6},
    "unmarked": {"incomplete": 6},
    "excess": {"excess": 6},
    "whole": {"not_streamed": 6},
    "stall": {"timeout": 6},
    "endless": {"timeout": 6},
    "refuse": {None: 3, "http_429": 3},
    "fail": {None: 3, "http_500": 3},
    "error": {"in_stream": 6},
    "flood": {"too_long": 2},
}


@pytest.mark.parametrize("mode", MODES)
def test_modes(mode: str, replica: Make, send: Send) -> None:
    timeout = 1.0 if mode in ("stall", "endless") else 20.0
    # A hundred megabytes each: two are enough.
    shard = send(replica(mode=mode).port, 2 if mode == "flood" else 6, timeout_s=timeout)
    assert errors(shard) == EXPECTED[mode]
    for handled in shard.results:
        if handled.error is None:
            assert handled.text == TEXT or mode == "clock"
            assert handled.reported_tokens == (None if mode == "terse" else 8)
            assert handled.pieces == (4 if mode == "double" else 8)


def test_the_kernel_had_a_token_after_the_server_sent_it(replica: Make, send: Send) -> None:
    """Both on one clock: a stamp before the sending would come from another event, or from a wrong bridge of clocks."""
    shard = send(replica(mode="clock").port, 20)
    assert errors(shard) == {None: 20}
    for handled in shard.results:
        told = [int(word) for word in str(handled.text).split()]
        assert len(told) == len(handled.token_ns) == 8
        # A hundred microseconds for the bridge between the two clocks.
        assert all(stamp > sent - 100_000 for sent, stamp in zip(told, handled.token_ns, strict=True))


def test_an_answer_is_ended_at_the_bound_that_was_given(replica: Make, send: Send) -> None:
    shard = send(replica().port, 3, longest_body=400)
    assert errors(shard) == {"too_long": 3}
    assert errors(send(replica().port, 3, longest_body=4000)) == {None: 3}


def test_a_read_without_the_kernels_time_is_not_called_stamped(
    replica: Make, send: Send, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system took the option and sends no times, as some do."""
    monkeypatch.setattr(http_stream.clocks, "stamp_in_kernel", lambda _: True)
    shard = send(replica().port, 3)
    assert errors(shard) == {None: 3}
    assert [h.stamped for h in shard.results] == [False] * 3


def test_a_host_that_falls_silent_is_noticed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        made = http_stream.Connection(0, (socket.AF_INET, listener.getsockname()), 0)
        assert made.sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert made.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == http_stream.KEEP_ALIVE_S
        assert made.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == http_stream.SILENT_S * 1000
        assert made.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_SYNCNT) == http_stream.SYN_TRIES
        made.close()


def test_authorities_are_read_once_for_each_target(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[ssl.SSLContext] = []
    real = ssl.create_default_context
    monkeypatch.setattr(ssl, "create_default_context", lambda **given: made.append(real(**given)) or made[-1])
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        connections = replicas.ConnectionPool([Target(host="127.0.0.1", port=port, tls=True)], 0)
        for _ in range(3):
            connections.open(0)
        connections.close()
    assert len(made) == 1


def test_chat(replica: Make, send: Send) -> None:
    shard = send(replica(mode="role").port, 4, request(path="/v1/chat/completions"))
    assert {h.text for h in shard.results} == {TEXT}


def test_a_model_that_does_not_exist(replica: Make, send: Send, golden: object) -> None:
    shard = send(replica().port, 3, request(model="other"))
    assert errors(shard) == {"http_404": 3}
    assert str(shard.results[0].detail) == golden
    assert "other" in str(shard.results[0].detail)


def test_nobody_listens(send: Send) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    assert errors(send(port, 5)) == {"connect": 5}


@pytest.mark.parametrize("code", [errno.EMFILE, errno.EADDRNOTAVAIL])
def test_what_the_client_ran_out_of_is_not_the_fault_of_a_replica(
    code: int, replica: Make, send: Send, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(code, "no more")

    monkeypatch.setattr(replicas, "Connection", fail)
    shard = send(0, 8, ports=[replica().port, replica().port], reassigns=True)
    assert errors(shard) == {"client": 8}
    assert (shard.died_ns, shard.reassigned) == ({}, {})


@pytest.mark.parametrize("linger", [None, struct.pack("ii", 1, 0)], ids=["closed", "reset"])
def test_a_kept_connection_that_was_given_up_is_asked_again(linger: bytes | None, send: Send) -> None:
    """The server answers one request per connection and gives it up when the next one comes."""
    listener = socket.create_server(("127.0.0.1", 0))
    asked: list[int] = []

    def serve() -> None:
        for _ in range(4):
            peer, _ = listener.accept()
            peer.recv(65536)
            asked.append(1)
            peer.sendall(
                b'HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\ndata: {"choices": [{"text": "a"}]}\n\ndata: [DONE]\n\n'
            )
            peer.recv(65536)
            if linger:
                peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            peer.close()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    shard = send(listener.getsockname()[1], 4, due_ns=schedule.closed_loop(4), concurrency=1)
    assert errors(shard) == {None: 4}
    assert [h.retried for h in shard.results] == [False, True, True, True]
    assert [h.attempt for h in shard.results] == [0, 1, 1, 1]
    assert len(asked) == 4


def test_a_request_that_was_worked_on_is_not_asked_again(send: Send) -> None:
    """The server closes a kept connection long after the second request came: it had begun on it."""
    asked: list[bytes] = []

    def serve(peer: socket.socket) -> None:
        asked.append(peer.recv(65536))
        peer.sendall(
            b'HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\ndata: {"choices": [{"text": "a"}]}\n\ndata: [DONE]\n\n'
        )
        asked.append(peer.recv(65536))
        time.sleep(3 * STALE_NS / 1e9)

    with listening(serve) as port:
        shard = send(port, 2, due_ns=schedule.closed_loop(2), concurrency=1)
    assert errors(shard) == {None: 1, "closed": 1}
    assert len(asked) == 2


def test_a_certificate_that_nobody_signed(send: Send, tmp_path: Any) -> None:
    import subprocess

    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    names = ["-addext", "subjectAltName=DNS:localhost"]
    subprocess.run([*command, *names, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                peer, _ = listener.accept()
                with context.wrap_socket(peer, server_side=True) as tls:
                    while tls.recv(65536):
                        body = b'data: {"choices": [{"text": "a"}]}\n\ndata: [DONE]\n\n'
                        tls.sendall(f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
            except ssl.SSLError:
                continue
            except OSError:
                return

    threading.Thread(target=serve, daemon=True).start()
    port = listener.getsockname()[1]
    trusted = [Target(host="localhost", port=port, tls=True, certificates=str(certificate))]
    assert errors(send(port, 3, targets=trusted, due_ns=schedule.closed_loop(3), concurrency=1)) == {None: 3}
    doubted = [Target(host="localhost", port=port, tls=True)]
    assert errors(send(port, 3, targets=doubted, due_ns=schedule.closed_loop(3), concurrency=1)) == {"tls": 3}
    listener.close()
