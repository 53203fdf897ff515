"""A replica of several processes: those that follow make every call of the leader, with the same arguments."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import pytest
from torch import Tensor

pytestmark = pytest.mark.skipif(find_spec("transformers") is None, reason="pip install 'paceline[finetune]'")


class Calls:
    def __init__(self) -> None:
        self.made: list[tuple[Any, ...]] = []

    def read(self, rows: Sequence[int], prompts: Sequence[Sequence[int]], start: int = 0) -> list[int]:
        self.made.append(("read", list(rows), [list(prompt) for prompt in prompts], start))
        return [1] * len(rows)

    def step(self, used: int, reach: int) -> list[int]:
        self.made.append(("step", used, reach))
        return [1]

    advance = step

    def clear(self, rows: Sequence[int]) -> None:
        self.made.append(("clear", list(rows)))


class Ended(Exception):
    pass


def test_a_follower_makes_every_call_of_the_leader(monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline.serving.replica import model

    sent: deque[Tensor] = deque()

    def broadcast(tensor: Tensor, *, src: int, group: str) -> None:
        if group == "leader":
            sent.append(tensor.clone())
        elif sent:
            assert tensor.shape == sent[0].shape
            tensor.copy_(sent.popleft())
        else:
            raise Ended

    monkeypatch.setattr(model.dist, "broadcast", broadcast)
    ours, theirs = Calls(), Calls()
    leader = model.Leader(ours, "leader")  # type: ignore[arg-type]
    leader.read([2, 0], [[5, 6, 7], [8]])
    leader.step(3, 256)
    leader.clear([1, 3, 4])
    leader.read([1], [[9, 9]], 1024)
    leader.step(2, 512)
    with pytest.raises(Ended):
        model.follow(theirs, "follower")  # type: ignore[arg-type]
    assert ours.made == theirs.made
    assert ours.made[1:] == [
        ("step", 3, 256),
        ("clear", [1, 3, 4]),
        ("read", [1], [[9, 9]], 1024),
        ("step", 2, 512),
    ]
