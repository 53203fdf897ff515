"""Rendezvous of the nodes of a job, before the ranks start.

Ranks that cannot reach each other wait silently for ten minutes and more. So each node first connects to the rendezvous
port of node 0, and node 0 connects back to a port that the node chose, as ranks will do. A node that does not arrive,
or cannot be reached, is named in one sentence with the command that shows why. When all nodes have arrived, node 0
opens a socket for the store of the ranks, on the interface that connects the nodes and on a port that the kernel
chooses, and tells the others where it is.

Nodes of one job know a secret, which is never sent. Node 0 and each node send a random text first, and sign every
message with the secret and both texts, so that neither a program that can reach the port nor one that records the
traffic can take part.

The second part finds out why a node cannot be reached: by its name, address family, port or interface.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import ipaddress
import json
import os
import secrets
import selectors
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.errors import LaunchError
from paceline.launchers.node import torchrun

RETRY_S = 0.5
# Node 0 waits this much longer, so that the others report first why they cannot connect.
MARGIN_S = 3.0
# For the nodes of an earlier attempt that are about to end.
PORT_WAIT_S = 15.0
CONNECT_S = 5.0
LONGEST_LINE = 4096
# Connections that have not identified themselves, beyond which the oldest is closed.
MOST_STRANGERS = 256
_NO_ROUTE = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
# Interface name -> its addresses.
Interfaces = Mapping[str, list[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One node of a rendezvous. secret: known to the nodes of this attempt only."""

    secret: str
    node: int
    nodes: int
    master: str
    port: int
    host: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """What a node knows after the rendezvous.

    own: its address as the others see it. master, port: where the store of the ranks is. listener: the open socket for
    that store, on node 0.
    """

    own: str
    master: str
    port: int
    listener: socket.socket | None = None


def join(member: Member, patience_s: float) -> Meeting:
    """Wait until all nodes have arrived. Raises LaunchError if one does not."""
    return _lead(member, patience_s) if member.node == 0 else _attend(member, patience_s)


def alone() -> Meeting:
    """Return the rendezvous of a single node: its ranks use loopback."""
    listener = torchrun.listen()
    return Meeting(own=torchrun.LOOPBACK, master=torchrun.LOOPBACK, port=listener.getsockname()[1], listener=listener)


# --- node 0 ---


@dataclass(slots=True, eq=False)
class _Peer:
    """A connection to node 0. It is a stranger until its first line proves that it knows the secret."""

    socket: socket.socket
    nonce: str
    deadline: float
    received: bytes = b""
    theirs: str = ""


@dataclass(slots=True)
class _Door:
    """The listening socket of node 0 with everyone who came: many strangers must not keep the nodes out."""

    server: socket.socket
    strangers: list[_Peer] = field(default_factory=list)
    arrived: dict[int, _Peer] = field(default_factory=dict)

    def close(self) -> None:
        for peer in (*self.strangers, *self.arrived.values()):
            peer.socket.close()

    def first_lines(self, until: float) -> list[tuple[_Peer, dict[str, Any]]]:
        """Wait for connections and their first lines, at most until the given time."""
        with selectors.DefaultSelector() as selector:
            selector.register(self.server, selectors.EVENT_READ)
            for peer in self.strangers:
                selector.register(peer.socket, selectors.EVENT_READ, peer)
            soonest = min((until, *(peer.deadline for peer in self.strangers)))
            ready = [key.data for key, _ in selector.select(max(0.01, soonest - time.monotonic()))]
        lines = []
        for peer in ready:
            if peer is None:
                self._accept()
            elif peer in self.strangers and (message := self._read(peer)) is not None:
                self.strangers.remove(peer)
                lines.append((peer, message))
        for late in [peer for peer in self.strangers if peer.deadline < time.monotonic()]:
            self._drop(late)
        return lines

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            connection = self.server.accept()[0]
            connection.setblocking(False)
            peer = _Peer(connection, secrets.token_hex(16), time.monotonic() + CONNECT_S)
            _send(connection, {"nonce": peer.nonce})
            self.strangers.append(peer)
        if len(self.strangers) > MOST_STRANGERS:
            self._drop(self.strangers[0])

    def _drop(self, peer: _Peer) -> None:
        self.strangers.remove(peer)
        peer.socket.close()

    def _read(self, peer: _Peer) -> dict[str, Any] | None:
        """Return the first line of a peer once it is complete; an empty message if it is not one of ours."""
        try:
            more = peer.socket.recv(LONGEST_LINE)
        except BlockingIOError:
            return None
        except OSError:
            more = b""
        peer.received += more
        complete = b"\n" in peer.received
        if more and not complete and len(peer.received) < LONGEST_LINE:
            return None
        peer.socket.settimeout(CONNECT_S)
        return _parse(peer.received.partition(b"\n")[0]) if complete else {}


