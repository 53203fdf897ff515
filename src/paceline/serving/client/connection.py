"""One connection of the client: a socket that never blocks, with or without TLS, and the time of every read."""

from __future__ import annotations

import contextlib
import errno
import socket
import ssl
import time
from collections.abc import Callable

from paceline.serving.client import clocks
from paceline.serving.client.orders import Handled
from paceline.serving.client.response import END_OF_CHUNKS, Response

READ_BYTES = 65_536
# A host that acknowledges nothing for so long is gone; asked for a sign of life when nothing else is under way.
SILENT_S, KEEP_ALIVE_S = 60, 15
# Tries to connect after the first, each twice as far from the one before: 15 s in all.
SYN_TRIES = 3
# The client's own want of descriptors, ports or memory: these say nothing about a replica.
OWN_ERRORS = (
    *(errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS, errno.ENOMEM),
    # Of epoll: no more descriptors may be watched.
    errno.ENOSPC,
)
_UNDER_WAY = (errno.EINPROGRESS, errno.EWOULDBLOCK, 0)


_ANCILLARY_BYTES, _timespec, _monotonic_ns = clocks.ANCILLARY_BYTES, clocks.TIMESPEC.unpack_from, time.monotonic_ns
_NS = 1_000_000_000


class Connection:
    """States: connecting, idle (response is None), busy with one request. `streams` while that is an answer whose reads
    may go through `read_on`; `parked` while it is among the free ones;
    `settled` once it was ready for the first time."""

    __slots__ = (
        *("replica", "sock", "_stamps", "_unstamped", "tls", "connected", "used", "handled", "response", "index"),
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
        _notice_silence(self.sock)
        self._stamps = clocks.stamp_in_kernel(self.sock)
        self._unstamped = 0
        self._offset_ns = offset_ns
        self.tls = tls
        self.connected = False
        self.used = 0
        self.handled: Handled | None = None
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
        """Whether every read since the request was given has the kernel's time: to ask for it is not to have it."""
        return self._stamps and not self._unstamped

    def fileno(self) -> int:
        return self.sock.fileno()

    def finish_connecting(self) -> None:
        """Raises OSError when the other side refused."""
        code = self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise OSError(code, errno.errorcode.get(code, "connect"))
        self.connected = True
        if self.tls:
            self.waiting += self.tls.greet()

    @property
    def is_given_up(self) -> bool:
        """Whether the other side has closed it while nothing was asked."""
        try:
            return not self.sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True

    @property
    def ready(self) -> bool:
        """Whether a request may be written: TLS has to agree on keys first."""
        return self.connected and (self.tls is None or self.tls.agreed)

    def begin_when_ready(self, handled: Handled, payload: bytes, longest_body: int) -> None:
        self.handled, self.response = handled, Response(longest_body)
        self._payload, self.has_begun = payload, False
        self.used += 1
        self._unstamped = 0

    def start_pending(self) -> None:
        """Put the request that waits for this connection into what is to be sent."""
        if self._payload is not None and self.ready:
            self.waiting += self.tls.seal(self._payload) if self.tls else self._payload
            self._payload, self.has_begun = None, True

    def write(self) -> bool:
        """Send what waits; False while the kernel takes no more."""
        while self.waiting:
            try:
                taken = self.sock.send(self.waiting)
            except BlockingIOError:
                return False
            self.waiting = self.waiting[taken:]
        return True

    def read(self) -> tuple[bytes, int, int]:
        """Plain bytes (b"" at the end of the connection), the kernel's time and this process's, both monotonic."""
        data, ancillary, _, _ = self._recvmsg(READ_BYTES, _ANCILLARY_BYTES)
        now = _monotonic_ns()
        stamp = clocks.kernel_time(ancillary) if self._stamps else None
        self._unstamped += stamp is None and bool(data)
        return data, now if stamp is None else stamp - self._offset_ns, now

    def read_on(self, response: Response) -> bool:
        """One read of an answer that streams: what `read` and `Response.feed` do together, in a third of their time,
        because nearly all reads of a run go through here. Whether the answer may have ended or is too long."""
        piece, ancillary, _, _ = self._recvmsg(READ_BYTES, _ANCILLARY_BYTES)
        now = _monotonic_ns()
        # The only thing asked for beside the data, so the first is the time; absent at the end of a connection.
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

    def plain(self, data: bytes) -> bytes:
        """What was read, out of TLS where there is one; what that wants to answer waits to be sent."""
        if self.tls is None:
            return data
        found, reply = self.tls.open(data)
        self.waiting += reply
        return found

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.sock.close()


def _notice_silence(sock: socket.socket) -> None:
    """A host that lost its power sends no reset: without these its streams would wait for their time-out, and end as
    slow instead of gone. A living host's kernel answers however busy its server is."""
    options = {
        (socket.SOL_SOCKET, "SO_KEEPALIVE"): 1,
        (socket.IPPROTO_TCP, "TCP_KEEPIDLE"): KEEP_ALIVE_S,
        (socket.IPPROTO_TCP, "TCP_KEEPINTVL"): KEEP_ALIVE_S,
        (socket.IPPROTO_TCP, "TCP_USER_TIMEOUT"): SILENT_S * 1000,
        (socket.IPPROTO_TCP, "TCP_SYNCNT"): SYN_TRIES,
    }
    for (level, name), value in options.items():
        with contextlib.suppress(OSError, AttributeError):
            sock.setsockopt(level, getattr(socket, name), value)


class TlsPipe:
    """TLS over memory, so that reading and writing stay this module's, with their times."""

    def __init__(self, context: ssl.SSLContext, host: str) -> None:
        self._coming, self._going = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._object = context.wrap_bio(self._coming, self._going, server_hostname=host)
        self.agreed = False

    def greet(self) -> bytes:
        self._agree()
        return self._going.read()

    def open(self, data: bytes) -> tuple[bytes, bytes]:
        """What the data mean, and what has to be answered; ssl.SSLError where the other side cannot be trusted."""
        self._coming.write(data)
        if not self.agreed:
            self._agree()
        plain = self._drain(self._object.read) if self.agreed else b""
        return plain, self._going.read()

    def seal(self, data: bytes) -> bytes:
        self._object.write(data)
        return self._going.read()

    def _agree(self) -> None:
        try:
            self._object.do_handshake()
            self.agreed = True
        except ssl.SSLWantReadError:
            return

    def _drain(self, read: Callable[[int], bytes]) -> bytes:
        pieces = []
        with contextlib.suppress(ssl.SSLWantReadError, ssl.SSLZeroReturnError):
            while piece := read(READ_BYTES):
                pieces.append(piece)
        return b"".join(pieces)
