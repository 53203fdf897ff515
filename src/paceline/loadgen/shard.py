"""One process of the client: an epoll loop that sends by the schedule and stamps what comes back.

No queue, no lock, no parsing while a response streams, no coroutine per request: a read costs a few microseconds, and
whatever this loop is late by stands in its own record (`orders.Shift`). Times of events are the kernel's.
"""

from __future__ import annotations

import gc
import select
import socket
import ssl
import time
from collections import deque
from dataclasses import dataclass, field

from paceline.loadgen.arrivals import NS, WHEN_FREE
from paceline.loadgen.clocks import Alarm, Bridge
from paceline.loadgen.connection import Connection
from paceline.loadgen.orders import Handled, Orders, Shift
from paceline.loadgen.response import BrokenResponse, Response, understand

# Connections that are being made at one time: more at once overflow a server's queue of new ones.
CONNECTING_AT_ONCE = 128
CONNECT_S = 10.0
# Of a burst only so many are read before the schedule is looked at again.
EVENTS_AT_ONCE = 64
# How often requests are looked at for their time-out.
LOOK_NS = NS // 10
_IN, _OUT = select.EPOLLIN | select.EPOLLRDHUP, select.EPOLLOUT


@dataclass(slots=True)
class Audit:
    """What the loop can say against itself, collected as it goes."""

    schedule_lag_ns: list[int] = field(default_factory=list)
    read_lag_ns: list[int] = field(default_factory=list)
    reads: int = 0
    most_in_flight: int = 0
    waited_for_cap: int = 0


