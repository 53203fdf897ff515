"""One HTTP/1.1 response as it came: bytes with the time of each read, understood when it has ended.

While a response streams only its end is looked for; frames, events and JSON are taken apart afterwards, where the time
that takes moves no stamp of another request. The kernel's receive time of the read that completed an event is the time
of that event; a read that completed several carries the last segment's, so those are marked.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from paceline.serving.client.orders import LONGEST_BODY, stamps

END_OF_HEAD = b"\r\n\r\n"
END_OF_CHUNKS = b"0\r\n\r\n"
EMPTY_LINE = re.compile(rb"\r?\n\r?\n")
# What json.loads does besides takes longer than the decoding itself, for values as short as an event's.
_decode = json.JSONDecoder().raw_decode
_HEX = re.compile(rb"[0-9a-fA-F]+")
LARGEST_HEAD = 65_536
# Of one event, a thousand times that of a token: what is longer would hold up the loop that reads it.
LARGEST_EVENT = 1 << 18
# Bytes an empty line has at most but for its last: so many may lie before a new piece.
BEFORE_LAST = 3
# More digits are no length that eight bytes hold.
_MOST_DIGITS = 19
# Counts that a float holds exactly; results are floats.
_MOST_TOKENS = 2**53


class BrokenResponse(Exception):
    """A response that is no HTTP, ended early, or never seems to end; the text is the error class of its request."""


@dataclass(slots=True)
class Response:
    """Feed what was read, in order, until `feed` says that it is whole."""

    longest_body: int = LONGEST_BODY
    data: bytearray = field(default_factory=bytearray)
    # For each read: where its bytes end, when the kernel had them, and how much later this process did.
    ends: array[int] = field(default_factory=stamps)
    kernel_ns: array[int] = field(default_factory=stamps)
    lag_ns: array[int] = field(default_factory=stamps)
    status: int = 0
    body_at: int = 0
    length: int | None = None
    chunked: bool = False
    keeps_alive: bool = True
    # Of head and body: where an answer that streams is ended.
    longest: int = LARGEST_HEAD
    headers: dict[bytes, bytes] = field(default_factory=dict)
    # Where the content of the chunks lies that have come whole; the last one of a whole body is empty.
    contents: list[tuple[int, int]] = field(default_factory=list)
    # Where the chunk after those begins, and how many bytes must be there before it is whole.
    chunk_at: int = 0
    awaited: int = 0

    def feed(self, piece: bytes, kernel_ns: int, user_ns: int) -> bool:
        before = len(self.data)
        self.data += piece
        self.ends.append(len(self.data))
        self.kernel_ns.append(kernel_ns)
        self.lag_ns.append(user_ns - kernel_ns)
        return (self.body_at > 0 or self._read_head(before)) and self.is_whole()

    def is_whole(self) -> bool:
        """After the head was read."""
        if len(self.data) > self.longest:
            raise BrokenResponse("too_long")
        if self.length is not None:
            return len(self.data) - self.body_at >= self.length
        # Content may end like the last chunk does: only then is the body looked through.
        return self.chunked and self.data.endswith(END_OF_CHUNKS) and self._has_last_chunk()

    def _has_last_chunk(self) -> bool:
        """Goes on where the last look ended: a server may end every frame the way a body ends."""
        data, at, length = self.data, self.chunk_at or self.body_at, len(self.data)
        if length < self.awaited:
            return False
        while (line_end := data.find(b"\r\n", at)) >= 0:
            begin = line_end + 2
            end = begin + chunk_size(data[at:line_end])
            if end == begin and data.find(b"\r\n", begin) < 0:
                break
            if end > length:
                self.awaited = end
                break
            self.contents.append((begin, end))
            if end == begin:
                return True
            at = self.chunk_at = end + 2
        return False

    @property
    def _has_ended(self) -> bool:
        return bool(self.contents) and self.contents[-1][0] == self.contents[-1][1]

    def close(self) -> None:
        """The other side has closed the connection: the end of a body without a length, too early for any other."""
        self.keeps_alive = False
        if not self.body_at or self.chunked or self.length is not None:
            raise BrokenResponse("truncated" if self.data else "closed")

    def _read_head(self, before: int) -> bool:
        """before: bytes that were looked through already."""
        end = self.data.find(END_OF_HEAD, max(0, before - len(END_OF_HEAD) + 1))
        if end < 0:
            if len(self.data) > LARGEST_HEAD:
                raise BrokenResponse("malformed")
            return False
        first, *lines = bytes(self.data[:end]).split(b"\r\n")
        version, _, rest = first.partition(b" ")
        if not version.startswith(b"HTTP/1.") or not rest[:3].isdigit():
            raise BrokenResponse("malformed")
        self.status = int(rest[:3])
        for line in lines:
            name, _, value = line.partition(b":")
            self.headers[name.strip().lower()] = value.strip()
        self.body_at = end + len(END_OF_HEAD)
        self.longest = self.body_at + self.longest_body
        self.chunked = b"chunked" in self.headers.get(b"transfer-encoding", b"").lower()
        told = self.headers.get(b"content-length")
        if told is not None and not self.chunked:
            if not told.isdigit() or len(told) > _MOST_DIGITS:
                raise BrokenResponse("malformed")
            self.length = int(told)
            if self.length > self.longest_body:
                raise BrokenResponse("too_long")
        closes = self.headers.get(b"connection", b"").lower() == b"close" or version == b"HTTP/1.0"
        self.keeps_alive = not closes and (self.chunked or self.length is not None)
        return True

    def body(self) -> bytes:
        return b"".join(bytes(self.data[begin:end]) for begin, end in self._contents())

    def events(self) -> Iterator[Event]:
        """Server-sent events of the body, each with the read that completed it."""
        return _events(self.data, self._contents(), self.ends)

    def _contents(self) -> Iterable[tuple[int, int]]:
        if not self.chunked:
            return [(self.body_at, len(self.data))]
        return self.contents if self._has_ended else _chunks(self.data, self.body_at)


def _chunks(data: bytearray, at: int) -> Iterator[tuple[int, int]]:
    """Where the content of each chunk lies, as far as it is there; only the last chunk of a body is empty."""
    find, length = data.find, len(data)
    while (line_end := find(b"\r\n", at)) >= 0:
        size = chunk_size(data[at:line_end])
        begin = line_end + 2
        if size == 0:
            if find(b"\r\n", begin) >= 0:
                yield begin, begin
            return
        end = begin + size
        if begin < length:
            yield begin, end if end < length else length
        at = end + 2


def chunk_size(told: bytearray) -> int:
    try:
        size = int(told, 16)
    except ValueError:
        digits = told.partition(b";")[0].strip()
        if not _HEX.fullmatch(digits):
            raise BrokenResponse("malformed") from None
        size = int(digits, 16)
    if size < 0:
        raise BrokenResponse("malformed")
    return size


class Event(NamedTuple):
    """data of one event, and the number of the read that brought its last byte."""

    data: bytes | bytearray
    read: int


def _events(data: bytearray, pieces: Iterable[tuple[int, int]], ends: array[int]) -> Iterator[Event]:
    """Events end with an empty line, wherever frames and reads were cut. Comments (keep-alive) are no events. Each byte
    is looked at once, however small the frames are."""
    kept, read, last_read = bytearray(), 0, len(ends) - 1
    for begin, end in pieces:
        piece = data[begin:end]
        size = end - begin
        if not kept and piece.find(b"\n") == size - 2 and piece.endswith(b"\n\n") and size <= LARGEST_EVENT:
            # One line, then an empty one: nearly every chunk of nearly every server.
            while read < last_read and ends[read] < end:
                read += 1
            if piece.startswith(b"data:"):
                yield Event(piece[5:].strip(), read)
            continue
        carried = len(kept)
        kept += piece
        last = 0
        for begins, ends_at in [gap.span() for gap in EMPTY_LINE.finditer(kept, max(0, carried - BEFORE_LAST))]:
            # Where the event ends in the response itself: what was carried lies before this piece.
            while read < last_read and ends[read] < begin + ends_at - carried:
                read += 1
            if (told := data_lines(kept[last:begins])) is not None:
                yield Event(told, read)
            last = ends_at
        del kept[:last]
        if len(kept) > LARGEST_EVENT:
            raise BrokenResponse("too_long")


def data_lines(event: bytearray) -> bytes | None:
    """What an event says; None of a comment."""
    if len(event) > LARGEST_EVENT:
        raise BrokenResponse("too_long")
    lines = [line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines) if lines else None


@dataclass(slots=True)
class Answer:
    """What a streamed completion said. Reads are numbers of reads of its response; content is kept where it is asked
    for. tokens_told is the server's own count, pieces the number of events with content."""

    first_read: int | None = None
    first_reasoning_read: int | None = None
    last_read: int | None = None
    pieces: int = 0
    coalesced: int = 0
    reads: list[int] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    prompt_tokens: int | None = None
    tokens_told: int | None = None
    finish: str | None = None
    error: str | None = None
    damaged: int = 0
    events: int = 0


