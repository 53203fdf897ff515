"""The replicas as one client process sees them: connections, which are alive, and which requests wait for them."""

from __future__ import annotations

import select
import socket
import ssl
from collections import deque
from collections.abc import Collection, Sequence

from paceline.serving.client.http_stream import Connection, TlsPipe
from paceline.serving.client.schedule import ANY_REPLICA, Target

READABLE = select.EPOLLIN | select.EPOLLRDHUP
WRITABLE = select.EPOLLOUT
# A replica is dead after this many refused connections in a row: a full accept queue may refuse one.
REFUSALS = 3
# A replica is silent after this many timeouts in a row, if it completed no answer for as long as a request may take.
TIMEOUTS = 3


class ConnectionPool:
    """Connections of one process, opened ahead of time, reused, and polled together. connecting: not ready yet."""

    def __init__(self, targets: Sequence[Target], offset_ns: int) -> None:
        self._targets, self._offset_ns = targets, offset_ns
        # Loading the system's certificates takes tens of milliseconds and a lookup more: once, before the clock runs.
        self._tls = [ssl.create_default_context(cafile=each.certificates) if each.tls else None for each in targets]
        self._addresses: list[tuple[int, tuple[object, ...]]] = []
        for target in targets:
            family, _, _, _, address = socket.getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM)[0]
            self._addresses.append((family, address))
        self._idle: list[list[Connection]] = [[] for _ in targets]
        self.epoll = select.epoll()
        self.by_descriptor: dict[int, Connection] = {}
        self.connecting = 0

    def open(self, replica: int) -> Connection:
        """Start a new connection; OSError if the system refuses at once."""
        context = self._tls[replica]
        tls = TlsPipe(context, self._targets[replica].host) if context else None
        connection = Connection(replica, self._addresses[replica], self._offset_ns, tls)
        connection.watched = READABLE | WRITABLE
        try:
            self.epoll.register(connection.fileno(), connection.watched)
        except OSError:
            connection.close()
            raise
        self.by_descriptor[connection.fileno()] = connection
        self.connecting += 1
        return connection

    def settle(self, connection: Connection) -> None:
        """The connection is ready for requests."""
        self.connecting -= 1
        connection.settled = True
        if connection.result is None:
            self.park(connection)

    def take_idle(self, replica: int) -> Connection | None:
        """The most recently used one: it is the least likely to have been closed for being idle."""
        idle = self._idle[replica]
        while idle:
            connection = idle.pop()
            if not connection.parked:
                continue
            if connection.is_closed_by_peer:
                self.drop(connection)
                continue
            connection.parked = False
            return connection
        return None

    def park(self, connection: Connection) -> None:
        connection.parked = True
        self._idle[connection.replica].append(connection)

    def drop_idle(self, replica: int) -> None:
        """Close the idle connections of a silent replica: a host that restarted would not answer on them."""
        while (connection := self.take_idle(replica)) is not None:
            self.drop(connection)

    def watch(self, connection: Connection, events: int) -> None:
        if connection.watched != events:
            connection.watched = events
            self.epoll.modify(connection.fileno(), events)

    def drop(self, connection: Connection) -> None:
        """Close it. It stays in the idle list, unparked: searching the list would take longer the longer it is."""
        self.connecting -= not connection.settled
        connection.settled, connection.parked, connection.streams = True, False, False
        self.by_descriptor.pop(connection.fileno(), None)
        self.epoll.unregister(connection.fileno())
        connection.close()

    def close(self) -> None:
        for connection in list(self.by_descriptor.values()):
            self.drop(connection)
        self.epoll.close()


