"""Ports that nobody listens at."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket

_next = itertools.count(20000 + os.getpid() * 37 % 9000)


def free_port() -> int:
    """Below those that the system gives out itself, and never twice: nobody else is likely to take it before we do."""
    for candidate in itertools.takewhile(lambda port: port < 32000, _next):
        with contextlib.suppress(OSError), socket.create_server(("", candidate)):
            return candidate
    raise OSError("no port is free")
