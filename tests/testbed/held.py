"""The engine `replicas`, but the replica of rank 1 stops answering after `dies_after` requests instead of dying.

Its unanswered requests stay open until its node is gone, so no load can end earlier, however slow the machine is.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from paceline.contract import Endpoint, Seat
from paceline.experiment.spec import RunSpec
from paceline.serving.mock import MockReplica
from testbed import replicas
from testbed.replicas import check

__all__ = ["check", "open"]


class Held(replicas.Mortal):
    def _begin(self, client: Any, asked: dict[str, Any], chat: bool, now: int) -> None:
        self._left -= 1
        if self._left >= 0:
            MockReplica._begin(self, client, asked, chat, now)


def open(spec: RunSpec, seat: Seat) -> AbstractContextManager[Sequence[Endpoint]]:
    # Of this rank's own process, and of those that it starts.
    replicas.Mortal = Held  # type: ignore[misc]
    return replicas.open(spec, seat)
