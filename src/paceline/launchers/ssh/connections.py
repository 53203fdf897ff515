"""Connections of the ssh client: their processes, and what comes out of them line by line without waiting."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import time
from collections import deque
from collections.abc import Sequence

from paceline.host.processes import end_with_parent

PIECE = 1 << 16
# Of one look: the other connections have their turn too.
MOST_LINES = 1000


class Lines:
    """Whole lines of a pipe, as they come."""

    def __init__(self, descriptor: int) -> None:
        os.set_blocking(descriptor, False)
        self.descriptor, self._rest = descriptor, b""
        self.is_at_end = False

    def take(self) -> list[str] | None:
        """What one look brings, None where nothing is there now; at the end also a last line that was not ended."""
        if self.is_at_end:
            return None
        try:
            piece = os.read(self.descriptor, PIECE)
        except BlockingIOError:
            return None
        *lines, self._rest = (self._rest + piece).split(b"\n")
        if not piece:
            self.is_at_end = True
            lines, self._rest = [*lines, *filter(None, [self._rest])], b""
        return [line.decode(errors="replace") for line in lines]


def _end_with_controller() -> None:
    """A controller that is killed takes its connections along, and the far side sees them closed."""
    end_with_parent(signal.SIGTERM)


class Connection:
    """One ssh client and the command at its other end."""

    def __init__(self, command: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=_end_with_controller,
            bufsize=0,
        )
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self.out, self.err = Lines(self._process.stdout.fileno()), Lines(self._process.stderr.fileno())
        # The last things said on the error channel, by ssh itself or from the far side.
        self.complaints: deque[str] = deque(maxlen=5)
        self._heard: deque[str] = deque()
        self.code: int | None = None

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, data: bytes) -> None:
        """A far side that is gone is seen by its end, not here."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            self._process.stdin.write(data)

    def hang_up(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()

    def listen(self) -> tuple[list[str], list[str]]:
        """Lines of both channels that have come. `code` is known once all of them were read."""
        ended = self._process.poll()
        out: list[str] = []
        err: list[str] = []
        while (more := self.out.take()) is not None:
            out += more
            if len(out) > MOST_LINES:
                return out, err
        while (more := self.err.take()) is not None:
            err += more
        self.complaints.extend(line for line in err if line.strip())
        if ended is not None:
            self.code = ended
        return out, err

    def await_line(self, deadline: float) -> str | None:
        """The next line of the far side's output, or None: it ended, or time is up. The error channel is read too."""
        if self._heard:
            return self._heard.popleft()
        with selectors.DefaultSelector() as selector:
            for lines in (self.out, self.err):
                selector.register(lines.descriptor, selectors.EVENT_READ)
            while time.monotonic() < deadline and not self.out.is_at_end:
                selector.select(0.1)
                self._heard += self.out.take() or ()
                self.complaints.extend(line for line in self.err.take() or () if line.strip())
                if self._heard:
                    return self._heard.popleft()
        return None

    def end(self, patience_s: float) -> int:
        """Close, and wait for the far side to end; after the patience the client is killed."""
        self.hang_up()
        deadline = time.monotonic() + patience_s
        while self._process.poll() is None and time.monotonic() < deadline:
            # Whoever is still writing over there must not be held up by a full pipe.
            self.listen()
            time.sleep(0.02)
        self._process.kill()
        self.listen()
        code = self._process.wait()
        for pipe in (self._process.stdout, self._process.stderr):
            assert pipe is not None
            pipe.close()
        self.out.is_at_end = self.err.is_at_end = True
        return code
