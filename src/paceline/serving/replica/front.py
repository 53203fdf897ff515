"""The front of a replica: starts its model processes, answers HTTP, and passes requests and tokens between them."""

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
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, cast

from paceline.serving import http_server
from paceline.serving.replica import completions
from paceline.serving.replica.completions import AnyTokenizer, Completion
from paceline.serving.replica.settings import Meeting, Settings

LONGEST_LINE = 64 << 20
LAST_MESSAGE_S = 1.0
# How long a client may take to send one request, and how many clients there may be.
SLOWEST_REQUEST_S = 60.0
MOST_CONNECTIONS = 16_384
IS_CHAT = {"/v1/completions": False, "/v1/chat/completions": True}


class Front:
    """Everything runs on one event loop: bytes of requests, messages of the model. send: sends the model a message."""

    def __init__(self, settings: Settings, secret: str, tokenizer: AnyTokenizer, send: Callable[[Any], None]) -> None:
        self.settings, self.tokenizer = settings, tokenizer
        self._key, self._send = f"Bearer {secret}".encode(), send
        self._replies: dict[int, tuple[Completion, Connection]] = {}
        self._last = 0
        self.connections = 0

    def largest_body(self, headers: dict[str, str]) -> int:
        """Nobody without the key may fill the memory with bodies."""
        return http_server.LARGEST_BODY if self._has_key(headers) else http_server.LARGEST_HEAD

    def _has_key(self, headers: dict[str, str]) -> bool:
        return hmac.compare_digest(headers.get("authorization", "").encode(), self._key)

    def answer(self, request: http_server.Request, connection: Connection) -> None:
        if request.path == "/health":
            connection.send(http_server.answer(200, {"status": "ok"}))
        elif not self._has_key(request.headers):
            raise http_server.Refused(401, "this replica needs the API key of its engine")
        elif request.path == "/v1/models":
            models = [{"id": self.settings.served, "object": "model", "max_model_len": self.settings.max_length}]
            connection.send(http_server.answer(200, {"object": "list", "data": models}))
        elif request.path not in IS_CHAT:
            raise http_server.Refused(404, f"unknown path: {request.path}")
        elif request.method != "POST":
            raise http_server.Refused(405, f"method: got {request.method}, expected POST")
        else:
            parsed = completions.parse(request.body, IS_CHAT[request.path], self.settings, self.tokenizer)
            self._last += 1
            reply = Completion(self._last, parsed, self.settings.served, self.tokenizer.decoder())
            self._replies[reply.number] = (reply, connection)
            connection.reply = reply
            limits = {"most": parsed.max_tokens, "ends": sorted(parsed.ends)}
            self._send({"ask": reply.number, "prompt": parsed.prompt, **limits})

    def forget(self, reply: Completion) -> None:
        """The client is gone: let the model stop this answer."""
        if self._replies.pop(reply.number, None) is not None:
            self._send({"drop": reply.number})

    def pass_on(self, tokens: list[tuple[int, int, str | None]]) -> None:
        """Send the tokens of the model to the clients."""
        for number, token, finish in tokens:
            if number not in self._replies:
                continue
            reply, connection = self._replies[number]
            connection.send(reply.add(token, finish))
            if finish is not None:
                del self._replies[number]
                connection.end_reply()


