"""The processes of the client: each has its share of the schedule from the beginning, and they meet again at the end.

Nothing is handed out while the clock runs: no queue, no lock, no message per request.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import resource
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from paceline.errors import UnsupportedError
from paceline.host.processes import end_with_parent
from paceline.serving.client.arrivals import NS
from paceline.serving.client.orders import Orders, Shift
from paceline.serving.client.shard import Shard
from paceline.serving.client.tally import Board, Tally

# From the word to start to the start: long enough for every process to hear it.
LEAD_NS = NS // 10
# How long between two looks at how far the load has come.
LOOK_S = 0.5
# Descriptors of a process besides its connections.
RESERVED_FILES = 64


def run(
    shares: Sequence[Orders], watch: Callable[[Tally], bool | None] | None = None, start_ns: int | None = None
) -> list[Shift]:
    """Every share by a process of its own, from one common start: start_ns of the monotonic clock, or when all are
    connected where that is later. UnsupportedError names a process that died. `watch` is called about twice a second
    and at the end; True is its word that no more requests shall be given out."""
    require_files(max(max(share.connections, share.concurrency) for share in shares))
    context = multiprocessing.get_context("fork")
    board = Board(len(shares))
    members = []
    for number, share in enumerate(shares):
        here, there = context.Pipe()
        process = context.Process(target=_work, args=(share, board.slot(number), there), daemon=True)
        process.start()
        there.close()
        members.append((process, here))
    try:
        pipes = [pipe for _, pipe in members]
        for pipe in pipes:
            _receive(pipe)
        start_ns = max(start_ns or 0, time.monotonic_ns() + LEAD_NS)
        for pipe in pipes:
            pipe.send(start_ns)
        return _gather(pipes, lambda: _look(board, watch))
    finally:
        for process, pipe in members:
            pipe.close()
            process.terminate()
            process.join()


def _look(board: Board, watch: Callable[[Tally], bool | None] | None) -> None:
    if watch and watch(board.total()):
        board.stop()


def _gather(pipes: Sequence[Connection[Any, Any]], look: Callable[[], None]) -> list[Shift]:
    found: dict[int, Shift] = {}
    left = {pipe: number for number, pipe in enumerate(pipes)}
    while left:
        for ready in wait(list(left), timeout=LOOK_S):
            assert isinstance(ready, type(pipes[0]))
            found[left.pop(ready)] = _receive(ready)
        look()
    return [found[number] for number in range(len(pipes))]


def _receive(pipe: Connection[Any, Any]) -> Any:
    try:
        return pipe.recv()
    except EOFError:
        raise UnsupportedError("a process of the client died; see what it printed above") from None


def _work(orders: Orders, slot: memoryview[int], pipe: Connection[Any, Any]) -> None:
    end_with_parent()
    _allow_files()
    shard = Shard(orders, slot)
    shard.connect()
    pipe.send("connected")
    with contextlib.suppress(EOFError):
        pipe.send(shard.work(pipe.recv()))


def _allow_files() -> None:
    """As many as the system lets this process have: how many an open load needs is the server's to decide."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def require_files(connections: int) -> None:
    """Every connection is an open file: ask the system for as many before anything is sent."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + RESERVED_FILES
    if soft >= wanted:
        return
    if hard != resource.RLIM_INFINITY and hard < wanted:
        raise UnsupportedError(
            f"{connections} connections need {wanted} open files, this system allows {hard}: run `ulimit -n {wanted}`"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