class Shard:
    """Run once: `connect`, then `work` from the common start on."""

    def __init__(self, orders: Orders) -> None:
        self.orders = orders
        self._bridge = Bridge.measured()
        self._epoll = select.epoll()
        self._alarm = Alarm()
        self._epoll.register(self._alarm.descriptor, select.EPOLLIN)
        self._addresses = [_address(target.host, target.port) for target in orders.targets]
        self._connections: dict[int, Connection] = {}
        self._free: list[list[Connection]] = [[] for _ in orders.targets]
        self._in_flight: deque[tuple[Connection, Handled]] = deque()
        self._busy = 0
        self._next = 0
        self._start_ns = 0
        self._looked_ns = 0
        self.handled: list[Handled] = []
        self.audit = Audit()

    # --- before the clock runs ---

    def connect(self) -> None:
        """Connections for the requests that will be in flight, made beforehand; ones that fail are made when needed."""
        wanted = deque(n % len(self.orders.targets) for n in range(self.orders.connections))
        deadline = time.monotonic() + CONNECT_S
        while (wanted or any(not c.ready for c in self._connections.values())) and time.monotonic() < deadline:
            opening = sum(not c.ready for c in self._connections.values())
            while wanted and opening < CONNECTING_AT_ONCE:
                opening += self._open(wanted.popleft()) is not None
            self._turn(0.05)

    def _open(self, replica: int) -> Connection | None:
        try:
            made = Connection(self.orders.targets[replica], replica, self._addresses[replica], self._bridge.offset_ns)
        except OSError:
            return None
        self._connections[made.fileno()] = made
        made.watched = _IN | _OUT
        self._epoll.register(made.fileno(), made.watched)
        return made

    # --- the work ---

    def work(self, start_ns: int) -> Shift:
        gc.collect()
        gc.freeze()
        gc.disable()
        self._start_ns, began_cpu = start_ns, time.process_time()
        try:
            while self._next < len(self.orders.numbers) or self._busy:
                self._send_what_is_due()
                self._turn(self._patience_s())
                self._end_late_ones()
        finally:
            gc.enable()
        return self._shift(start_ns, time.process_time() - began_cpu)

    def _send_what_is_due(self) -> None:
        while self._next < len(self.orders.numbers):
            due = int(self.orders.due_ns[self._next])
            now = time.monotonic_ns()
            if due == WHEN_FREE:
                if self._busy >= self.orders.concurrency or now < self._start_ns:
                    self._alarm.set(max(self._start_ns, 1) if now < self._start_ns else now + NS)
                    return
                due = now - self._start_ns
            elif now < self._start_ns + due:
                self._alarm.set(self._start_ns + due)
                return
            elif self.orders.cap is not None and self._busy >= self.orders.cap:
                self.audit.waited_for_cap += 1
                return
            self._send(self._next, self._start_ns + due)
            self._next += 1

    def _patience_s(self) -> float:
        return 0.1 if self._busy or self._next < len(self.orders.numbers) else 0.0

    def _send(self, index: int, due_ns: int) -> None:
        replica = self.orders.replicas[index]
        handled = Handled(number=self.orders.numbers[index], replica=replica, due_ns=due_ns)
        self._busy += 1
        self.audit.most_in_flight = max(self.audit.most_in_flight, self._busy)
        self._hand_over(handled, index)

    def _hand_over(self, handled: Handled, index: int) -> None:
        free = self._free[handled.replica]
        # The one used last is the one least likely to have been closed for being idle.
        connection = free.pop() if free else self._open(handled.replica)
        if connection is None:
            self._finish(handled, "connect")
            return
        connection.index = index
        connection.begin_when_ready(handled, self.orders.payloads[index])
        self._in_flight.append((connection, handled))
        if connection.ready:
            self._write(connection)

    def _write(self, connection: Connection) -> None:
        handled = connection.handled
        try:
            connection.start_pending()
            done = connection.write()
        except OSError as error:
            self._lose(connection, "reset", str(error))
            return
        if handled is not None and handled.sent_ns is None and connection.has_begun:
            handled.sent_ns = time.monotonic_ns()
            self.audit.schedule_lag_ns.append(handled.sent_ns - handled.due_ns)
        self._watch(connection, _IN if done else _IN | _OUT)

    def _watch(self, connection: Connection, what: int) -> None:
        if connection.watched != what:
            connection.watched = what
            self._epoll.modify(connection.fileno(), what)

    # --- what happens ---

    def _turn(self, patience_s: float) -> None:
        for descriptor, what in self._epoll.poll(patience_s, EVENTS_AT_ONCE):
            if descriptor == self._alarm.descriptor:
                self._alarm.answer()
                continue
            connection = self._connections.get(descriptor)
            if connection is None:
                continue
            if not connection.connected:
                self._connected(connection)
            elif what & select.EPOLLOUT:
                self._write(connection)
            if what & (select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR | select.EPOLLRDHUP):
                self._read(connection)

    def _connected(self, connection: Connection) -> None:
        try:
            connection.finish_connecting()
        except OSError as error:
            self._lose(connection, "connect", str(error))
            return
        if connection.handled is None and connection.ready:
            self._free[connection.replica].append(connection)
        self._write(connection)

    def _read(self, connection: Connection) -> None:
        if self._connections.get(connection.fileno()) is not connection:
            return
        try:
            data, kernel_ns, user_ns = connection.read()
            plain = connection.plain(data) if data else b""
        except BlockingIOError:
            return
        except ssl.SSLError as error:
            self._lose(connection, "tls", str(error))
            return
        except OSError as error:
            self._lose(connection, "reset", str(error))
            return
        self.audit.reads += 1
        if connection.tls and data:
            self._after_tls(connection)
        if connection.response is None:
            if not data:
                self._drop(connection)
            return
        if plain:
            self._take(connection, plain, kernel_ns, user_ns)
        elif not data:
            self._closed(connection, user_ns)

    def _after_tls(self, connection: Connection) -> None:
        """The other side's answer may have completed the keys, or ask for one."""
        if connection.ready and connection.handled is None and connection not in self._free[connection.replica]:
            self._free[connection.replica].append(connection)
        self._write(connection)

    def _take(self, connection: Connection, plain: bytes, kernel_ns: int, user_ns: int) -> None:
        response, handled = connection.response, connection.handled
        assert response is not None
        assert handled is not None
        lag = user_ns - kernel_ns
        self.audit.read_lag_ns.append(lag)
        if handled.worst_lag_ns is None or lag > handled.worst_lag_ns:
            handled.worst_lag_ns = lag
        try:
            whole = response.feed(plain, kernel_ns, user_ns)
        except BrokenResponse as error:
            self._lose(connection, str(error))
            return
        if whole:
            self._complete(connection, response, handled)

    def _closed(self, connection: Connection, user_ns: int) -> None:
        response, handled = connection.response, connection.handled
        assert response is not None
        assert handled is not None
        try:
            response.close()
        except BrokenResponse as error:
            if str(error) == "closed" and connection.used > 1 and not handled.retried:
                self._retry(connection, handled)
            else:
                self._lose(connection, str(error))
            return
        self._complete(connection, response, handled)

    def _retry(self, connection: Connection, handled: Handled) -> None:
        """A server may close a kept connection just when it is used again: nothing was asked of it yet."""
        index = connection.index
        self._drop(connection)
        handled.retried, handled.sent_ns = True, None
        self._hand_over(handled, index)

    # --- ends ---

    def _complete(self, connection: Connection, response: Response, handled: Handled) -> None:
        connection.handled = connection.response = None
        _read_off(handled, response, connection.stamped, self.orders.keeps_text)
        if response.keeps_alive:
            self._free[connection.replica].append(connection)
        else:
            self._drop(connection)
        self._finish(handled, handled.error)

    def _finish(self, handled: Handled, error: str | None, detail: str | None = None) -> None:
        self._busy -= 1
        handled.error = error
        handled.detail = detail or handled.detail
        if handled.ended_ns is None:
            handled.ended_ns = time.monotonic_ns()
        self.handled.append(handled)

    def _lose(self, connection: Connection, error: str, detail: str | None = None) -> None:
        handled, response = connection.handled, connection.response
        connection.handled = connection.response = None
        self._drop(connection)
        if handled is not None:
            if response is not None and response.status:
                handled.status = response.status
            self._finish(handled, error, detail)

    def _drop(self, connection: Connection) -> None:
        self._connections.pop(connection.fileno(), None)
        free = self._free[connection.replica]
        if connection in free:
            free.remove(connection)
        self._epoll.unregister(connection.fileno())
        connection.close()

    def _end_late_ones(self) -> None:
        """All requests have one time-out, so those sent first are the first to have it."""
        now = time.monotonic_ns()
        if now - self._looked_ns < LOOK_NS:
            return
        self._looked_ns = now
        limit = now - int(self.orders.timeout_s * NS)
        while self._in_flight:
            connection, handled = self._in_flight[0]
            ended = connection.handled is not handled
            if not ended and handled.due_ns >= limit:
                return
            self._in_flight.popleft()
            if not ended:
                self._lose(connection, "timeout")

    def _shift(self, start_ns: int, cpu_s: float) -> Shift:
        after = Bridge.measured()
        for connection in list(self._connections.values()):
            self._drop(connection)
        self._alarm.close()
        self._epoll.close()
        audit = self.audit
        return Shift(
            handled=self.handled,
            start_ns=start_ns,
            schedule_lag_ns=audit.schedule_lag_ns,
            read_lag_ns=audit.read_lag_ns,
            reads=audit.reads,
            cpu_s=cpu_s,
            wall_s=(time.monotonic_ns() - start_ns) / NS,
            most_in_flight=audit.most_in_flight,
            waited_for_cap=audit.waited_for_cap,
            clock_doubt_ns=self._bridge.doubt_ns,
            clock_drift_ns=after.offset_ns - self._bridge.offset_ns,
        )


