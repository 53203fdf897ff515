"""Somebody who watches a campaign and says nothing."""

from __future__ import annotations

from typing import Any


class Unseen:
    """Takes every call of `supervision.Observer`; what runs were waiting for is kept."""

    def __init__(self) -> None:
        self.waited_for: list[str] = []

    def waiting(self, spec: Any, reason: str, seconds: float) -> None:
        self.waited_for.append(reason)

    def begin(self, *_: Any) -> None: ...

    started = moved = restarting = advising = ended = begin
