"""A process that was started here and everything below it, ended as one."""

from __future__ import annotations

import contextlib
import subprocess
from typing import Protocol

GRACE_S = 5.0


class Child(Protocol):
    """What is used of `subprocess.Popen`."""

    @property
    def pid(self) -> int: ...
    def terminate(self) -> None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def kill(self) -> None: ...


def end_all(child: Child) -> None:
    """End a child and every process below it; ones that do not listen, or are stopped, are killed."""
    import psutil

    try:
        family = psutil.Process(child.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        family = []
    child.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(GRACE_S)
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    child.kill()
    child.wait()
    psutil.wait_procs(family, GRACE_S)
