"""A port of this host at which a test answers as it likes."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def listening(serve: Callable[[socket.socket], object]) -> Iterator[int]:
    """The port. Whoever connects is served, one after another, and hung up on; a peer that goes first is no matter."""
    listener = socket.create_server(("127.0.0.1", 0))

    def accept() -> None:
        while True:
            try:
                peer, _ = listener.accept()
            except OSError:
                return
            with peer, contextlib.suppress(OSError):
                serve(peer)

    accepting = threading.Thread(target=accept, daemon=True)
    accepting.start()
    try:
        yield listener.getsockname()[1]
    finally:
        # Wakes the thread, which closing alone does not.
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