def understand(events: Iterable[Event], answer: Answer | None = None) -> Answer:
    """Both kinds of OpenAI-compatible streams, completions and chat. A chunk without content is no token. An event that
    makes no sense is counted as damaged and harms no other. Added to `answer` where its first events were understood
    before."""
    answer = answer or Answer()
    for event in events:
        answer.events += 1
        if event.data == b"[DONE]":
            continue
        try:
            text = event.data.decode()
            chunk, end = _decode(text)
            if not isinstance(chunk, dict) or end != len(text):
                raise ValueError("no object, or more than one")
            _take(answer, chunk, event.read)
        except (ValueError, TypeError, RecursionError):
            # Whatever a server sends: what it says is data, and must not end the process that has all other answers.
            answer.damaged += 1
    return answer


def _take(answer: Answer, chunk: dict[str, Any], read: int) -> None:
    if error := chunk.get("error"):
        answer.error = str(error)
    choices = chunk.get("choices") or []
    if not isinstance(choices, list):
        raise TypeError("choices are a list")
    for choice in choices:
        if isinstance(choice, dict):
            _take_choice(answer, choice, read)
    if isinstance(usage := chunk.get("usage"), dict):
        answer.prompt_tokens = _count(usage.get("prompt_tokens"), answer.prompt_tokens)
        answer.tokens_told = _count(usage.get("completion_tokens"), answer.tokens_told)


def _take_choice(answer: Answer, choice: dict[str, Any], read: int) -> None:
    text, reasoning = choice.get("text"), None
    delta = choice.get("delta")
    if isinstance(delta, dict):
        reasoning = delta.get("reasoning_content") or delta.get("reasoning")
        text = text or delta.get("content")
    if isinstance(finish := choice.get("finish_reason"), str) and finish:
        answer.finish = finish
    if reasoning and answer.first_reasoning_read is None:
        answer.first_reasoning_read = read
    if text and answer.first_read is None:
        answer.first_read = read
    if text or reasoning:
        answer.coalesced += answer.last_read == read
        answer.last_read = read
        answer.reads.append(read)
        answer.pieces += 1
        answer.text.append(str(text or reasoning))


def _count(value: object, before: int | None) -> int | None:
    """ValueError for a number that counts nothing: below zero, or more than any sum of them could hold."""
    if not isinstance(value, int) or isinstance(value, bool):
        return before
    if not 0 <= value < _MOST_TOKENS:
        raise ValueError("no count of tokens")
    return value
