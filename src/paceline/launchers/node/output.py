"""What a node says, in whole lines: its own and those of its ranks, which write in pieces and all at once."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterable

from paceline.launchers.node import log_transport

# A rank that never ends its line (a progress bar) is shown in pieces of this length.
LONGEST_PIECE = 8192
# How long a reader may leave one line of ours unread at the end, before it counts as gone.
DEAF_S = 60


class Voice:
    """One writer to the output of this process. A reader that is gone is no error: there is nobody left to tell."""

    def __init__(self, descriptor: int, keep: Callable[[str, bytes], None] | None = None) -> None:
        self._descriptor, self._keep = descriptor, keep
        self._lock = threading.Lock()
        self._pumps: list[threading.Thread] = []

    def say(self, lines: Iterable[str]) -> None:
        for line in lines:
            self._write(line.encode(errors="backslashreplace") + b"\n")

    def say_last(self, lines: Iterable[str]) -> None:
        """To a reader that may hang: the kernel ends this process when a line is not taken in time."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
        for line in lines:
            signal.alarm(DEAF_S)
            self.say([line])
        signal.alarm(0)

    def _write(self, data: bytes) -> None:
        with self._lock, contextlib.suppress(OSError):
            while data:
                data = data[os.write(self._descriptor, data) :]

    def pass_on(self, pipe: int) -> None:
        """Say what comes out of a pipe, line by line, until it ends; closes it."""
        pump = threading.Thread(target=self._pump, args=(pipe,), daemon=True)
        pump.start()
        self._pumps.append(pump)

    def finish(self, patience_s: float) -> None:
        """Wait until everything that was passed on has been said; a pipe that somebody still holds is left."""
        for pump in self._pumps:
            pump.join(patience_s)

    def _pump(self, pipe: int) -> None:
        rest = b""
        while piece := os.read(pipe, 1 << 16):
            *lines, rest = (rest + piece).split(b"\n")
            if len(rest) > LONGEST_PIECE:
                lines, rest = [*lines, rest], b""
            self._relate(lines)
        self._relate([rest] if rest else [])
        os.close(pipe)

    def _relate(self, lines: Iterable[bytes]) -> None:
        """A rank's lines, but for files that it hands over; none may pass for one of the agent's own."""
        for line in lines:
            found = log_transport.understood(line.decode(errors="replace")) if self._keep else None
            if found and self._keep:
                self._keep(*found)
            else:
                self._write((b" " if line.startswith(log_transport.MARK.encode()) else b"") + line + b"\n")
