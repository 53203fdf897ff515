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


def admitted(batching: Batching) -> list[int]:
    """The numbers of the requests that get a slot; their prompts are read at once."""
    numbers = [request.number for _, request in batching.admit()]
    list(batching.readings())
    return numbers


def test_continuous_gives_a_free_place_to_the_next() -> None:
    batching = Batching(settings(batching="continuous"))
    for number, most in ((1, 1), (2, 3), (3, 1)):
        batching.arrive(guest(number, most))
    assert admitted(batching) == [1, 2]
    assert batching.record({0: 7, 1: 8}) == [(1, 7, "length"), (2, 8, None)]
    assert [(place, each.number) for place, each in batching.admit()] == [(0, 3)]


def test_static_keeps_every_place_until_the_last_answer_has_ended() -> None:
    batching = Batching(settings(batching="static"))
    for number, most in ((1, 1), (2, 2), (3, 1)):
        batching.arrive(guest(number, most))
    admitted(batching)
    batching.record({0: 7, 1: 8})
    assert batching.admit() == []
    # The place of the first goes on being computed, and nothing of it is told.
    assert batching.record({0: 9, 1: 9}) == [(2, 9, "length")]
    assert [each.number for _, each in batching.admit()] == [3]


def test_an_end_token_ends_and_a_place_nobody_has_says_nothing() -> None:
    batching = Batching(settings())
    batching.arrive(guest(1, 9, ends=frozenset({5})))
    admitted(batching)
    assert batching.record({0: 4, 1: 5}) == [(1, 4, None)]
    assert batching.record({0: 5, 1: 5}) == [(1, 5, "stop")]
    assert batching.is_idle


@pytest.mark.parametrize("law", ["static", "continuous"])
def test_a_dropped_request_is_not_reported_again(law: str) -> None:
    batching = Batching(settings(batching=law))
    for number in (1, 2, 3):
        batching.arrive(guest(number))
    admitted(batching)
    batching.drop(1)
    batching.drop(3)
    assert batching.record({0: 7, 1: 8}) == [(2, 8, None)]
    assert not batching.waiting


def test_contexts_of_free_slots_are_forgotten_now_and_then() -> None:
    batching = Batching(settings(max_batch=4))
    for number, most in ((1, 9), (2, 1), (3, 9)):
        batching.arrive(guest(number, most))
    admitted(batching)
    batching.record({0: 7, 1: 7, 2: 7})
    cleared = [batching.to_clear() for _ in range(2 * STEPS_PER_CLEARING)]
    assert [number for number, slots in enumerate(cleared, 1) if slots] == [STEPS_PER_CLEARING, 2 * STEPS_PER_CLEARING]
    assert cleared[STEPS_PER_CLEARING - 1] == [1, 3], "the one that has ended, and the one that nobody had"


def test_a_step_reaches_as_far_as_the_longest_context() -> None:
    batching = Batching(settings(max_length=1000))
    assert batching.settings.reaches == (256, 512, 1000)
    assert batching.next_step() is None
    batching.arrive(guest(1, 9, prompt=255))
    admitted(batching)
    batching.record({0: 7})
    assert batching.next_step() == (1, 256)
    batching.record({0: 7})
    assert batching.next_step() == (1, 512)


def test_a_step_computes_the_slots_up_to_the_highest_one_in_use_and_the_lowest_is_given_first() -> None:
    batching = Batching(settings(max_batch=8))
    for number, most in enumerate((1, 9, 1, 9, 2)):
        batching.arrive(guest(number, most))
    admitted(batching)
    assert batching.next_step() == (5, 64)
    batching.record(dict.fromkeys(range(5), 7))
    batching.record(dict.fromkeys(range(5), 7))
    assert batching.next_step() == (4, 64), "slots 0, 2 and 4 are free"
    batching.arrive(guest(5))
    assert [slot for slot, _ in batching.admit()] == [0]


def pieces(batching: Batching) -> list[tuple[list[int], list[int], int]]:
    """What is read before the next step: slots, how many tokens for each, and where they begin."""
    return [(each.slots, [len(piece) for piece in each.pieces], each.start) for each in batching.readings()]


