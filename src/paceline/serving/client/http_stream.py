"""One HTTP connection of the client and the streamed answer on it.

A `Connection` is a non-blocking socket, with or without TLS, that records the time of every read. A `Response` keeps
the bytes and these times. While it streams only its end is looked for; chunks, events and JSON are parsed afterwards,
when that delays no other request. The time of an event is the kernel's receive time of the read that completed it. If
one read completed several events, they share that time and count as coalesced.
"""

from __future__ import annotations

import contextlib
import errno
import json
import re
import socket
import ssl
import time
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from paceline.serving.client import clocks
from paceline.serving.client.schedule import LONGEST_BODY, RequestResult, timestamps

READ_BYTES = 65_536
# A host that acknowledges nothing for this long is gone; keep-alive probes are sent while nothing else is.
SILENT_S, KEEP_ALIVE_S = 60, 15
# Retries of a connect, at doubling intervals: 15 s in all.
SYN_TRIES = 3
_LIVENESS = {
    (socket.SOL_SOCKET, "SO_KEEPALIVE"): 1,
    (socket.IPPROTO_TCP, "TCP_KEEPIDLE"): KEEP_ALIVE_S,
    (socket.IPPROTO_TCP, "TCP_KEEPINTVL"): KEEP_ALIVE_S,
    (socket.IPPROTO_TCP, "TCP_USER_TIMEOUT"): SILENT_S * 1000,
    (socket.IPPROTO_TCP, "TCP_SYNCNT"): SYN_TRIES,
}
# The client itself ran out of descriptors, ports or memory: these say nothing about a replica.
OWN_ERRORS = (
    *(errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS, errno.ENOMEM),
    # epoll: too many watched descriptors.
    errno.ENOSPC,
)
_UNDER_WAY = (errno.EINPROGRESS, errno.EWOULDBLOCK, 0)
_ANCILLARY_BYTES, _timespec, _monotonic_ns = clocks.ANCILLARY_BYTES, clocks.TIMESPEC.unpack_from, time.monotonic_ns
_NS = 1_000_000_000


class Connection:
    """States: connecting, idle (response is None), busy with one request.

    `streams`: its reads may go through `read_streaming`. `parked`: it is in the list of idle connections. `settled`: it
    has been ready once.
    """

    __slots__ = (
        *("replica", "sock", "_stamps", "_unstamped", "tls", "connected", "used", "result", "response", "index"),
        *("watched", "has_begun", "waiting", "streams", "parked", "settled", "_offset_ns", "_payload", "_recvmsg"),
    )

    def __init__(
        self, replica: int, address: tuple[int, tuple[object, ...]], offset_ns: int, tls: TlsPipe | None = None
    ) -> None:
        family, where = address
        self.replica = replica
        self.sock = socket.socket(family, socket.SOCK_STREAM)
        self.sock.setblocking(False)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # A host that lost power sends no reset: without these options its streams would end as timeouts instead of
        # resets. The kernel of a living host answers, however busy its server is.
        for (level, name), value in _LIVENESS.items():
            with contextlib.suppress(OSError, AttributeError):
                self.sock.setsockopt(level, getattr(socket, name), value)
        self._stamps = clocks.stamp_in_kernel(self.sock)
        self._unstamped = 0
        self._offset_ns = offset_ns
        self.tls = tls
        self.connected = False
        self.used = 0
        self.result: RequestResult | None = None
        self.response: Response | None = None
        self.index = -1
        self.watched = 0
        self.has_begun = self.streams = self.parked = self.settled = False
        self._recvmsg = self.sock.recvmsg
        self._payload: bytes | None = None
        self.waiting = b""
        code = self.sock.connect_ex(where)
        if code not in _UNDER_WAY:
            self.sock.close()
            raise OSError(code, errno.errorcode.get(code, "connect"))

    @property
    def stamped(self) -> bool:
        """Whether every read of this request carried the kernel's time, which the kernel does not guarantee."""
        return self._stamps and not self._unstamped

    def fileno(self) -> int:
        return self.sock.fileno()

    def finish_connecting(self) -> None:
        """Raises OSError if the server refused."""
        code = self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise OSError(code, errno.errorcode.get(code, "connect"))
        self.connected = True
        if self.tls:
            self.waiting += self.tls.greet()

    @property
    def is_closed_by_peer(self) -> bool:
        """Whether the server closed the connection while it was idle."""
        try:
            return not self.sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True

    @property
    def ready(self) -> bool:
        """Whether a request may be written. With TLS, the handshake comes first."""
        return self.connected and (self.tls is None or self.tls.agreed)

    def begin_when_ready(self, result: RequestResult, payload: bytes, longest_body: int) -> None:
        self.result, self.response = result, Response(longest_body)
        self._payload, self.has_begun = payload, False
        self.used += 1
        self._unstamped = 0

    def start_pending(self) -> None:
        """Move the pending request into the output buffer."""
        if self._payload is not None and self.ready:
            self.waiting += self.tls.seal(self._payload) if self.tls else self._payload
            self._payload, self.has_begun = None, True

    def write(self) -> bool:
        """Send the output buffer; False while the kernel takes no more."""
        while self.waiting:
            try:
                taken = self.sock.send(self.waiting)
            except BlockingIOError:
                return False
            self.waiting = self.waiting[taken:]
        return True

    def read(self) -> tuple[bytes, int, int]:
        """Bytes (b"" at the end of the connection), the kernel's time and this process's time, both monotonic."""
        data, ancillary, _, _ = self._recvmsg(READ_BYTES, _ANCILLARY_BYTES)
        now = _monotonic_ns()
        stamp = clocks.kernel_time(ancillary) if self._stamps else None
        self._unstamped += stamp is None and bool(data)
        return data, now if stamp is None else stamp - self._offset_ns, now

    def read_streaming(self, response: Response) -> bool:
        """Read more of a streaming answer; whether it may have ended or is too long.

        Does what `read` and `Response.feed` do together in a third of the time: nearly all reads of a run come here.
        """
        piece, ancillary, _, _ = self._recvmsg(READ_BYTES, _ANCILLARY_BYTES)
        now = _monotonic_ns()
        # The time is the only ancillary data requested; there is none at the end of a connection.
        if ancillary:
            seconds, nanoseconds = _timespec(ancillary[0][2])
            stamp = seconds * _NS + nanoseconds - self._offset_ns
        else:
            stamp = now
            self._unstamped += bool(piece)
        data = response.data
        data += piece
        response.kernel_ns.append(stamp)
        response.lag_ns.append(now - stamp)
        response.ends.append(len(data))
        return data.endswith(END_OF_CHUNKS) or len(data) > response.longest

    def decrypt(self, data: bytes) -> bytes:
        """The data without TLS. What TLS needs to answer is added to the output buffer."""
        if self.tls is None:
            return data
        plain, reply = self.tls.open(data)
        self.waiting += reply
        return plain

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.sock.close()