def _lead(member: Member, patience_s: float) -> Meeting:
    deadline = time.monotonic() + patience_s + MARGIN_S
    with _listen(member, min(patience_s, PORT_WAIT_S)) as server, contextlib.closing(_Door(server)) as door:
        arrived = door.arrived
        while len(arrived) < member.nodes - 1:
            problem = None
            for peer, message in door.first_lines(deadline):
                problem = problem or _admit(member, peer, message, arrived)
            if problem is None and time.monotonic() > deadline:
                missing = [str(node) for node in range(1, member.nodes) if node not in arrived]
                names = ", ".join(missing[:8]) + (" ..." if len(missing) > 8 else "")
                problem = (
                    f"{'node' if len(missing) == 1 else 'nodes'} {names} did not reach node 0 ({member.host}) at "
                    f"{member.master} port {member.port} within {patience_s:g} s; try on them: nc -zv {member.master} "
                    f"{member.port}"
                )
            if problem:
                for peer in arrived.values():
                    _send(peer.socket, _signed(member, "node 0", peer.nonce, peer.theirs, {"failed": problem}))
                raise LaunchError(problem)
        addresses = [plain(peer.socket.getsockname()[0]) for peer in arrived.values()]
        own = _common_address(addresses)
        listener = torchrun.listen(own) if _is_reachable_at(own, addresses) else _listen_everywhere(0)
        port = int(listener.getsockname()[1])
        for peer in arrived.values():
            _send(peer.socket, _signed(member, "node 0", peer.nonce, peer.theirs, {"go": own, "port": port}))
        return Meeting(own=own, master=own, port=port, listener=listener)


def _common_address(addresses: list[str]) -> str:
    """Return an address that all nodes can use. A node on this very host connects by loopback."""
    return next((address for address in addresses if not _is_loopback(address)), addresses[0])


def _is_reachable_at(own: str, addresses: list[str]) -> bool:
    """Whether a socket on this one address serves all nodes. Not if they came over several networks.

    A link-local address would need the name of its interface, which differs between hosts.
    """
    others = {address for address in addresses if not _is_loopback(address)}
    return others <= {own} and not ipaddress.ip_address(own).is_link_local


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def _listen_everywhere(port: int) -> socket.socket:
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    return socket.create_server(("", port), family=family, dualstack_ipv6=dual, backlog=512)


