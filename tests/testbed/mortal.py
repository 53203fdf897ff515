"""Ranks that are killed at a step: MORTAL_AT is `RANK:STEP`; MORTAL_ONCE a file that tells that it has happened. Without
it, it happens at every attempt."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from paceline import worker


def arm(rank: int) -> None:
    """Let this process die by signal 9 in the forward pass of its step."""
    whom, _, step = os.environ.get("MORTAL_AT", "").partition(":")
    mark = os.environ.get("MORTAL_ONCE")
    if not step or int(whom) != rank or (mark and Path(mark).exists()):
        return

    class Mortal(worker.FolderRecorder):
        def progress(self, now: int, phase: str) -> None:
            super().progress(now, phase)
            if now == int(step) and phase == "forward":
                if mark:
                    Path(mark).touch()
                os.kill(os.getpid(), signal.SIGKILL)

    worker.FolderRecorder = Mortal  # type: ignore[misc]
