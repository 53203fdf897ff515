"""The client processes: each gets its share of the schedule before the start and returns its results at the end.

Nothing is exchanged while the clock runs: no queue, no lock, no message per request.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import resource
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol

from paceline.errors import UnsupportedError
from paceline.host.processes import end_with_parent
from paceline.serving.client.schedule import NS, Assignment, ShardResult
from paceline.serving.client.shard import Progress, ProgressBoard, Shard
from paceline.serving.client.silence import BoardView, ReplicaBoard

# From the start signal to the start: long enough for every process to receive it.
LEAD_NS = NS // 10
# How often progress is reported.
REPORT_S = 0.5
# Open files of a process besides its connections.
RESERVED_FILES = 64


class Guard(Protocol):
    """Suspends replicas that stop answering, see `silence.ReplicaGuard`."""

    def begin(self, board: ReplicaBoard) -> None: ...
    def watch(self, board: ReplicaBoard) -> None: ...
    def close(self) -> None: ...


def run(
    shares: Sequence[Assignment],
    watch: Callable[[Progress], bool | None] | None = None,
    start_ns: int | None = None,
    guard: Guard | None = None,
) -> list[ShardResult]:
    """Run every share in a process of its own, all from one start, and return their results in order.

    The start is start_ns of the monotonic clock, or later when all are connected. `watch` is called about twice a
    second and at the end; if it returns True, no more requests are sent. So is the guard, which suspends replicas.
    UnsupportedError if a process died.
    """
    require_files(max(max(share.connections, share.concurrency) for share in shares))
    context = multiprocessing.get_context("fork")
    board, replicas = ProgressBoard(len(shares)), ReplicaBoard(len(shares), len(shares[0].targets))
    if guard is not None:
        guard.begin(replicas)
    workers = []
    for number, share in enumerate(shares):
        here, there = context.Pipe()
        process = context.Process(
            target=_work, args=(share, board.slot(number), replicas.view(number), there), daemon=True
        )
        process.start()
        there.close()
        workers.append((process, here))
    try:
        pipes = [pipe for _, pipe in workers]
        for pipe in pipes:
            _receive(pipe)
        start_ns = max(start_ns or 0, time.monotonic_ns() + LEAD_NS)
        for pipe in pipes:
            pipe.send(start_ns)
        results: dict[int, ShardResult] = {}
        running: dict[object, int] = {pipe: number for number, pipe in enumerate(pipes)}
        while running:
            for ready in wait([pipes[number] for number in running.values()], timeout=REPORT_S):
                number = running.pop(ready)
                results[number] = _receive(pipes[number])
            if watch and watch(board.total()):
                board.stop()
            if guard is not None:
                guard.watch(replicas)
        return [results[number] for number in range(len(pipes))]
    finally:
        if guard is not None:
            guard.close()
        for process, pipe in workers:
            pipe.close()
            process.terminate()
            process.join()


def _receive(pipe: Connection[Any, Any]) -> Any:
    try:
        return pipe.recv()
    except EOFError:
        raise UnsupportedError("a client process died; its output is above") from None


def _work(assignment: Assignment, slot: memoryview[int], replicas: BoardView, pipe: Connection[Any, Any]) -> None:
    end_with_parent()
    # As many files as the system allows: the server decides how many connections an open loop needs.
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    shard = Shard(assignment, slot, replicas)
    shard.connect()
    pipe.send("connected")
    with contextlib.suppress(EOFError):
        pipe.send(shard.work(pipe.recv()))


def require_files(connections: int) -> None:
    """Raise the limit of open files before anything is sent; UnsupportedError if the system does not allow it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + RESERVED_FILES
    if soft >= wanted:
        return
    if hard != resource.RLIM_INFINITY and hard < wanted:
        raise UnsupportedError(
            f"{connections} connections need {wanted} open files, but this system allows {hard}. "
            f"Run `ulimit -n {wanted}` and try again"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
