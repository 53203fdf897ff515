"""Ranks that are killed once, at the step that MORTAL_AT names (`RANK:STEP`). As a program, it is the worker."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from paceline.results import store
from paceline.workloads import worker


def arm(rank: int, run_dir: Path) -> None:
    """Kill this process with signal 9 in the forward pass of that step, in the first attempt of its run."""
    whom, _, step = os.environ.get("MORTAL_AT", "").partition(":")
    mark = run_dir / "died"
    if not step or int(whom) != rank or mark.exists() or not store.read_spec(run_dir).checkpoint_every:
        return

    class Mortal(worker.FolderRecorder):
        def progress(self, now: int, phase: str) -> None:
            super().progress(now, phase)
            if now == int(step) and phase == "forward":
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)

    worker.FolderRecorder = Mortal  # type: ignore[misc]


if __name__ == "__main__":
    arm(int(os.environ["RANK"]), Path(sys.argv[1]))
    sys.exit(worker.main(sys.argv))
