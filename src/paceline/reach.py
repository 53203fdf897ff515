"""Whether the nodes of a job can meet: by name, by address family, by port, and over which interface.

Ranks that cannot meet hang in their first call for as long as they are allowed to. Each node looks first, and says in
one sentence what is wrong and which command shows it.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

from paceline.errors import UnsupportedError

PATIENCE_S = 120.0
RETRY_S = 0.5
CONNECT_S = 5.0


def await_master(host: str, port: int, patience_s: float = PATIENCE_S) -> None:
    """Return once node 0 answers; UnsupportedError says why it does not within the patience."""
    deadline = time.monotonic() + patience_s
    problem = _problem(host, port)
    while problem is not None:
        if time.monotonic() > deadline:
            raise UnsupportedError(f"{problem} (tried for {patience_s:g} s)")
        time.sleep(RETRY_S)
        problem = _problem(host, port)


def _problem(host: str, port: int) -> str | None:
    """Why this one look did not find node 0; None when it answered."""
    try:
        addresses = resolve(host)
    except OSError as error:
        return f"the name of node 0, {host!r}, does not resolve here ({error}); try: getent hosts {host}"
    failures = [failure for address in addresses if (failure := _refusal(address, port)) is not None]
    return None if len(failures) < len(addresses) else "; ".join(failures)


def resolve(host: str) -> list[str]:
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def _refusal(address: str, port: int) -> str | None:
    try:
        with socket.create_connection((address, port), timeout=CONNECT_S):
            return None
    except ConnectionRefusedError:
        why = "refuses: nobody listens there, or it is blocked"
    except TimeoutError:
        why = "does not answer: a firewall or network policy drops it"
    except OSError as error:
        why = f"cannot be reached ({error.strerror or error})"
    return f"node 0 at {address} port {port} {why}; try: nc -zv {address} {port}"


def interface_towards(
    host: str, interfaces: Callable[[], dict[str, list[str]]] | None = None
) -> tuple[str, str] | None:
    """Name and own address of the interface that leads to a host; None where the system does not tell."""
    for address in resolve(host):
        own = _own_address(address)
        for name, addresses in (interfaces or _interfaces)().items():
            if own is not None and own in addresses:
                return name, own
    return None


def _own_address(towards: str) -> str | None:
    """The address this host would use, by its routing table; nothing is sent."""
    family = socket.AF_INET6 if ":" in towards else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((towards, 9))
        except OSError:
            return None
        return str(probe.getsockname()[0])


def _interfaces() -> dict[str, list[str]]:
    import psutil

    return {name: [entry.address for entry in found] for name, found in psutil.net_if_addrs().items()}
