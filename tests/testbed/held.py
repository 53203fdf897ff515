"""Replicas as an engine (see `replicas`), but that of rank 1 lives on: after `dies_after` requests it answers none.

What it holds is not answered before its node is gone, so that no load ends before that, on however slow a machine.
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
