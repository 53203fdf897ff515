"""The HTTP server of `paceline ui`: read-only, for browsers of this user.

It listens on loopback by default. A request must name a host that cannot be somebody's own domain (a page of
another site could otherwise read this one by DNS rebinding), and bring the token if there is one: once in the address,
then as a cookie that only this server gets, or as `Authorization: Bearer` from programs.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import select
import socket
import sys
import threading
from collections.abc import Iterator
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit

from paceline.campaign.live.local_server import LocalServer, is_loopback, is_own_host, parse_address
from paceline.campaign.ui.routes import TEXT, Answer, App
from paceline.errors import RequestError

# The variable with a token that stays the same, for programs that read /metrics, and for hosts with several users.
TOKEN = "PACELINE_UI_TOKEN"
DEFAULT_ADDRESS = "127.0.0.1:8501"
# Streams occupy a thread each.
MOST_STREAMS = 64
LEAST_TOKEN = 16
MOST_FIELDS = 200
LONGEST_COOKIE = 8192
FAILED = (
    b"HTTP/1.0 500 Internal Server Error\r\nContent-Type: text/plain\r\n\r\n"
    b"paceline: this page could not be made; the terminal of `paceline ui` says why.\n"
)
HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}


@contextlib.contextmanager
def serving(app: App, address: str = DEFAULT_ADDRESS) -> Iterator[str]:
    """Serve in threads until the block ends; yields the address to open, with the token if one is needed."""
    host, port = parse_address(address, "--listen", DEFAULT_ADDRESS)
    token = os.environ.get(TOKEN, "")
    if token and len(token) < LEAST_TOKEN:
        raise RequestError(f"{TOKEN}: got {len(token)} characters, expected at least {LEAST_TOKEN}.")
    if not token and not is_loopback(host):
        token = secrets.token_urlsafe(24)
    try:
        server = _Server(host, port, app, token)
    except OSError as error:
        raise RequestError(
            f"--listen: cannot listen on {address!r} ({error.strerror}). Choose another address."
        ) from None
    thread = threading.Thread(target=server.serve_forever, name="paceline-ui", daemon=True)
    thread.start()
    shown = socket.gethostname() if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
    try:
        yield f"http://{shown}:{server.server_address[1]}/" + (f"?{urlencode({'token': token})}" if token else "")
    finally:
        server.closing.set()
        server.shutdown()
        server.server_close()
        thread.join(timeout=5)
        app.builder.close()


class _Server(LocalServer):
    def __init__(self, host: str, port: int, app: App, token: str) -> None:
        self.app, self.token = app, token
        self.closing = threading.Event()
        self.streams = threading.BoundedSemaphore(MOST_STREAMS)
        super().__init__(host, port, _Handler)

    @property
    def cookie(self) -> str:
        # Browsers send cookies to every port of a host.
        return f"paceline-{self.server_address[1]}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        super().handle_error(request, client_address)
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            with contextlib.suppress(OSError):
                request.sendall(FAILED)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    server_version = "paceline"
    sys_version = ""
    # A client that connects and sends nothing must not occupy a thread forever.
    timeout = 30

    def do_GET(self) -> None:
        self._respond(with_body=True)

    def do_HEAD(self) -> None:
        self._respond(with_body=False)

    def _respond(self, with_body: bool) -> None:
        self.server.has_request(self.connection)
        refusal = self._refusal()
        if refusal is not None:
            self._write(refusal, with_body)
            return
        parts, words = urlsplit(self.path), self._query()
        if self.server.token and any(name == "token" for name, _ in words):
            rest = urlencode([pair for pair in words if pair[0] != "token"])
            # A browser reads `//host` and `/\\host` as another server.
            self._redirect("/" + parts.path.lstrip("/\\") + (f"?{rest}" if rest else ""))
            return
        answer = self.server.app.answer(parts.path, parts.query)
        if answer.stream is not None and with_body:
            self._stream(answer)
        else:
            self._write(answer, with_body)

    def _refusal(self) -> Answer | None:
        """Why this request is not answered; None if it is."""
        if not is_own_host(self.headers.get("Host", ""), self.server.own_host):
            return Answer(body=b"paceline: the Host header names another server.\n", kind=TEXT, status=421)
        if self._is_foreign_page():
            return Answer(body=b"paceline: a page of another server asks for this one.\n", kind=TEXT, status=403)
        try:
            self._query()
        except ValueError:
            return Answer(body=b"paceline: this is not an address of this server.\n", kind=TEXT, status=400)
        if self.server.token and not any(map(self._is_token, self._tokens())):
            words = "paceline: a token is needed. Open the address that `paceline ui` printed.\n"
            return Answer(body=words.encode(), kind=TEXT, status=401)
        return None

    def _is_foreign_page(self) -> bool:
        """Whether a page of another server loads this one in the background, which costs time though it cannot read it.
        A link to a page here is no such case. Programs send no such header."""
        site, mode = (self.headers.get(name, "") for name in ("Sec-Fetch-Site", "Sec-Fetch-Mode"))
        return site in ("cross-site", "same-site") and mode != "navigate"

    def _query(self) -> list[tuple[str, str]]:
        return parse_qsl(urlsplit(self.path).query, max_num_fields=MOST_FIELDS)

    def _tokens(self) -> Iterator[str]:
        yield self.headers.get("Authorization", "").removeprefix("Bearer ")
        # Python takes long to parse a long cookie.
        cookie = self.headers.get("Cookie", "")
        with contextlib.suppress(CookieError):
            if len(cookie) <= LONGEST_COOKIE and (morsel := SimpleCookie(cookie).get(self.server.cookie)):
                yield morsel.value
        yield from (value for name, value in self._query() if name == "token")

    def _is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(errors="replace"), self.server.token.encode())

    def _redirect(self, path: str) -> None:
        """Keep the token out of the address bar and the history."""
        self.send_response(303)
        self.send_header("Location", path)
        cookie = f"{self.server.cookie}={self.server.token}; Path=/; HttpOnly; SameSite=Strict"
        self.send_header("Set-Cookie", cookie)
        self._end_headers()

    def _write(self, answer: Answer, with_body: bool) -> None:
        self.send_response(answer.status)
        self.send_header("Content-Type", answer.kind)
        self.send_header("Content-Security-Policy", answer.policy)
        self.send_header("Content-Length", str(len(answer.body)))
        self._end_headers()
        if with_body:
            self.wfile.write(answer.body)

    def _stream(self, answer: Answer) -> None:
        if not self.server.streams.acquire(blocking=False):
            self._write(Answer(body=b"paceline: too many open pages.\n", kind=TEXT, status=503), True)
            return
        try:
            self.send_response(200)
            self.send_header("Content-Type", answer.kind)
            self._end_headers()
            assert answer.stream is not None
            answer.stream(self)
        finally:
            self.server.streams.release()

    def _end_headers(self) -> None:
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.end_headers()

    # --- the channel of a stream ---

    def send(self, data: bytes) -> None:
        self.wfile.write(data)

    def is_open(self) -> bool:
        """Whether the browser still reads: its end of the connection is open, and the server goes on."""
        if self.server.closing.is_set():
            return False
        readable, _, _ = select.select([self.connection], [], [], 0)
        return not readable or bool(self.connection.recv(1, socket.MSG_PEEK))

    def log_message(self, format: str, *args: object) -> None:
        """Do not log requests."""
