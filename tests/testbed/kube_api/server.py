"""The HTTP side of the API server: paths, verbs, watches and log streams."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, unquote, urlsplit

from testbed.kube_api import refusals
from testbed.kube_api.discovery import document
from testbed.kube_api.refusals import Refusal
from testbed.kube_api.resources import KNOWN, NAMESPACES, Object, Resource

if TYPE_CHECKING:
    from testbed.kube_api.requests import Api

VERBS = {"POST": "create", "PUT": "update", "PATCH": "patch"}


@dataclass(frozen=True, slots=True)
class Request:
    """One request to a resource, as the authorizer sees it."""

    verb: str
    resource: Resource
    namespace: str
    name: str | None
    sub: str
    query: dict[str, str]
    body: Any
    content_type: str

    @property
    def is_dry(self) -> bool:
        return self.query.get("dryRun") == "All"


def route(path: str) -> tuple[Resource, str, str | None, str]:
    """Resource, namespace, name, subresource of a path; raises for one that nobody serves."""
    words = [unquote(word) for word in path.strip("/").split("/")]
    if len(words) < (3 if words[0] == "api" else 4) or words[0] not in ("api", "apis"):
        raise refusals.no_such_path()
    group, version, rest = ("", words[1], words[2:]) if words[0] == "api" else (words[1], words[2], words[3:])
    namespace = ""
    if len(rest) > 2 and rest[0] == "namespaces" and (group, version, rest[2]) in KNOWN:
        namespace, rest = rest[1], rest[2:]
    if not rest or (group, version, rest[0]) not in KNOWN:
        raise refusals.no_such_path()
    resource = KNOWN[group, version, rest[0]]
    name, sub = [*rest[1:], None, ""][:2] if len(rest) < 2 else (rest[1], "/".join(rest[2:]))
    if resource == NAMESPACES and name:
        namespace = name
    return resource, namespace, name, sub or ""


class Connection(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    api: Api
    stopped: threading.Event
    sockets: set[socket.socket]

    def setup(self) -> None:
        super().setup()
        # Small answers must not wait for the client's acknowledgement of their head.
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sockets.add(self.connection)

    def finish(self) -> None:
        self.sockets.discard(self.connection)
        with contextlib.suppress(OSError):
            super().finish()

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: tests read what is printed."""

    def do_GET(self) -> None:
        self._serve()

    do_POST = do_PUT = do_PATCH = do_DELETE = do_GET

    def _serve(self) -> None:
        try:
            length = int(self.headers.get("Content-Length") or 0)
            raw = self.rfile.read(length) if length else b""
            self._answer_to(raw)
        except Refusal as refusal:
            self._answer(refusal.code, refusal.body)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def _answer_to(self, raw: bytes) -> None:
        url = urlsplit(self.path)
        known = document("/" + url.path.strip("/"))
        user = self.api.access.user(self.headers.get("Authorization"))
        if known is not None:
            self._answer(200, known)
            return
        request = self._request(url.path, dict(parse_qsl(url.query)), raw)
        whom = (request.resource, request.sub, request.namespace, request.name)
        self.api.access.require(user, request.verb, *whom)
        if request.sub == "log":
            self._stream("text/plain", self.api.log(request, self.stopped))
        elif request.verb == "watch":
            lines = (json.dumps(event).encode() + b"\n" for event in self.api.watch(request, self.stopped))
            self._stream("application/json", lines)
        else:
            code, body = self.api.answer(request, user)
            self._answer(code, body)

    def _request(self, path: str, query: dict[str, str], raw: bytes) -> Request:
        resource, namespace, name, sub = route(path)
        try:
            body = json.loads(raw) if raw else None
        except ValueError as error:
            raise refusals.bad_request(f"the object provided is unrecognized: {error}") from None
        if self.command == "GET":
            watched = query.get("watch") in ("true", "True", "1")
            verb = "watch" if watched else "get" if name else "list"
        elif self.command == "DELETE":
            verb = "delete" if name else "deletecollection"
        else:
            verb = VERBS[self.command]
        return Request(verb, resource, namespace, name, sub, query, body, self.headers.get("Content-Type") or "")

    def _answer(self, code: int, body: Object) -> None:
        data = json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _stream(self, content_type: str, pieces: Iterable[bytes]) -> None:
        """Send chunks as they come; the header is sent at once, so that the client knows that the stream is open."""
        self.send_response(200)
        self.send_header("Content-Type", content_type)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.wfile.flush()
        for piece in pieces:
            self._chunk(piece)
        self.wfile.write(b"0\r\n\r\n")

    def _chunk(self, piece: bytes) -> None:
        if piece:
            self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
        self.wfile.flush()


class Quiet(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Connections that are cut are what a restart is about; anything else is a mistake of the double."""
        import sys
        import traceback

        if not isinstance(sys.exc_info()[1], OSError):
            traceback.print_exc()


class Listener:
    """Listens, stops, comes back on the same port: clients see refused and broken connections in between."""

    def __init__(self, api: Api) -> None:
        self._api, self.port = api, 0
        self._server: Quiet | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._stopped, self._sockets = threading.Event(), set[socket.socket]()
        parts = {"api": self._api, "stopped": self._stopped, "sockets": self._sockets}
        self._server = Quiet(("127.0.0.1", self.port), type("Connection", (Connection,), parts))
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        if self._server is None or self._thread is None:
            return
        self._stopped.set()
        self._server.shutdown()
        self._server.server_close()
        for each in list(self._sockets):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._server = None
