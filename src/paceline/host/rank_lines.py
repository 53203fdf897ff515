"""Lines of several ranks in one log: split, written with the rank in front, attributed to a rank when they are read."""

from __future__ import annotations

import contextlib
import re
import sys
import threading
from collections.abc import Iterator, Mapping
from typing import Any, TextIO

# A line that never ends (a progress bar) is passed on in pieces of this length.
LONGEST_PIECE = 8192
# A line of a stream that anybody may have written is cut at this length: one of a gigabyte must not fill the memory.
LONGEST_LINE = 1 << 18
_OURS = re.compile(r"\[rank (\d{1,7})\] ")
# torch begins its own messages like this.
_TORCHS = re.compile(r"\[rank(\d{1,7})\]:")
# NCCL begins its messages with host, process and thread; torch's profiler with a word, the time, process and thread.
_NATIVE = re.compile(r"[\w.-]+:(?:[\d-]{10} [\d:]{8} )?(\d{1,10}):\d{1,10} ")


class LineSplitter:
    """Whole lines of a stream that arrives in pieces. Lines above LONGEST_LINE are cut, always at the same bytes: a
    stream that is read again has the same lines.

    >>> splitter = LineSplitter()
    >>> splitter.add(b"one\\ntw"), splitter.add(b"o\\n"), splitter.rest
    ([b'one'], [b'two'], b'')
    """

    def __init__(self) -> None:
        self.rest = b""

    def add(self, piece: bytes) -> list[bytes]:
        """Take a piece and return the lines that it completes."""
        *lines, rest = (self.rest + piece).split(b"\n")
        *cut, self.rest = _cut(rest)
        return [part for line in lines for part in _cut(line)] + cut

    def last(self) -> list[bytes]:
        """The line that the stream ended in, if it did not end with a line feed."""
        rest, self.rest = self.rest, b""
        return [rest] if rest else []


def _cut(line: bytes) -> list[bytes]:
    return [line[i : i + LONGEST_LINE] for i in range(0, len(line), LONGEST_LINE)] or [line]


def with_rank(rank: int, line: str) -> str:
    return f"[rank {rank}] {line}"


def split_rank(line: str, pids: Mapping[int, int]) -> tuple[int | None, str]:
    """The rank that wrote a line, and the line without our mark; None for lines of starters and engines.

    pids: process id -> rank, for messages of native libraries, which name their process.

    >>> split_rank("[rank 3] loss 5.1", {})
    (3, 'loss 5.1')
    >>> split_rank("gpu1:4711:4802 [0] NCCL INFO Connected all rings", {4711: 2})
    (2, 'gpu1:4711:4802 [0] NCCL INFO Connected all rings')
    """
    if ours := _OURS.match(line):
        return int(ours[1]), line[ours.end() :]
    if torchs := _TORCHS.match(line):
        return int(torchs[1]), line
    native = _NATIVE.match(line)
    return (pids.get(int(native[1])) if native else None), line


class RankStream:
    """A text stream that puts the rank before every line. What it does not define is that of the stream beneath."""

    def __init__(self, stream: TextIO, rank: int) -> None:
        self._stream, self._rank = stream, rank
        self._rest = ""
        self._lock = threading.RLock()

    def write(self, text: str) -> int:
        with self._lock:
            *lines, self._rest = (self._rest + text).split("\n")
            if len(self._rest) > LONGEST_PIECE:
                lines, self._rest = [*lines, self._rest], ""
            if lines:
                self._stream.write("".join(with_rank(self._rank, line) + "\n" for line in lines))
        return len(text)

    def writelines(self, lines: list[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        self._stream.flush()

    def finish(self) -> None:
        """Write a last line that was not ended."""
        with self._lock:
            if self._rest:
                self.write("\n")
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def marked_output(rank: int) -> Iterator[None]:
    """Put the rank before every line that Python code of this process prints. Native libraries write past it."""
    before = sys.stdout, sys.stderr
    marked = tuple(RankStream(stream, rank) for stream in before)
    sys.stdout, sys.stderr = marked
    try:
        yield
    finally:
        for stream in marked:
            # A full disk must not hide how the rank ended.
            with contextlib.suppress(OSError, ValueError):
                stream.finish()
        sys.stdout, sys.stderr = before
