"""A server of known law: an OpenAI-compatible endpoint whose times are decided beforehand, for testing clients.

Token k of a request is due at arrival + ttft + k * itl, whatever was late before it: the law holds over the whole
answer. Arrival is when the kernel had the request. With slots, a request that comes while all are taken waits in line
and counts as arrived when the answer ended, by the law, whose slot it takes: such a server can do
slots / (ttft + (tokens - 1) * itl) requests a second. What the server itself was late by is counted and told at /law.
Modes are the ways in which real servers surprise clients.
"""

from __future__ import annotations

import contextlib
import heapq
import json
import random
import select
import signal
import socket
import struct
import time
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from paceline.errors import RequestError
from paceline.serving.client.clocks import ANCILLARY_BYTES, Alarm, Bridge, kernel_time, stamp_in_kernel
from paceline.serving.mock import wire

NS = 1_000_000_000
# How each mode surprises; `plain` does not.
MODES = {
    "plain": "one token per event",
    "clock": "one token per event, its text the server's monotonic clock just before it is sent",
    "role": "a role chunk and an empty one before the first token",
    "double": "two tokens per event",
    "split": "characters and frames cut in the middle",
    "comments": "keep-alive comments between events",
    "reset": "connection reset after half of the tokens",
    "stall": "no event after half of the tokens, for ever",
    "endless": "goes on after the asked number of tokens",
    "untold": "no usage and no [DONE]",
    "tail": "usage in an event after the last token",
    "refuse": "HTTP 429 with Retry-After for every other request",
    "fail": "HTTP 500 for every other request",
    "slow-head": "headers byte by byte",
    "error": "an error object in the stream",
    "flood": "a body of 100 MB",
}
# Written without a look at anything else: the modes in which how many streams are held is measured.
STRAIGHT = ("plain", "clock")
RECEIVE_BYTES = 1 << 18
# Tokens that are sent before requests are looked for again: one that is late must not make others wait for ever.
SENDS_AT_ONCE = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Law:
    """spread: sigma of a lognormal factor on ttft, drawn per request from the seed; 0 for none. slots: answers under
    way at once, 0 for any number."""

    ttft_s: float = 0.1
    itl_s: float = 0.02
    tokens: int = 32
    mode: str = "plain"
    spread: float = 0.0
    seed: int = 0
    model: str = "mock"
    slots: int = 0


@dataclass(slots=True)
class Stream:
    """One answer under way: how many tokens were sent, and when the first one is due."""

    connection: Client
    first_due_ns: int
    total: int
    chat: bool
    prompt_tokens: int
    sent: int = 0


@dataclass(slots=True)
class Client:
    sock: socket.socket
    received: bytearray = field(default_factory=bytearray)
    waiting: bytearray = field(default_factory=bytearray)
    watched: int = select.EPOLLIN
    open: bool = True


