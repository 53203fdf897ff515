"""A command and everything it starts, ended when its owner ends.

Used as `python -m paceline.host.process_guard PID COMMAND`.

A rank that is killed runs no clean-up of its own, and servers leave processes of theirs behind when they are killed
alone. This process stands between: it is told by the kernel when its parent dies, and orphans of the command become
its own children, so that it finds them all.
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
    """Somebody asked for the end, or nobody is left who wants the command."""


def command(argv: Sequence[str]) -> list[str]:
    """What to start in the place of argv: the same, guarded, for as long as this process lives."""
    return [sys.executable, "-m", "paceline.host.process_guard", str(os.getpid()), *argv]


def main(argv: Sequence[str]) -> None:
    """Return when the command and all its processes have ended, however that came about."""
    for number in _ENDS:
        signal.signal(number, _end)
    end_with_parent(signal.SIGTERM)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_ADOPT_ORPHANS, 1)
    with contextlib.suppress(Ended):
        # A parent that died before the kernel was asked to tell has another number by now.
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
    """Kill what is left below this process, again and again: one that is killed may have started another before. What
    the kernel does not let go of is not waited for without end."""
    import psutil

    own = psutil.Process()
    for _ in range(ROUNDS):
        left = own.children(recursive=True)
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, GRACE_S)


def _end(number: int, frame: FrameType | None) -> None:
    raise Ended


if __name__ == "__main__":
    main(sys.argv)
