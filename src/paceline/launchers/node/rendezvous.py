"""Rendezvous of the nodes of a job, before the ranks start.

Ranks that cannot reach each other wait silently for ten minutes and more. So each node first connects to the rendezvous
port of node 0, and node 0 connects back to a port that the node chose, as ranks will do. A node that does not arrive,
or cannot be reached, is named in one sentence with the command that shows why. When all nodes have arrived, the port is
closed and the ranks use it.

The second part finds out why a node cannot be reached: by its name, address family, port or interface.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import json
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from paceline.errors import LaunchError

RETRY_S = 0.5
# Node 0 waits this much longer, so that the others report first why they cannot connect.
MARGIN_S = 3.0
# For the nodes of an earlier attempt that are about to end.
PORT_WAIT_S = 15.0
CONNECT_S = 5.0
LONGEST_LINE = 4096
_NO_ROUTE = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
# Interface name -> its addresses.
Interfaces = Mapping[str, list[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One node of a rendezvous. key: differs between attempts, so that nodes of another attempt are rejected."""

    key: str
    node: int
    nodes: int
    master: str
    port: int
    host: str


def join(member: Member, patience_s: float) -> str:
    """Wait until all nodes have arrived. Returns this node's address as the others see it, or raises LaunchError."""
    return _lead(member, patience_s) if member.node == 0 else _attend(member, patience_s)


# --- node 0 ---


def _lead(member: Member, patience_s: float) -> str:
    deadline = time.monotonic() + patience_s + MARGIN_S
    arrived: dict[int, socket.socket] = {}
    with _listen(member, min(patience_s, PORT_WAIT_S)) as server, contextlib.ExitStack() as peers:
        while len(arrived) < member.nodes - 1:
            server.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                problem = _admit(member, peers.enter_context(server.accept()[0]), arrived)
            except TimeoutError:
                missing = [str(node) for node in range(1, member.nodes) if node not in arrived]
                names = ", ".join(missing[:8]) + (" ..." if len(missing) > 8 else "")
                problem = (
                    f"{'node' if len(missing) == 1 else 'nodes'} {names} did not reach node 0 ({member.host}) at "
                    f"{member.master} port {member.port} within {patience_s:g} s; try on them: nc -zv {member.master} "
                    f"{member.port}"
                )
            if problem:
                for peer in arrived.values():
                    _send(peer, {"failed": problem})
                raise LaunchError(problem)
        own = _common_address([plain(peer.getsockname()[0]) for peer in arrived.values()])
        for peer in arrived.values():
            _send(peer, {"go": own})
        return own


def _common_address(addresses: list[str]) -> str:
    """Return an address that all nodes can use. A node on this very host connects by loopback."""
    return next((address for address in addresses if not _is_loopback(address)), addresses[0])


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def _listen(member: Member, wait_s: float) -> socket.socket:
    """Listen at every address of this host. Raises LaunchError if the port stays occupied."""
    deadline = time.monotonic() + wait_s
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    while True:
        try:
            return socket.create_server(("", member.port), family=family, dualstack_ipv6=dual, backlog=512)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() > deadline:
                raise LaunchError(
                    f"port {member.port} of node 0 ({member.host}) cannot be opened ({error.strerror}); try: "
                    f"ss -ltnp 'sport = :{member.port}', or choose another port for the launcher"
                ) from None
            time.sleep(RETRY_S)


def _admit(member: Member, peer: socket.socket, arrived: dict[int, socket.socket]) -> str | None:
    """Add a node of this run and reject any other. Returns a sentence if node 0 cannot connect back to it."""
    peer.settimeout(CONNECT_S)
    hello = _receive(peer)
    node = hello.get("node")
    if hello.get("key") != member.key or not isinstance(node, int) or not 0 < node < member.nodes:
        _send(peer, {"stranger": True})
        peer.close()
        return None
    if node in arrived:
        arrived.pop(node).close()
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


def _attend(member: Member, patience_s: float) -> str:
    deadline = time.monotonic() + patience_s
    while True:
        connection, problem = connect(member.master, member.port)
        if connection is not None:
            own = plain(connection.getsockname()[0])
            family = socket.AF_INET6 if ":" in own else socket.AF_INET
            # Node 0 connects back to this port. Connections complete without being accepted.
            with connection, socket.create_server((own, 0), family=family) as callback:
                back = {"address": own, "port": int(callback.getsockname()[1])}
                _send(connection, {"key": member.key, "node": member.node, "host": member.host, **back})
                # Node 0 may have started later than this node, so its patience counts from here on.
                connection.settimeout(patience_s + 2 * MARGIN_S)
                answer = _receive(connection)
            if "failed" in answer:
                raise LaunchError(f"node 0 gave up: {answer['failed']}")
            if "go" in answer:
                # A node that connected by loopback is on node 0's host and has its address.
                return str(answer["go"]) if _is_loopback(own) else own
            where = f"{member.master} port {member.port}"
            problem = f"another program than node 0 of this run listens at {where}, or node 0 has ended"
            if "stranger" in answer:
                problem = f"node 0 of another run answers at {where}; choose another port for the launcher"
        if time.monotonic() > deadline:
            raise LaunchError(f"{problem} (tried for {patience_s:g} s)")
        time.sleep(RETRY_S)


def _send(peer: socket.socket, message: dict[str, Any]) -> None:
    """Send one line; ignore a peer that is gone."""
    with contextlib.suppress(OSError):
        peer.sendall(json.dumps(message).encode() + b"\n")


def _receive(peer: socket.socket) -> dict[str, Any]:
    """Return the message of one line, empty if there is no valid one."""
    line = b""
    try:
        while not line.endswith(b"\n") and len(line) < LONGEST_LINE and (more := peer.recv(LONGEST_LINE)):
            line += more
        message = json.loads(line)
    except (OSError, ValueError, RecursionError):
        return {}
    return message if isinstance(message, dict) else {}


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