class MockReplica:
    """`serve` runs until `stop` says so; `port` is known before."""

    def __init__(self, law: Law, host: str = "127.0.0.1", port: int = 0) -> None:
        self.law = law
        self._listener = socket.create_server((host, port), backlog=4096)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._epoll = select.epoll()
        self._alarm = Alarm()
        self._epoll.register(self._listener.fileno(), select.EPOLLIN)
        self._epoll.register(self._alarm.descriptor, select.EPOLLIN)
        self._clients: dict[int, Client] = {}
        self._due: list[tuple[int, int, Stream]] = []
        self._line: deque[tuple[Client, dict[str, Any], bool]] = deque()
        self._taken = 0
        self._order = 0
        self._requests = 0
        self._draws = random.Random(law.seed)
        self._lags = array("q")
        self._itl_ns = round(law.itl_s * NS)
        self._offset_ns = Bridge.measured().offset_ns

    def serve(self, stop: Callable[[], bool]) -> None:
        while not stop():
            if self._due:
                self._alarm.set(self._due[0][0])
            for descriptor, what in self._epoll.poll(0.2):
                self._answer(descriptor, what)
            self._send_due()
        self.close()

    def close(self) -> None:
        for client in list(self._clients.values()):
            self._drop(client)
        self._listener.close()
        self._alarm.close()
        self._epoll.close()

    # --- connections ---

    def _answer(self, descriptor: int, what: int) -> None:
        if descriptor == self._listener.fileno():
            self._accept()
        elif descriptor == self._alarm.descriptor:
            self._alarm.answer()
        elif (client := self._clients.get(descriptor)) is not None:
            if what & select.EPOLLOUT:
                self._flush(client)
            if what & (select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR):
                self._receive(client)

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                sock, _ = self._listener.accept()
                sock.setblocking(False)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                stamp_in_kernel(sock)
                self._clients[sock.fileno()] = Client(sock)
                self._epoll.register(sock.fileno(), select.EPOLLIN)

    def _receive(self, client: Client) -> None:
        try:
            data, ancillary, _, _ = client.sock.recvmsg(RECEIVE_BYTES, ANCILLARY_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data, ancillary = b"", []
        if not data:
            self._drop(client)
            return
        stamp = kernel_time(ancillary)
        now = time.monotonic_ns() if stamp is None else stamp - self._offset_ns
        client.received += data
        while (request := wire.whole_request(client.received)) is not None:
            path, body, size = request
            del client.received[:size]
            self._serve_one(client, path, body, now)

    def _drop(self, client: Client) -> None:
        client.open = False
        self._clients.pop(client.sock.fileno(), None)
        with contextlib.suppress(OSError, ValueError):
            self._epoll.unregister(client.sock.fileno())
        client.sock.close()

    def _put(self, client: Client, data: bytes) -> None:
        if not client.waiting:
            try:
                data = data[client.sock.send(data) :]
            except BlockingIOError:
                pass
            except OSError:
                self._drop(client)
                return
            if not data:
                return
        client.waiting += data
        self._flush(client)

    def _flush(self, client: Client) -> None:
        while client.waiting and client.open:
            try:
                del client.waiting[: client.sock.send(client.waiting)]
            except BlockingIOError:
                self._watch(client, select.EPOLLIN | select.EPOLLOUT)
                return
            except OSError:
                self._drop(client)
                return
        if client.open:
            self._watch(client, select.EPOLLIN)

    def _watch(self, client: Client, what: int) -> None:
        if client.watched != what:
            client.watched = what
            self._epoll.modify(client.sock.fileno(), what)

    # --- requests ---

    def _serve_one(self, client: Client, path: str, body: bytes, now: int) -> None:
        if path == "/v1/models":
            self._put(
                client, wire.json_answer(200, {"object": "list", "data": [{"id": self.law.model, "object": "model"}]})
            )
        elif path == "/health":
            self._put(client, wire.json_answer(200, {}))
        elif path == "/law":
            self._put(client, wire.json_answer(200, self.told()))
        elif path not in ("/v1/completions", "/v1/chat/completions"):
            self._put(client, wire.json_answer(404, {"error": {"message": f"no such path: {path}"}}))
        else:
            self._complete(client, path, body, now)

    def told(self) -> dict[str, Any]:
        """The law, and what the server was late by itself."""
        lags = sorted(self._lags)
        late = {f"p{p}": lags[min(len(lags) - 1, len(lags) * p // 100)] / NS for p in (50, 99)} if lags else {}
        return {"law": asdict(self.law), "requests": self._requests, "events": len(lags), "late_s": late}

    def _complete(self, client: Client, path: str, body: bytes, now: int) -> None:
        self._requests += 1
        try:
            asked = json.loads(body)
        except ValueError:
            asked = None
        if not isinstance(asked, dict):
            self._put(client, wire.json_answer(400, {"error": {"message": "the body is no JSON object"}}))
            return
        if asked.get("model", self.law.model) != self.law.model:
            self._put(
                client, wire.json_answer(404, {"error": {"message": f"the model {asked['model']!r} does not exist"}})
            )
            return
        every_other = self._requests % 2 == 0
        if self.law.mode == "refuse" and every_other:
            self._put(client, wire.json_answer(429, {"error": {"message": "busy"}}, "Retry-After: 1\r\n"))
        elif self.law.mode == "fail" and every_other:
            self._put(client, wire.json_answer(500, {"error": {"message": "broken"}}))
        else:
            self._admit(client, asked, path.endswith("chat/completions"), now)

    def _admit(self, client: Client, asked: dict[str, Any], chat: bool, now: int) -> None:
        if self.law.slots and self._taken >= self.law.slots:
            self._line.append((client, asked, chat))
            return
        self._taken += 1
        self._begin(client, asked, chat, now)

    def _release(self, at: int) -> None:
        """The slot of an answer that ended; the next in line whose client is still there takes it."""
        self._taken -= 1
        while self._line:
            client, asked, chat = self._line.popleft()
            if client.open:
                self._admit(client, asked, chat, at)
                return

    def _begin(self, client: Client, asked: dict[str, Any], chat: bool, now: int) -> None:
        factor = self._draws.lognormvariate(0.0, self.law.spread) if self.law.spread else 1.0
        total = asked.get("max_tokens") or asked.get("max_completion_tokens") or self.law.tokens
        due = now + round(self.law.ttft_s * factor * NS)
        self._order += 1
        stream = Stream(client, due, int(total), chat, wire.prompt_tokens(asked))
        heapq.heappush(self._due, (due, self._order, stream))

    def _send_due(self) -> None:
        due, straight, now = self._due, self.law.mode in STRAIGHT, time.monotonic_ns()
        for _ in range(SENDS_AT_ONCE):
            if not due or due[0][0] > now:
                return
            at, order, stream = due[0]
            if not stream.connection.open:
                heapq.heappop(due)
                self._release(at)
                continue
            goes_on = self._send_straight(stream) if straight else self._send_event(stream)
            if goes_on:
                heapq.heapreplace(due, (stream.first_due_ns + stream.sent * self._itl_ns, order, stream))
            else:
                heapq.heappop(due)
                self._release(at)
            now = time.monotonic_ns()
            self._lags.append(now - at)

    def _send_straight(self, stream: Stream) -> bool:
        """One token with one write, its head before the first and its farewell after the last; whether more follow."""
        sent, word = stream.sent, wire.WORDS[stream.sent % len(wire.WORDS)]
        data = wire.timed_token(stream.chat) if self.law.mode == "clock" else wire.token(stream.chat, word)
        if sent == 0:
            data = wire.HEAD + data
        stream.sent = sent = sent + 1
        if sent >= stream.total:
            data += self._farewell(stream)
        self._put(stream.connection, data)
        return sent < stream.total

    def _send_event(self, stream: Stream) -> bool:
        """In the way of the mode; whether more follow."""
        client, mode = stream.connection, self.law.mode
        first = stream.sent == 0
        if first:
            self._put_head(stream)
        step = 2 if mode == "double" else 1
        words = "".join(wire.WORDS[(stream.sent + n) % len(wire.WORDS)] for n in range(step))
        stream.sent += step
        half = stream.sent > stream.total // 2
        if mode == "reset" and half:
            client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self._drop(client)
            return False
        if mode == "stall" and half:
            return False
        if mode == "error" and half:
            self._put(client, wire.frame(b'data: {"error": {"message": "out of pages", "code": 500}}\n\n') + wire.END)
            return False
        self._put_token(stream, words)
        if stream.sent < stream.total or mode == "endless":
            return True
        self._put(client, self._farewell(stream))
        return False

    def _put_head(self, stream: Stream) -> None:
        client = stream.connection
        if self.law.mode == "slow-head":
            for place in range(len(wire.HEAD)):
                self._put(client, wire.HEAD[place : place + 1])
            return
        if self.law.mode == "role":
            opening = wire.event(stream.chat, "", role="assistant") + wire.event(stream.chat, "")
            self._put(client, wire.HEAD + wire.frame(opening))
        elif self.law.mode == "flood":
            filler = b": " + b"x" * 65_534 + b"\n\n"
            self._put(client, wire.HEAD + wire.frame(filler) * 1600)
        else:
            client.waiting += wire.HEAD

    def _put_token(self, stream: Stream, words: str) -> None:
        event = wire.event(stream.chat, words)
        if self.law.mode == "comments":
            event = b": alive\n\n" + event
        if self.law.mode == "split":
            middle = event.find("ü".encode()) + 1 or len(event) // 2
            frame = wire.frame(event[:middle]) + wire.frame(event[middle:])
            self._put(stream.connection, frame[: len(frame) - 9])
            self._put(stream.connection, frame[len(frame) - 9 :])
            return
        self._put(stream.connection, wire.frame(event))

    def _farewell(self, stream: Stream) -> bytes:
        return wire.END if self.law.mode == "untold" else wire.goodbye(stream.sent, stream.prompt_tokens)


def serve_until_told(law: Law, host: str, port: int, ready: Callable[[int], None]) -> None:
    """In a process of its own: until SIGTERM or Ctrl-C. RequestError where it cannot listen there."""
    try:
        replica = MockReplica(law, host, port)
    except OSError as error:
        why = str(error.strerror or error).partition(" (")[0]
        raise RequestError(
            f"{host}:{port} was given, where nobody can listen ({why}); accepted is a free port"
        ) from None
    ended: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.append(1))
    ready(replica.port)
    replica.serve(lambda: bool(ended))