class Connection(asyncio.Protocol):
    """One client's connection; requests are answered one after the other."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self._received = bytearray()
        self._transport: asyncio.Transport | None = None
        self._stays = True
        self._deadline: asyncio.TimerHandle | None = None
        self.reply: Completion | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._front.connections += 1
        if self._front.connections > MOST_CONNECTIONS:
            self._close()

    def data_received(self, data: bytes) -> None:
        self._received += data
        self._next()
        if self._transport is None or self._transport.is_closing():
            return
        if self.reply is not None:
            # What a client sends meanwhile stays with the client.
            self._transport.pause_reading()
        if self._received and self.reply is None:
            if self._deadline is None:
                self._deadline = asyncio.get_running_loop().call_later(SLOWEST_REQUEST_S, self._close)
        elif self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _next(self) -> None:
        while self.reply is None and self._stays:
            try:
                request = http_server.take_request(self._received, self._front.largest_body)
            except http_server.Refused as refused:
                # It is unknown where the next request begins.
                self._stays = False
                self.send(http_server.refusal(refused))
                self._close()
                return
            if request is None:
                return
            self._stays = request.keeps_alive
            try:
                self._front.answer(request, self)
            except http_server.Refused as refused:
                self.send(http_server.refusal(refused))
            if self.reply is None and not self._stays:
                self._close()

    def send(self, data: bytes) -> None:
        if data and self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def end_reply(self) -> None:
        self.reply = None
        if self._stays:
            self._next()
            if self.reply is None and self._transport is not None and not self._transport.is_closing():
                self._transport.resume_reading()
        else:
            self._close()

    def _close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._front.connections -= 1
        if self._deadline is not None:
            self._deadline.cancel()
        if self.reply is not None:
            self._front.forget(self.reply)
            self.reply = None


# --- the process ---


async def run(settings: Settings, secret: str, meeting: Meeting | None) -> None:
    """Serve until a model process ends or this process is ended. The model processes end with it.

    meeting: where the model processes of several hosts connect; on one host, the first of them opens a store.
    """
    ours, theirs = socket.socketpair()
    reader, writer = await asyncio.open_connection(sock=ours, limit=LONGEST_LINE)
    first, *others = settings.ranks
    models = [await _start_model(settings, first, theirs, meeting)]
    theirs.close()

    def send(message: Any) -> None:
        writer.write(json.dumps(message, separators=(",", ":")).encode() + b"\n")

    try:
        # While the model is built: both take seconds.
        named = settings.model if settings.is_directory else None
        tokenizer = completions.tokenizer_of(named) if settings.part == 0 else None
        message = {"meeting": meeting} if meeting else await _message_of(models, reader)
        if "meeting" in message:
            models += [await _start_model(settings, rank, None, message["meeting"]) for rank in others]
            message = await _message_of(models, reader)
        if "ready" not in message:
            _print_line(message)
            return
        if tokenizer is None:
            # The first host answers.
            _print_line({"port": None, "facts": {}})
            await _first_of(asyncio.get_running_loop().create_future(), models)
            return
        front = Front(settings, secret, tokenizer, send)

        async def pass_tokens_on() -> None:
            while message := await _message(reader):
                front.pass_on(message["tokens"])

        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: Connection(front), settings.host, 0, backlog=4096)
        _print_line({"port": server.sockets[0].getsockname()[1], "facts": message["ready"]})
        await _first_of(asyncio.ensure_future(pass_tokens_on()), models)
    finally:
        for model in models:
            # Kill by process id: `Process.kill` would consume the exit status that asyncio waits for, and asyncio would
            # then print a warning as the last line of the replica's output.
            if model.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(model.pid, signal.SIGKILL)


async def _start_model(settings: Settings, rank: int, line: socket.socket | None, meeting: Meeting | None) -> Process:
    passed = (line.fileno(),) if line is not None else ()
    started = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "paceline.serving.replica", "model"),
        stdin=asyncio.subprocess.PIPE,
        stdout=sys.stderr,
        pass_fds=passed,
    )
    assert started.stdin is not None
    fields = {"settings": asdict(settings), "rank": rank, "line": passed[0] if passed else None, "meeting": meeting}
    started.stdin.write(json.dumps(fields).encode() + b"\n")
    started.stdin.close()
    return started


async def _message(reader: asyncio.StreamReader) -> dict[str, Any]:
    """The next message of the model; empty when it is gone."""
    line = await reader.readline()
    message: dict[str, Any] = json.loads(line) if line else {}
    return message


async def _message_of(models: list[Process], reader: asyncio.StreamReader) -> dict[str, Any]:
    """The next message of the first model process; empty if any has ended, because the others would wait forever."""
    message = asyncio.ensure_future(_message(reader))
    await _first_of(message, models)
    # A process may have sent the reason just before it ended.
    done, _ = await asyncio.wait([message], timeout=LAST_MESSAGE_S)
    return message.result() if done else {}


async def _first_of(message: asyncio.Future[Any], models: list[Process]) -> None:
    """Wait for the future, or until a model process ends."""
    ends = [asyncio.ensure_future(model.wait()) for model in models]
    await asyncio.wait([message, *ends], return_when=asyncio.FIRST_COMPLETED)


def _print_line(fields: dict[str, Any]) -> None:
    """A line for the engine that started this process, if it still reads."""
    with contextlib.suppress(OSError):
        sys.stdout.write(json.dumps(fields) + "\n")
        sys.stdout.flush()
