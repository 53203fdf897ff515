"""Whether the nodes of a job can reach each other: by name, by address family, by port, and over which interface.

Ranks that cannot meet hang in their first call for as long as they are allowed to. Each node looks first, and says in
one sentence what is wrong and which command shows it.
"""

from __future__ import annotations

import errno
import ipaddress
import socket
from collections.abc import Callable, Mapping

from paceline.errors import LaunchError

CONNECT_S = 5.0
_NO_ROUTE = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
# Interfaces by name, each with its addresses.
Interfaces = Mapping[str, list[str]]


def resolve(host: str) -> list[str]:
    """The addresses of a name, in the system's order, each once."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def connect(host: str, port: int) -> tuple[socket.socket | None, str | None]:
    """A connection to the first address of node 0 that answers; else why none does and which command shows it."""
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
    """Why this address of node 0 did not answer. Called on the other nodes only."""
    where, own = f"node 0 at {address} port {port}", interface_of(address)
    if own is not None and isinstance(error, ConnectionRefusedError):
        return (
            f"{where} is an address of this host itself (interface {own}) and nobody listens there: node 0 needs a "
            f"name or address that means it on every node; try: getent hosts {host}"
        )
    if isinstance(error, ConnectionRefusedError):
        return f"{where} refuses: nobody listens there, or it is blocked; try: nc -zv {address} {port}"
    if isinstance(error, TimeoutError):
        return f"{where} does not answer: a firewall or network policy drops it; try: nc -zv {address} {port}"
    if error.errno in _NO_ROUTE and (lacking := _lacking_family(address)):
        return lacking
    why = error.strerror or str(error)
    return f"{where} cannot be reached ({why}); try: ip route get {address}"


def _lacking_family(address: str, interfaces: Callable[[], Interfaces] | None = None) -> str | None:
    """A sentence where node 0 has an address of a family that this host does not speak."""
    version = ipaddress.ip_address(address.partition("%")[0]).version
    spoken = {
        found.version
        for addresses in (interfaces or all_interfaces)().values()
        for found in map(ipaddress.ip_address, addresses)
        if not found.is_loopback and not found.is_link_local
    }
    if version in spoken or not spoken:
        return None
    return (
        f"node 0 was found at the IPv{version} address {address}, and this host has only IPv{spoken.pop()} addresses: "
        "give node 0 by an address that all nodes can use; try: ip address show"
    )


def all_interfaces() -> dict[str, list[str]]:
    """Interfaces that are up, with their addresses."""
    import psutil

    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    families = (socket.AF_INET, socket.AF_INET6)
    return {
        name: [entry.address.partition("%")[0] for entry in found if entry.family in families]
        for name, found in psutil.net_if_addrs().items()
        if name in up
    }


def plain(address: str) -> str:
    """An address as people write it: IPv4 seen through an IPv6 socket is IPv4."""
    return address.removeprefix("::ffff:").partition("%")[0]


def interface_of(address: str, interfaces: Callable[[], Interfaces] | None = None) -> str | None:
    """The interface of this host that has the address; None where none has."""
    found = ipaddress.ip_address(plain(address))
    for name, addresses in (interfaces or all_interfaces)().items():
        if any(ipaddress.ip_address(own) == found for own in addresses):
            return name
    # All of 127/8 is this host, though the interface shows one address of it.
    return "lo" if found.is_loopback else None


def check_interfaces(environ: Mapping[str, str], names: tuple[str, ...], interfaces: Interfaces | None = None) -> None:
    """LaunchError where a variable names interfaces of which this host has none with an address."""
    present = {name for name, found in (all_interfaces() if interfaces is None else interfaces).items() if found}
    for variable in names:
        given = environ.get(variable, "")
        found = _chosen(given, present) if variable.startswith("NCCL") else present & set(given.split(","))
        if given and not found:
            raise LaunchError(
                f"{variable} is {given!r}, and no such interface of this host has an address; it has "
                f"{', '.join(sorted(present)) or 'none'}; try: ip -brief address"
            )


def _chosen(given: str, present: set[str]) -> set[str]:
    """What a value means to NCCL: beginnings of names, after `=` whole names, after `^` all but these. gloo takes whole
    names only."""
    exact, but = given.startswith(("=", "^=")), given.startswith("^")
    words = [word for word in given.lstrip("^=").split(",") if word]
    found = {name for name in present for word in words if name == word or (not exact and name.startswith(word))}
    return present - found if but else found
