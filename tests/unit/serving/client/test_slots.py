"""A server of known law that answers so many at once: who waits, how long at least, and that all have a turn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from testbed.requests import request

from paceline.serving.client import schedule
from paceline.serving.client.schedule import ShardResult
from paceline.serving.mock import MockReplica

Start = Callable[..., MockReplica]
Send = Callable[..., ShardResult]


def waits_s(send: Send, replica: MockReplica, count: int, **more: Any) -> list[float]:
    """From when it was due to its first token, shortest first; all are due at once."""
    shard = send(replica.port, count, due_ns=schedule.at_once(count), **more)
    assert {each.error for each in shard.results} == {None}
    return sorted((each.first_ns - each.due_ns) / 1e9 for each in shard.results if each.first_ns is not None)


def test_those_beyond_the_slots_wait_for_the_answers_before_them(replica: Start, send: Send) -> None:
    """Four tokens after 50 ms and 10 ms each take 80 ms: of six at once two begin with each 80 ms."""
    waits = waits_s(send, replica(ttft_s=0.05, itl_s=0.01, slots=2), 6, payload=request(tokens=4))
    least = [0.05, 0.05, 0.13, 0.13, 0.21, 0.21]
    assert all(wait > law - 1e-3 for wait, law in zip(waits, least, strict=True)), waits


def test_a_slot_is_free_again_when_its_answer_breaks_off(replica: Start, send: Send) -> None:
    shard = send(replica(mode="reset", slots=1).port, 4, due_ns=schedule.at_once(4))
    assert {each.error for each in shard.results} == {"reset"}


def test_a_slot_is_free_again_when_its_client_has_left(replica: Start, send: Send) -> None:
    server = replica(ttft_s=0.3, slots=1)
    shard = send(server.port, 3, due_ns=schedule.at_once(3), timeout_s=0.05)
    assert {each.error for each in shard.results} == {"timeout"}
    assert len(waits_s(send, server, 2)) == 2
