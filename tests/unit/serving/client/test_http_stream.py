"""Responses cut at every byte mean the same, and every event has the time of the read that completed it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from paceline.serving.client import http_stream as module
from paceline.serving.client.http_stream import BrokenResponse, Response, understand
from paceline.serving.client.schedule import LONGEST_BODY, longest_body

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def event(**fields: object) -> bytes:
    return b"data: " + json.dumps(fields, ensure_ascii=False).encode() + b"\n\n"


def token(text: str) -> bytes:
    return event(choices=[{"delta": {"content": text}}])


ROLE = event(choices=[{"delta": {"role": "assistant", "content": ""}}])
USAGE = event(choices=[], usage={"prompt_tokens": 7, "completion_tokens": 3})
DONE = b"data: [DONE]\n\n"
STREAM = [ROLE, b": keep-alive\n\n", token("Zür"), token("ich "), token("0\r\n\r\n"), USAGE, DONE]
WHOLE = HEAD + b"".join(map(chunk, STREAM)) + b"0\r\n\r\n"


def fed(pieces: list[bytes]) -> tuple[Response, list[bool]]:
    response = Response()
    return response, [response.feed(piece, 10 * n, 10 * n + 1) for n, piece in enumerate(pieces)]


def test_one_read_per_frame() -> None:
    response, whole = fed([HEAD, *map(chunk, STREAM), b"0\r\n\r\n"])
    assert whole == [False] * 8 + [True]
    answer = understand(response.events())
    assert (answer.first_read, answer.last_read, answer.reads) == (3, 5, [3, 4, 5])
    assert "".join(answer.text) == "Zürich 0\r\n\r\n"
    assert (answer.pieces, answer.reported_tokens, answer.prompt_tokens, answer.coalesced) == (3, 3, 7, 0)


def test_cut_at_every_byte() -> None:
    for cut in range(1, len(WHOLE)):
        response, whole = fed([WHOLE[:cut], WHOLE[cut:]])
        assert whole == [False, True], cut
        answer = understand(response.events())
        assert "".join(answer.text) == "Zürich 0\r\n\r\n", cut
        assert answer.damaged == 0, cut
        first = WHOLE.index(b"Z") < cut and WHOLE.index(b"\n\n", WHOLE.index("ür".encode())) + 2 <= cut
        assert answer.first_read == (0 if first else 1), cut


def test_byte_by_byte() -> None:
    response, whole = fed([WHOLE[n : n + 1] for n in range(len(WHOLE))])
    assert whole == [False] * (len(WHOLE) - 1) + [True]
    assert understand(response.events()).pieces == 3


def test_events_of_one_read_are_marked() -> None:
    answer = understand(fed([WHOLE])[0].events())
    assert (answer.pieces, answer.coalesced) == (3, 2)


def test_events_over_several_frames_and_several_in_one() -> None:
    body = b"".join(STREAM)
    response, whole = fed([HEAD, chunk(body[:50]), chunk(body[50:120]), chunk(body[120:]), b"0\r\n\r\n"])
    assert whole[-1]
    assert "".join(understand(response.events()).text) == "Zürich 0\r\n\r\n"


def test_completions_reasoning_and_errors() -> None:
    events = [
        event(choices=[{"delta": {"reasoning_content": "hm"}}]),
        event(choices=[{"text": "a", "finish_reason": "length"}]),
        event(error={"message": "out of pages"}),
        b"data: {broken\n\n",
    ]
    answer = understand(fed([HEAD, *map(chunk, events), b"0\r\n\r\n"])[0].events())
    assert (answer.first_reasoning_read, answer.first_read, answer.finish) == (1, 2, "length")
    assert answer.damaged == 1
    assert "out of pages" in str(answer.error)


@pytest.mark.parametrize(
    "damage",
    [
        b'{"choices": 5}',
        b"[" * 200_000,
        b'{"usage": {"completion_tokens": ' + b"9" * 5000 + b"}}",
        b'{"usage": {"completion_tokens": ' + b"9" * 400 + b"}}",
        b'{"usage": {"completion_tokens": -5}}',
        b'{"usage": {"prompt_tokens": -1}}',
        b"\xff\xfe",
        b"7",
    ],
    ids=lambda damage: damage[:40].decode(errors="replace"),
)
def test_an_event_without_sense_harms_no_other(damage: bytes) -> None:
    events = [token("a"), b"data: " + damage + b"\n\n", token("b"), USAGE]
    answer = understand(fed([HEAD, *map(chunk, events), b"0\r\n\r\n"])[0].events())
    assert answer.damaged == 1
    assert (answer.text, answer.reported_tokens, answer.prompt_tokens) == (["a", "b"], 3, 7)


def test_a_finish_that_is_no_word_is_none() -> None:
    events = [event(choices=[{"text": "a", "finish_reason": {"why": "length"}}])]
    assert understand(fed([HEAD, *map(chunk, events), b"0\r\n\r\n"])[0].events()).finish is None


def test_frames_of_one_byte_are_searched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """How much is looked through grows with the answer, not with its square."""
    searched = []

    class Searching:
        def finditer(self, kept: bytearray, begin: int) -> Any:
            searched.append(len(kept) - begin)
            return iter(())

    monkeypatch.setattr(module, "EMPTY_LINE", Searching())
    body = b"data: " + b"x" * 3000
    response, _ = fed([HEAD + b"".join(chunk(body[n : n + 1]) for n in range(len(body))) + b"0\r\n\r\n"])
    assert list(response.events()) == []
    assert sum(searched) <= 4 * len(body)


@pytest.mark.parametrize(("tail", "cut"), [(b"", 5), (b"\n\n", 5), (b"\n\n", 0)], ids=["unended", "ended", "one frame"])
def test_an_event_has_a_bound(tail: bytes, cut: int) -> None:
    long = b"data: " + b"x" * module.LARGEST_EVENT + tail
    response, _ = fed([HEAD, *(chunk(part) for part in (long[:cut], long[cut:]) if part), b"0\r\n\r\n"])
    with pytest.raises(BrokenResponse, match="too_long"):
        list(response.events())


def test_a_length_and_a_refusal() -> None:
    response, whole = fed([b"HTTP/1.1 429 Too Many\r\nRetry-After: 2\r\nContent-Length: 4\r\n\r\nbu", b"sy"])
    assert whole == [False, True]
    assert (response.status, response.headers[b"retry-after"], response.body()) == (429, b"2", b"busy")


def test_a_body_without_length_ends_with_its_connection() -> None:
    response, whole = fed([b"HTTP/1.0 200 OK\r\n\r\n" + token("x")])
    assert whole == [False]
    response.close()
    assert not response.keeps_alive
    assert understand(response.events()).pieces == 1


@pytest.mark.parametrize(
    ("pieces", "word"),
    [
        ([b"SSH-2.0-server\r\n\r\n"], "malformed"),
        ([b"x" * 70_000], "malformed"),
        ([HEAD + b"zz\r\n" + b"0\r\n\r\n"], "malformed"),
        ([HEAD + b"-4\r\n" + b"0\r\n\r\n"], "malformed"),
        ([b"HTTP/1.1 200 OK\r\nContent-Length: 999999999\r\n\r\n"], "too_long"),
        ([b"HTTP/1.1 200 OK\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n"], "malformed"),
        ([HEAD] + [chunk(b"y" * 65_536)] * 600, "too_long"),
    ],
)
def test_hostile_responses(pieces: list[bytes], word: str) -> None:
    with pytest.raises(BrokenResponse, match=word):
        fed(pieces)


def test_the_bound_of_an_answer_grows_with_its_tokens() -> None:
    """A token in a verbose event of 1 KB has room four times over; a flood of 100 MB has none."""
    assert longest_body(128) > 4 * 128 * 1024
    assert longest_body(128) < 1 << 20
    assert longest_body(10**9) == LONGEST_BODY < 100_000_000


def test_no_more_is_kept_than_the_bound_and_one_read() -> None:
    response = Response(longest_body=100_000)
    response.feed(HEAD, 0, 0)
    piece = chunk(b"y" * 5000)
    for _ in range(100_000 // len(piece)):
        assert not response.feed(piece, 0, 0)
    with pytest.raises(BrokenResponse, match="too_long"):
        response.feed(piece, 0, 0)
    assert len(response.data) <= len(HEAD) + 100_000 + len(piece)


@pytest.mark.parametrize("beyond", [b"0\r\n\r\n", token("more") + b"0\r\n\r\n"])
def test_bytes_beyond_the_announced_ones_are_an_error(beyond: bytes) -> None:
    """Whatever a server sends after the end is no token."""
    with pytest.raises(BrokenResponse, match="excess"):
        fed([WHOLE + beyond])
    length = b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\n"
    assert fed([length + b"busy"])[1]
    with pytest.raises(BrokenResponse, match="excess"):
        fed([length + b"busy" + beyond])


@pytest.mark.parametrize(("sent", "word"), [(b"", "closed"), (HEAD, "truncated"), (WHOLE[:-1], "truncated")])
def test_closed_early(sent: bytes, word: str) -> None:
    response = Response()
    if sent:
        response.feed(sent, 0, 0)
    with pytest.raises(BrokenResponse, match=word):
        response.close()
