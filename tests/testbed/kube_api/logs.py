"""A container's log as the kubelet keeps and serves it: rotated by size, only its newest file is read."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import IO

# The kubelet's containerLogMaxSize.
ROTATED_AT = 10 * 2**20


@dataclass(frozen=True, slots=True)
class LogQuery:
    """The parameters of `GET .../log`."""

    follow: bool = False
    tail_lines: int | None = None
    since_seconds: int | None = None
    limit_bytes: int | None = None
    timestamps: bool = False


@dataclass(slots=True)
class ContainerLog:
    """Lines with the time each came. A follower goes on across a rotation; whoever comes later does not see what was
    rotated away."""

    rotated_at: int = ROTATED_AT
    lost: re.Pattern[bytes] | None = None
    lines: list[tuple[float, bytes]] = field(default_factory=list)
    begin: int = 0
    is_closed: bool = False
    changed: threading.Condition = field(default_factory=threading.Condition)
    _size: int = 0
    _cuts: int = 0

    def pump(self, stream: IO[bytes]) -> None:
        """Take over what the container prints until its end."""
        for line in stream:
            if self.lost is not None and self.lost.search(line):
                continue
            with self.changed:
                if self._size + len(line) > self.rotated_at:
                    self.begin, self._size = len(self.lines), 0
                self.lines.append((time.time(), line))
                self._size += len(line)
                self.changed.notify_all()
        with self.changed:
            self.is_closed = True
            self.changed.notify_all()

    def rotate(self, *, cut: bool = False) -> None:
        """cut: whoever follows now gets no more."""
        with self.changed:
            self.begin, self._size = len(self.lines), 0
            self._cuts += cut

    def read(self, query: LogQuery, stopped: threading.Event) -> Iterator[bytes]:
        """The lines asked for; with follow, those to come until the container has ended or the server stops."""
        left = query.limit_bytes if query.limit_bytes is not None else float("inf")
        position, cuts = self._start(query), self._cuts
        while left > 0 and cuts == self._cuts:
            with self.changed:
                fresh, closed = self.lines[position:], self.is_closed
                if not fresh and query.follow and not closed:
                    self.changed.wait(0.1)
            for stamp, line in fresh:
                piece = (_stamp(stamp) + line if query.timestamps else line)[: int(min(left, len(line) + 64))]
                left -= len(piece)
                yield piece
                if left <= 0:
                    return
            position += len(fresh)
            if stopped.is_set() or (not fresh and (closed or not query.follow)):
                return

    def _start(self, query: LogQuery) -> int:
        with self.changed:
            start = self.begin
            if query.since_seconds is not None:
                oldest = time.time() - query.since_seconds
                start = next((i for i in range(start, len(self.lines)) if self.lines[i][0] >= oldest), len(self.lines))
            if query.tail_lines is not None:
                start = max(start, len(self.lines) - query.tail_lines)
            return start


def _stamp(seconds: float) -> bytes:
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
    return f"{whole}.{int(seconds % 1 * 1e9):09d}Z ".encode()
