"""Which request has which place of the batch, and what is told of every step."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from paceline.serving.replica.line import Line
from paceline.serving.replica.settings import Settings

Said = tuple[int, int, str | None]


class Decoder(Protocol):
    """What computes: see `decoding.Decoding`."""

    def read(self, rows: Sequence[int], prompts: Sequence[Sequence[int]]) -> list[int]: ...
    def step(self, reach: int) -> list[int]: ...


@dataclass(slots=True)
class Guest:
    """One request: its prompt, the tokens it may have at most, and those that end it. ended: it keeps its place under
    static batching, and nothing more is told of it."""

    number: int
    prompt: list[int]
    most: int
    ends: frozenset[int]
    said: int = 0
    ended: bool = False

    @property
    def context(self) -> int:
        return len(self.prompt) + self.said


class Batching:
    """Places given out by one law (see `settings.BATCHING`), first come, first served."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.waiting: deque[Guest] = deque()
        self.seated: dict[int, Guest] = {}

    @property
    def is_busy(self) -> bool:
        return any(not guest.ended for guest in self.seated.values())

    @property
    def is_idle(self) -> bool:
        return not self.waiting and not self.is_busy

    def arrive(self, guest: Guest) -> None:
        self.waiting.append(guest)

    def drop(self, number: int) -> None:
        """Nobody listens to this one any more."""
        self.waiting = deque(guest for guest in self.waiting if guest.number != number)
        for guest in self.seated.values():
            guest.ended |= guest.number == number

    def admit(self) -> list[tuple[int, Guest]]:
        """Those that get a place now."""
        if self.settings.batching == "continuous" or not self.is_busy:
            self.seated = {place: guest for place, guest in self.seated.items() if not guest.ended}
        elif self.settings.batching == "static":
            return []
        free = [place for place in range(self.settings.max_batch) if place not in self.seated]
        come = [(place, self.waiting.popleft()) for place in free[: len(self.waiting)]]
        self.seated.update(come)
        return come

    def groups(self, come: Sequence[tuple[int, Guest]]) -> Iterator[list[tuple[int, Guest]]]:
        """Those whose prompts are read together: in the order they came, up to `prefill_tokens` with padding."""
        group: list[tuple[int, Guest]] = []
        for pair in come:
            longest = max(len(guest.prompt) for _, guest in [*group, pair])
            if group and longest * (len(group) + 1) > self.settings.prefill_tokens:
                yield group
                group = []
            group.append(pair)
        if group:
            yield group

    def reach(self) -> int:
        """The shortest one that holds every context, the token of this step included."""
        longest = max(guest.context for guest in self.seated.values() if not guest.ended)
        return next(reach for reach in self.settings.reaches if reach >= longest)

    def hear(self, tokens: dict[int, int]) -> list[Said]:
        """Token of each place -> what is told: request, token, and how it ended, None while it goes on."""
        told: list[Said] = []
        for place, token in tokens.items():
            guest = self.seated.get(place)
            if guest is None or guest.ended:
                continue
            guest.said += 1
            finish = "stop" if token in guest.ends else "length" if guest.said == guest.most else None
            guest.ended = finish is not None
            told.append((guest.number, token, finish))
        return told


def serve(decoder: Decoder, line: Line, settings: Settings) -> None:
    """Until the front hangs up. What a pass over the model has said is told before the next pass begins."""
    batching = Batching(settings)
    while True:
        for message in line.take(wait=batching.is_idle):
            _take(batching, message)
        for group in batching.groups(batching.admit()):
            first = decoder.read([place for place, _ in group], [guest.prompt for _, guest in group])
            _tell(line, batching.hear({place: token for (place, _), token in zip(group, first, strict=True)}))
        if batching.is_busy:
            _tell(line, batching.hear(dict(enumerate(decoder.step(batching.reach())))))


def _take(batching: Batching, message: dict[str, Any]) -> None:
    if "drop" in message:
        batching.drop(message["drop"])
        return
    ends = frozenset(message["ends"])
    batching.arrive(Guest(number=message["ask"], prompt=message["prompt"], most=message["most"], ends=ends))


def _tell(line: Line, said: list[Said]) -> None:
    if said:
        line.put({"said": said})
