"""Processes: whether one runs, what it prints, how it ended, and ending it together with its parent or children; and
the garbage collection of this one."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from concurrent.futures import ProcessPoolExecutor

_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)
# How often a command that prints nothing is looked at.
LOOK_S = 0.05


def end_with_parent(how: signal.Signals = signal.SIGKILL) -> None:
    """Ask the kernel to send this process a signal when its parent dies, however it dies (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, how)


def forked_pool(size: int, prepare: Callable[..., None] | None = None, *arguments: object) -> ProcessPoolExecutor:
    """Processes that have what this one has in memory, for work that is CPU-bound. They call prepare first, and end
    with this process, which handles Ctrl-C."""
    # Not at the top: few commands need it, and importing it takes longer than some of them.
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor

    context = multiprocessing.get_context("fork")
    return ProcessPoolExecutor(size, context, initializer=_begin_forked, initargs=(prepare, arguments))


def _begin_forked(prepare: Callable[..., None] | None, arguments: tuple[object, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent()
    # What is made here has no cycles of objects.
    gc.disable()
    if prepare is not None:
        prepare(*arguments)


def signal_name(number: int) -> str:
    """`signal 15 (SIGTERM)`, or the number alone for signals without a name."""
    try:
        return f"signal {number} ({signal.Signals(number).name})"
    except ValueError:
        return f"signal {number}"


def how_it_ended(who: str, code: int, log: Path) -> str:
    """Why a process that left no message ended; a negative exit code is the signal that ended it."""
    if code == -signal.SIGKILL:
        return f"{who} was killed by signal 9 (by hand, or because the host ran out of memory)"
    if code < 0:
        return f"{who} was ended by {signal_name(-code)}"
    return f"{who} ended with exit code {code} and left no outcome; see {log}"


def is_running(pid: int) -> bool:
    """Whether this host has a process with that pid, whoever owns it."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def printed_by(
    command: Sequence[str], environment: Mapping[str, str], limit_s: float, most_bytes: int
) -> tuple[int, bytes] | None:
    """The exit code of a command and what it prints; None if it cannot be started, takes longer or prints more.

    It is read while it runs, and not after its end: what it started may keep its output open for ever. Everything that
    it started is killed at the end.
    """
    deadline, content = time.monotonic() + limit_s, b""
    try:
        child = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    except OSError:
        return None
    assert child.stdout is not None
    try:
        while (left_s := deadline - time.monotonic()) > 0 and len(content) <= most_bytes:
            has_ended = child.poll() is not None
            if select.select([child.stdout], [], [], 0 if has_ended else min(left_s, LOOK_S))[0]:
                piece = os.read(child.stdout.fileno(), 1 << 16)
                content += piece
                if piece:
                    continue
                with contextlib.suppress(subprocess.TimeoutExpired):
                    return child.wait(left_s), content
            elif has_ended:
                return child.returncode, content
        return None
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        child.stdout.close()


GRACE_S = 5.0


class Child(Protocol):
    """The part of `subprocess.Popen` that is used here."""

    @property
    def pid(self) -> int: ...
    def terminate(self) -> None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def kill(self) -> None: ...


def end_all(child: Child) -> bool:
    """End a child and all its descendants, kill those that ignore SIGTERM or are stopped, and return whether all are
    gone. Some cannot be ended, for example while a driver holds them: no wait is without a limit."""
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
    try:
        child.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        return False
    _, alive = psutil.wait_procs(family, GRACE_S)
    return not alive


@contextlib.contextmanager
def collection_paused() -> Iterator[None]:
    """No garbage collection inside: looking for cycles of objects takes a sixth of the import of torch, and
    a tenth of a report, whose records and findings have none."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
