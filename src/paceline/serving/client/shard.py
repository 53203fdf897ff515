"""One client process: an epoll loop that sends on schedule and records when answers arrive.

There is no queue, no lock, no coroutine per request, and no parsing while an answer streams: a read costs a few
microseconds. The loop records its own delays (`schedule.ShardResult`). Times of events are the kernel's.
"""

from __future__ import annotations

import contextlib
import gc
import mmap
import select
import ssl
import time
from array import array
from collections import deque
from dataclasses import dataclass
from itertools import islice

from paceline.serving.client.clocks import Alarm, Bridge
from paceline.serving.client.http_stream import OWN_ERRORS, Answer, BrokenResponse, Connection, Response, understand
from paceline.serving.client.replicas import READABLE, WRITABLE, ConnectionPool, ReplicaStates, RequestQueues
from paceline.serving.client.schedule import (
    ANY_REPLICA,
    NS,
    WHEN_FREE,
    Assignment,
    RequestResult,
    ShardResult,
    timestamps,
)
from paceline.serving.client.silence import BoardView, ReplicaBoard

# Connections being opened at one time: more overflow a server's accept queue.
CONNECTING_AT_ONCE, CONNECT_S = 128, 10.0
# Sockets handled and requests sent before the loop looks at the schedule again.
SOCKETS_AT_ONCE = 64
SENDS_AT_ONCE = 32
# Events of a complete answer parsed at once, in under 100 us: 1,000 tokens at once would delay other requests.
PARSED_AT_ONCE = 16
# Answers are parsed when fewer sockets than this were ready, or when more bytes than this wait.
QUIET_SOCKETS = SOCKETS_AT_ONCE // 2
MOST_UNREAD_BYTES = 64 << 20
TIMEOUT_CHECK_NS = NS // 10
# If a reused connection ends this soon after a request, the server had already closed it.
STALE_NS = NS // 4
# Errors that mean a replica is gone: it refused, broke or closed the connection. A late or refused answer is an answer.
# It is silent if it was suspended while the request was in flight.
GONE = ("connect", "reset", "closed", "truncated", "silent")
DETAIL_BYTES = 300
FINISH_BYTES = 80
MODEL_BYTES = 200
_HAS_NEWS = READABLE | select.EPOLLHUP | select.EPOLLERR
# The counters of one process.
_FIELDS = 6
PLANNED, SENT, ENDED, LATE, FAILED, STOP = range(_FIELDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Requests of all processes so far. ended includes late (complete, but beyond a limit) and failed (incomplete)."""

    planned: int
    sent: int
    ended: int
    late: int
    failed: int


class ProgressBoard:
    """Counters in shared memory, one slot for each process, created before the processes are forked.

    Each slot has one writer and 8-byte numbers, so no lock is needed. A reader may see a request as sent slightly
    before it sees another as ended. Only STOP is written from outside: once it is set, no more requests are sent.
    """

    def __init__(self, slots: int) -> None:
        self._cells = memoryview(mmap.mmap(-1, 8 * _FIELDS * slots)).cast("q")

    def slot(self, number: int) -> memoryview[int]:
        return self._cells[number * _FIELDS : (number + 1) * _FIELDS]

    def total(self) -> Progress:
        planned, sent, ended, late, failed = (sum(self._cells[field::_FIELDS]) for field in range(STOP))
        return Progress(planned=planned, sent=sent, ended=ended, late=late, failed=failed)

    def stop(self) -> None:
        for cell in range(STOP, len(self._cells), _FIELDS):
            self._cells[cell] = 1


class AnswerParser:
    """Turns a complete response into a `RequestResult`, a few events per call.

    A status other than 200 is an error named by its number. A server may echo what it was sent, so `secret` (the API
    key) is removed from every text.
    """

    def __init__(self, result: RequestResult, response: Response, stamped: bool, secret: bytes | None = None) -> None:
        self.result, self.response = result, response
        self._secret = None if secret is None else secret.decode(errors="replace")
        result.status, result.stamped = response.status, stamped
        result.first_byte_ns, result.ended_ns = response.kernel_ns[0], response.kernel_ns[-1]
        self._events = response.events()
        self._answer = Answer()

    def parse_some(self, keeps_text: bool) -> bool:
        """Whether the result is complete."""
        response, result = self.response, self.result
        if response.status != 200:
            result.error = f"http_{response.status}"
            # Retry-After is recorded but not obeyed: a second attempt would be a different load.
            retry_after = response.headers.get(b"retry-after")
            prefix = f"Retry-After: {self._redact(retry_after.decode(errors='replace'), 40)}; " if retry_after else ""
            result.detail = prefix + self._redact(response.body().decode(errors="replace"), DETAIL_BYTES)
            return True
        before = self._answer.events
        try:
            understand(islice(self._events, PARSED_AT_ONCE), self._answer)
        except BrokenResponse as error:
            result.error = str(error)
            return True
        if self._answer.events - before == PARSED_AT_ONCE:
            return False
        answer, times = self._answer, response.kernel_ns
        result.first_ns = None if answer.first_read is None else times[answer.first_read]
        if answer.first_reasoning_read is not None:
            result.first_reasoning_ns = times[answer.first_reasoning_read]
        result.last_ns = None if answer.last_read is None else times[answer.last_read]
        result.token_ns.extend(map(times.__getitem__, answer.reads))
        result.pieces, result.coalesced = answer.pieces, answer.coalesced
        result.finish = None if answer.finish is None else self._redact(answer.finish, FINISH_BYTES)
        result.model = None if answer.model is None else self._redact(answer.model, MODEL_BYTES)
        result.reported_tokens, result.prompt_tokens = answer.reported_tokens, answer.prompt_tokens
        if keeps_text:
            result.text = self._redact("".join(answer.text))
        if answer.error is not None:
            result.error, result.detail = "in_stream", self._redact(answer.error, DETAIL_BYTES)
        else:
            result.error = answer.fault
        if answer.events == 0 and response.body().lstrip()[:1] == b"{":
            # One JSON object has no times of tokens.
            result.error, result.detail = "not_streamed", "one JSON object instead of a stream of events"
        return True

    def _redact(self, text: str, most: int | None = None) -> str:
        """Removes the key before cutting the text: part of a key would not be recognised."""
        return (text if self._secret is None else text.replace(self._secret, "***"))[:most]


class Results:
    """Requests that have ended. Complete answers wait in `unread` until the loop has time to parse them."""

    def __init__(self, assignment: Assignment, slot: memoryview[int]) -> None:
        self._keeps_text, self._limits, self._slot = assignment.keeps_text, assignment.limits, slot
        self._secrets = [target.secret for target in assignment.targets]
        self.results: list[RequestResult] = []
        self.read_lag_ns: array[int] = timestamps()
        self.unread: deque[AnswerParser] = deque()
        self.unread_bytes = 0

    def answered(self, result: RequestResult, response: Response, stamped: bool) -> None:
        self.unread.append(AnswerParser(result, response, stamped, self._secrets[result.replica]))
        self.unread_bytes += len(response.data)

    def parse_some(self) -> None:
        """Parse a few events of the answer that has waited longest."""
        parser = self.unread[0]
        if parser.parse_some(self._keeps_text):
            self.unread.popleft()
            self.unread_bytes -= len(parser.response.data)
            self.read_lag_ns += parser.response.lag_ns
            self.add(parser.result)

    def add(self, result: RequestResult) -> None:
        self.results.append(result)
        self._slot[ENDED] += 1
        if result.error is not None:
            self._slot[FAILED] += 1
        elif result.is_late(self._limits):
            self._slot[LATE] += 1


class Shard:
    """Use once: `connect`, then `work` from the common start on. `slot` holds its counters (`ProgressBoard`), `board`
    the replicas that get no requests."""

    def __init__(
        self, assignment: Assignment, slot: memoryview[int] | None = None, board: BoardView | None = None
    ) -> None:
        self.assignment = assignment
        self._board = ReplicaBoard(1, len(assignment.targets)).view(0) if board is None else board
        self._slot = ProgressBoard(1).slot(0) if slot is None else slot
        self._slot[PLANNED] = len(assignment.numbers)
        self._bridge = Bridge.measured()
        self._pool = ConnectionPool(assignment.targets, self._bridge.offset_ns)
        self._alarm = Alarm()
        self._pool.epoll.register(self._alarm.descriptor, select.EPOLLIN)
        self._replicas = ReplicaStates(len(assignment.targets), assignment.per_replica)
        self._queues = RequestQueues(len(assignment.targets))
        self._in_flight: deque[tuple[int, Connection, RequestResult]] = deque()
        self._to_resend: dict[int, RequestResult] = {}
        self._due_ns: list[int] = assignment.due_ns.tolist()
        self._is_closed = WHEN_FREE in self._due_ns[:1]
        self._most = assignment.concurrency if self._is_closed else assignment.cap
        # Requests before _held_back that still wait do so because of the cap, not for their turn in a burst.
        self._busy = self._next = self._sent = self._held_back = 0
        self._start_ns = self._checked_ns = 0
        self._results = Results(assignment, self._slot)
        self._schedule_lag_ns = timestamps()
        self._most_in_flight = self._waited_for_cap = 0

    # --- before the clock runs ---

    def connect(self) -> None:
        """Open the connections that the load will use. One that fails is opened again when it is needed."""
        self._follow_board()
        turns = (n % len(self.assignment.targets) for n in range(self.assignment.connections))
        wanted = deque(replica for replica in turns if not self._replicas.is_gone(replica))
        deadline = time.monotonic() + CONNECT_S
        while (wanted or self._pool.connecting) and time.monotonic() < deadline:
            while wanted and self._pool.connecting < CONNECTING_AT_ONCE:
                with contextlib.suppress(OSError):
                    self._pool.open(wanted.popleft())
            self._poll(0.05)

    # --- sending ---

    def work(self, start_ns: int) -> ShardResult:
        gc.collect()
        gc.freeze()
        gc.disable()
        self._start_ns, began_cpu = start_ns, time.process_time()
        unread = self._results.unread
        try:
            while self._next < len(self._due_ns) or self._queues.waiting or self._busy or unread:
                now = time.monotonic_ns()
                more_is_due = self._send_due(now)
                ready = self._poll(0.0 if unread or more_is_due else 0.1)
                if unread and (ready < QUIET_SOCKETS or self._results.unread_bytes > MOST_UNREAD_BYTES):
                    self._results.parse_some()
                if now - self._checked_ns >= TIMEOUT_CHECK_NS:
                    self._end_timed_out(now)
        finally:
            gc.enable()
        cpu_s = time.process_time() - began_cpu
        clock_drift_ns = Bridge.measured().offset_ns - self._bridge.offset_ns
        wall_s = (time.monotonic_ns() - start_ns) / NS
        self._pool.close()
        self._alarm.close()
        return ShardResult(
            results=self._results.results,
            start_ns=start_ns,
            schedule_lag_ns=self._schedule_lag_ns,
            read_lag_ns=self._results.read_lag_ns,
            reads=len(self._results.read_lag_ns),
            cpu_s=cpu_s,
            wall_s=wall_s,
            most_in_flight=self._most_in_flight,
            waited_for_cap=self._waited_for_cap,
            clock_doubt_ns=self._bridge.doubt_ns,
            clock_drift_ns=clock_drift_ns,
            died_ns=self._replicas.died_ns,
            reassigned=self._replicas.reassigned,
        )

    def _send_due(self, now: int) -> bool:
        """Send some of the requests that are due and have room; whether any are left."""
        since = now - self._start_ns
        if since < 0:
            self._alarm.set(self._start_ns)
            return False
        due, count = self._due_ns, len(self._due_ns)
        while self._next < count and due[self._next] <= since:
            replica = self.assignment.replicas[self._next]
            if self.assignment.reassigns and self._replicas.is_gone(replica):
                self._replicas.count_reassigned(replica)
                replica = ANY_REPLICA
            self._queues.add(self._next, replica)
            self._next += 1
        if self._next < count:
            self._alarm.set(self._start_ns + due[self._next])
        least_ns, least_requests = self.assignment.least_ns, self.assignment.least_requests
        is_bounded = least_ns > 0 or least_requests > 0
        is_enough = is_bounded and since >= least_ns and self._sent >= least_requests
        if self._queues.waiting and (is_enough or self._slot[STOP]):
            self._next = count
            self._queues.keep_only(self._to_resend)
        for _ in range(SENDS_AT_ONCE):
            if not self._has_room() or (taken := self._queues.take(self._replicas)) is None:
                self._held_back = self._next
                return False
            self._waited_for_cap += taken[0] < self._held_back and not self._is_closed
            self._send(*taken)
        return self._has_room()

    def _has_room(self) -> bool:
        return self._queues.waiting > 0 and (not self._most or self._busy < self._most)

    def _send(self, index: int, replica: int | None) -> None:
        result = self._to_resend.pop(index, None)
        if result is None:
            due = time.monotonic_ns() if self._due_ns[index] == WHEN_FREE else self._start_ns + self._due_ns[index]
            planned = self.assignment.replicas[index]
            result = RequestResult(number=self.assignment.numbers[index], replica=planned, due_ns=due)
            self._sent += 1
            self._slot[SENT] += 1
        self._busy += 1
        self._most_in_flight = max(self._most_in_flight, self._busy)
        if replica is None:
            self._fail(result, result.error or "connect", result.detail or "no replica is left")
            return
        result.replica, result.error, result.detail = replica, None, None
        self._replicas.count_sent(replica)
        self._hand_over(result, index)

    def _hand_over(self, result: RequestResult, index: int) -> None:
        """Give the request to an idle connection of its replica, or to a new one."""
        try:
            idle = None if result.retried else self._pool.take_idle(result.replica)
            connection = idle or self._pool.open(result.replica)
        except OSError as error:
            self._replicas.in_flight[result.replica] -= 1
            self._end_attempt(result, index, self._refused(result.replica, error), str(error))
            return
        connection.index = index
        payload = self.assignment.payload(index, result.replica)
        connection.begin_when_ready(result, payload, self.assignment.longest_body)
        self._in_flight.append((time.monotonic_ns(), connection, result))
        if connection.ready:
            self._write(connection)

    def _write(self, connection: Connection) -> None:
        """Send what waits. sent_ns is when sending begins; the lag is taken when it has ended. The process may be
        paused in between, and neither the server's time nor the client's lag may look shorter for it."""
        result, before = connection.result, time.monotonic_ns()
        try:
            connection.start_pending()
            done = connection.write()
        except OSError as error:
            self._lose(connection, "reset", str(error))
            return
        if result is not None and result.sent_ns is None and connection.has_begun:
            result.sent_ns = before
            if not result.retried and result.attempt == 0:
                self._schedule_lag_ns.append(time.monotonic_ns() - result.due_ns)
        self._pool.watch(connection, READABLE if done else READABLE | WRITABLE)

    # --- receiving ---

    def _poll(self, timeout_s: float) -> int:
        """Wait, then handle every socket that is ready; how many were."""
        ready = self._pool.epoll.poll(timeout_s, SOCKETS_AT_ONCE)
        connections = self._pool.by_descriptor
        for descriptor, events in ready:
            connection = connections.get(descriptor)
            if connection is None:
                if descriptor == self._alarm.descriptor:
                    self._alarm.answer()
            elif events == select.EPOLLIN and connection.streams:
                self._read_streaming(connection)
            else:
                if not connection.connected:
                    self._connected(connection)
                elif events & select.EPOLLOUT:
                    self._write(connection)
                if events & _HAS_NEWS and connections.get(descriptor) is connection:
                    self._read(connection)
        return len(ready)

    def _read_streaming(self, connection: Connection) -> None:
        response = connection.response
        assert response is not None
        try:
            if connection.read_streaming(response) and response.is_whole():
                self._complete(connection, response)
        except BlockingIOError:
            return
        except OSError as error:
            self._lose(connection, "reset", str(error))
        except BrokenResponse as error:
            self._lose(connection, str(error))

    def _connected(self, connection: Connection) -> None:
        try:
            connection.finish_connecting()
        except OSError as error:
            self._lose(connection, self._refused(connection.replica, error), str(error))
            return
        self._replicas.accepted(connection.replica)
        if connection.ready:
            self._pool.settle(connection)
        self._write(connection)

    def _refused(self, replica: int, error: OSError) -> str:
        """The error class. If this process itself ran out of resources, the replica is not blamed."""
        if error.errno in OWN_ERRORS:
            return "client"
        if self._replicas.refused(replica, time.monotonic_ns()) and self.assignment.reassigns:
            self._queues.release(replica, self._replicas)
        return "connect"

    def _read(self, connection: Connection) -> None:
        was_ready = connection.ready
        try:
            data, kernel_ns, user_ns = connection.read()
            plain = connection.decrypt(data) if data else b""
        except BlockingIOError:
            return
        except ssl.SSLError as error:
            self._lose(connection, "tls", str(error))
            return
        except OSError as error:
            self._lose(connection, "reset", str(error))
            return
        if connection.tls and data:
            # The handshake may be complete now, or need an answer.
            if connection.ready and not was_ready:
                self._pool.settle(connection)
            self._write(connection)
        response = connection.response
        if response is None:
            if not data:
                self._pool.drop(connection)
            return
        try:
            if plain:
                if response.feed(plain, kernel_ns, user_ns):
                    self._complete(connection, response)
                else:
                    connection.streams = response.chunked and connection.stamped and connection.tls is None
            elif not data:
                response.close()
                self._complete(connection, response)
        except BrokenResponse as error:
            self._lose(connection, str(error))

    # --- ends ---

    def _complete(self, connection: Connection, response: Response) -> None:
        """The whole answer is here. It is parsed when there is time."""
        result = connection.result
        assert result is not None
        connection.result = connection.response = None
        connection.streams = False
        self._replicas.in_flight[connection.replica] -= 1
        self._replicas.answered(connection.replica, time.monotonic_ns())
        self._busy -= 1
        self._results.answered(result, response, connection.stamped)
        if response.keeps_alive:
            self._pool.park(connection)
        else:
            self._pool.drop(connection)

    def _fail(self, result: RequestResult, error: str, detail: str | None = None) -> None:
        self._busy -= 1
        result.error, result.detail = error, detail
        result.ended_ns = time.monotonic_ns()
        self._results.add(result)

    def _lose(self, connection: Connection, error: str, detail: str | None = None) -> None:
        """Drop the connection. Send its request again if the server had closed it while idle, else end the attempt."""
        result, response = connection.result, connection.response
        connection.result = connection.response = None
        self._pool.drop(connection)
        if result is None or response is None:
            return
        is_reused = connection.used > 1 and not response.data and not result.retried
        worked_ns = 0 if result.sent_ns is None else time.monotonic_ns() - result.sent_ns
        if error in ("closed", "reset") and is_reused and worked_ns < STALE_NS:
            result.retried, result.sent_ns = True, None
            result.attempt += 1
            self._hand_over(result, connection.index)
            return
        self._replicas.in_flight[connection.replica] -= 1
        self._results.read_lag_ns += response.lag_ns
        result.status = response.status or None
        self._end_attempt(result, connection.index, error, detail)

    def _end_attempt(self, result: RequestResult, index: int, error: str, detail: str | None = None) -> None:
        """Reassign the request if its replica died; otherwise mark it failed."""
        can_move = error in GONE and self.assignment.reassigns
        if can_move and self._queues.requeue(index, result.replica, self._replicas):
            self._busy -= 1
            result.attempt += 1
            result.error, result.detail = error, detail
            result.sent_ns = result.status = None
            result.retried = False
            self._to_resend[index] = result
        else:
            self._fail(result, "timeout" if error == "silent" else error, detail)

    def _end_timed_out(self, now: int) -> None:
        """All requests have the same timeout, so the oldest ones expire first."""
        self._checked_ns = now
        self._follow_board()
        limit = now - int(self.assignment.timeout_s * NS)
        while self._in_flight:
            began_ns, connection, result = self._in_flight[0]
            ended = connection.result is not result
            if not ended and began_ns >= limit:
                return
            self._in_flight.popleft()
            if not ended:
                self._lose(connection, "timeout")
                if self.assignment.reassigns and self._replicas.timed_out(connection.replica, began_ns):
                    self._board.report(connection.replica)
                    self._suspend(connection.replica)

    def _follow_board(self) -> None:
        """Suspend and use replicas as the parent process decided."""
        if not self.assignment.reassigns:
            return
        suspended = self._board.suspended()
        for replica in self._replicas.suspended - suspended:
            self._replicas.resume(replica)
        for replica in suspended - self._replicas.suspended:
            self._suspend(replica)

    def _suspend(self, replica: int) -> None:
        """Send nothing more to a silent replica, and let others take what it has not answered."""
        self._replicas.suspended.add(replica)
        self._queues.release(replica, self._replicas)
        for _, connection, result in list(self._in_flight):
            if connection.result is result and connection.replica == replica:
                self._lose(connection, "silent", "its replica stopped answering")
        self._pool.drop_idle(replica)