class TlsPipe:
    """TLS over memory buffers, so that this module does the reading and writing and knows the times."""

    def __init__(self, context: ssl.SSLContext, host: str) -> None:
        self._coming, self._going = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._object = context.wrap_bio(self._coming, self._going, server_hostname=host)
        self.agreed = False

    def greet(self) -> bytes:
        self._agree()
        return self._going.read()

    def open(self, data: bytes) -> tuple[bytes, bytes]:
        """The decrypted data, and what to send back; ssl.SSLError if the server cannot be trusted."""
        self._coming.write(data)
        if not self.agreed:
            self._agree()
        pieces = []
        with contextlib.suppress(ssl.SSLWantReadError, ssl.SSLZeroReturnError):
            while self.agreed and (piece := self._object.read(READ_BYTES)):
                pieces.append(piece)
        return b"".join(pieces), self._going.read()

    def seal(self, data: bytes) -> bytes:
        self._object.write(data)
        return self._going.read()

    def _agree(self) -> None:
        with contextlib.suppress(ssl.SSLWantReadError):
            self._object.do_handshake()
            self.agreed = True


END_OF_HEAD = b"\r\n\r\n"
END_OF_CHUNKS = b"0\r\n\r\n"
EMPTY_LINE = re.compile(rb"\r?\n\r?\n")
# The error class of a response with more bytes than it announced: whatever they are, they are no tokens.
EXCESS = "excess"
# The checks of json.loads take longer than decoding, for values as short as an event's.
_decode = json.JSONDecoder().raw_decode
_HEX = re.compile(rb"[0-9a-fA-F]+")
LARGEST_HEAD = 65_536
# The largest event, a thousand times one token's. A longer one would block the loop that parses it.
LARGEST_EVENT = 1 << 18
# An empty line has at most one byte more than this, so it may begin this many bytes before a new piece.
BEFORE_LAST = 3
# More digits do not fit into eight bytes.
_MOST_DIGITS = 19
# Counts that a float represents exactly; results are floats.
_MOST_TOKENS = 2**53


class BrokenResponse(Exception):
    """The response is not HTTP, ended early, or does not end. The text is the error class of its request."""