def _listen(member: Member, wait_s: float) -> socket.socket:
    """Listen at every address of this host, or on loopback only if node 0 has a loopback address.

    Raises LaunchError if the port stays occupied.
    """
    deadline = time.monotonic() + wait_s
    while True:
        try:
            with contextlib.suppress(ValueError):
                if ipaddress.ip_address(member.master).is_loopback:
                    family = socket.AF_INET6 if ":" in member.master else socket.AF_INET
                    return socket.create_server((member.master, member.port), family=family, backlog=512)
            return _listen_everywhere(member.port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() > deadline:
                why = os.strerror(error.errno or 0)
                raise LaunchError(
                    f"port {member.port} of node 0 ({member.host}) cannot be opened ({why}); try: "
                    f"ss -ltnp 'sport = :{member.port}', or choose another port for the launcher"
                ) from None
            time.sleep(RETRY_S)


def _admit(member: Member, peer: _Peer, hello: dict[str, Any], arrived: dict[int, _Peer]) -> str | None:
    """Add a node of this run and reject any other. Returns a sentence if node 0 cannot connect back to it."""
    node, peer.theirs = hello.get("node"), str(hello.get("nonce"))
    is_ours = _is_signed(member, "node", peer.nonce, peer.theirs, hello)
    if not is_ours or type(node) is not int or not 0 < node < member.nodes:
        _send(peer.socket, {"stranger": True})
        peer.socket.close()
        return None
    if node in arrived:
        arrived.pop(node).socket.close()
    arrived[node] = peer
    address, port = str(hello.get("address")), hello.get("port")
    try:
        socket.create_connection((address, int(str(port))), timeout=CONNECT_S).close()
    except (OSError, ValueError, OverflowError) as error:
        return (
            f"node {node} ({hello.get('host')}) reaches node 0, but node 0 does not reach it at {address} port {port} "
            f"({error}): ranks choose their own ports, so all ports must be open between the nodes; try on it: "
            "nft list ruleset"
        )
    return None


# --- the other nodes ---


def _attend(member: Member, patience_s: float) -> Meeting:
    deadline = time.monotonic() + patience_s
    while True:
        connection, problem = connect(member.master, member.port)
        if connection is not None:
            with connection:
                own, reached = (plain(name[0]) for name in (connection.getsockname(), connection.getpeername()))
                answer = _introduce(member, connection, own, patience_s)
            if "failed" in answer:
                raise LaunchError(f"node 0 gave up: {answer['failed']}")
            if "go" in answer:
                # A node that connected by loopback is on node 0's host and has its address.
                there = str(answer["go"]) if _is_loopback(own) else reached
                return Meeting(own=there if _is_loopback(own) else own, master=there, port=int(answer["port"]))
            where = f"{member.master} port {member.port}"
            problem = f"another program than node 0 of this run listens at {where}, or node 0 has ended"
            if "stranger" in answer:
                problem = f"node 0 of another run answers at {where}; choose another port for the launcher"
        if time.monotonic() > deadline:
            raise LaunchError(f"{problem} (tried for {patience_s:g} s)")
        time.sleep(RETRY_S)


def _introduce(member: Member, connection: socket.socket, own: str, patience_s: float) -> dict[str, Any]:
    """Tell node 0 who this is and return its answer; empty if it is not one of node 0 of this run."""
    nonce, theirs = secrets.token_hex(16), _receive(connection, CONNECT_S).get("nonce")
    if not isinstance(theirs, str):
        return {}
    family = socket.AF_INET6 if ":" in own else socket.AF_INET
    # Node 0 connects back to this port. Connections complete without being accepted.
    with socket.create_server((own, 0), family=family) as callback:
        back = {"address": own, "port": int(callback.getsockname()[1])}
        hello = {"nonce": nonce, "node": member.node, "host": member.host, **back}
        _send(connection, _signed(member, "node", theirs, nonce, hello))
        # Node 0 may have started later than this node, so its patience counts from here on.
        answer = _receive(connection, patience_s + 2 * MARGIN_S)
    is_ours = _is_signed(member, "node 0", theirs, nonce, answer)
    return answer if is_ours else {"stranger": True} if "stranger" in answer else {}


# --- messages ---


def _signature(member: Member, role: str, nonce: str, theirs: str, message: Mapping[str, Any]) -> str:
    content = {name: value for name, value in message.items() if name != "signature"}
    text = json.dumps([role, nonce, theirs, content], sort_keys=True)
    return hmac.new(member.secret.encode(), text.encode(), hashlib.sha256).hexdigest()


def _signed(member: Member, role: str, nonce: str, theirs: str, message: dict[str, Any]) -> dict[str, Any]:
    return {**message, "signature": _signature(member, role, nonce, theirs, message)}


def _is_signed(member: Member, role: str, nonce: str, theirs: str, message: Mapping[str, Any]) -> bool:
    expected = _signature(member, role, nonce, theirs, message)
    return hmac.compare_digest(expected.encode(), str(message.get("signature")).encode(errors="replace"))


def _send(peer: socket.socket, message: dict[str, Any]) -> None:
    """Send one line; ignore a peer that is gone."""
    with contextlib.suppress(OSError):
        peer.sendall(json.dumps(message).encode() + b"\n")


def _receive(peer: socket.socket, wait_s: float) -> dict[str, Any]:
    """Return the message of one line, empty if there is no valid one in time."""
    line, deadline = b"", time.monotonic() + wait_s
    try:
        while not line.endswith(b"\n") and len(line) < LONGEST_LINE:
            # The limit holds for the whole line: a program that sends a byte now and then is not node 0.
            peer.settimeout(max(0.01, deadline - time.monotonic()))
            if not (more := peer.recv(LONGEST_LINE)):
                break
            line += more
    except OSError:
        return {}
    return _parse(line)


def _parse(line: bytes) -> dict[str, Any]:
    """Return a message of plain values, empty if it is none. A nested one could be too deep to be signed."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    is_flat = isinstance(message, dict) and not any(isinstance(value, list | dict) for value in message.values())
    return message if is_flat else {}


# --- reachability ---


def resolve(host: str) -> list[str]:
    """Return the addresses of a name in the system's order, without duplicates."""
    entries = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in entries))


