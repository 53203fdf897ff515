"""Places of a batch: who gets one when, under both laws, and what is told of every step."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from paceline.serving.replica.batching import (
    STEPS_PER_CLEARING,
    BatchedRequest,
    Batching,
    Channel,
    ChannelClosed,
    serve,
)
from paceline.serving.replica.settings import Settings


def settings(**more: Any) -> Settings:
    return Settings(**{"engine": "transformers", "model": "tiny-llama", "max_batch": 2, "max_length": 64, **more})


def guest(number: int, most: int = 2, prompt: int = 3, ends: frozenset[int] = frozenset()) -> BatchedRequest:
    return BatchedRequest(number=number, prompt=[1] * prompt, most=most, ends=ends)


def test_continuous_gives_a_free_place_to_the_next() -> None:
    batching = Batching(settings(batching="continuous"))
    for number, most in ((1, 1), (2, 3), (3, 1)):
        batching.arrive(guest(number, most))
    assert [each.number for _, each in batching.admit()] == [1, 2]
    assert batching.record({0: 7, 1: 8}) == [(1, 7, "length"), (2, 8, None)]
    assert [(place, each.number) for place, each in batching.admit()] == [(0, 3)]


def test_static_keeps_every_place_until_the_last_answer_has_ended() -> None:
    batching = Batching(settings(batching="static"))
    for number, most in ((1, 1), (2, 2), (3, 1)):
        batching.arrive(guest(number, most))
    batching.admit()
    batching.record({0: 7, 1: 8})
    assert batching.admit() == []
    # The place of the first goes on being computed, and nothing of it is told.
    assert batching.record({0: 9, 1: 9}) == [(2, 9, "length")]
    assert [each.number for _, each in batching.admit()] == [3]


def test_an_end_token_ends_and_a_place_nobody_has_says_nothing() -> None:
    batching = Batching(settings())
    batching.arrive(guest(1, 9, ends=frozenset({5})))
    batching.admit()
    assert batching.record({0: 4, 1: 5}) == [(1, 4, None)]
    assert batching.record({0: 5, 1: 5}) == [(1, 5, "stop")]
    assert batching.is_idle


@pytest.mark.parametrize("law", ["static", "continuous"])
def test_a_dropped_request_is_not_reported_again(law: str) -> None:
    batching = Batching(settings(batching=law))
    for number in (1, 2, 3):
        batching.arrive(guest(number))
    batching.admit()
    batching.drop(1)
    batching.drop(3)
    assert batching.record({0: 7, 1: 8}) == [(2, 8, None)]
    assert not batching.waiting


def test_contexts_of_free_slots_are_forgotten_now_and_then() -> None:
    batching = Batching(settings(max_batch=4))
    for number, most in ((1, 9), (2, 1), (3, 9)):
        batching.arrive(guest(number, most))
    batching.admit()
    batching.record({0: 7, 1: 7, 2: 7})
    cleared = [batching.to_clear() for _ in range(2 * STEPS_PER_CLEARING)]
    assert [number for number, slots in enumerate(cleared, 1) if slots] == [STEPS_PER_CLEARING, 2 * STEPS_PER_CLEARING]
    assert cleared[STEPS_PER_CLEARING - 1] == [1, 3], "the one that has ended, and the one that nobody had"


def test_a_step_reaches_as_far_as_the_longest_context() -> None:
    batching = Batching(settings(max_length=1000))
    assert batching.settings.reaches == (256, 512, 1000)
    batching.arrive(guest(1, 9, prompt=255))
    batching.admit()
    batching.record({0: 7})
    assert batching.reach() == 256
    batching.record({0: 7})
    assert batching.reach() == 512


def test_prompts_are_read_together_up_to_the_tokens_allowed_padding_included() -> None:
    batching = Batching(settings(max_batch=4, prefill_tokens=10))
    come = [(place, guest(place, prompt=size)) for place, size in enumerate((3, 5, 3, 20))]
    assert [[place for place, _ in group] for group in batching.groups(come)] == [[0, 2], [1], [3]]


def test_prompts_of_similar_lengths_are_read_together_and_none_is_passed_over() -> None:
    batching = Batching(settings(max_batch=4, prefill_tokens=400))
    for number, size in enumerate((200, 10, 200, 12, 5)):
        batching.arrive(guest(number, prompt=size))
    admitted = batching.admit()
    assert [request.number for _, request in admitted] == [0, 1, 2, 3], "the fifth is short, but it came last"
    groups = [[request.number for _, request in group] for group in batching.groups(admitted)]
    assert groups == [[1, 3], [0, 2]]


class Counting:
    """A decoder that says how often each place was computed since its prompt was read."""

    def __init__(self) -> None:
        self.counts = [0, 0]

    def read(self, rows: Sequence[int], prompts: Sequence[Sequence[int]]) -> list[int]:
        for row, prompt in zip(rows, prompts, strict=True):
            self.counts[row] = prompt[0]
        return [self.counts[row] for row in rows]

    def step(self, reach: int) -> list[int]:
        self.counts = [count + 1 for count in self.counts]
        return self.counts

    def clear(self, rows: Sequence[int]) -> None:
        self.counts = [0 if row in rows else count for row, count in enumerate(self.counts)]


def test_serving_clears_free_slots_only() -> None:
    ours, theirs = socket.socketpair()
    counting = Counting()

    def model() -> None:
        with contextlib.suppress(ChannelClosed):
            serve(counting, Channel(theirs), settings(max_length=400))

    thread = threading.Thread(target=model)
    thread.start()
    line, said = Channel(ours), list[int]()
    line.put({"ask": 1, "prompt": [1000], "most": 3 * STEPS_PER_CLEARING, "ends": []})
    while len(said) < 3 * STEPS_PER_CLEARING:
        said += [token for message in line.take(wait=True) for _, token, _ in message["tokens"]]
    ours.close()
    thread.join(60)
    theirs.close()
    assert said == [*range(1000, 1000 + 3 * STEPS_PER_CLEARING)], "what a request has is not touched"
    assert counting.counts[1] < 2 * STEPS_PER_CLEARING, "a free slot counts from 0 again"


def test_serving_sends_all_tokens_in_order_and_ends_with_the_front() -> None:
    ours, theirs = socket.socketpair()
    ended: list[type[BaseException]] = []

    def model() -> None:
        try:
            serve(Counting(), Channel(theirs), settings(batching="continuous"))
        except ChannelClosed as error:
            ended.append(type(error))

    thread = threading.Thread(target=model)
    thread.start()
    line = Channel(ours)
    for number in (1, 2, 3):
        line.put({"ask": number, "prompt": [100 * number], "most": 3, "ends": []})
    said: dict[int, list[int]] = {1: [], 2: [], 3: []}
    finishes: list[str] = []
    while len(finishes) < 3:
        for message in line.take(wait=True):
            for number, token, finish in message["tokens"]:
                said[number].append(token)
                finishes += [finish] if finish else []
    ours.close()
    thread.join(60)
    theirs.close()
    assert said == {1: [100, 101, 102], 2: [200, 201, 202], 3: [300, 301, 302]}
    assert finishes == ["length"] * 3
    assert ended == [ChannelClosed]