@dataclass(slots=True)
class Response:
    """Call `feed` with every read, in order, until it returns True: the response is complete."""

    longest_body: int = LONGEST_BODY
    data: bytearray = field(default_factory=bytearray)
    # For each read: where its bytes end, when the kernel had them, and how much later this process did.
    ends: array[int] = field(default_factory=timestamps)
    kernel_ns: array[int] = field(default_factory=timestamps)
    lag_ns: array[int] = field(default_factory=timestamps)
    status: int = 0
    body_at: int = 0
    length: int | None = None
    chunked: bool = False
    keeps_alive: bool = True
    # The most bytes of head and body together; more is an error.
    longest: int = LARGEST_HEAD
    headers: dict[bytes, bytes] = field(default_factory=dict)
    # Where the content of each complete chunk is. The last chunk of a complete body is empty.
    contents: list[tuple[int, int]] = field(default_factory=list)
    # Where the next chunk begins, and how many bytes must be there before it is complete.
    chunk_at: int = 0
    awaited: int = 0

    def feed(self, piece: bytes, kernel_ns: int, user_ns: int) -> bool:
        before = len(self.data)
        self.data += piece
        self.ends.append(len(self.data))
        self.kernel_ns.append(kernel_ns)
        self.lag_ns.append(user_ns - kernel_ns)
        return (self.body_at > 0 or self._read_head(before)) and self.is_whole()

    def is_whole(self) -> bool:
        """Whether the body is complete; call it after the head was read."""
        if len(self.data) > self.longest:
            raise BrokenResponse("too_long")
        if self.length is not None:
            if len(self.data) - self.body_at > self.length:
                raise BrokenResponse(EXCESS)
            return len(self.data) - self.body_at == self.length
        # Content may end like the last chunk does: only then are the chunks searched.
        return self.chunked and self.data.endswith(END_OF_CHUNKS) and self._has_last_chunk()

    def _has_last_chunk(self) -> bool:
        """Continues where the last search ended: a server may end every chunk the way a body ends."""
        data, at, length = self.data, self.chunk_at or self.body_at, len(self.data)
        if length < self.awaited:
            return False
        while (line_end := data.find(b"\r\n", at)) >= 0:
            begin = line_end + 2
            end = begin + chunk_size(data[at:line_end])
            if end == begin and data.find(b"\r\n", begin) < 0:
                break
            if end > length:
                self.awaited = end
                break
            self.contents.append((begin, end))
            if end == begin:
                if length > end + 2:
                    raise BrokenResponse(EXCESS)
                return True
            at = self.chunk_at = end + 2
        return False

    def close(self) -> None:
        """The server closed the connection. That ends a body without a length; any other is incomplete."""
        self.keeps_alive = False
        if not self.body_at or self.chunked or self.length is not None:
            raise BrokenResponse("truncated" if self.data else "closed")

    def _read_head(self, before: int) -> bool:
        """Parse the head if it is complete. before: bytes that were searched already."""
        end = self.data.find(END_OF_HEAD, max(0, before - len(END_OF_HEAD) + 1))
        if end < 0:
            if len(self.data) > LARGEST_HEAD:
                raise BrokenResponse("malformed")
            return False
        first, *lines = bytes(self.data[:end]).split(b"\r\n")
        version, _, rest = first.partition(b" ")
        if not version.startswith(b"HTTP/1.") or not rest[:3].isdigit():
            raise BrokenResponse("malformed")
        self.status = int(rest[:3])
        for line in lines:
            name, _, value = line.partition(b":")
            self.headers[name.strip().lower()] = value.strip()
        self.body_at = end + len(END_OF_HEAD)
        self.longest = self.body_at + self.longest_body
        self.chunked = b"chunked" in self.headers.get(b"transfer-encoding", b"").lower()
        content_length = self.headers.get(b"content-length")
        if content_length is not None and not self.chunked:
            if not content_length.isdigit() or len(content_length) > _MOST_DIGITS:
                raise BrokenResponse("malformed")
            self.length = int(content_length)
            if self.length > self.longest_body:
                raise BrokenResponse("too_long")
        closes = self.headers.get(b"connection", b"").lower() == b"close" or version == b"HTTP/1.0"
        self.keeps_alive = not closes and (self.chunked or self.length is not None)
        return True

    def body(self) -> bytes:
        return b"".join(bytes(self.data[begin:end]) for begin, end in self._contents())

    def events(self) -> Iterator[Event]:
        """Server-sent events of the body, each with the number of the read that completed it."""
        return _events(self.data, self._contents(), self.ends)

    def _contents(self) -> Iterable[tuple[int, int]]:
        """Where the content of a complete response is."""
        return self.contents if self.chunked else [(self.body_at, len(self.data))]


def chunk_size(text: bytearray) -> int:
    try:
        size = int(text, 16)
    except ValueError:
        digits = text.partition(b";")[0].strip()
        if not _HEX.fullmatch(digits):
            raise BrokenResponse("malformed") from None
        size = int(digits, 16)
    if size < 0:
        raise BrokenResponse("malformed")
    return size


class Event(NamedTuple):
    """The data of one event, and the number of the read that brought its last byte."""

    data: bytes | bytearray
    read: int


