"""What ties a node to its controller: standard input. While it is open and something comes, the controller lives.

A line `end` asks for a polite end, any other line says "still here". The end of input, or silence where a limit was
given, means that nobody is left who wants the node's work.
"""

from __future__ import annotations

import os
import select
import signal
import threading

END = b"end"
LONGEST_LINE = 64 << 20


def first_line(descriptor: int) -> bytes:
    """The first line of input, without reading beyond it; what came where the input ended before."""
    line = bytearray()
    while not line.endswith(b"\n") and len(line) < LONGEST_LINE:
        # One byte at a time is slow for megabytes, and a spec has a few kilobytes; what follows belongs to the tether.
        piece = os.read(descriptor, 1)
        if not piece:
            break
        line += piece
    return bytes(line)


class Tether:
    """Sends this process SIGTERM when the controller asks for it or is gone; `is_cut` tells which."""

    def __init__(self, descriptor: int, silence_s: float | None) -> None:
        self._descriptor, self._silence_s = descriptor, silence_s
        self.is_cut = False
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        rest = b""
        while True:
            readable, _, _ = select.select([self._descriptor], [], [], self._silence_s)
            piece = os.read(self._descriptor, 4096) if readable else b""
            *lines, rest = (rest + piece).split(b"\n")
            if END in lines:
                break
            if not piece:
                self.is_cut = True
                break
        os.kill(os.getpid(), signal.SIGTERM)
