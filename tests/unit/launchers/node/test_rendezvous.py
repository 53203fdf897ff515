"""Nodes on threads of one process meet at a port, or every one of them says why not."""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from paceline.errors import LaunchError
from paceline.launchers.node import rendezvous
from paceline.launchers.node.rendezvous import Meeting, Member


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "MARGIN_S", 0.2)
    monkeypatch.setattr(rendezvous, "RETRY_S", 0.05)


def member(port: int, node: int, nodes: int = 3, secret: str = "run") -> Member:
    return Member(secret=secret, node=node, nodes=nodes, master="127.0.0.1", port=port, host=f"host{node}")


def come(one: Member, patience_s: float) -> Meeting:
    meeting = rendezvous.join(one, patience_s)
    if meeting.listener:
        meeting.listener.close()
    return meeting


def met(*members: Member, patience_s: float = 30.0) -> list[Future[Meeting]]:
    with ThreadPoolExecutor(len(members)) as pool:
        return [pool.submit(come, one, patience_s) for one in members]


def line_of(peer: socket.socket) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(peer.makefile("rb").readline())
    return found


def introduce(peer: socket.socket, secret: str, back: int, node: Any = 1) -> None:
    """As a node that knows this secret does."""
    hello = {"nonce": "n", "node": node, "host": "host1", "address": "127.0.0.1", "port": back}
    one = member(0, 1, secret=secret)
    peer.sendall(json.dumps(rendezvous._signed(one, "node", line_of(peer)["nonce"], "n", hello)).encode() + b"\n")


def knock(port: int) -> socket.socket:
    """A connection, as soon as somebody listens there."""
    for _ in range(600):
        with contextlib.suppress(ConnectionRefusedError):
            return socket.create_connection(("127.0.0.1", port), timeout=30)
        threading.Event().wait(0.05)
    pytest.fail("nobody listens")


def test_all_come_and_know_their_own_address(port: int) -> None:
    found = [future.result() for future in met(*(member(port, node) for node in (2, 0, 1)))]
    assert [(one.own, one.master) for one in found] == [("127.0.0.1", "127.0.0.1")] * 3
    # The store of the ranks has a port of its own, the same for all, and only node 0 listens there.
    assert len({one.port for one in found} - {port}) == 1
    assert [one.listener is not None for one in found] == [False, True, False]


def test_the_store_listens_where_the_nodes_came_from_and_nowhere_else(port: int) -> None:
    with ThreadPoolExecutor(2) as pool:
        first, _ = [pool.submit(rendezvous.join, member(port, node, nodes=2), 30.0) for node in (0, 1)]
        meeting = first.result()
    assert meeting.listener is not None
    with meeting.listener as listener:
        assert listener.getsockname() == ("127.0.0.1", meeting.port)


@pytest.mark.parametrize(
    ("own", "addresses", "one"),
    [
        ("10.0.0.1", ["10.0.0.1", "127.0.0.1", "10.0.0.1"], True),
        ("10.0.0.1", ["10.0.0.1", "192.168.0.1"], False),
        ("fe80::1", ["fe80::1"], False),
        ("::1", ["::1", "127.0.0.1"], True),
    ],
)
def test_one_address_is_enough_unless_nodes_came_over_several_networks(
    own: str, addresses: list[str], one: bool
) -> None:
    assert rendezvous._is_reachable_at(own, addresses) is one


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


def test_a_port_in_use_is_reported(port: int, monkeypatch: pytest.MonkeyPatch, golden: object) -> None:
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
    assert [future.result().own for future in found] == ["127.0.0.1"] * 2


def test_a_node_of_another_attempt_is_not_taken_for_ours(port: int, golden: object) -> None:
    ours = (member(port, 0, nodes=2), member(port, 1, nodes=2, secret="run, an earlier attempt"))
    first, other = met(*ours, patience_s=0.5)
    with pytest.raises(LaunchError) as caught:
        first.result()
    assert str(caught.value) == golden
    with pytest.raises(LaunchError) as caught:
        other.result()
    assert str(caught.value) == golden


def test_another_program_at_the_port_is_not_taken_for_node_0(port: int, golden: object) -> None:
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


def test_who_does_not_know_the_secret_is_sent_away_however_it_asks(port: int) -> None:
    """The run id is no secret. A wrong signature, none, a node number of another type, or a recorded line: all fail."""
    with ThreadPoolExecutor(2) as pool, socket.create_server(("127.0.0.1", 0)) as bell:
        first = pool.submit(come, member(port, 0, nodes=2, secret="of the nodes"), 30.0)
        back = bell.getsockname()[1]
        for secret, node in (("run", 1), ("of the nodes", True), ("of the nodes", "1"), ("of the nodes", [1])):
            with knock(port) as stranger:
                introduce(stranger, secret, back, node)
                assert line_of(stranger) == {"stranger": True}, (secret, node)
        recorded = rendezvous._signed(
            member(port, 1, secret="of the nodes"), "node", "an earlier nonce", "n", {"nonce": "n", "node": 1}
        )
        for line in (recorded, {"node": 1}, {"node": 1, "signature": None}, {"node": 1, "signature": "\ud800"}):
            with knock(port) as stranger:
                line_of(stranger)
                stranger.sendall(json.dumps(line).encode() + b"\n")
                assert line_of(stranger) == {"stranger": True}
        bell.settimeout(0.0)
        with pytest.raises(BlockingIOError):
            bell.accept()  # node 0 connects to nobody that it does not know
        assert pool.submit(come, member(port, 1, nodes=2, secret="of the nodes"), 30.0).result().own == "127.0.0.1"
        assert first.result().own == "127.0.0.1"


