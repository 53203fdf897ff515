"""One process of the client: an epoll loop that sends by the schedule and stamps what comes back.

No queue, no lock, no parsing while a response streams, no coroutine per request: a read costs a few microseconds, and
whatever this loop is late by stands in its own record (`orders.Shift`). Times of events are the kernel's.
"""

from __future__ import annotations

import contextlib
import gc
import select
import ssl
import time
from array import array
from collections import deque
from dataclasses import dataclass, field

from paceline.serving.client import tally
from paceline.serving.client.arrivals import NS, WHEN_FREE
from paceline.serving.client.clocks import Alarm, Bridge
from paceline.serving.client.connection import OWN_ERRORS, Connection
from paceline.serving.client.fleet import Fleet, Lanes
from paceline.serving.client.orders import ANY_REPLICA, Handled, Orders, Shift, stamps
from paceline.serving.client.pool import READABLE, WRITABLE, Pool
from paceline.serving.client.reading import Results
from paceline.serving.client.response import BrokenResponse, Response

# Connections that are being made at one time: more at once overflow a server's queue of new ones.
CONNECTING_AT_ONCE, CONNECT_S = 128, 10.0
# Of a burst only so many are read before the schedule is looked at again.
EVENTS_AT_ONCE = 64
# How often requests are looked at for their time-out.
LOOK_NS = NS // 10
# A kept connection that ends so soon after a request was sent had been given up before it came.
AT_ONCE_NS = NS // 4
# So many requests are sent before answers are looked at again.
SENDS_AT_ONCE = 32
# Answers are read off when fewer sockets than this were ready, or when so much waits.
QUIET_EVENTS = EVENTS_AT_ONCE // 2
MOST_UNREAD_BYTES = 64 << 20
# A replica is gone by these: it refused, broke or closed the connection. Answers that are late or refused are answers.
GONE = ("connect", "reset", "closed", "truncated")
_HAS_NEWS = READABLE | select.EPOLLHUP | select.EPOLLERR


@dataclass(slots=True)
class Audit:
    """What the loop can say against itself, collected as it goes."""

    schedule_lag_ns: array[int] = field(default_factory=stamps)
    most_in_flight: int = 0
    waited_for_cap: int = 0


