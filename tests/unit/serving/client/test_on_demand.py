"""Requests asked on another program's word: each is told of once, whatever the replica does."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest
from testbed.requests import request

from paceline.serving.client import on_demand
from paceline.serving.client.on_demand import OnDemandClient, OnDemandRequest
from paceline.serving.client.schedule import Target
from paceline.serving.mock import MockReplica

TOKENS = 4
Start = Callable[..., MockReplica]


def target(replica: MockReplica) -> Target:
    return Target(host="127.0.0.1", port=replica.port)


class Heard:
    """callbacks of one client."""

    def __init__(self) -> None:
        self.firsts: list[int] = []
        self.ends: list[tuple[int, int]] = []

    def errand(self, number: int, replicas: int, replica: int | None) -> OnDemandRequest:
        return OnDemandRequest(
            payloads=[request(TOKENS)] * replicas,
            replica=replica,
            first=lambda: self.firsts.append(number),
            ended=lambda tokens: self.ends.append((number, tokens)),
        )


def carried(targets: list[Target], count: int, replica: int | None = 0, **more: Any) -> tuple[Heard, Any]:
    heard = Heard()
    with OnDemandClient(targets, **{"cap": None, "timeout_s": 20.0, **more}) as client:
        client.send([heard.errand(number, len(targets), replica) for number in range(count)])
    return heard, client.account


def test_every_errand_has_one_first_token_and_one_end(replica: Start) -> None:
    heard, account = carried([target(replica())], 20, cap=3)
    assert sorted(heard.firsts) == list(range(20))
    assert sorted(heard.ends) == [(number, TOKENS) for number in range(20)]
    assert account.sent == 20
    assert not account.errors
    assert account.in_flight == [0]


def test_without_a_replica_the_free_one_is_asked(replica: Start) -> None:
    targets = [target(replica()), target(replica())]
    heard, account = carried(targets, 10, replica=None)
    assert len(heard.ends) == 10
    assert account.sent_to == [5, 5]
    assert account.in_flight == [0, 0]


@pytest.mark.parametrize(
    ("mode", "error"), [("fail", "http_500"), ("reset", "reset"), ("stall", "timeout"), ("error", "in_stream")]
)
def test_failures_end_too_and_are_counted(replica: Start, mode: str, error: str) -> None:
    heard, account = carried([target(replica(mode=mode))], 4, timeout_s=0.5 if mode == "stall" else 20.0)
    assert len(heard.ends) == 4
    assert account.errors[error] >= 2
    assert sum(tokens == 0 for _, tokens in heard.ends) == sum(account.errors.values())


def test_an_end_is_reported_whatever_goes_wrong(replica: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """LoadGen waits for each without a bound."""

    def fail(*_: object) -> None:
        raise TypeError("'int' object is not iterable")

    monkeypatch.setattr(on_demand, "understand", fail)
    heard, account = carried([target(replica())], 2)
    assert heard.ends == [(0, 0), (1, 0)]
    assert account.errors == {"malformed": 2}


def test_no_replica_at_all() -> None:
    heard, _ = carried([], 2, replica=None)
    assert heard.ends == [(0, 0), (1, 0)]


def test_nobody_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    heard, account = carried([Target(host="127.0.0.1", port=port)], 2)
    assert heard.ends == [(0, 0), (1, 0)]
    assert account.errors == {"connect": 2}


def test_a_connection_closed_while_idle_costs_no_request() -> None:
    """A server that closes after each answer, without having said so."""
    ended = threading.Event()
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(0.2)
    chunk = b'data: {"choices": [{"text": "a"}]}\n\ndata: [DONE]\n\n'
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(chunk) + chunk

    def serve() -> None:
        while not ended.is_set():
            try:
                client, _ = listener.accept()
            except TimeoutError:
                continue
            with client:
                client.recv(65_536)
                client.sendall(answer)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    heard, account = carried([Target(host="127.0.0.1", port=listener.getsockname()[1])], 6, cap=1)
    ended.set()
    thread.join()
    listener.close()
    assert [tokens for _, tokens in heard.ends] == [1] * 6
    assert not account.errors