class ReplicaStates:
    """Requests on each replica (now, and in total), and which replicas died or are suspended because they are silent.
    most: requests in flight on each."""

    def __init__(self, replicas: int, most: int | None) -> None:
        self.in_flight = [0] * replicas
        self.sent = [0] * replicas
        self.died_ns: dict[int, int] = {}
        self.reassigned: dict[int, int] = {}
        self.suspended: set[int] = set()
        self._most = most
        self._refusals = [0] * replicas
        self._timeouts = [0] * replicas
        self._answered_ns = [0] * replicas

    def has_room(self, replica: int) -> bool:
        return self._most is None or self.in_flight[replica] < self._most

    def alive(self, but: Collection[int] = ()) -> list[int]:
        """Replicas that may get requests; silent ones only if there is no other."""
        living = [r for r in range(len(self.in_flight)) if r not in self.died_ns and r not in but]
        return [r for r in living if r not in self.suspended] or living

    def is_gone(self, replica: int) -> bool:
        """Whether others must take the requests of this replica."""
        return (replica in self.died_ns or replica in self.suspended) and any(r != replica for r in self.alive())

    def least_busy(self, but: Collection[int] = ()) -> int | None:
        """The living replica with the fewest requests in flight, then with the fewest sent so far."""
        able = [r for r in self.alive(but) if self.has_room(r)]
        return min(able, key=lambda r: (self.in_flight[r], self.sent[r], r), default=None)

    def count_sent(self, replica: int) -> None:
        self.in_flight[replica] += 1
        self.sent[replica] += 1

    def accepted(self, replica: int) -> None:
        self._refusals[replica] = 0

    def refused(self, replica: int, now_ns: int) -> bool:
        """Count a refused connection; True if the replica is dead because of it."""
        self._refusals[replica] += 1
        if self._refusals[replica] < REFUSALS or replica in self.died_ns:
            return False
        self.died_ns[replica] = now_ns
        return True

    def answered(self, replica: int, now_ns: int) -> None:
        self._answered_ns[replica] = now_ns
        self._timeouts[replica] = 0

    def timed_out(self, replica: int, began_ns: int) -> bool:
        """Count a timeout of a request that began then; True if the replica is silent because of it."""
        if self._answered_ns[replica] >= began_ns:
            return False
        self._timeouts[replica] += 1
        is_known = replica in self.died_ns or replica in self.suspended
        others = [r for r in self.alive(but=(replica,)) if r not in self.suspended]
        return self._timeouts[replica] >= TIMEOUTS and not is_known and bool(others)

    def resume(self, replica: int) -> None:
        self.suspended.discard(replica)
        self._timeouts[replica] = 0

    def count_reassigned(self, replica: int, count: int = 1) -> None:
        self.reassigned[replica] = self.reassigned.get(replica, 0) + count


class RequestQueues:
    """Requests that are due and wait: a queue for each replica and one for any replica, so that a full replica blocks
    only its own requests. Requests are their numbers in the schedule."""

    def __init__(self, replicas: int) -> None:
        # The last one is for ANY_REPLICA.
        self._queues: list[deque[int]] = [deque() for _ in range(replicas + 1)]
        self._tried: dict[int, set[int]] = {}
        self.waiting = 0

    def add(self, request: int, replica: int) -> None:
        self._queues[replica].append(request)
        self.waiting += 1

    def requeue(self, request: int, replica: int, states: ReplicaStates) -> bool:
        """Put back a request that the replica did not answer, first in line for any other; False if all were tried."""
        tried = self._tried.setdefault(request, set())
        tried.add(replica)
        if not states.alive(but=tried):
            return False
        self._queues[ANY_REPLICA].appendleft(request)
        self.waiting += 1
        states.count_reassigned(replica)
        return True

    def take(self, states: ReplicaStates) -> tuple[int, int | None] | None:
        """The earliest request whose replica has room, and that replica (None if no replica is left)."""
        ready: list[tuple[int, int, int | None]] = [
            (queue[0], replica, replica)
            for replica, queue in enumerate(self._queues[:ANY_REPLICA])
            if queue and states.has_room(replica)
        ]
        if shared := self._queues[ANY_REPLICA]:
            tried = self._tried.get(shared[0], ())
            chosen = states.least_busy(but=tried)
            if chosen is not None or not states.alive(but=tried):
                ready.append((shared[0], ANY_REPLICA, chosen))
        if not ready:
            return None
        request, queue_number, replica = min(ready, key=lambda each: each[0])
        self._queues[queue_number].popleft()
        self.waiting -= 1
        return request, replica

    def release(self, replica: int, states: ReplicaStates) -> None:
        """Let any other replica take the requests that wait for a dead one."""
        left = self._queues[replica]
        if not left or not states.alive():
            return
        states.count_reassigned(replica, len(left))
        self._queues[ANY_REPLICA] = deque(sorted([*self._queues[ANY_REPLICA], *left]))
        left.clear()

    def keep_only(self, kept: Collection[int]) -> None:
        """Drop all other requests."""
        self._queues = [deque(request for request in queue if request in kept) for queue in self._queues]
        self.waiting = sum(map(len, self._queues))
