"""The connections of one process: made beforehand where that was asked, kept for the next request, watched together."""

from __future__ import annotations

import select
import socket
import ssl
from collections.abc import Sequence

from paceline.serving.client.connection import Connection, TlsPipe
from paceline.serving.client.orders import Target

READABLE = select.EPOLLIN | select.EPOLLRDHUP
WRITABLE = select.EPOLLOUT


class Pool:
    """connecting counts those that may not be written to yet."""

    def __init__(self, targets: Sequence[Target], offset_ns: int) -> None:
        self._targets, self._offset_ns = targets, offset_ns
        # Reading the system's authorities takes tens of milliseconds: once, before the clock runs.
        self._tls = [ssl.create_default_context(cafile=each.certificates) if each.tls else None for each in targets]
        self._addresses = [_address(target.host, target.port) for target in targets]
        self._free: list[list[Connection]] = [[] for _ in targets]
        self.epoll = select.epoll()
        self.by_descriptor: dict[int, Connection] = {}
        self.connecting = 0

    def open(self, replica: int) -> Connection:
        """A new one that is being made; OSError where the system refuses at once."""
        context = self._tls[replica]
        tls = TlsPipe(context, self._targets[replica].host) if context else None
        made = Connection(replica, self._addresses[replica], self._offset_ns, tls)
        made.watched = READABLE | WRITABLE
        try:
            self.epoll.register(made.fileno(), made.watched)
        except OSError:
            made.close()
            raise
        self.by_descriptor[made.fileno()] = made
        self.connecting += 1
        return made

    def settle(self, connection: Connection) -> None:
        """It may be written to from now on."""
        self.connecting -= 1
        connection.settled = True
        if connection.handled is None:
            self.park(connection)

    def free_one(self, replica: int) -> Connection | None:
        """The one used last is the one least likely to have been closed for being idle."""
        free = self._free[replica]
        while free:
            connection = free.pop()
            if not connection.parked:
                continue
            if connection.is_given_up:
                self.drop(connection)
                continue
            connection.parked = False
            return connection
        return None

    def park(self, connection: Connection) -> None:
        connection.parked = True
        self._free[connection.replica].append(connection)

    def holds(self, connection: Connection) -> bool:
        return self.by_descriptor.get(connection.fileno()) is connection

    def watch(self, connection: Connection, what: int) -> None:
        if connection.watched != what:
            connection.watched = what
            self.epoll.modify(connection.fileno(), what)

    def drop(self, connection: Connection) -> None:
        """Stays in the list of free ones, unparked: looking for it there would take longer the more there are."""
        self.connecting -= not connection.settled
        connection.settled, connection.parked, connection.streams = True, False, False
        self.by_descriptor.pop(connection.fileno(), None)
        self.epoll.unregister(connection.fileno())
        connection.close()

    def close(self) -> None:
        for connection in list(self.by_descriptor.values()):
            self.drop(connection)
        self.epoll.close()


def _address(host: str, port: int) -> tuple[int, tuple[object, ...]]:
    """Looked up once, before the clock runs."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    return family, address
