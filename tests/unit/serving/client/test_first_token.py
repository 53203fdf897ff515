"""The first token is found at the read that completes it, and no byte is looked at twice to find it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from paceline.serving.client import http_stream, on_demand
from paceline.serving.client.http_stream import BrokenResponse, Event, Response, understand
from paceline.serving.client.on_demand import FirstToken

HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
BARE = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n"
ENDING = b"0\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def event(text: str) -> bytes:
    return b"data: " + json.dumps({"choices": [{"text": text}]}).encode() + b"\n\n"


STREAM = (event(""), b": keep-alive\n\n", event("a"), event("b"))


def found_at(pieces: Iterable[bytes]) -> int | None:
    """The read at which the first token was found."""
    made = Response()
    token = FirstToken(made)
    for number, piece in enumerate(pieces):
        made.feed(piece, 0, 0)
        if made.status and token.has_come():
            return number
    return None


@pytest.mark.parametrize("head", [HEAD, BARE])
def test_cut_at_every_byte(head: bytes) -> None:
    body = [chunk(each) if head is HEAD else each for each in STREAM]
    whole = head + b"".join(body) + (ENDING if head is HEAD else b"")
    completed = whole.index(b"\n\n", whole.index(b'"a"')) + 2
    for cut in range(1, len(whole)):
        assert found_at([whole[:cut], whole[cut:]]) == (0 if cut >= completed else 1)
    assert found_at(bytes([each]) for each in whole) == completed - 1


def test_an_event_over_several_chunks_and_a_chunk_over_several_reads() -> None:
    split = event("a")
    assert found_at([HEAD, chunk(split[:9]), chunk(split[9:])]) == 2
    frame = chunk(event("") + event("a") + event("b"))
    until = frame.index(b"\n\n", frame.index(b'"a"')) + 2
    assert found_at([HEAD, frame[:5], frame[5 : until - 1], frame[until - 1 : until]]) == 3


def test_none_at_all() -> None:
    assert found_at([HEAD, chunk(event("")), chunk(b"data: no json\n\n"), ENDING]) is None
    with pytest.raises(BrokenResponse, match="too_long"):
        found_at([HEAD, *[chunk(b"x" * 50_000)] * 6])
    with pytest.raises(BrokenResponse, match="malformed"):
        found_at([HEAD, b"no size\r\n"])


# --- work ---


class Counted(bytearray):
    """A response's bytes that count how many were searched or copied."""

    passed = 0

    def find(self, what: Any, start: Any = 0, *more: Any) -> int:
        found = super().find(what, start, *more)
        type(self).passed += (len(self) if found < 0 else found) - min(start, len(self))
        return found

    def __getitem__(self, which: Any) -> Any:
        found = super().__getitem__(which)
        type(self).passed += len(found) if isinstance(which, slice) else 1
        return found


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> type[Counted]:
    """Also what was searched for ends of events, and given to their parser."""

    def understood(events: Iterable[Event]) -> http_stream.Answer:
        told = list(events)
        Counted.passed += sum(len(each.data) for each in told)
        return understand(told)

    class Searching:
        def finditer(self, kept: bytearray, begin: int) -> Any:
            Counted.passed += len(kept) - begin
            return http_stream.EMPTY_LINE.finditer(kept, begin)

    monkeypatch.setattr(on_demand, "EMPTY_LINE", Searching())
    monkeypatch.setattr(Counted, "passed", 0)
    monkeypatch.setattr(on_demand, "understand", understood)
    return Counted


def work_of(pieces: Iterable[bytes], counted: type[Counted]) -> int:
    made = Response(data=counted())
    token = FirstToken(made)
    before = counted.passed
    for piece in pieces:
        made.feed(piece, 0, 0)
        assert not made.status or not token.has_come()
    return counted.passed - before


HOSTILE: dict[str, Callable[[int], list[bytes]]] = {
    "events without content": lambda n: [HEAD, *[chunk(event(""))] * n],
    "comments": lambda n: [HEAD, *[chunk(b": still here\n\n")] * n],
    "frames that end like a body": lambda n: [HEAD[:-2], *[b"\r\n8\r\n: x" + ENDING] * n],
    "one chunk whose parts end like a body": lambda n: [HEAD, b"fffffff\r\n", *[b": x" + ENDING] * n],
    "a size that never ends": lambda n: [HEAD, b"5;", *[b"x" * 8] * n],
    "a long extension, then parts that end like a body": lambda n: [
        HEAD + b"fffffff;" + b"x" * 8 * n + b"\r\n",
        *[b": x" + ENDING] * n,
    ],
    "a head byte by byte": lambda n: [b"H"] * n,
    "chunks of one byte": lambda n: [HEAD, *[chunk(b":")] * n],
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_stream_ten_times_as_long_costs_ten_times_the_work(name: str, counted: type[Counted]) -> None:
    short, long = (work_of(HOSTILE[name](count), counted) for count in (200, 2000))
    total = sum(map(len, HOSTILE[name](2000)))
    assert long <= 12 * max(short, 200)
    assert long <= 12 * total
