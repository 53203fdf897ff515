"""Nodes on threads of one process meet at a port, or every one of them says why not."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from paceline.errors import LaunchError
from paceline.launchers.node import rendezvous
from paceline.launchers.node.rendezvous import Member


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "MARGIN_S", 0.2)
    monkeypatch.setattr(rendezvous, "RETRY_S", 0.05)


def member(port: int, node: int, nodes: int = 3, key: str = "run") -> Member:
    return Member(key=key, node=node, nodes=nodes, master="127.0.0.1", port=port, host=f"host{node}")


def met(*members: Member, patience_s: float = 30.0) -> list[Future[str]]:
    with ThreadPoolExecutor(len(members)) as pool:
        return [pool.submit(rendezvous.join, one, patience_s) for one in members]


HELLO = {"key": "run", "node": 1, "host": "host1", "address": "127.0.0.1"}


def knock(port: int) -> socket.socket:
    """A connection, as soon as somebody listens there."""
    for _ in range(600):
        with contextlib.suppress(ConnectionRefusedError):
            return socket.create_connection(("127.0.0.1", port), timeout=30)
        threading.Event().wait(0.05)
    pytest.fail("nobody listens")


def test_all_come_and_know_their_own_address(port: int) -> None:
    found = met(*(member(port, node) for node in (2, 0, 1)))
    assert [future.result() for future in found] == ["127.0.0.1"] * 3
    # The port is free for the ranks.
    socket.create_server(("127.0.0.1", port)).close()


def test_one_address_for_all_where_some_came_from_node_0s_own_host() -> None:
    assert rendezvous._common_address(["127.0.1.1", "10.0.0.1"]) == "10.0.0.1"
    assert rendezvous._common_address(["::1", "127.0.0.1"]) == "::1"


def test_who_never_came_is_named_to_all(port: int, golden: object) -> None:
    first, second = met(member(port, 0, nodes=4), member(port, 2, nodes=4), patience_s=1.0)
    with pytest.raises(LaunchError) as caught:
        first.result()
    assert str(caught.value) == golden
    assert "host0" in str(caught.value)
    assert "127.0.0.1" in str(caught.value)
    with pytest.raises(LaunchError) as caught:
        second.result()
    assert str(caught.value) == golden


def test_a_port_that_is_taken_is_told(port: int, monkeypatch: pytest.MonkeyPatch, golden: object) -> None:
    monkeypatch.setattr(rendezvous, "PORT_WAIT_S", 0.1)
    with socket.create_server(("127.0.0.1", port)):
        (first,) = met(member(port, 0), patience_s=0.2)
    with pytest.raises(LaunchError) as caught:
        first.result()
    assert str(caught.value) == golden
    assert f"{port}" in str(caught.value)


def test_a_port_that_gets_free_in_time_is_used(port: int) -> None:
    server = socket.create_server(("127.0.0.1", port))
    threading.Timer(0.3, server.close).start()
    found = met(member(port, 0, nodes=2), member(port, 1, nodes=2))
    assert [future.result() for future in found] == ["127.0.0.1"] * 2


def test_a_node_of_another_attempt_is_not_taken_for_ours(port: int, golden: object) -> None:
    ours = (member(port, 0, nodes=2), member(port, 1, nodes=2, key="run, an earlier attempt"))
    first, other = met(*ours, patience_s=0.5)
    with pytest.raises(LaunchError) as caught:
        first.result()
    assert str(caught.value) == golden
    with pytest.raises(LaunchError) as caught:
        other.result()
    assert str(caught.value) == golden


def test_another_program_at_the_port_is_told_from_node_0(port: int, golden: object) -> None:
    stop = threading.Event()

    def shut_every_door(server: socket.socket) -> None:
        while not stop.is_set():
            with contextlib.suppress(TimeoutError):
                server.accept()[0].close()

    with socket.create_server(("127.0.0.1", port)) as server:
        server.settimeout(0.05)
        thread = threading.Thread(target=shut_every_door, args=(server,))
        thread.start()
        (guest,) = met(member(port, 1, nodes=2), patience_s=0.3)
        stop.set()
        thread.join()
    with pytest.raises(LaunchError) as caught:
        guest.result()
    assert str(caught.value) == golden


@pytest.mark.parametrize(
    "said", [b"", b"GET / HTTP/1.0\r\n\r\n", b"[1]\n", b'{"key": "run", "node": 9}\n', b"\xff" * 9000]
)
def test_strangers_at_the_door_change_nothing(port: int, said: bytes) -> None:
    def intrude() -> None:
        with knock(port) as stranger:
            stranger.sendall(said)

    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(rendezvous.join, member(port, 0, nodes=2), 30.0)
        pool.submit(intrude).result()
        second = pool.submit(rendezvous.join, member(port, 1, nodes=2), 30.0)
        assert (first.result(), second.result()) == ("127.0.0.1", "127.0.0.1")


def test_a_node_that_cannot_be_called_back_is_named(port: int, golden: object) -> None:
    """Its own ports are closed to node 0, as behind a firewall that lets only the rendezvous through."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        shut = closed.getsockname()[1]

    def come() -> bytes:
        with knock(port) as guest:
            guest.sendall(json.dumps(HELLO | {"port": shut}).encode() + b"\n")
            return guest.recv(4096)

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(rendezvous.join, member(port, 0, nodes=2), 30.0)
        word = pool.submit(come).result()
    with pytest.raises(LaunchError) as caught:
        first.result()
    assert str(caught.value) == golden
    assert f"{shut}" in str(caught.value)
    assert b"failed" in word


def test_two_that_say_they_are_one(port: int) -> None:
    """The later one counts: the earlier may be its own dead connection."""
    with ThreadPoolExecutor(3) as pool, socket.create_server(("127.0.0.1", 0)) as bell:
        first = pool.submit(rendezvous.join, member(port, 0), 30.0)
        earlier = knock(port)
        earlier.sendall(json.dumps(HELLO | {"port": bell.getsockname()[1]}).encode() + b"\n")
        bell.accept()[0].close()
        second = pool.submit(rendezvous.join, member(port, 1), 30.0)
        assert earlier.recv(4096) == b""
        third = pool.submit(rendezvous.join, member(port, 2), 30.0)
        assert [future.result() for future in (first, second, third)] == ["127.0.0.1"] * 3
    earlier.close()
