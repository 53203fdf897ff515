"""A mock OpenAI server with known latencies, for testing clients.

Token k of a request is due at arrival + ttft + k * itl, however late the tokens before it were. Arrival is when the
kernel had the request. With slots, a request that finds all slots busy waits in a queue; it counts as arrived when the
answer whose slot it gets was due to end. Such a server sustains slots / (ttft + (tokens - 1) * itl) requests per
second. The server records its own delays and reports them at /law. Modes imitate what real servers do to surprise
clients.
"""

from __future__ import annotations

import contextlib
import errno
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
from functools import cache, lru_cache
from typing import Any

from paceline.errors import RequestError, shown
from paceline.serving import http_server
from paceline.serving.client.clocks import ANCILLARY_BYTES, Alarm, Bridge, kernel_time, stamp_in_kernel

NS = 1_000_000_000
# What each mode does; `plain` has no surprise.
MODES = {
    "plain": "one token per event",
    "clock": "one token per event, its text the server's monotonic clock just before it is sent",
    "role": "a role chunk and an empty one before the first token",
    "double": "two tokens per event",
    "split": "characters and frames cut in the middle",
    "comments": "keep-alive comments between events",
    "reset": "connection reset after half of the tokens",
    "stall": "no event after half of the tokens, forever",
    "endless": "continues after the requested number of tokens",
    "terse": "no usage and no [DONE], only a finish reason",
    "short": "ends after half of the tokens, as if complete, without a finish reason or [DONE]",
    "renamed": "answers name another model than /v1/models lists",
    "announced": "a Content-Length of 100 bytes more than are sent before the connection closes",
    "cut": "a chunked body without its last chunk before the connection closes",
    "unmarked": "HTTP/1.0: the connection closes after the tokens, without a finish reason or [DONE]",
    "excess": "more tokens after the announced Content-Length",
    "whole": "one JSON object instead of a stream",
    "tail": "usage in an event after the last token",
    "refuse": "HTTP 429 with Retry-After for every other request",
    "fail": "HTTP 500 for every other request",
    "slow-head": "headers byte by byte",
    "error": "an error object in the stream",
    "flood": "a body of 100 MB",
}
# Modes with a fast path, in which the number of streams is measured.
STRAIGHT = ("plain", "clock")
# Modes whose answer comes at once, when the first token is due; then the connection closes.
CLOSED = ("announced", "cut", "unmarked", "excess", "whole")
# The model in answers of the mode `renamed`.
RENAMED = "another-model"
RECEIVE_BYTES = 1 << 18
# Tokens sent before new requests are read: a late token must not make others wait forever.
SENDS_AT_ONCE = 256
MOST_TOKENS = 1_000_000
# What a client may leave unread before its connection is closed; the mode `flood` sends 105 MB at once.
MOST_UNREAD = 256 << 20
WORDS = ("pace", "line", "über", "node", "rank", "wire", "clock", "tie ")
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Latencies:
    """spread: sigma of a lognormal factor on ttft, drawn per request from the seed (0: none). slots: answers in
    progress at once (0: unlimited)."""

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
    """One answer in progress: how many tokens were sent, and when the first one is due."""

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
    """`serve` runs until `stop` returns True; `port` is known before."""

    def __init__(self, latencies: Latencies, host: str = "127.0.0.1", port: int = 0) -> None:
        self.latencies = latencies
        self._listener = socket.create_server((host, port), backlog=4096)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._epoll = select.epoll()
        self._alarm = Alarm()
        self._epoll.register(self._listener.fileno(), select.EPOLLIN)
        self._epoll.register(self._alarm.descriptor, select.EPOLLIN)
        self._clients: dict[int, Client] = {}
        self._due: list[tuple[int, int, Stream]] = []
        self._queue: deque[tuple[Client, dict[str, Any], bool]] = deque()
        self._taken = 0
        self._is_full = False
        self._order = 0
        self._requests = 0
        self._draws = random.Random(latencies.seed)
        self._lags = array("q")
        self._itl_ns = round(latencies.itl_s * NS)
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
            with contextlib.suppress(BlockingIOError, ConnectionError):
                while True:
                    try:
                        sock, _ = self._listener.accept()
                    except OSError as error:
                        if error.errno not in (errno.EMFILE, errno.ENFILE):
                            raise
                        # Too many connections: the others wait until one of these ends.
                        self._epoll.unregister(self._listener.fileno())
                        self._is_full = True
                        return
                    sock.setblocking(False)
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    stamp_in_kernel(sock)
                    self._clients[sock.fileno()] = Client(sock)
                    self._epoll.register(sock.fileno(), select.EPOLLIN)
        elif descriptor == self._alarm.descriptor:
            self._alarm.answer()
        elif (client := self._clients.get(descriptor)) is not None:
            if what & select.EPOLLOUT:
                self._flush(client)
            if what & (select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR):
                self._receive(client)

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
        try:
            while client.open and (request := http_server.take_request(client.received)) is not None:
                if answer := self._respond(client, request, now):
                    self._put(client, answer)
        except http_server.Refused as refused:
            self._put(client, http_server.refusal(refused))
            self._drop(client)

    def _drop(self, client: Client) -> None:
        client.open = False
        self._clients.pop(client.sock.fileno(), None)
        with contextlib.suppress(OSError, ValueError):
            self._epoll.unregister(client.sock.fileno())
        client.sock.close()
        if self._is_full:
            self._is_full = False
            self._epoll.register(self._listener.fileno(), select.EPOLLIN)

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
        if len(client.waiting) > MOST_UNREAD:
            self._drop(client)
            return
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

    def report(self) -> dict[str, Any]:
        """The latencies, and the server's own delays."""
        lags = sorted(self._lags)
        late = {f"p{p}": lags[min(len(lags) - 1, len(lags) * p // 100)] / NS for p in (50, 99)} if lags else {}
        return {"law": asdict(self.latencies), "requests": self._requests, "events": len(lags), "late_s": late}

    def _respond(self, client: Client, request: http_server.Request, now: int) -> bytes:
        """The answer, or nothing for a completion, which is sent when it is due."""

        def error(status: int, message: str, headers: str = "") -> bytes:
            return http_server.answer(status, {"error": {"message": message}}, headers)

        model = self.latencies.model
        if request.path == "/v1/models":
            return http_server.answer(200, {"object": "list", "data": [{"id": model, "object": "model"}]})
        if request.path == "/health":
            return http_server.answer(200, {})
        if request.path == "/law":
            return http_server.answer(200, self.report())
        if request.path not in ("/v1/completions", "/v1/chat/completions"):
            return error(404, f"unknown path: {request.path}")
        self._requests += 1
        try:
            fields = json.loads(request.body)
        except (ValueError, RecursionError):
            fields = None
        if not isinstance(fields, dict):
            return error(400, "the body is not a JSON object")
        if fields.get("model", model) != model:
            return error(404, f"the model {shown(fields['model'])} does not exist")
        if not 1 <= self._tokens_of(fields) <= MOST_TOKENS:
            return error(400, f"max_tokens: expected a whole number from 1 to {MOST_TOKENS}")
        every_other = self._requests % 2 == 0
        if self.latencies.mode == "refuse" and every_other:
            return error(429, "busy", "Retry-After: 1\r\n")
        if self.latencies.mode == "fail" and every_other:
            return error(500, "broken")
        self._admit(client, fields, request.path.endswith("chat/completions"), now)
        return b""

    def _tokens_of(self, request: dict[str, Any]) -> int:
        """The number of tokens of the answer; 0 if the request does not state one that can be."""
        total = request.get("max_tokens") or request.get("max_completion_tokens") or self.latencies.tokens
        return total if type(total) is int else 0

    def _admit(self, client: Client, request: dict[str, Any], chat: bool, now: int) -> None:
        if self.latencies.slots and self._taken >= self.latencies.slots:
            self._queue.append((client, request, chat))
            return
        self._taken += 1
        self._begin(client, request, chat, now)

    def _release(self, at: int) -> None:
        """Free the slot of an ended answer; the next request in the queue whose client is still there gets it."""
        self._taken -= 1
        while self._queue:
            client, request, chat = self._queue.popleft()
            if client.open:
                self._admit(client, request, chat, at)
                return

    def _begin(self, client: Client, request: dict[str, Any], chat: bool, now: int) -> None:
        factor = self._draws.lognormvariate(0.0, self.latencies.spread) if self.latencies.spread else 1.0
        due = now + round(self.latencies.ttft_s * factor * NS)
        self._order += 1
        stream = Stream(client, due, self._tokens_of(request), chat, prompt_tokens(request))
        heapq.heappush(self._due, (due, self._order, stream))

    def _send_due(self) -> None:
        due, straight, now = self._due, self.latencies.mode in STRAIGHT, time.monotonic_ns()
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
        """Send one token in one write, with the head before the first and the usage after the last."""
        sent, word = stream.sent, WORDS[stream.sent % len(WORDS)]
        data = timed_token(stream.chat) if self.latencies.mode == "clock" else token_of(stream.chat, word)
        if sent == 0:
            data = HEAD + data
        stream.sent = sent = sent + 1
        if sent >= stream.total:
            data += self._ending(stream)
        self._put(stream.connection, data)
        return sent < stream.total

    def _send_event(self, stream: Stream) -> bool:
        """Send one event in the way of the mode; whether more follow."""
        client, mode = stream.connection, self.latencies.mode
        if mode in CLOSED:
            # The last bytes before the connection closes.
            self._put(client, whole_answer(mode, stream))
            self._drop(client)
            return False
        if stream.sent == 0:
            if mode == "slow-head":
                for position in range(len(HEAD)):
                    self._put(client, HEAD[position : position + 1])
            elif mode == "role":
                opening = event_of(stream.chat, "", role="assistant") + event_of(stream.chat, "")
                self._put(client, HEAD + http_server.chunk(opening))
            elif mode == "flood":
                self._put(client, HEAD + http_server.chunk(b": " + b"x" * 65_534 + b"\n\n") * 1600)
            else:
                client.waiting += HEAD
        step = 2 if mode == "double" else 1
        words = "".join(WORDS[(stream.sent + n) % len(WORDS)] for n in range(step))
        stream.sent += step
        half = stream.sent > stream.total // 2
        if mode == "reset" and half:
            client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self._drop(client)
            return False
        if mode == "stall" and half:
            return False
        if mode == "error" and half:
            error = http_server.chunk(b'data: {"error": {"message": "out of pages", "code": 500}}\n\n')
            self._put(client, error + http_server.LAST_CHUNK)
            return False
        if mode == "short" and half:
            self._put(client, http_server.LAST_CHUNK)
            return False
        event = (b": alive\n\n" if mode == "comments" else b"") + event_of(stream.chat, words)
        if mode == "split":
            middle = event.find("ü".encode()) + 1 or len(event) // 2
            frame = http_server.chunk(event[:middle]) + http_server.chunk(event[middle:])
            self._put(client, frame[: len(frame) - 9])
            self._put(client, frame[len(frame) - 9 :])
        else:
            self._put(client, http_server.chunk(event))
        if stream.sent < stream.total or mode == "endless":
            return True
        self._put(client, self._ending(stream))
        return False

    def _ending(self, stream: Stream) -> bytes:
        if self.latencies.mode != "terse":
            name = RENAMED if self.latencies.mode == "renamed" else self.latencies.model
            return last_events(stream.sent, stream.prompt_tokens, name)
        choice: dict[str, Any] = {"index": 0, "delta": {}} if stream.chat else {"index": 0, "text": ""}
        choice["finish_reason"] = "length"
        return http_server.chunk(http_server.event({"id": "mock", "choices": [choice]})) + http_server.LAST_CHUNK


def serve_until_signalled(latencies: Latencies, host: str, port: int, ready: Callable[[int], None]) -> None:
    """Serve until SIGTERM or Ctrl-C; RequestError if the address is not available."""
    try:
        replica = MockReplica(latencies, host, port)
    except OSError as error:
        why = str(error.strerror or error).partition(" (")[0]
        raise RequestError(f"got {host}:{port}, which cannot be used ({why}); expected a free port") from None
    ended: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.append(1))
    ready(replica.port)
    replica.serve(lambda: bool(ended))


# --- the bytes it sends ---


def prompt_tokens(request: dict[str, Any]) -> int:
    """The number of token ids, or the words of the text, or the words of all messages."""
    prompt = request.get("prompt")
    if isinstance(prompt, list):
        return len(prompt)
    messages = request.get("messages")
    texts = [m.get("content") for m in messages if isinstance(m, dict)] if isinstance(messages, list) else [prompt]
    return sum(len(text.split()) for text in texts if isinstance(text, str))


def whole_answer(mode: str, stream: Stream) -> bytes:
    """An answer in one write, with what the mode gets wrong; a Content-Length unless the mode has none."""
    words = [WORDS[number % len(WORDS)] for number in range(stream.total)]
    tokens = b"".join(event_of(stream.chat, word) for word in words)
    body = tokens + http_server.DONE
    if mode == "cut":
        return HEAD + http_server.chunk(body)
    if mode == "unmarked":
        return b"HTTP/1.0 200 OK\r\nContent-Type: text/event-stream\r\n\r\n" + tokens
    if mode == "whole":
        text = "".join(words)
        choice = {"index": 0, "finish_reason": "length"} | (
            {"message": {"role": "assistant", "content": text}} if stream.chat else {"text": text}
        )
        return http_server.answer(200, {"id": "mock", "choices": [choice]})
    length = len(body) + 100 if mode == "announced" else len(body)
    more = tokens if mode == "excess" else b""
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: %d\r\n\r\n" % length
    return head + body + more


@cache
def event_of(chat: bool, text: str, role: str | None = None) -> bytes:
    delta = {"role": role, "content": text} if role else {"content": text}
    choice: dict[str, Any] = {"index": 0, "delta": delta} if chat else {"index": 0, "text": text}
    text = json.dumps({"id": "mock", "choices": [choice]}, ensure_ascii=False)
    return b"data: " + text.encode() + b"\n\n"


@cache
def token_of(chat: bool, text: str) -> bytes:
    return http_server.chunk(event_of(chat, text))


def timed_token(chat: bool) -> bytes:
    """An event whose text is the monotonic clock, in as many digits as the placeholder has."""
    return token_of(chat, "#" * 20 + " ").replace(b"#" * 20, b"%020d" % time.monotonic_ns())


@lru_cache(maxsize=4096)
def last_events(tokens: int, prompt: int, model: str = "mock") -> bytes:
    usage = {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": tokens + prompt}
    last = json.dumps({"id": "mock", "model": model, "choices": [], "usage": usage}).encode()
    return http_server.chunk(b"data: " + last + b"\n\n" + http_server.DONE) + http_server.LAST_CHUNK
