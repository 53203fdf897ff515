"""The front of a replica: starts its model processes, answers HTTP, and hands requests and tokens to and fro."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import os
import signal
import socket
import sys
from asyncio.subprocess import Process
from collections.abc import Callable, Sequence
from typing import Any, cast

from paceline.serving.replica import asking, wire
from paceline.serving.replica.reply import Reply
from paceline.serving.replica.settings import Settings
from paceline.serving.replica.words import StandIn, Tokenizer, words_of

LONGEST_LINE = 64 << 20
LAST_WORD_S = 1.0
ASKED = {"/v1/completions": False, "/v1/chat/completions": True}


class Front:
    """Everything happens on one event loop: bytes of requests, messages of the model."""

    def __init__(
        self, settings: Settings, secret: str, words: StandIn | Tokenizer, tell: Callable[[Any], None]
    ) -> None:
        self.settings, self.words = settings, words
        self._key, self._tell = f"Bearer {secret}".encode(), tell
        self._replies: dict[int, tuple[Reply, Connection]] = {}
        self._last = 0

    # --- requests ---

    def answer(self, request: wire.Request, connection: Connection) -> None:
        if request.path == "/health":
            connection.send(wire.answer(200, {"status": "ok"}))
        elif not hmac.compare_digest(request.headers.get("authorization", "").encode(), self._key):
            raise wire.Refused(401, "this replica wants the key that its engine was given")
        elif request.path == "/v1/models":
            models = [{"id": self.settings.served, "object": "model", "max_model_len": self.settings.max_length}]
            connection.send(wire.answer(200, {"object": "list", "data": models}))
        elif request.path not in ASKED:
            raise wire.Refused(404, f"no such path: {request.path}")
        elif request.method != "POST":
            raise wire.Refused(405, f"{request.method} was given; accepted is POST")
        else:
            self._ask(request, connection)

    def _ask(self, request: wire.Request, connection: Connection) -> None:
        asked = asking.understand(request.body, ASKED[request.path], self.settings, self.words)
        self._last += 1
        reply = Reply(self._last, asked, self.settings.served, self.words.speech())
        self._replies[reply.number] = (reply, connection)
        connection.reply = reply
        self._tell({"ask": reply.number, "prompt": asked.prompt, "most": asked.most, "ends": sorted(asked.ends)})

    def forget(self, reply: Reply) -> None:
        """Its client is gone: the model need not go on with it."""
        if self._replies.pop(reply.number, None) is not None:
            self._tell({"drop": reply.number})

    # --- tokens ---

    def hear(self, said: list[tuple[int, int, str | None]]) -> None:
        for number, token, finish in said:
            found = self._replies.get(number)
            if found is None:
                continue
            reply, connection = found
            connection.send(reply.add(token, finish))
            if finish is not None:
                del self._replies[number]
                connection.end_reply()


class Connection(asyncio.Protocol):
    """One client's; requests are answered one after the other."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self._received = bytearray()
        self._transport: asyncio.Transport | None = None
        self._stays = True
        self.reply: Reply | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._received += data
        self._next()

    def _next(self) -> None:
        while self.reply is None and self._stays:
            try:
                request = wire.take_request(self._received)
            except wire.Refused as refused:
                # Where one request ends and the next begins is not known any more.
                self._stays = False
                self.send(wire.refusal(refused))
                self._close()
                return
            if request is None:
                return
            self._answer(request)

    def _answer(self, request: wire.Request) -> None:
        self._stays = request.keeps_alive
        try:
            self._front.answer(request, self)
        except wire.Refused as refused:
            self.send(wire.refusal(refused))
        if self.reply is None and not self._stays:
            self._close()

    def send(self, data: bytes) -> None:
        if data and self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def end_reply(self) -> None:
        self.reply = None
        if self._stays:
            self._next()
        else:
            self._close()

    def _close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if self.reply is not None:
            self._front.forget(self.reply)
            self.reply = None


# --- the process ---


async def run(settings: Settings, secret: str) -> None:
    """Until a model process ends, or this process is ended: what it started ends with it."""
    ours, theirs = socket.socketpair()
    reader, writer = await asyncio.open_connection(sock=ours, limit=LONGEST_LINE)
    models = [await _model(settings, 0, theirs, None)]
    theirs.close()
    with contextlib.ExitStack() as ended:
        ended.callback(_kill_all, models)
        # While the model is built: both take seconds.
        words = words_of(settings.model if settings.is_directory else None)
        told = await _word_of(models, reader)
        if "meet" in told:
            others = range(1, settings.tensor_parallel)
            models += [await _model(settings, rank, None, told["meet"]) for rank in others]
            told = await _word_of(models, reader)
        if "ready" not in told:
            _say(told)
            return

        def tell(message: Any) -> None:
            writer.write(json.dumps(message, separators=(",", ":")).encode() + b"\n")

        await _serve(Front(settings, secret, words, tell), told["ready"], reader, models)


async def _model(settings: Settings, rank: int, line: socket.socket | None, port: int | None) -> Process:
    passed = (line.fileno(),) if line is not None else ()
    started = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "paceline.serving.replica", "model"),
        stdin=asyncio.subprocess.PIPE,
        stdout=sys.stderr,
        pass_fds=passed,
    )
    assert started.stdin is not None
    words = {"settings": settings.to_line(), "rank": rank, "line": passed[0] if passed else None, "port": port}
    started.stdin.write(json.dumps(words).encode() + b"\n")
    started.stdin.close()
    return started


async def _message(reader: asyncio.StreamReader) -> dict[str, Any]:
    """The next one of the model; nothing when it is gone."""
    line = await reader.readline()
    told: dict[str, Any] = json.loads(line) if line else {}
    return told


async def _word_of(models: list[Process], reader: asyncio.StreamReader) -> dict[str, Any]:
    """The next message of the first model process; nothing when any of them has ended, for which the others would wait
    in vain."""
    message = asyncio.ensure_future(_message(reader))
    await _first_of([message, *(asyncio.ensure_future(model.wait()) for model in models)])
    # One that ends by itself may have said why just before.
    done, _ = await asyncio.wait([message], timeout=LAST_WORD_S)
    return message.result() if done else {}


async def _first_of(awaited: Sequence[asyncio.Future[Any]]) -> None:
    await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)


async def _serve(front: Front, facts: dict[str, Any], reader: asyncio.StreamReader, models: list[Process]) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(front), front.settings.host, 0, backlog=4096)
    _say({"port": server.sockets[0].getsockname()[1], "facts": facts})
    listening = asyncio.ensure_future(_listen(reader, front))
    await _first_of([listening, *(asyncio.ensure_future(model.wait()) for model in models)])


async def _listen(reader: asyncio.StreamReader, front: Front) -> None:
    while message := await _message(reader):
        front.hear(message["said"])


def _say(words: dict[str, Any]) -> None:
    """To the engine that started this process; whoever has gone need not hear it."""
    with contextlib.suppress(OSError):
        sys.stdout.write(json.dumps(words) + "\n")
        sys.stdout.flush()


def _kill_all(models: list[Process]) -> None:
    """By number: `Process.kill` first looks whether it has ended, and takes that news from asyncio, whose complaint
    would then be the last words of the replica."""
    for model in models:
        if model.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(model.pid, signal.SIGKILL)
