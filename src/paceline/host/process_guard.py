"""Runs a command, and ends it with all its descendants when the owner ends.

Used as `python -m paceline.host.process_guard PID COMMAND`.

A killed rank cannot clean up, and a server that is killed alone leaves its child processes behind. The kernel signals
this process when its parent dies, and makes it the parent of the command's orphans, so that it can end them all.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from types import FrameType

from paceline.host.processes import GRACE_S, end_all, end_with_parent

_ADOPT_ORPHANS = 36  # PR_SET_CHILD_SUBREAPER of prctl(2)
ROUNDS = 3
_ENDS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Ended(Exception):
    """A signal asked this process to end, or its owner died."""


def command(argv: Sequence[str]) -> list[str]:
    """The command line that runs argv guarded by the life of this process."""
    return [sys.executable, "-m", "paceline.host.process_guard", str(os.getpid()), *argv]


def main(argv: Sequence[str]) -> None:
    """Return when the command and all its descendants have ended."""

    def end(number: int, frame: FrameType | None) -> None:
        raise Ended

    for number in _ENDS:
        signal.signal(number, end)
    end_with_parent(signal.SIGTERM)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_ADOPT_ORPHANS, 1)
    with contextlib.suppress(Ended):
        # If the parent died before the kernel was asked to signal that, the parent is another process now.
        if os.getppid() == int(argv[1]):
            guard(argv[2:])


def guard(argv: Sequence[str]) -> None:
    child = subprocess.Popen(argv, stdin=subprocess.DEVNULL, preexec_fn=end_with_parent)
    try:
        child.wait()
    finally:
        for number in _ENDS:
            signal.signal(number, signal.SIG_IGN)
        end_all(child)
        end_orphans()


def end_orphans() -> None:
    """Kill all descendants, several times: a process may have started another before it was killed. Processes stuck in
    the kernel are not waited for forever."""
    import psutil

    own = psutil.Process()
    for _ in range(ROUNDS):
        left = own.children(recursive=True)
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, GRACE_S)


if __name__ == "__main__":
    main(sys.argv)
