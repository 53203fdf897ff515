"""How tests wait for what other processes and threads do."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

# Generous: a busy machine is no reason to fail.
WAIT_S = 180.0


def until(condition: Callable[[], Any], what: str, limit_s: float = WAIT_S, pause_s: float = 0.05) -> Any:
    """Return the first true result of the condition."""
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        if found := condition():
            return found
        time.sleep(pause_s)
    raise TimeoutError(f"{what} did not happen within {limit_s:g} s")
