"""What the HTTP servers of `paceline ui` and `paceline monitor --serve` share: who may ask, and how many at once."""

from __future__ import annotations

import contextlib
import ipaddress
import re
import socket
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from paceline.errors import RequestError

# Each connection occupies a thread.
MOST_CONNECTIONS = 256
# From the connection to the end of its headers; a client that sends a byte now and then is closed, too.
HEAD_S = 30.0


def parse_address(text: str, option: str = "--serve", example: str = "127.0.0.1:9109") -> tuple[str, int]:
    """Host and port from HOST:PORT, with an IPv6 host in brackets; port 0 picks a free one."""
    match = re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[^:\[\]/\s]+):(\d{1,5})", text)
    if match is None or int(match[2]) > 65535:
        raise RequestError(f"{option}: got {text!r}, expected HOST:PORT, such as {example}.")
    return match[1].strip("[]"), int(match[2])


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_own_host(header: str, own: str) -> bool:
    """Whether a Host header names this server: an IP address, `localhost`, the name of this machine, or the address
    that it listens on. A name that anybody may own is refused, because its owner can point it here."""
    match = re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+)(?::\d{1,5})?", header)
    if match is None:
        return False
    name = match[1].strip("[]").lower().rstrip(".")
    with contextlib.suppress(ValueError):
        address = ipaddress.ip_address(name)
        return address.is_loopback or not is_loopback(own)
    names = {"localhost", own.lower()}
    if not is_loopback(own):
        names |= {socket.gethostname().lower(), socket.getfqdn().lower()}
    return name in names


class LocalServer(ThreadingHTTPServer):
    """A thread for each of at most MOST_CONNECTIONS connections. One too many replaces the one that has been silent
    longest; if all have sent their request, it is closed."""

    daemon_threads = True

    def __init__(self, host: str, port: int, handler: type[BaseHTTPRequestHandler]) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.own_host = host
        self._open: set[Any] = set()
        # Connections without a complete request, and when they are closed. The oldest is first.
        self._silent: dict[Any, float] = {}
        super().__init__((host, port), handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if len(self._open) >= MOST_CONNECTIONS and not self._close_oldest():
            self.shutdown_request(request)
            return
        self._open.add(request)
        self._silent[request] = time.monotonic() + HEAD_S
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # no more threads
            self._forget(request)
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._forget(request)

    def has_request(self, request: Any) -> None:
        """Note that the headers of this connection are complete."""
        self._silent.pop(request, None)

    def service_actions(self) -> None:
        """Close connections whose time for the headers is over. Called twice a second."""
        now = time.monotonic()
        for _ in [deadline for deadline in tuple(self._silent.values()) if deadline < now]:
            self._close_oldest()

    def _close_oldest(self) -> bool:
        for oldest in tuple(self._silent)[:1]:
            self._forget(oldest)
            with contextlib.suppress(OSError):  # its thread reads the end of input and closes it
                oldest.shutdown(socket.SHUT_RDWR)
            return True
        return False

    def _forget(self, request: Any) -> None:
        self._open.discard(request)
        self._silent.pop(request, None)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that disconnect; report everything else."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)
