"""Which request has which slot of the batch, and what each step reports."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from paceline.serving.replica.channel import Channel
from paceline.serving.replica.settings import Settings

Token = tuple[int, int, str | None]


class Decoder(Protocol):
    """What computes: see `decoding.Decoding`."""

    def read(self, rows: Sequence[int], prompts: Sequence[Sequence[int]]) -> list[int]: ...
    def step(self, reach: int) -> list[int]: ...


@dataclass(slots=True)
class BatchedRequest:
    """One request: its prompt, the most tokens of its answer, and the tokens that end it. ended: with static batching
    it keeps its slot, and nothing more is reported."""

    number: int
    prompt: list[int]
    most: int
    ends: frozenset[int]
    tokens: int = 0
    ended: bool = False

    @property
    def context(self) -> int:
        return len(self.prompt) + self.tokens


class Batching:
    """Slots assigned first come, first served (see `settings.BATCHING`)."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.waiting: deque[BatchedRequest] = deque()
        self.running: dict[int, BatchedRequest] = {}

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
        if self.settings.batching == "continuous" or not self.is_busy:
            self.running = {slot: request for slot, request in self.running.items() if not request.ended}
        elif self.settings.batching == "static":
            return []
        free = [slot for slot in range(self.settings.max_batch) if slot not in self.running]
        admitted = [(slot, self.waiting.popleft()) for slot in free[: len(self.waiting)]]
        self.running.update(admitted)
        return admitted

    def groups(self, admitted: Sequence[tuple[int, BatchedRequest]]) -> Iterator[list[tuple[int, BatchedRequest]]]:
        """Requests whose prompts are read together: in order, up to `prefill_tokens` with padding."""
        group: list[tuple[int, BatchedRequest]] = []
        for pair in admitted:
            longest = max(len(request.prompt) for _, request in [*group, pair])
            if group and longest * (len(group) + 1) > self.settings.prefill_tokens:
                yield group
                group = []
            group.append(pair)
        if group:
            yield group

    def reach(self) -> int:
        """The shortest reach that covers every context, including the token of this step."""
        longest = max(request.context for request in self.running.values() if not request.ended)
        return next(reach for reach in self.settings.reaches if reach >= longest)

    def hear(self, tokens: dict[int, int]) -> list[Token]:
        """From the token of each slot: request, token, and how it ended (None while it continues)."""
        reported: list[Token] = []
        for slot, token in tokens.items():
            request = self.running.get(slot)
            if request is None or request.ended:
                continue
            request.tokens += 1
            finish = "stop" if token in request.ends else "length" if request.tokens == request.most else None
            request.ended = finish is not None
            reported.append((request.number, token, finish))
        return reported


def serve(decoder: Decoder, channel: Channel, settings: Settings) -> None:
    """Until the front closes the channel. The tokens of one pass are reported before the next pass begins."""
    batching = Batching(settings)
    while True:
        for message in channel.take(wait=batching.is_idle):
            _take(batching, message)
        for group in batching.groups(batching.admit()):
            first = decoder.read([slot for slot, _ in group], [request.prompt for _, request in group])
            _report(channel, batching.hear({slot: token for (slot, _), token in zip(group, first, strict=True)}))
        if batching.is_busy:
            _report(channel, batching.hear(dict(enumerate(decoder.step(batching.reach())))))


def _take(batching: Batching, message: dict[str, Any]) -> None:
    if "drop" in message:
        batching.drop(message["drop"])
        return
    ends = frozenset(message["ends"])
    batching.arrive(BatchedRequest(number=message["ask"], prompt=message["prompt"], most=message["most"], ends=ends))


def _report(channel: Channel, tokens: list[Token]) -> None:
    if tokens:
        channel.put({"said": tokens})
