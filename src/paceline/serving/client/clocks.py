"""Clocks of the client: kernel receive times on the monotonic clock, and a timer that does not drift."""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import sys
import time
from dataclasses import dataclass

# Linux: SO_TIMESTAMPNS makes recvmsg carry the time (CLOCK_REALTIME) at which the kernel had the data.
SO_TIMESTAMPNS = 35
TIMESPEC = struct.Struct("@ll")
ANCILLARY_BYTES = socket.CMSG_SPACE(TIMESPEC.size) if hasattr(socket, "CMSG_SPACE") else 0
_NS = 1_000_000_000
_TFD_NONBLOCK = 0o4000
_TFD_TIMER_ABSTIME = 1


def stamp_in_kernel(sock: socket.socket) -> bool:
    """Enable kernel timestamps on this socket; False if the system has none."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        sock.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
    except OSError:
        return False
    return True


def kernel_time(ancillary: list[tuple[int, int, bytes]]) -> int | None:
    """The kernel's receive time, in nanoseconds of CLOCK_REALTIME, from the ancillary data of a read."""
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == SO_TIMESTAMPNS and len(data) >= TIMESPEC.size:
            seconds, nanoseconds = TIMESPEC.unpack_from(data)
            return int(seconds) * _NS + int(nanoseconds)
    return None


@dataclass(frozen=True, slots=True)
class Bridge:
    """Subtract offset_ns from a wall time to get a monotonic time, correct to doubt_ns."""

    offset_ns: int
    doubt_ns: int

    @classmethod
    def measured(cls, tries: int = 20) -> Bridge:
        """The tightest of a few readings of one clock between two readings of the other."""
        readings = []
        for _ in range(tries):
            before, wall, after = time.monotonic_ns(), time.time_ns(), time.monotonic_ns()
            readings.append(cls(wall - (before + after) // 2, (after - before) // 2))
        return min(readings, key=lambda reading: reading.doubt_ns)


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _Setting(ctypes.Structure):
    _fields_ = (("interval", _Timespec), ("value", _Timespec))


class Alarm:
    """A file descriptor that becomes readable at a moment of the monotonic clock (timerfd). A poll on sockets then
    wakes for the schedule too, to the microsecond; the timeout of a poll is rounded to milliseconds."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None, use_errno=True)
        self.descriptor: int = self._library.timerfd_create(time.CLOCK_MONOTONIC, _TFD_NONBLOCK)
        if self.descriptor < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        self._at_ns = 0
        self._setting = _Setting()
        self._reference = ctypes.byref(self._setting)

    def set(self, at_ns: int) -> None:
        """Ring at this moment, or at once if it has passed (0 would mean never)."""
        if at_ns == self._at_ns:
            return
        self._at_ns = at_ns
        value = self._setting.value
        value.seconds, value.nanoseconds = divmod(max(at_ns, 1), _NS)
        self._library.timerfd_settime(self.descriptor, _TFD_TIMER_ABSTIME, self._reference, None)

    def answer(self) -> None:
        self._at_ns = 0
        try:
            os.read(self.descriptor, 8)
        except BlockingIOError:
            return

    def close(self) -> None:
        os.close(self.descriptor)