def test_a_program_that_poses_as_node_0_is_rejected(port: int) -> None:
    """It would send the nodes to a store of its own."""

    def pose(server: socket.socket) -> None:
        with server.accept()[0] as guest:
            guest.sendall(b'{"nonce": "n"}\n')
            guest.makefile("rb").readline()
            guest.sendall(b'{"go": "192.0.2.9", "port": 1}\n')
        server.close()

    with ThreadPoolExecutor(2) as pool:
        server = socket.create_server(("127.0.0.1", port))
        pool.submit(pose, server)
        with pytest.raises(LaunchError, match=r"another program than node 0 of this run|nothing listens there"):
            pool.submit(rendezvous.join, member(port, 1, nodes=2), 0.2).result()


@pytest.mark.parametrize(
    "said", [b"", b"GET / HTTP/1.0\r\n\r\n", b"[1]\n", b'{"node": 9}\n', b"\xff" * 9000, b"[" * 4000 + b"\n"]
)
def test_strangers_at_the_door_change_nothing(port: int, said: bytes) -> None:
    def intrude() -> None:
        with knock(port) as stranger:
            stranger.sendall(said)

    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(come, member(port, 0, nodes=2), 30.0)
        pool.submit(intrude).result()
        second = pool.submit(come, member(port, 1, nodes=2), 30.0)
        assert (first.result().own, second.result().own) == ("127.0.0.1", "127.0.0.1")


def test_a_message_too_deep_to_be_signed_does_not_end_the_rendezvous(port: int) -> None:
    """Python reads such a message, and fails when it writes it again a few calls deeper."""
    depth = sys.getrecursionlimit()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(come, member(port, 0, nodes=2), 30.0)
        for nested in range(depth - 60, depth):
            with knock(port) as stranger:
                stranger.sendall(b'{"node": ' + b"[" * nested + b"]" * nested + b"}\n")
        assert pool.submit(come, member(port, 1, nodes=2), 30.0).result().own == "127.0.0.1"
        assert first.result().own == "127.0.0.1"


def test_a_program_that_answers_byte_by_byte_is_not_waited_for(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "CONNECT_S", 0.3)
    ended = threading.Event()

    def drip(server: socket.socket) -> int:
        sent = 0
        with server.accept()[0] as guest, contextlib.suppress(OSError):
            while not ended.wait(0.02) and sent < rendezvous.LONGEST_LINE:
                sent += guest.send(b" ")
        return sent

    with ThreadPoolExecutor(2) as pool, socket.create_server(("127.0.0.1", port)) as server:
        dripped = pool.submit(drip, server)
        with pytest.raises(LaunchError, match="another program than node 0"):
            pool.submit(rendezvous.join, member(port, 1, nodes=2), 0.1).result()
        ended.set()
        assert dripped.result() < rendezvous.LONGEST_LINE


def test_many_silent_strangers_keep_no_node_out(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each used to cost node 0 five seconds, one after the other, until its patience ended."""
    monkeypatch.setattr(rendezvous, "MOST_STRANGERS", 20)
    with ThreadPoolExecutor(2) as pool, contextlib.ExitStack() as crowd:
        first = pool.submit(come, member(port, 0, nodes=2), 15.0)
        for _ in range(60):
            crowd.enter_context(knock(port))
        second = pool.submit(come, member(port, 1, nodes=2), 15.0)
        assert (first.result().own, second.result().own) == ("127.0.0.1", "127.0.0.1")


def test_a_node_that_cannot_be_called_back_is_named(port: int, golden: object) -> None:
    """Its own ports are closed to node 0, as behind a firewall that lets only the rendezvous through."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        shut = closed.getsockname()[1]

    def arrive() -> dict[str, Any]:
        with knock(port) as guest:
            introduce(guest, "run", shut)
            return line_of(guest)

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(rendezvous.join, member(port, 0, nodes=2), 30.0)
        word = pool.submit(arrive).result()
    with pytest.raises(LaunchError) as caught:
        first.result()
    assert str(caught.value) == golden
    assert f"{shut}" in str(caught.value)
    assert "failed" in word


def test_two_that_say_they_are_one(port: int) -> None:
    """The later one counts: the earlier may be its own dead connection."""
    with ThreadPoolExecutor(3) as pool, socket.create_server(("127.0.0.1", 0)) as bell:
        first = pool.submit(come, member(port, 0), 30.0)
        earlier = knock(port)
        introduce(earlier, "run", bell.getsockname()[1])
        bell.accept()[0].close()
        second = pool.submit(come, member(port, 1), 30.0)
        assert earlier.recv(4096) == b""
        third = pool.submit(come, member(port, 2), 30.0)
        assert [future.result().own for future in (first, second, third)] == ["127.0.0.1"] * 3
    earlier.close()