def _events(data: bytearray, pieces: Iterable[tuple[int, int]], ends: array[int]) -> Iterator[Event]:
    """Events end with an empty line, wherever chunks and reads were cut. Comments (keep-alive) are not events. Each
    byte is searched once, however small the chunks are."""
    kept, read, last_read = bytearray(), 0, len(ends) - 1
    for begin, end in pieces:
        piece = data[begin:end]
        size = end - begin
        if not kept and piece.find(b"\n") == size - 2 and piece.endswith(b"\n\n") and size <= LARGEST_EVENT:
            # One line, then an empty line: nearly every chunk of nearly every server.
            while read < last_read and ends[read] < end:
                read += 1
            if piece.startswith(b"data:"):
                yield Event(piece[5:].strip(), read)
            continue
        carried = len(kept)
        kept += piece
        last = 0
        for begins, ends_at in [gap.span() for gap in EMPTY_LINE.finditer(kept, max(0, carried - BEFORE_LAST))]:
            # Where the event ends in the response: the carried bytes are before this piece.
            while read < last_read and ends[read] < begin + ends_at - carried:
                read += 1
            if (text := data_lines(kept[last:begins])) is not None:
                yield Event(text, read)
            last = ends_at
        del kept[:last]
        if len(kept) > LARGEST_EVENT:
            raise BrokenResponse("too_long")


def data_lines(event: bytearray) -> bytes | None:
    """The data of an event; None for a comment."""
    if len(event) > LARGEST_EVENT:
        raise BrokenResponse("too_long")
    lines = [line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines) if lines else None


@dataclass(slots=True)
class Answer:
    """A streamed completion. Reads are numbers. reported_tokens: the server's count. pieces: events with content.
    model: the name that the server gives in its answer."""

    first_read: int | None = None
    first_reasoning_read: int | None = None
    last_read: int | None = None
    pieces: int = 0
    coalesced: int = 0
    reads: list[int] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    prompt_tokens: int | None = None
    reported_tokens: int | None = None
    finish: str | None = None
    model: str | None = None
    is_done: bool = False
    error: str | None = None
    damaged: int = 0
    events: int = 0

    @property
    def fault(self) -> str | None:
        """Why the answer does not count; None if it is whole. A stream that ends well says so, with a finish reason or
        [DONE]: without either, the server may have stopped in the middle."""
        if self.damaged:
            return "malformed"
        if self.pieces == 0:
            return "empty"
        return None if self.is_done or self.finish is not None else "incomplete"


def understand(events: Iterable[Event], answer: Answer | None = None) -> Answer:
    """Parse both kinds of OpenAI-compatible streams, completions and chat, adding to `answer`.

    A chunk without content is not a token. An invalid event counts as damaged and does not affect the others.
    """
    answer = answer or Answer()
    for event in events:
        answer.events += 1
        if event.data == b"[DONE]":
            answer.is_done = True
            continue
        try:
            text = event.data.decode()
            chunk, end = _decode(text)
            if not isinstance(chunk, dict) or end != len(text):
                raise ValueError("expected one JSON object")
            if answer.model is None and isinstance(name := chunk.get("model"), str) and name:
                answer.model = name
            if error := chunk.get("error"):
                answer.error = str(error)
            choices = chunk.get("choices") or []
            if not isinstance(choices, list):
                raise TypeError("choices: expected a list")
            for choice in choices:
                if isinstance(choice, dict):
                    _take_choice(answer, choice, event.read)
            if isinstance(usage := chunk.get("usage"), dict):
                answer.prompt_tokens = _count(usage.get("prompt_tokens"), answer.prompt_tokens)
                answer.reported_tokens = _count(usage.get("completion_tokens"), answer.reported_tokens)
        except (ValueError, TypeError, RecursionError):
            # Whatever a server sends is data. It must not end the process that holds all other answers.
            answer.damaged += 1
    return answer


def _take_choice(answer: Answer, choice: dict[str, Any], read: int) -> None:
    text, reasoning = choice.get("text"), None
    delta = choice.get("delta")
    if isinstance(delta, dict):
        reasoning = delta.get("reasoning_content") or delta.get("reasoning")
        text = text or delta.get("content")
    if isinstance(finish := choice.get("finish_reason"), str) and finish:
        answer.finish = finish
    if reasoning and answer.first_reasoning_read is None:
        answer.first_reasoning_read = read
    if text and answer.first_read is None:
        answer.first_read = read
    if text or reasoning:
        answer.coalesced += answer.last_read == read
        answer.last_read = read
        answer.reads.append(read)
        answer.pieces += 1
        answer.text.append(str(text or reasoning))


def _count(value: object, before: int | None) -> int | None:
    """The count, or `before` if there is none; ValueError for a negative or absurdly large number."""
    if not isinstance(value, int) or isinstance(value, bool):
        return before
    if not 0 <= value < _MOST_TOKENS:
        raise ValueError("not a token count")
    return value
