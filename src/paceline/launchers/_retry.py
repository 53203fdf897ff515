"""A second question before a whole campaign is refused: what keeps an engine from answering may pass within seconds."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from paceline.errors import LaunchError

# A server that is started anew, or a switch that learns its ports again, is back by then.
AGAIN_S = 5.0

Answer = TypeVar("Answer")


class SilenceError(LaunchError):
    """Nobody answered, which may be so for a moment only."""


def asked_again(ask: Callable[[], Answer]) -> Answer:
    """What is answered, at the second try where nobody did at the first. A refusal in words is final."""
    try:
        return ask()
    except SilenceError:
        time.sleep(AGAIN_S)
    return ask()
