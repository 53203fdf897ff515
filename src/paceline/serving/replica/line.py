"""Messages between the front of a replica and its model: JSON, one a line, over a pair of sockets."""

from __future__ import annotations

import json
import select
import socket
from typing import Any

READ_BYTES = 1 << 20


class Hangup(Exception):
    """The other side is gone: there is nobody left to compute for."""


class Line:
    """The model's end. `take` hands over all whole messages that have come."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._received = bytearray()

    def put(self, message: dict[str, Any]) -> None:
        try:
            self._socket.sendall(json.dumps(message, separators=(",", ":")).encode() + b"\n")
        except OSError:
            raise Hangup from None

    def take(self, wait: bool) -> list[dict[str, Any]]:
        """wait: until there is at least one."""
        found = self._whole() if not wait else []
        while wait and not found:
            self._receive()
            found = self._whole()
        while select.select([self._socket], [], [], 0)[0]:
            self._receive()
            found += self._whole()
        return found

    def _receive(self) -> None:
        piece = self._socket.recv(READ_BYTES)
        if not piece:
            raise Hangup
        self._received += piece

    def _whole(self) -> list[dict[str, Any]]:
        *lines, rest = bytes(self._received).split(b"\n") if b"\n" in self._received else (bytes(self._received),)
        self._received = bytearray(rest)
        return [json.loads(line) for line in lines]
