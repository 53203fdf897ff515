"""The first token of a response while it still streams, for who must be told at once.

Looked for at every read, so each byte is looked at once: a server that sends a thousand events without content, or one
byte at a time, must not make every look longer than the one before.
"""

from __future__ import annotations

from paceline.serving.client.response import (
    BEFORE_LAST,
    EMPTY_LINE,
    LARGEST_EVENT,
    BrokenResponse,
    Event,
    Response,
    chunk_size,
    data_lines,
    understand,
)

CRLF = b"\r\n"


class Content:
    """What a body says, without the frames of its chunks, as it comes; after the head was read."""

    def __init__(self, response: Response) -> None:
        self._response = response
        # Where to go on, how much of the chunk there is still to come, and how far the line of its size was searched.
        self._at = self._left = self._searched = 0
        self._ended = False

    def more(self) -> bytearray:
        """What came since the last look."""
        data = self._response.data
        self._at = max(self._at, self._response.body_at)
        if not self._response.chunked:
            found, self._at = data[self._at :], len(data)
            return found
        found = bytearray()
        while self._at < len(data) and not self._ended and (self._left or self._next_chunk()):
            piece = data[self._at : self._at + self._left]
            found += piece
            self._at += len(piece)
            self._left -= len(piece)
            # An empty line ends the chunk.
            self._at += 0 if self._left else len(CRLF)
        return found

    def _next_chunk(self) -> bool:
        """Whether its size is there, and is that of another chunk."""
        data = self._response.data
        line_end = data.find(CRLF, max(self._at, self._searched - 1))
        if line_end < 0:
            self._searched = len(data)
            return False
        self._left = chunk_size(data[self._at : line_end])
        self._at = line_end + len(CRLF)
        self._ended = self._left == 0
        return not self._ended


class FirstToken:
    """Ask `has_come` after each read, until it has."""

    def __init__(self, response: Response) -> None:
        self._content = Content(response)
        self._kept = bytearray()

    def has_come(self) -> bool:
        """Whether an event with content is whole by now; BrokenResponse where one is too long to be a token's."""
        kept, carried, last = self._kept, len(self._kept), 0
        kept += self._content.more()
        for gap in EMPTY_LINE.finditer(kept, max(0, carried - BEFORE_LAST)):
            told = data_lines(kept[last : gap.start()])
            last = gap.end()
            if told is not None and understand([Event(told, 0)]).pieces:
                return True
        del kept[:last]
        if len(kept) > LARGEST_EVENT:
            raise BrokenResponse("too_long")
        return False
