"""Sends requests when another program (LoadGen) asks for them, and calls back with the first token and the end.

One thread with one event loop. The regular client (`shard`) knows its whole schedule beforehand. LoadGen does not, so
nothing is planned here. Times are when this loop had the bytes, slightly later than the kernel's.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from paceline.serving.client.http_stream import (
    BEFORE_LAST,
    EMPTY_LINE,
    LARGEST_EVENT,
    OWN_ERRORS,
    READ_BYTES,
    Answer,
    BrokenResponse,
    Event,
    Response,
    chunk_size,
    data_lines,
    understand,
)
from paceline.serving.client.schedule import Target

CRLF = b"\r\n"
CONNECT_S = 10.0
_Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class FirstToken:
    """Finds the first token while the answer still streams. Call `has_come` after each read, until it has.

    Each byte is searched once: a server that sends a thousand events without content, or one byte at a time, must not
    make each search longer than the last.
    """

    def __init__(self, response: Response) -> None:
        self._response = response
        self._kept = bytearray()
        # Where to continue, how many bytes of the chunk are missing, and how far its size line was searched.
        self._at = self._left = self._searched = 0
        self._ended = False

    def has_come(self) -> bool:
        """Whether an event with content is complete; BrokenResponse if one is too long for a token."""
        kept, carried, last = self._kept, len(self._kept), 0
        kept += self._content()
        for gap in EMPTY_LINE.finditer(kept, max(0, carried - BEFORE_LAST)):
            data = data_lines(kept[last : gap.start()])
            last = gap.end()
            if data is not None and understand([Event(data, 0)]).pieces:
                return True
        del kept[:last]
        if len(kept) > LARGEST_EVENT:
            raise BrokenResponse("too_long")
        return False

    def _content(self) -> bytearray:
        """The body that arrived since the last call, without its chunk framing."""
        data = self._response.data
        self._at = max(self._at, self._response.body_at)
        if not self._response.chunked:
            content, self._at = data[self._at :], len(data)
            return content
        content = bytearray()
        while self._at < len(data) and not self._ended:
            if not self._left:
                line_end = data.find(CRLF, max(self._at, self._searched - 1))
                if line_end < 0:
                    self._searched = len(data)
                    break
                self._left = chunk_size(data[self._at : line_end])
                self._at = line_end + len(CRLF)
                self._ended = self._left == 0
            piece = data[self._at : self._at + self._left]
            content += piece
            self._at += len(piece)
            self._left -= len(piece)
            # An empty line ends the chunk.
            self._at += 0 if self._left else len(CRLF)
        return content


@dataclass(slots=True, kw_only=True)
class OnDemandRequest:
    """One request: a complete HTTP request for each replica, and two callbacks. `first` is called once, with the first
    token; `ended` always, with the tokens of the answer (0 if it failed). Both run in the client's thread."""

    payloads: Sequence[bytes]
    replica: int | None
    first: Callable[[], None]
    ended: Callable[[int], None]


@dataclass(slots=True)
class Account:
    """Requests sent to and in flight on each replica, errors by class, and in the end the CPU and wall time of the one
    thread that sends: at a full core the client itself limits the result."""

    sent_to: list[int]
    in_flight: list[int]
    errors: Counter[str] = field(default_factory=Counter)
    cpu_s: float = 0.0
    wall_s: float = 0.0

    @property
    def sent(self) -> int:
        return sum(self.sent_to)