def connect(host: str, port: int) -> tuple[socket.socket | None, str | None]:
    """Connect to the first address of node 0 that answers, else return why none does and which command shows it."""
    try:
        addresses = resolve(host)
    except OSError as error:
        return None, f"the name of node 0, {host!r}, does not resolve here ({error}); try: getent hosts {host}"
    refusals = []
    for address in addresses:
        try:
            return socket.create_connection((address, port), timeout=CONNECT_S), None
        except OSError as error:
            refusals.append(_refusal(host, address, port, error))
    return None, "; ".join(refusals)


def _refusal(host: str, address: str, port: int, error: OSError) -> str:
    """Explain why this address of node 0 did not answer. Called on the other nodes only."""
    where, own = f"node 0 at {address} port {port}", interface_of(address)
    if own is not None and isinstance(error, ConnectionRefusedError):
        return (
            f"{where} is an address of this host (interface {own}) and nothing listens there: node 0 needs a name or "
            f"address that is valid on every node; try: getent hosts {host}"
        )
    if isinstance(error, ConnectionRefusedError):
        return f"{where} refuses: nothing listens there, or it is blocked; try: nc -zv {address} {port}"
    if isinstance(error, TimeoutError):
        return f"{where} does not answer: a firewall or network policy drops it; try: nc -zv {address} {port}"
    if error.errno in _NO_ROUTE and (mismatch := _family_mismatch(address)):
        return mismatch
    why = error.strerror or str(error)
    return f"{where} cannot be reached ({why}); try: ip route get {address}"


def _family_mismatch(address: str, interfaces: Callable[[], Interfaces] | None = None) -> str | None:
    """Return a sentence if node 0 has an address of a family that this host does not have."""
    version = ipaddress.ip_address(address.partition("%")[0]).version
    available = {
        own.version
        for addresses in (interfaces or all_interfaces)().values()
        for own in map(ipaddress.ip_address, addresses)
        if not own.is_loopback and not own.is_link_local
    }
    if version in available or not available:
        return None
    return (
        f"node 0 has the IPv{version} address {address}, but this host has only IPv{available.pop()} addresses: "
        "give node 0 an address that all nodes can use; try: ip address show"
    )


def all_interfaces() -> dict[str, list[str]]:
    """Return the interfaces that are up, with their addresses."""
    import psutil

    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    families = (socket.AF_INET, socket.AF_INET6)
    return {
        name: [entry.address.partition("%")[0] for entry in entries if entry.family in families]
        for name, entries in psutil.net_if_addrs().items()
        if name in up
    }


def plain(address: str) -> str:
    """Return an address as people write it.

    >>> plain("::ffff:10.0.0.1"), plain("fe80::1%eth0")
    ('10.0.0.1', 'fe80::1')
    """
    return address.removeprefix("::ffff:").partition("%")[0]


def interface_of(address: str, interfaces: Callable[[], Interfaces] | None = None) -> str | None:
    """Return the interface of this host that has the address, or None."""
    wanted = ipaddress.ip_address(plain(address))
    for name, addresses in (interfaces or all_interfaces)().items():
        if any(ipaddress.ip_address(own) == wanted for own in addresses):
            return name
    # All of 127/8 is this host, though the interface has only one of these addresses.
    return "lo" if wanted.is_loopback else None


def check_interfaces(
    environ: Mapping[str, str], variables: tuple[str, ...], interfaces: Interfaces | None = None
) -> None:
    """Raise LaunchError if a variable selects no interface of this host that has an address."""
    known = all_interfaces() if interfaces is None else interfaces
    present = {name for name, addresses in known.items() if addresses}
    for variable in variables:
        value = environ.get(variable, "")
        chosen = present & set(value.split(","))
        if variable.startswith("NCCL"):
            # By prefix, after `=` by full name, after `^` all others. gloo accepts full names only.
            exact, inverted = value.startswith(("=", "^=")), value.startswith("^")
            names = [name for name in value.lstrip("^=").split(",") if name]
            chosen = {o for o in present for n in names if o == n or (not exact and o.startswith(n))}
            chosen = present - chosen if inverted else chosen
        if value and not chosen:
            raise LaunchError(
                f"{variable}: got {value!r}, expected interfaces of this host that have an address: "
                f"{', '.join(sorted(present)) or 'it has none'}; try: ip -brief address"
            )
