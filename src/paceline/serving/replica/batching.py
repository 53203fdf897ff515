"""Which request has which slot of the batch, what each step reports, and the channel to the front."""

from __future__ import annotations

import json
import select
import socket
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from paceline.serving.replica.settings import Settings

READ_BYTES = 1 << 20
# After so many steps the contexts of free slots are forgotten: our kernels and FlashAttention's read them, too.
STEPS_PER_CLEARING = 64
# The number of its request, the token, and how the answer ended (None while it continues).
Token = tuple[int, int, str | None]


class ChannelClosed(Exception):
    """The front is gone: nobody waits for answers."""


class Channel:
    """The model's end of a socket pair with the front. Messages are JSON lines."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._received = bytearray()

    def put(self, message: dict[str, Any]) -> None:
        try:
            self._socket.sendall(json.dumps(message, separators=(",", ":")).encode() + b"\n")
        except OSError:
            raise ChannelClosed from None

    def take(self, wait: bool) -> list[dict[str, Any]]:
        """All complete messages that have arrived. wait: until there is at least one."""
        messages: list[dict[str, Any]] = []
        while (wait and not messages) or select.select([self._socket], [], [], 0)[0]:
            piece = self._socket.recv(READ_BYTES)
            if not piece:
                raise ChannelClosed
            *lines, rest = bytes(self._received + piece).split(b"\n")
            self._received = bytearray(rest)
            messages += [json.loads(line) for line in lines]
        return messages


class Decoder(Protocol):
    """Computes tokens: see `decoding.Decoding`."""

    def read(self, rows: Sequence[int], prompts: Sequence[Sequence[int]], start: int = 0) -> list[int]: ...
    def step(self, used: int, reach: int) -> list[int]: ...
    def clear(self, rows: Sequence[int]) -> None: ...


@dataclass(slots=True)
class BatchedRequest:
    """One request: its prompt, the most tokens of its answer, and the tokens that end it. read: tokens of the prompt
    that have been read. context: the tokens that it has cached once the prompt is read. ended: with static batching it
    keeps its slot, and nothing more is reported."""

    number: int
    prompt: list[int]
    most: int
    ends: frozenset[int]
    tokens: int = 0
    read: int = 0
    ended: bool = False
    context: int = field(init=False)

    def __post_init__(self) -> None:
        self.context = len(self.prompt)

    @property
    def is_read(self) -> bool:
        return self.read == len(self.prompt)


@dataclass(frozen=True, slots=True)
class Reading:
    """Prompts, or pieces of them, that are read together into their slots. start: where in the prompts they begin."""

    slots: list[int]
    pieces: list[list[int]]
    start: int


class Batching:
    """Slots assigned first come, first served (see `settings.BATCHING`)."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.waiting: deque[BatchedRequest] = deque()
        self.running: dict[int, BatchedRequest] = {}
        self.steps = 0

    @property
    def is_busy(self) -> bool:
        return any(not request.ended for request in self.running.values())

    @property
    def is_idle(self) -> bool:
        return not self.waiting and not self.is_busy

    def arrive(self, request: BatchedRequest) -> None:
        self.waiting.append(request)

    def drop(self, number: int) -> None:
        """Its client is gone."""
        self.waiting = deque(request for request in self.waiting if request.number != number)
        for request in self.running.values():
            request.ended |= request.number == number

    def admit(self) -> list[tuple[int, BatchedRequest]]:
        """The requests that get a slot now."""
        # Of most steps: nobody waits, and slots are looked at when somebody does.
        if not self.waiting:
            return []
        if self.settings.batching == "continuous" or not self.is_busy:
            self.running = {slot: request for slot, request in self.running.items() if not request.ended}
        elif self.settings.batching == "static":
            return []
        free = [slot for slot in range(self.settings.max_batch) if slot not in self.running]
        admitted = [(slot, self.waiting.popleft()) for slot in free[: len(self.waiting)]]
        self.running.update(admitted)
        return admitted

    def readings(self) -> Iterator[Reading]:
        """What is read before the next step: everything that is unread, or at most `prefill_chunk` tokens beginning
        with the oldest request, so that none waits for ever."""
        unread = [(slot, each) for slot, each in self.running.items() if not each.is_read and not each.ended]
        most = self.settings.prefill_chunk
        if most and unread and len(unread[0][1].prompt) > most:
            slot, request = unread[0]
            start = request.read
            piece = request.prompt[start : start + most]
            request.read += len(piece)
            yield Reading([slot], [piece], start)
            return
        oldest = unread[:1]
        for group in self.groups([pair for pair in unread if not most or len(pair[1].prompt) <= most]):
            if not most or oldest[0] in group:
                for _, request in group:
                    request.read = len(request.prompt)
                yield Reading([slot for slot, _ in group], [request.prompt for _, request in group], 0)

    def groups(self, unread: Sequence[tuple[int, BatchedRequest]]) -> Iterator[list[tuple[int, BatchedRequest]]]:
        """Requests whose prompts are read together, up to `prefill_tokens` and `prefill_chunk` with padding: short
        prompts first, so that little padding is read."""
        most = min(self.settings.prefill_tokens, self.settings.prefill_chunk or self.settings.prefill_tokens)
        group: list[tuple[int, BatchedRequest]] = []
        for pair in sorted(unread, key=lambda pair: len(pair[1].prompt)):
            if group and len(pair[1].prompt) * (len(group) + 1) > most:
                yield group
                group = []
            group.append(pair)
        if group:
            yield group

    def next_step(self) -> tuple[int, int] | None:
        """How many slots the next step must compute, beginning with slot 0, and the shortest reach that covers every
        context, including the token of this step. None if no answer is in progress."""
        contexts = {slot: each.context for slot, each in self.running.items() if each.is_read and not each.ended}
        if not contexts:
            return None
        longest = max(contexts.values())
        return max(contexts) + 1, next(reach for reach in self.settings.reaches if reach >= longest)

    def to_clear(self) -> list[int]:
        """Slots without a request whose contexts should be forgotten before the next step; called before each. A slot
        whose prompt is only read in part has a request."""
        self.steps += 1
        if self.steps % STEPS_PER_CLEARING:
            return []
        used = {slot for slot, request in self.running.items() if not request.ended}
        return [slot for slot in range(self.settings.max_batch) if slot not in used]

    def record(self, tokens: dict[int, int]) -> list[Token]:
        """Record the token of each slot, and return those of requests that had not ended before."""
        reported: list[Token] = []
        for slot, token in tokens.items():
            request = self.running.get(slot)
            if request is None or request.ended or not request.is_read:
                continue
            request.tokens += 1
            request.context += 1
            finish = "stop" if token in request.ends else "length" if request.tokens == request.most else None
            request.ended = finish is not None
            reported.append((request.number, token, finish))
        return reported


def tokens_of_pass(decoder: Decoder, batching: Batching) -> Iterator[list[Token]]:
    """The tokens of what is read before the next step, and then those of the step."""
    batching.admit()
    for reading in batching.readings():
        first = decoder.read(reading.slots, reading.pieces, reading.start)
        yield batching.record(dict(zip(reading.slots, first, strict=True)))
    if step := batching.next_step():
        if slots := batching.to_clear():
            decoder.clear(slots)
        yield batching.record(dict(enumerate(decoder.step(*step))))


def serve(decoder: Decoder, channel: Channel, settings: Settings) -> None:
    """Serve until the front closes the channel. Tokens are reported as soon as they exist."""
    batching = Batching(settings)
    while True:
        for message in channel.take(wait=batching.is_idle):
            if "drop" in message:
                batching.drop(message["drop"])
            else:
                number, prompt, most, ends = (message[key] for key in ("ask", "prompt", "most", "ends"))
                batching.arrive(BatchedRequest(number, prompt, most, frozenset(ends)))
        for tokens in tokens_of_pass(decoder, batching):
            if tokens:
                channel.put({"tokens": tokens})
