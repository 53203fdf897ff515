"""A server of known law: an OpenAI-compatible endpoint whose times are decided beforehand, for testing clients.

Token k of a request is due at arrival + ttft + k * itl, whatever was late before it: the law holds over the whole
answer. What the server itself was late by is counted and told at /law. Modes are the ways in which real servers
surprise clients.
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
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Any

from paceline.loadgen.clocks import Alarm

NS = 1_000_000_000
# How each mode surprises; `plain` does not.
MODES = {
    "plain": "one token per event",
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
WORDS = ("pace", "line", "über", "node", "rank", "wire", "clock", "tie ")


@dataclass(frozen=True, slots=True, kw_only=True)
class Law:
    """spread: sigma of a lognormal factor on ttft, drawn per request from the seed; 0 for none."""

    ttft_s: float = 0.1
    itl_s: float = 0.02
    tokens: int = 32
    mode: str = "plain"
    spread: float = 0.0
    seed: int = 0
    model: str = "mock"


@dataclass(slots=True)
class Stream:
    """One answer under way: which event comes next and when."""

    connection: Client
    arrived_ns: int
    total: int
    chat: bool
    ttft_ns: int
    sent: int = 0

    def due_ns(self, itl_ns: int) -> int:
        return self.arrived_ns + self.ttft_ns + self.sent * itl_ns


@dataclass(slots=True)
class Client:
    sock: socket.socket
    received: bytearray = field(default_factory=bytearray)
    waiting: bytearray = field(default_factory=bytearray)
    stream: Stream | None = None
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
        self._order = 0
        self._requests = 0
        self._draws = random.Random(law.seed)
        self._lags: list[int] = []

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
                self._clients[sock.fileno()] = Client(sock)
                self._epoll.register(sock.fileno(), select.EPOLLIN)

    def _receive(self, client: Client) -> None:
        try:
            data = client.sock.recv(1 << 20)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._drop(client)
            return
        client.received += data
        while (request := _whole_request(client.received)) is not None:
            path, body, size = request
            del client.received[:size]
            self._serve_one(client, path, body, time.monotonic_ns())

    def _drop(self, client: Client) -> None:
        client.open = False
        self._clients.pop(client.sock.fileno(), None)
        with contextlib.suppress(OSError, ValueError):
            self._epoll.unregister(client.sock.fileno())
        client.sock.close()

    def _put(self, client: Client, data: bytes) -> None:
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
            self._put(client, _json(200, {"object": "list", "data": [{"id": self.law.model, "object": "model"}]}))
        elif path == "/law":
            self._put(client, _json(200, self.told()))
        elif path not in ("/v1/completions", "/v1/chat/completions"):
            self._put(client, _json(404, {"error": {"message": f"no such path: {path}"}}))
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
            self._put(client, _json(400, {"error": {"message": "the body is no JSON object"}}))
            return
        if asked.get("model", self.law.model) != self.law.model:
            self._put(client, _json(404, {"error": {"message": f"the model {asked['model']!r} does not exist"}}))
            return
        odd = self._requests % 2 == 0
        if self.law.mode == "refuse" and odd:
            self._put(client, _json(429, {"error": {"message": "busy"}}, "Retry-After: 1\r\n"))
        elif self.law.mode == "fail" and odd:
            self._put(client, _json(500, {"error": {"message": "broken"}}))
        else:
            self._begin(client, asked, path.endswith("chat/completions"), now)

    def _begin(self, client: Client, asked: dict[str, Any], chat: bool, now: int) -> None:
        factor = self._draws.lognormvariate(0.0, self.law.spread) if self.law.spread else 1.0
        total = asked.get("max_tokens") or asked.get("max_completion_tokens") or self.law.tokens
        stream = Stream(client, now, int(total), chat, round(self.law.ttft_s * factor * NS))
        client.stream = stream
        self._schedule(stream)

    def _schedule(self, stream: Stream) -> None:
        self._order += 1
        heapq.heappush(self._due, (stream.due_ns(round(self.law.itl_s * NS)), self._order, stream))

    def _send_due(self) -> None:
        now = time.monotonic_ns()
        while self._due and self._due[0][0] <= now:
            due, _, stream = heapq.heappop(self._due)
            if stream.connection.open:
                self._send_event(stream)
                self._lags.append(time.monotonic_ns() - due)
            now = time.monotonic_ns()

    def _send_event(self, stream: Stream) -> None:
        client, mode = stream.connection, self.law.mode
        first = stream.sent == 0
        if first:
            self._put_head(stream)
        step = 2 if mode == "double" else 1
        words = "".join(WORDS[(stream.sent + n) % len(WORDS)] for n in range(step))
        stream.sent += step
        half = stream.sent > stream.total // 2
        if mode == "reset" and half:
            client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self._drop(client)
            return
        if mode == "stall" and half:
            return
        if mode == "error" and half:
            self._put(client, _frame(b'data: {"error": {"message": "out of pages", "code": 500}}\n\n') + _END)
            return
        self._put_token(stream, words)
        if stream.sent < stream.total or mode == "endless":
            self._schedule(stream)
        else:
            self._put(client, self._farewell(stream))

    def _put_head(self, stream: Stream) -> None:
        head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        if self.law.mode == "slow-head":
            for place in range(len(head)):
                self._put(stream.connection, head[place : place + 1])
            return
        client = stream.connection
        if self.law.mode == "role":
            opening = _event(stream.chat, "", role="assistant") + _event(stream.chat, "")
            self._put(client, head + _frame(opening))
        elif self.law.mode == "flood":
            filler = b": " + b"x" * 65_534 + b"\n\n"
            self._put(client, head + _frame(filler) * 1600)
        else:
            client.waiting += head

    def _put_token(self, stream: Stream, words: str) -> None:
        event = _event(stream.chat, words)
        if self.law.mode == "comments":
            event = b": alive\n\n" + event
        if self.law.mode == "split":
            middle = event.find("ü".encode()) + 1 or len(event) // 2
            frame = _frame(event[:middle]) + _frame(event[middle:])
            self._put(stream.connection, frame[: len(frame) - 9])
            self._put(stream.connection, frame[len(frame) - 9 :])
            return
        self._put(stream.connection, _frame(event))

    def _farewell(self, stream: Stream) -> bytes:
        if self.law.mode == "untold":
            return _END
        usage = {"prompt_tokens": 1, "completion_tokens": stream.sent, "total_tokens": stream.sent + 1}
        told = json.dumps({"id": "mock", "choices": [], "usage": usage}).encode()
        return _frame(b"data: " + told + b"\n\n" + b"data: [DONE]\n\n") + _END


_END = b"0\r\n\r\n"


def _whole_request(received: bytearray) -> tuple[str, bytes, int] | None:
    """Path, body and size of the request at the beginning; None while it is not whole."""
    head_end = received.find(b"\r\n\r\n")
    if head_end < 0:
        return None
    head = bytes(received[:head_end]).decode("latin-1")
    length = 0
    for line in head.split("\r\n")[1:]:
        name, _, value = line.partition(":")
        if name.strip().lower() == "content-length" and value.strip().isdigit():
            length = int(value)
    size = head_end + 4 + length
    if len(received) < size:
        return None
    words = head.split(" ", 2)
    return (words[1] if len(words) > 1 else "/"), bytes(received[head_end + 4 : size]), size


@cache
def _event(chat: bool, text: str, role: str | None = None) -> bytes:
    delta = {"role": role, "content": text} if role else {"content": text}
    choice: dict[str, Any] = {"index": 0, "delta": delta} if chat else {"index": 0, "text": text}
    chunk = json.dumps({"id": "mock", "choices": [choice]}, ensure_ascii=False)
    return b"data: " + chunk.encode() + b"\n\n"


def _frame(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def _json(status: int, value: object, headers: str = "") -> bytes:
    body = json.dumps(value).encode()
    head = f"HTTP/1.1 {status} -\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n{headers}\r\n"
    return head.encode() + body


def serve_until_told(law: Law, host: str, port: int, ready: Callable[[int], None]) -> None:
    """In a process of its own: until SIGTERM or Ctrl-C."""
    ended: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.append(1))
    replica = MockReplica(law, host, port)
    ready(replica.port)
    replica.serve(lambda: bool(ended))