def test_a_long_prompt_is_read_in_pieces_with_steps_between_them() -> None:
    batching = Batching(settings(max_batch=4, max_length=64, prefill_chunk=8))
    batching.arrive(guest(1, 9, prompt=3))
    batching.admit()
    assert pieces(batching) == [([0], [3], 0)]
    batching.arrive(BatchedRequest(2, list(range(20)), 9, frozenset()))
    batching.arrive(guest(3, 9, prompt=4))
    batching.arrive(guest(4, 9, prompt=4))
    batching.admit()
    found = []
    for _ in range(3):
        found += [(each.slots, each.pieces, each.start) for each in batching.readings()]
        if len(found) < 3:
            assert batching.record({0: 7, 1: 7, 2: 7, 3: 7}) == [(1, 7, None)], "the others are not read yet"
            assert batching.next_step() == (1, 64)
    prompt = list(range(20))
    assert found == [([1], [prompt[:8]], 0), ([1], [prompt[8:16]], 8), ([1], [prompt[16:]], 16)]
    assert batching.next_step() == (2, 64)
    assert pieces(batching) == [([2, 3], [4, 4], 0)], "short ones wait for the oldest, and are then read together"
    assert pieces(batching) == []
    assert [number for number, *_ in batching.record({0: 7, 1: 7, 2: 7, 3: 7})] == [1, 2, 3, 4]


def test_whole_prompts_are_read_together_up_to_the_chunk_the_oldest_among_them() -> None:
    batching = Batching(settings(max_batch=4, prefill_chunk=10))
    for number, size in enumerate((5, 2, 9, 2)):
        batching.arrive(guest(number, prompt=size))
    batching.admit()
    assert [pieces(batching) for _ in range(4)] == [[([0], [5], 0)], [([1, 3], [2, 2], 0)], [([2], [9], 0)], []]
    # Without a limit all are read before the next step, the shortest first.
    whole = Batching(settings(max_batch=4, prefill_tokens=10))
    for number, size in enumerate((5, 2, 9, 2)):
        whole.arrive(guest(number, prompt=size))
    whole.admit()
    assert pieces(whole) == [([1, 3], [2, 2], 0), ([0], [5], 0), ([2], [9], 0)]


def test_a_slot_whose_prompt_is_read_in_part_is_not_cleared_and_a_dropped_one_is_not_read_on() -> None:
    batching = Batching(settings(prefill_chunk=8))
    batching.arrive(guest(1, prompt=20))
    batching.admit()
    assert pieces(batching) == [([0], [8], 0)]
    assert batching.is_busy
    cleared = [batching.to_clear() for _ in range(STEPS_PER_CLEARING)]
    assert cleared[-1] == [1]
    batching.drop(1)
    assert pieces(batching) == []
    assert batching.is_idle
    batching.arrive(guest(2, prompt=9))
    assert [slot for slot, _ in batching.admit()] == [0]
    assert pieces(batching) == [([0], [8], 0)], "from the beginning"


def test_prompts_are_read_together_up_to_the_tokens_allowed_padding_included() -> None:
    batching = Batching(settings(max_batch=4, prefill_tokens=10))
    come = [(place, guest(place, prompt=size)) for place, size in enumerate((3, 5, 3, 20))]
    assert [[place for place, _ in group] for group in batching.groups(come)] == [[0, 2], [1], [3]]


def test_prompts_of_similar_lengths_are_read_together_and_none_is_passed_over() -> None:
    batching = Batching(settings(max_batch=4, prefill_tokens=400))
    for number, size in enumerate((200, 10, 200, 12, 5)):
        batching.arrive(guest(number, prompt=size))
    got = batching.admit()
    assert [request.number for _, request in got] == [0, 1, 2, 3], "the fifth is short, but it came last"
    groups = [[request.number for _, request in group] for group in batching.groups(got)]
    assert groups == [[1, 3], [0, 2]]


class Counting:
    """A decoder that says how often each place was computed since its prompt was read."""

    def __init__(self) -> None:
        self.counts = [0, 0]

    def read(self, rows: Sequence[int], prompts: Sequence[Sequence[int]], start: int = 0) -> list[int]:
        for row, prompt in zip(rows, prompts, strict=True):
            self.counts[row] = prompt[0]
        return [self.counts[row] for row in rows]

    def step(self, used: int, reach: int) -> list[int]:
        self.counts = [count + (slot < used) for slot, count in enumerate(self.counts)]
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
