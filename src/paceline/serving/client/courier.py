"""Requests asked on the word of another program: whoever decides when, this carries them out and tells back.

A thread of its own with one event loop. The plain client (`shard`) knows its whole schedule beforehand; LoadGen does
not say what comes next, so here nothing is planned, and times are those at which this loop had the bytes: somewhat late
against the kernel's.
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

from paceline.serving.client.connection import OWN_ERRORS
from paceline.serving.client.first_token import FirstToken
from paceline.serving.client.orders import Target
from paceline.serving.client.response import Answer, BrokenResponse, Response, understand

READ_BYTES = 65_536
CONNECT_S = 10.0
_Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass(slots=True, kw_only=True)
class Errand:
    """One request: a whole HTTP request for each replica, and who is told. `first` is called once, with the first
    token; `ended` always, with the tokens of the answer, 0 where there was none. Both in the courier's thread."""

    payloads: Sequence[bytes]
    replica: int | None
    first: Callable[[], None]
    ended: Callable[[int], None]


@dataclass(slots=True)
class Account:
    """What each replica was asked so far and has in flight, the errors by class, and at the end the processor time of
    the one thread that did it beside the time it took: at a full core the courier is what was measured."""

    asked_of: list[int]
    in_flight: list[int]
    errors: Counter[str] = field(default_factory=Counter)
    cpu_s: float = 0.0
    wall_s: float = 0.0

    @property
    def asked(self) -> int:
        return sum(self.asked_of)


class Courier:
    """`with Courier(...) as courier: courier.take(errands)`, from any thread; leaving waits for what is under way.

    cap: most in flight (None: no cap). An errand without a replica goes to the one with the fewest in flight.
    """

    def __init__(self, targets: Sequence[Target], cap: int | None, timeout_s: float) -> None:
        self._targets, self._timeout_s = targets, timeout_s
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="courier", daemon=True)
        self._room = asyncio.Semaphore(cap) if cap else None
        self._idle: list[list[_Streams]] = [[] for _ in targets]
        self._under_way: set[asyncio.Task[None]] = set()
        self._began_s: float | None = None
        self._first_cpu_s = 0.0
        self._tls = [ssl.create_default_context(cafile=each.certificates) if each.tls else None for each in targets]
        self.account = Account([0 for _ in targets], [0 for _ in targets])

    def __enter__(self) -> Courier:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._settle(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def take(self, errands: Sequence[Errand]) -> None:
        self._loop.call_soon_threadsafe(self._begin, errands)

    def _begin(self, errands: Sequence[Errand]) -> None:
        if self._began_s is None:
            self._began_s, self._first_cpu_s = time.monotonic(), time.thread_time()
        for errand in errands:
            task = self._loop.create_task(self._carry(errand))
            self._under_way.add(task)
            task.add_done_callback(self._under_way.discard)

    async def _settle(self) -> None:
        while self._under_way:
            await asyncio.wait(self._under_way)
        if self._began_s is not None:
            self.account.wall_s = time.monotonic() - self._began_s
            self.account.cpu_s = time.thread_time() - self._first_cpu_s
        for _, writer in (streams for kept in self._idle for streams in kept):
            writer.close()

    async def _carry(self, errand: Errand) -> None:
        """Who gave the errand waits for its end without a bound: whatever happens here, that is told."""
        tokens = 0
        try:
            async with self._room or contextlib.nullcontext():
                tokens = await self._answered(errand)
        except Exception as error:
            self.account.errors[_class_of(error)] += 1
        finally:
            errand.ended(tokens)

    async def _answered(self, errand: Errand) -> int:
        loads = self.account.in_flight
        replica = loads.index(min(loads)) if errand.replica is None else errand.replica
        loads[replica] += 1
        self.account.asked_of[replica] += 1
        try:
            async with asyncio.timeout(self._timeout_s):
                return _tokens(await self._exchange(replica, errand))
        finally:
            loads[replica] -= 1

    async def _exchange(self, replica: int, errand: Errand) -> Answer:
        """A kept connection may have been closed just now: then nothing was asked yet, and a new one is made."""
        while self._idle[replica]:
            streams = self._idle[replica].pop()
            with contextlib.suppress(_Stale):
                return await self._ask(replica, errand, streams, fresh=False)
        target = self._targets[replica]
        async with asyncio.timeout(CONNECT_S):
            streams = await asyncio.open_connection(target.host, target.port, ssl=self._tls[replica])
        return await self._ask(replica, errand, streams, fresh=True)

    async def _ask(self, replica: int, errand: Errand, streams: _Streams, *, fresh: bool) -> Answer:
        reader, writer = streams
        response = Response()
        kept = False
        try:
            writer.write(errand.payloads[replica])
            await _read(reader, response, errand.first)
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
        return _judged(response)


class _Stale(Exception):
    """A kept connection that the other side had closed."""


async def _read(reader: asyncio.StreamReader, response: Response, first: Callable[[], None]) -> None:
    """All of a response; `first` is called at the read that completes the first event with content."""
    token, told = FirstToken(response), False
    while True:
        piece = await reader.read(READ_BYTES)
        if not piece:
            response.close()
            return
        now = time.monotonic_ns()
        whole = response.feed(piece, now, now)
        if not told and response.status == 200 and token.has_come():
            told = True
            first()
        if whole:
            return


def _judged(response: Response) -> Answer:
    if response.status != 200:
        raise BrokenResponse(f"http_{response.status}")
    answer = understand(response.events())
    if answer.error is not None or answer.damaged or answer.pieces == 0:
        raise BrokenResponse("in_stream" if answer.error is not None else "malformed" if answer.damaged else "empty")
    return answer


def _tokens(answer: Answer) -> int:
    return answer.pieces if answer.tokens_told is None else answer.tokens_told


def _class_of(error: Exception) -> str:
    if isinstance(error, BrokenResponse):
        return str(error)
    if not isinstance(error, OSError):
        return "malformed"
    if error.errno in OWN_ERRORS:
        return "client"
    kinds = ((ssl.SSLError, "tls"), (TimeoutError, "timeout"), (ConnectionRefusedError, "connect"))
    return next((name for kind, name in kinds if isinstance(error, kind)), "reset")
