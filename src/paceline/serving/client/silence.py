"""Replicas that stop answering: they get no requests until a probe shows that they answer again.

    in use ── requests time out in a row (`Shard`) ─────────────────┐
      │                                                             v
      └── its rank reports nothing ── a probe fails ──> suspended ── a probe succeeds ──> in use

Client processes notice timeouts, the parent process decides and probes. They exchange numbers in shared memory only, so
the clocks of the processes are not disturbed.
"""

from __future__ import annotations

import mmap
import socket
import ssl
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from paceline.serving.client.schedule import Target

# A probe asks for one token. A replica that does not send it within this time is not used.
PROBE_S = 5.0
PROBE_EVERY_S = 5.0


class ReplicaBoard:
    """Which replicas are suspended, in shared memory that is created before the processes are forked.

    Every number has one writer. The parent's number of a replica counts changes, so it is odd while the replica is
    suspended. A process that wants the next suspension writes the number that it would have.
    """

    def __init__(self, processes: int, replicas: int) -> None:
        self._cells = memoryview(mmap.mmap(-1, 8 * replicas * (processes + 1))).cast("q")
        self._replicas = replicas
        self._states = self._cells[:replicas]

    def view(self, process: int) -> BoardView:
        first = (process + 1) * self._replicas
        return BoardView(self._states, self._cells[first : first + self._replicas])

    def is_suspended(self, replica: int) -> bool:
        return bool(self._states[replica] & 1)

    def is_reported(self, replica: int) -> bool:
        """Whether a process asks for a suspension that has not happened yet."""
        return any(number > self._states[replica] for number in self._cells[replica + self._replicas :: self._replicas])

    def change(self, replica: int) -> None:
        """Suspend a replica that is in use, or use one that is suspended."""
        self._states[replica] += 1


@dataclass(frozen=True, slots=True)
class BoardView:
    """The board as one client process sees it."""

    states: memoryview[int]
    own: memoryview[int]

    def report(self, replica: int) -> None:
        self.own[replica] = self.states[replica] + 1

    def suspended(self) -> set[int]:
        """Replicas that the parent has suspended, or will as soon as it reads this process's report."""
        return {r for r, number in enumerate(self.states) if number & 1 or self.own[r] > number}


def probe(target: Target, request: bytes) -> bool:
    """Whether the replica begins to stream an answer within PROBE_S. request: its head and body."""
    deadline = time.monotonic() + PROBE_S
    try:
        with socket.create_connection((target.host, target.port), timeout=PROBE_S) as plain:
            context = ssl.create_default_context(cafile=target.certificates) if target.tls else None
            with context.wrap_socket(plain, server_hostname=target.host) if context else plain as connection:
                connection.sendall(request)
                answer = b""
                while b"\ndata:" not in answer:
                    connection.settimeout(max(0.01, deadline - time.monotonic()))
                    part = connection.recv(65_536)
                    answer += part
                    if not part or time.monotonic() > deadline or len(answer) > 65_536:
                        return False
                return answer.startswith(b"HTTP/1.1 200")
    except OSError:
        return False


@dataclass
class ReplicaGuard:
    """Decides in the parent process which replicas get no requests, for all loads of a run.

    probe(replica) tells whether it answers. quiet() returns replicas whose own ranks report nothing or report them
    dead. note(replica, is_silent, reason) is called at every change. silences: by replica, when it was suspended and
    used again, alternating, on the monotonic clock.
    """

    probe: Callable[[int], bool]
    quiet: Callable[[], Collection[int]]
    note: Callable[[int, bool, str], None]
    silences: dict[int, list[int]] = field(default_factory=dict)
    _probes: dict[int, tuple[float, threading.Thread]] = field(default_factory=dict)
    _answers: dict[int, bool] = field(default_factory=dict)

    @property
    def silent(self) -> set[int]:
        return {replica for replica, moments in self.silences.items() if len(moments) % 2}

    def begin(self, board: ReplicaBoard, replicas: Sequence[int]) -> None:
        """Suspend what was silent at the end of the last load. replicas: their numbers, in the order of the board."""
        for index, replica in enumerate(replicas):
            if replica in self.silent:
                board.change(index)

    def watch(self, board: ReplicaBoard, replicas: Sequence[int]) -> None:
        """Take reports and answers of probes into account. It is called about twice a second and does not block."""
        quiet = set(self.quiet())
        for index, replica in enumerate(replicas):
            is_silent = board.is_suspended(index)
            if not is_silent and board.is_reported(index):
                self._change(board, index, replica, "its requests timed out in a row")
            elif is_silent and replica not in quiet and self._answer(replica) is True:
                self._change(board, index, replica, "a probe was answered")
            elif not is_silent and replica in quiet and self._answer(replica) is False:
                # A rank that is only slow is not silent: its replica still answers.
                self._change(board, index, replica, "its rank reports nothing, and a probe was not answered")

    def close(self) -> None:
        """Wait for the probes: a thread must not run while processes are forked."""
        for _, thread in self._probes.values():
            thread.join()
        self._probes.clear()
        self._answers.clear()

    def _change(self, board: ReplicaBoard, index: int, replica: int, reason: str) -> None:
        board.change(index)
        self.silences.setdefault(replica, []).append(time.monotonic_ns())
        self._answers.pop(replica, None)
        self.note(replica, board.is_suspended(index), reason)

    def _answer(self, replica: int) -> bool | None:
        """The answer of the last probe, taken once; None while none is known. Starts a probe every PROBE_EVERY_S."""
        started, thread = self._probes.get(replica, (float("-inf"), None))
        if thread is not None and not thread.is_alive() and replica in self._answers:
            return self._answers.pop(replica)
        if (thread is None or not thread.is_alive()) and time.monotonic() - started >= PROBE_EVERY_S:
            thread = threading.Thread(target=self._ask, args=(replica,), daemon=True)
            self._probes[replica] = (time.monotonic(), thread)
            thread.start()
        return None

    def _ask(self, replica: int) -> None:
        self._answers[replica] = self.probe(replica)
