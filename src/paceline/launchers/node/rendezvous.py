"""Nodes meet before their ranks do: node 0 learns who came, the others that it is there, all by which way.

Ranks wait for each other in silence, for ten minutes and more. Here every node says its number at the port where ranks
will meet; node 0 calls each one back at a port of its own choice, as ranks will. Who does not come, or cannot be called
back, is named within the patience. When all have come the port is given up to the ranks.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import json
import socket
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from paceline.errors import LaunchError
from paceline.launchers.node import reachability

RETRY_S = 0.5
# The others tell why they cannot come; node 0 speaks after them.
COURTESY_S = 3.0
# For the nodes of an earlier attempt that are about to end.
PORT_WAIT_S = 15.0
LONGEST_LINE = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathering:
    """Who shall meet. key tells one attempt from every other: a node left from another one is not taken for ours."""

    key: str
    node: int
    nodes: int
    master: str
    port: int
    host: str


def meet(gathering: Gathering, patience_s: float) -> str:
    """Return when all nodes have come: the address of this node that the others know. LaunchError names who did not."""
    return _host(gathering, patience_s) if gathering.node == 0 else _attend(gathering, patience_s)


# --- node 0 ---


def _host(gathering: Gathering, patience_s: float) -> str:
    deadline = time.monotonic() + patience_s + COURTESY_S
    here: dict[int, socket.socket] = {}
    with _listen(gathering, min(patience_s, PORT_WAIT_S)) as server, _shown_out(here):
        while len(here) < gathering.nodes - 1:
            server.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                guest, _ = server.accept()
            except TimeoutError:
                raise _dismissed(here, _absent(gathering, here, patience_s)) from None
            if refusal := _admit(gathering, guest, here):
                raise _dismissed(here, refusal)
        own = _outer([reachability.plain(guest.getsockname()[0]) for guest in here.values()])
        for guest in here.values():
            _tell(guest, {"go": own})
        return own


def _outer(addresses: Iterable[str]) -> str:
    """Of the addresses by which guests came the one that all can use: one of them may have come from this very host."""
    found = list(addresses)
    return next((address for address in found if not _is_inner(address)), found[0])


def _is_inner(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


@contextlib.contextmanager
def _shown_out(here: Mapping[int, socket.socket]) -> Iterator[None]:
    try:
        yield
    finally:
        for guest in here.values():
            guest.close()


def _listen(gathering: Gathering, wait_s: float) -> socket.socket:
    """At every address of this host; a port that stays occupied is a sentence."""
    deadline = time.monotonic() + wait_s
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    while True:
        try:
            return socket.create_server(("", gathering.port), family=family, dualstack_ipv6=dual, backlog=512)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() > deadline:
                raise LaunchError(
                    f"port {gathering.port} of node 0 ({gathering.host}) cannot be opened ({error.strerror}); try: "
                    f"ss -ltnp 'sport = :{gathering.port}', or choose another port for the launcher"
                ) from None
            time.sleep(RETRY_S)


def _admit(gathering: Gathering, guest: socket.socket, here: dict[int, socket.socket]) -> str | None:
    """Take a guest that is one of ours; a stranger is shown out. A sentence where one of ours cannot be called back."""
    guest.settimeout(reachability.CONNECT_S)
    said = _hear(guest)
    node = said.get("node")
    if said.get("key") != gathering.key or not isinstance(node, int) or not 0 < node < gathering.nodes:
        _tell(guest, {"stranger": True})
        guest.close()
        return None
    if node in here:
        here.pop(node).close()
    here[node] = guest
    address, port = str(said.get("address")), said.get("port")
    try:
        socket.create_connection((address, int(str(port))), timeout=reachability.CONNECT_S).close()
    except (OSError, ValueError, OverflowError) as error:
        return (
            f"node {node} ({said.get('host')}) reaches node 0, but node 0 does not reach it at {address} port {port} "
            f"({error}): ranks choose ports of their own, so all of them must be open between the nodes; try on it: "
            "nft list ruleset"
        )
    return None


def _absent(gathering: Gathering, here: dict[int, socket.socket], patience_s: float) -> str:
    missing = [str(node) for node in range(1, gathering.nodes) if node not in here]
    named = ", ".join(missing[:8]) + (" ..." if len(missing) > 8 else "")
    who = f"node {named}" if len(missing) == 1 else f"nodes {named}"
    return (
        f"{who} never came to node 0 ({gathering.host}) at {gathering.master} port {gathering.port} within "
        f"{patience_s:g} s; try on them: nc -zv {gathering.master} {gathering.port}"
    )


def _dismissed(here: dict[int, socket.socket], sentence: str) -> LaunchError:
    for guest in here.values():
        _tell(guest, {"failed": sentence})
    return LaunchError(sentence)


# --- the others ---


def _attend(gathering: Gathering, patience_s: float) -> str:
    deadline = time.monotonic() + patience_s
    while True:
        connection, problem = reachability.connect(gathering.master, gathering.port)
        if connection is not None:
            with connection:
                own = reachability.plain(connection.getsockname()[0])
                word = _wait_for_word(gathering, connection, own, patience_s)
                if "go" in word:
                    # A guest that came by loopback is on node 0's own host, and known to others as node 0 is.
                    return str(word["go"]) if _is_inner(own) else own
                problem = _misunderstanding(gathering, word)
        if time.monotonic() > deadline:
            raise LaunchError(f"{problem} (tried for {patience_s:g} s)")
        time.sleep(RETRY_S)


def _wait_for_word(gathering: Gathering, connection: socket.socket, own: str, patience_s: float) -> dict[str, Any]:
    """What node 0 says when all have come, or nothing. Word of a failure ends the waiting at once.

    Node 0 may have begun later than this node: from here on its patience counts.
    """
    with _doorbell(own) as port:
        me = {"key": gathering.key, "node": gathering.node, "host": gathering.host, "address": own, "port": port}
        _tell(connection, me)
        connection.settimeout(patience_s + 2 * COURTESY_S)
        word = _hear(connection)
    if "failed" in word:
        raise LaunchError(f"node 0 gave up: {word['failed']}")
    return word


def _misunderstanding(gathering: Gathering, word: dict[str, Any]) -> str:
    where = f"{gathering.master} port {gathering.port}"
    if "stranger" in word:
        return f"at {where} another run's node 0 answers; choose another port for the launcher"
    return f"what answers at {where} is not node 0 of this run: another program listens there, or node 0 went away"


@contextlib.contextmanager
def _doorbell(own: str) -> Iterator[int]:
    """A port at which node 0 may call back; connections complete without being accepted."""
    family = socket.AF_INET6 if ":" in own else socket.AF_INET
    with socket.create_server((own, 0), family=family) as bell:
        yield int(bell.getsockname()[1])


# --- words ---


def _tell(peer: socket.socket, words: dict[str, Any]) -> None:
    """One line; whoever is gone need not hear it."""
    with contextlib.suppress(OSError):
        peer.sendall(json.dumps(words).encode() + b"\n")


def _hear(peer: socket.socket) -> dict[str, Any]:
    """One line's words; empty where nothing, or nothing of ours, was said."""
    line = b""
    try:
        while not line.endswith(b"\n") and len(line) < LONGEST_LINE and (more := peer.recv(LONGEST_LINE)):
            line += more
        words = json.loads(line)
    except (OSError, ValueError, RecursionError):
        return {}
    return words if isinstance(words, dict) else {}
