"""Messages between the front of a replica and its model: JSON lines over a socket pair."""

from __future__ import annotations

import json
import select
import socket
from typing import Any

READ_BYTES = 1 << 20


class ChannelClosed(Exception):
    """The front is gone: nobody waits for answers."""


class Channel:
    """The model's end."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._received = bytearray()

    def put(self, message: dict[str, Any]) -> None:
        try:
            self._socket.sendall(json.dumps(message, separators=(",", ":")).encode() + b"\n")
        except OSError:
            raise ChannelClosed from None

    def take(self, wait: bool) -> list[dict[str, Any]]:
        """All complete messages that have arrived. wait: until there is at least one."""
        messages = self._complete() if not wait else []
        while (wait and not messages) or select.select([self._socket], [], [], 0)[0]:
            piece = self._socket.recv(READ_BYTES)
            if not piece:
                raise ChannelClosed
            self._received += piece
            messages += self._complete()
        return messages

    def _complete(self) -> list[dict[str, Any]]:
        *lines, rest = bytes(self._received).split(b"\n")
        self._received = bytearray(rest)
        return [json.loads(line) for line in lines]