class OnDemandClient:
    """`with OnDemandClient(...) as client: client.send(requests)`, from any thread; leaving waits for the answers.

    cap: most in flight (None: no cap). A request without a replica goes to the one with the fewest in flight.
    """

    def __init__(self, targets: Sequence[Target], cap: int | None, timeout_s: float) -> None:
        self._targets, self._timeout_s = targets, timeout_s
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="on-demand client", daemon=True)
        self._room = asyncio.Semaphore(cap) if cap else None
        self._idle: list[list[_Streams]] = [[] for _ in targets]
        self._tasks: set[asyncio.Task[None]] = set()
        self._began_s: float | None = None
        self._first_cpu_s = 0.0
        self._tls = [ssl.create_default_context(cafile=each.certificates) if each.tls else None for each in targets]
        self.account = Account([0 for _ in targets], [0 for _ in targets])

    def __enter__(self) -> OnDemandClient:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._settle(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def send(self, requests: Sequence[OnDemandRequest]) -> None:
        def begin() -> None:
            if self._began_s is None:
                self._began_s, self._first_cpu_s = time.monotonic(), time.thread_time()
            for request in requests:
                task = self._loop.create_task(self._carry_out(request))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

        self._loop.call_soon_threadsafe(begin)

    async def _settle(self) -> None:
        while self._tasks:
            await asyncio.wait(self._tasks)
        if self._began_s is not None:
            self.account.wall_s = time.monotonic() - self._began_s
            self.account.cpu_s = time.thread_time() - self._first_cpu_s
        for _, writer in (streams for kept in self._idle for streams in kept):
            writer.close()

    async def _carry_out(self, request: OnDemandRequest) -> None:
        """The caller waits for `ended` without a timeout, so it is called whatever happens here."""
        tokens, in_flight = 0, self.account.in_flight
        try:
            async with self._room or contextlib.nullcontext():
                replica = in_flight.index(min(in_flight)) if request.replica is None else request.replica
                in_flight[replica] += 1
                self.account.sent_to[replica] += 1
                try:
                    async with asyncio.timeout(self._timeout_s):
                        answer = await self._exchange(replica, request)
                finally:
                    in_flight[replica] -= 1
                tokens = answer.pieces if answer.reported_tokens is None else answer.reported_tokens
        except Exception as error:
            self.account.errors[_class_of(error)] += 1
        finally:
            request.ended(tokens)

    async def _exchange(self, replica: int, request: OnDemandRequest) -> Answer:
        """Use an idle connection. If the server had closed it, nothing was sent yet: open a new one."""
        while self._idle[replica]:
            streams = self._idle[replica].pop()
            with contextlib.suppress(_Stale):
                return await self._send_over(streams, replica, request, fresh=False)
        target = self._targets[replica]
        async with asyncio.timeout(CONNECT_S):
            streams = await asyncio.open_connection(target.host, target.port, ssl=self._tls[replica])
        return await self._send_over(streams, replica, request, fresh=True)

    async def _send_over(self, streams: _Streams, replica: int, request: OnDemandRequest, *, fresh: bool) -> Answer:
        reader, writer = streams
        response = Response()
        kept = False
        try:
            writer.write(request.payloads[replica])
            await _read(reader, response, request.first)
            kept = response.keeps_alive
        except (BrokenResponse, ConnectionError) as error:
            if not fresh and not response.data:
                raise _Stale from error
            raise
        finally:
            if kept:
                self._idle[replica].append(streams)
            else:
                writer.close()
        if response.status != 200:
            raise BrokenResponse(f"http_{response.status}")
        answer = understand(response.events())
        if answer.error is not None:
            raise BrokenResponse("in_stream")
        if answer.fault is not None:
            raise BrokenResponse(answer.fault)
        return answer


class _Stale(Exception):
    """The server had closed an idle connection."""


async def _read(reader: asyncio.StreamReader, response: Response, first: Callable[[], None]) -> None:
    """Read a whole response; call `first` at the read that completes the first event with content."""
    token, has_come = FirstToken(response), False
    while True:
        piece = await reader.read(READ_BYTES)
        if not piece:
            response.close()
            return
        now = time.monotonic_ns()
        whole = response.feed(piece, now, now)
        if not has_come and response.status == 200 and token.has_come():
            has_come = True
            first()
        if whole:
            return


def _class_of(error: Exception) -> str:
    if isinstance(error, BrokenResponse):
        return str(error)
    if not isinstance(error, OSError):
        return "malformed"
    if error.errno in OWN_ERRORS:
        return "client"
    kinds = ((ssl.SSLError, "tls"), (TimeoutError, "timeout"), (ConnectionRefusedError, "connect"))
    return next((name for kind, name in kinds if isinstance(error, kind)), "reset")
