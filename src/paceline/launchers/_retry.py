"""One retry before a whole campaign is refused: an engine that does not answer may be back within seconds."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from paceline.errors import LaunchError

# Long enough for a server to restart, or for a switch to relearn its ports.
RETRY_S = 5.0

Answer = TypeVar("Answer")


class NoAnswerError(LaunchError):
    """Nothing answered, which may pass."""


def retry_once(ask: Callable[[], Answer]) -> Answer:
    """Call again after a pause if nothing answered. A refusal in words is final."""
    try:
        return ask()
    except NoAnswerError:
        time.sleep(RETRY_S)
    return ask()