def _read_off(handled: Handled, response: Response, stamped: bool, keeps_text: bool) -> None:
    """Times and counts of a whole response; an answer that is no success is an error by its number."""
    times = response.kernel_ns
    handled.status, handled.stamped = response.status, stamped
    handled.first_byte_ns, handled.ended_ns = times[0], times[-1]
    if response.status != 200:
        handled.error = f"http_{response.status}"
        handled.detail = response.body()[:300].decode(errors="replace")
        return
    try:
        answer = understand(response.events())
    except BrokenResponse as error:
        handled.error = str(error)
        return
    handled.first_ns = None if answer.first_read is None else times[answer.first_read]
    if answer.first_reasoning_read is not None:
        handled.first_reasoning_ns = times[answer.first_reasoning_read]
    handled.last_ns = None if answer.last_read is None else times[answer.last_read]
    handled.token_ns = [times[read] for read in answer.reads]
    handled.pieces, handled.coalesced = answer.pieces, answer.coalesced
    handled.tokens_told, handled.prompt_tokens, handled.finish = answer.tokens_told, answer.prompt_tokens, answer.finish
    if keeps_text:
        handled.text = "".join(answer.text)
    if answer.error is not None:
        handled.error, handled.detail = "in_stream", answer.error
    elif answer.damaged:
        handled.error = "malformed"
    elif answer.pieces == 0:
        handled.error = "empty"


def _address(host: str, port: int) -> tuple[int, tuple[object, ...]]:
    """Looked up once, before the clock runs."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    return family, address