class Shard:
    """Run once: `connect`, then `work` from the common start on. `slot` is where it tells how far it has come."""

    def __init__(self, orders: Orders, slot: memoryview[int] | None = None) -> None:
        self.orders = orders
        self._slot = tally.Board(1).slot(0) if slot is None else slot
        self._slot[tally.PLANNED] = len(orders.numbers)
        self._bridge = Bridge.measured()
        self._pool = Pool(orders.targets, self._bridge.offset_ns)
        self._alarm = Alarm()
        self._pool.epoll.register(self._alarm.descriptor, select.EPOLLIN)
        self._fleet = Fleet(len(orders.targets), orders.per_replica)
        self._lanes = Lanes(len(orders.targets))
        self._in_flight: deque[tuple[int, Connection, Handled]] = deque()
        self._again: dict[int, Handled] = {}
        self._due_ns: list[int] = orders.due_ns.tolist()
        self._is_closed = WHEN_FREE in self._due_ns[:1]
        self._most = orders.concurrency if self._is_closed else orders.cap
        # held_back: requests before this one that still wait do so for the cap, not for their turn in a burst.
        self._busy = self._next = self._given = self._held_back = 0
        self._start_ns = self._looked_ns = 0
        self._results = Results(orders, self._slot)
        self._audit = Audit()

    # --- before the clock runs ---

    def connect(self) -> None:
        """Connections for the requests that will be in flight, made beforehand; ones that fail are made when needed."""
        wanted = deque(n % len(self.orders.targets) for n in range(self.orders.connections))
        deadline = time.monotonic() + CONNECT_S
        while (wanted or self._pool.connecting) and time.monotonic() < deadline:
            while wanted and self._pool.connecting < CONNECTING_AT_ONCE:
                with contextlib.suppress(OSError):
                    self._pool.open(wanted.popleft())
            self._turn(0.05)

    # --- the work ---

    def work(self, start_ns: int) -> Shift:
        gc.collect()
        gc.freeze()
        gc.disable()
        self._start_ns, began_cpu = start_ns, time.process_time()
        unread = self._results.unread
        try:
            while self._next < len(self._due_ns) or self._lanes.waiting or self._busy or unread:
                now = time.monotonic_ns()
                more_is_due = self._give_out(now)
                happened = self._turn(0.0 if unread or more_is_due else 0.1)
                if unread and (happened < QUIET_EVENTS or self._results.unread_bytes > MOST_UNREAD_BYTES):
                    self._results.read_off()
                if now - self._looked_ns >= LOOK_NS:
                    self._end_late_ones(now)
        finally:
            gc.enable()
        return self._shift(start_ns, time.process_time() - began_cpu)

    def _give_out(self, now: int) -> bool:
        """Some of what is due and has room; whether that left any."""
        since = now - self._start_ns
        if since < 0:
            self._alarm.set(self._start_ns)
            return False
        due, count = self._due_ns, len(self._due_ns)
        while self._next < count and due[self._next] <= since:
            self._join(self._next)
            self._next += 1
        if self._next < count:
            self._alarm.set(self._start_ns + due[self._next])
        if self._lanes.waiting and self._is_enough(since):
            self._next = count
            self._lanes.forget(kept=self._again)
        for _ in range(SENDS_AT_ONCE):
            if not self._has_room() or (found := self._lanes.take(self._fleet)) is None:
                self._held_back = self._next
                return False
            self._audit.waited_for_cap += found[0] < self._held_back and not self._is_closed
            self._send(*found)
        return self._has_room()

    def _has_room(self) -> bool:
        return self._lanes.waiting > 0 and (not self._most or self._busy < self._most)

    def _join(self, index: int) -> None:
        replica = self.orders.replicas[index]
        if replica in self._fleet.died_ns and self.orders.reassigns and self._fleet.alive():
            self._fleet.taken_from(replica)
            replica = ANY_REPLICA
        self._lanes.join(index, replica)

    def _is_enough(self, since_ns: int) -> bool:
        asked = self.orders
        if self._slot[tally.STOP]:
            return True
        bounded = asked.least_ns > 0 or asked.least_requests > 0
        return bounded and since_ns >= asked.least_ns and self._given >= asked.least_requests

    def _send(self, index: int, replica: int | None) -> None:
        handled = self._again.pop(index, None)
        if handled is None:
            due = time.monotonic_ns() if self._due_ns[index] == WHEN_FREE else self._start_ns + self._due_ns[index]
            planned = self.orders.replicas[index]
            handled = Handled(number=self.orders.numbers[index], replica=planned, due_ns=due)
            self._given += 1
            self._slot[tally.SENT] += 1
        self._busy += 1
        self._audit.most_in_flight = max(self._audit.most_in_flight, self._busy)
        if replica is None:
            self._finish(handled, handled.error or "connect", handled.detail or "no replica is left to ask")
            return
        handled.replica, handled.error, handled.detail = replica, None, None
        self._fleet.give(replica)
        self._hand_over(handled, index)

    def _hand_over(self, handled: Handled, index: int) -> None:
        try:
            kept = None if handled.retried else self._pool.free_one(handled.replica)
            connection = kept or self._pool.open(handled.replica)
        except OSError as error:
            self._fleet.in_flight[handled.replica] -= 1
            self._end(handled, index, self._refused(handled.replica, error), str(error))
            return
        connection.index = index
        payload = self.orders.payload(index, handled.replica)
        connection.begin_when_ready(handled, payload, self.orders.longest_body)
        self._in_flight.append((time.monotonic_ns(), connection, handled))
        if connection.ready:
            self._write(connection)

    def _write(self, connection: Connection) -> None:
        """A request is sent when its sending begins, and late by when it has been handed over: this process may be held
        up in between, and neither the server's time nor the client's own lateness shall look shorter for it."""
        handled, before = connection.handled, time.monotonic_ns()
        try:
            connection.start_pending()
            done = connection.write()
        except OSError as error:
            self._lose(connection, "reset", str(error))
            return
        if handled is not None and handled.sent_ns is None and connection.has_begun:
            handled.sent_ns = before
            if not handled.retried and handled.attempt == 0:
                self._audit.schedule_lag_ns.append(time.monotonic_ns() - handled.due_ns)
        self._pool.watch(connection, READABLE if done else READABLE | WRITABLE)

    # --- what happens ---

    def _turn(self, patience_s: float) -> int:
        """Wait, then see to every socket that is ready; how many were."""
        ready = self._pool.epoll.poll(patience_s, EVENTS_AT_ONCE)
        connections = self._pool.by_descriptor
        for descriptor, what in ready:
            connection = connections.get(descriptor)
            if connection is None:
                if descriptor == self._alarm.descriptor:
                    self._alarm.answer()
            elif what == select.EPOLLIN and connection.streams:
                self._read_on(connection)
            else:
                self._see_to(connection, what)
        return len(ready)

    def _read_on(self, connection: Connection) -> None:
        response = connection.response
        assert response is not None
        try:
            may_have_ended = connection.read_on(response)
        except BlockingIOError:
            return
        except OSError as error:
            self._lose(connection, "reset", str(error))
            return
        if may_have_ended:
            self._look_for_end(connection, response)

    def _see_to(self, connection: Connection, what: int) -> None:
        if not connection.connected:
            self._connected(connection)
        elif what & select.EPOLLOUT:
            self._write(connection)
        if what & _HAS_NEWS and self._pool.holds(connection):
            self._read(connection)

    def _connected(self, connection: Connection) -> None:
        try:
            connection.finish_connecting()
        except OSError as error:
            self._lose(connection, self._refused(connection.replica, error), str(error))
            return
        self._fleet.accepted(connection.replica)
        if connection.ready:
            self._pool.settle(connection)
        self._write(connection)

    def _refused(self, replica: int, error: OSError) -> str:
        """The error class; what this process itself has run out of is held against no replica."""
        if error.errno in OWN_ERRORS:
            return "client"
        if self._fleet.refused(replica, time.monotonic_ns()) and self.orders.reassigns:
            self._lanes.release(replica, self._fleet)
        return "connect"

    def _read(self, connection: Connection) -> None:
        was_ready = connection.ready
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
        if connection.tls and data:
            # The other side's answer may have completed the keys, or ask for one.
            if connection.ready and not was_ready:
                self._pool.settle(connection)
            self._write(connection)
        response = connection.response
        if response is None:
            if not data:
                self._pool.drop(connection)
        elif plain:
            self._take(connection, response, plain, kernel_ns, user_ns)
        elif not data:
            self._closed(connection, response)

    def _take(self, connection: Connection, response: Response, plain: bytes, kernel_ns: int, user_ns: int) -> None:
        try:
            whole = response.feed(plain, kernel_ns, user_ns)
        except BrokenResponse as error:
            self._lose(connection, str(error))
            return
        if whole:
            self._complete(connection, response)
        else:
            connection.streams = response.chunked and connection.stamped and connection.tls is None

    def _look_for_end(self, connection: Connection, response: Response) -> None:
        try:
            whole = response.is_whole()
        except BrokenResponse as error:
            self._lose(connection, str(error))
            return
        if whole:
            self._complete(connection, response)

    def _closed(self, connection: Connection, response: Response) -> None:
        try:
            response.close()
        except BrokenResponse as error:
            self._lose(connection, str(error))
            return
        self._complete(connection, response)

    # --- ends ---

    def _complete(self, connection: Connection, response: Response) -> None:
        """Everything is there; what it says is read off when there is time."""
        handled = connection.handled
        assert handled is not None
        connection.handled = connection.response = None
        connection.streams = False
        self._fleet.in_flight[connection.replica] -= 1
        self._busy -= 1
        self._results.answered(handled, response, connection.stamped)
        if response.keeps_alive:
            self._pool.park(connection)
        else:
            self._pool.drop(connection)

    def _finish(self, handled: Handled, error: str, detail: str | None = None) -> None:
        """Without an answer."""
        self._busy -= 1
        handled.error, handled.detail = error, detail
        handled.ended_ns = time.monotonic_ns()
        self._results.keep(handled)

    def _lose(self, connection: Connection, error: str, detail: str | None = None) -> None:
        handled, response = connection.handled, connection.response
        connection.handled = connection.response = None
        self._pool.drop(connection)
        if handled is None or response is None:
            return
        is_kept = connection.used > 1 and not response.data and not handled.retried
        worked_ns = 0 if handled.sent_ns is None else time.monotonic_ns() - handled.sent_ns
        if error in ("closed", "reset") and is_kept and worked_ns < AT_ONCE_NS:
            # A server may close a kept connection just when it is used again; later it had begun on the request.
            handled.retried, handled.sent_ns = True, None
            handled.attempt += 1
            self._hand_over(handled, connection.index)
            return
        self._fleet.in_flight[connection.replica] -= 1
        self._results.read_lag_ns += response.lag_ns
        handled.status = response.status or None
        self._end(handled, connection.index, error, detail)

    def _end(self, handled: Handled, index: int, error: str, detail: str | None = None) -> None:
        """Of an attempt: the request is another replica's where this one is gone, else it has failed."""
        if error in GONE and self.orders.reassigns and self._lanes.join_again(index, handled.replica, self._fleet):
            self._busy -= 1
            handled.attempt += 1
            handled.error, handled.detail = error, detail
            handled.sent_ns = handled.status = None
            handled.retried = False
            self._again[index] = handled
        else:
            self._finish(handled, error, detail)

    def _end_late_ones(self, now: int) -> None:
        """All requests have one time-out, so those sent first are the first to have it."""
        self._looked_ns = now
        limit = now - int(self.orders.timeout_s * NS)
        while self._in_flight:
            began_ns, connection, handled = self._in_flight[0]
            ended = connection.handled is not handled
            if not ended and began_ns >= limit:
                return
            self._in_flight.popleft()
            if not ended:
                self._lose(connection, "timeout")

    def _shift(self, start_ns: int, cpu_s: float) -> Shift:
        after = Bridge.measured()
        wall_s = (time.monotonic_ns() - start_ns) / NS
        self._pool.close()
        self._alarm.close()
        audit, lags = self._audit, self._results.read_lag_ns
        return Shift(
            handled=self._results.handled,
            start_ns=start_ns,
            schedule_lag_ns=audit.schedule_lag_ns,
            read_lag_ns=lags,
            reads=len(lags),
            cpu_s=cpu_s,
            wall_s=wall_s,
            most_in_flight=audit.most_in_flight,
            waited_for_cap=audit.waited_for_cap,
            clock_doubt_ns=self._bridge.doubt_ns,
            clock_drift_ns=after.offset_ns - self._bridge.offset_ns,
            died_ns=self._fleet.died_ns,
            reassigned=self._fleet.reassigned,
        )
