"""The HTTP server of `paceline ui`: read-only, for browsers of this user.

It listens on loopback by default. A request must name a host that cannot be somebody's own domain (a page of
another site could otherwise read this one by DNS rebinding), and bring the token if there is one: once in the address,
then as a cookie that only this server gets, or as `Authorization: Bearer` from programs.
"""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
import os
import re
import secrets
import select
import socket
import sys
import threading
from collections.abc import Iterator
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qsl, urlencode, urlsplit

from paceline.campaign.live.metrics_endpoint import is_loopback, parse_address
from paceline.campaign.ui.routes import TEXT, Answer, App
from paceline.errors import RequestError

# The variable with a token that stays the same, for programs that read /metrics, and for hosts with several users.
TOKEN = "PACELINE_UI_TOKEN"
DEFAULT_ADDRESS = "127.0.0.1:8501"
# Streams occupy a thread each.
MOST_STREAMS = 64
LEAST_TOKEN = 16
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


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, host: str, port: int, app: App, token: str) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.app, self.token, self.own_host = app, token, host
        self.closing = threading.Event()
        self.streams = threading.BoundedSemaphore(MOST_STREAMS)
        super().__init__((host, port), _Handler)

    @property
    def cookie(self) -> str:
        # Browsers send cookies to every port of a host.
        return f"paceline-{self.server_address[1]}"

    def handle_error(self, request: object, client_address: object) -> None:
        # Ignore clients that disconnect; report everything else, here and to the browser.
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]
            assert isinstance(request, socket.socket)
            with contextlib.suppress(OSError):
                request.sendall(FAILED)


def is_own_host(header: str, own: str) -> bool:
    """Whether a Host header names this server: an IP address, `localhost`, the name of this machine, or the address
    that it listens on. A name that anybody may own is refused, because its owner can point it here."""
    match = re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+)(?::\d{1,5})?", header)
    if match is None:
        return False
    name = match[1].strip("[]").lower().rstrip(".")
    with contextlib.suppress(ValueError):
        address = ipaddress.ip_address(name)
        return address.is_loopback or not is_loopback(own)
    names = {"localhost", own.lower()}
    if not is_loopback(own):
        names |= {socket.gethostname().lower(), socket.getfqdn().lower()}
    return name in names


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
        refusal = self._refusal()
        if refusal is not None:
            self._write(refusal, with_body)
            return
        parts = urlsplit(self.path)
        given = dict(parse_qsl(parts.query, max_num_fields=200)).get("token") if self.server.token else None
        if given is not None:
            rest = urlencode([pair for pair in parse_qsl(parts.query) if pair[0] != "token"])
            self._redirect("/" + parts.path.lstrip("/") + (f"?{rest}" if rest else ""))
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
        if self.server.token and not any(map(self._is_token, self._tokens())):
            words = "paceline: a token is needed. Open the address that `paceline ui` printed.\n"
            return Answer(body=words.encode(), kind=TEXT, status=401)
        return None

    def _tokens(self) -> Iterator[str]:
        yield self.headers.get("Authorization", "").removeprefix("Bearer ")
        with contextlib.suppress(CookieError):
            if morsel := SimpleCookie(self.headers.get("Cookie", "")).get(self.server.cookie):
                yield morsel.value
        with contextlib.suppress(ValueError):
            yield from (value for name, value in parse_qsl(urlsplit(self.path).query) if name == "token")

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
