"""The ranks of a sweep acting as one: fences, agreements, memory for buffers, durations without barriers in them."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.contract import Recorder, Seat
from paceline.launchers.node import placement
from paceline.training.instruments import Clock, clock_for
from paceline.workloads.collectives.operations import Buffers, Launch, Operation, Place
from paceline.workloads.collectives.payload import TORCH_DTYPES

# Buffers of a row: one to send, one to receive.
BUFFERS = 2
# Share of free memory that a sweep takes unasked, and the largest size it goes to.
MEMORY_SHARE = 0.25
LARGEST_BYTES = {"cuda": 1 << 30, "cpu": 64 << 20}
FEWEST_ITERATIONS = 5


class Ensemble:
    """What one rank needs to move in step with the others. Every method marked `agreed` is called by all ranks."""

    def __init__(self, seat: Seat, recorder: Recorder) -> None:
        self.seat, self.recorder = seat, recorder
        self.clock: Clock = clock_for(seat.device)
        self.place = Place(seat.rank, seat.world_size)

    def fence(self) -> None:
        """Agreed: nothing is queued on any rank, and all go on together."""
        self.clock.drain()
        dist.barrier()
        self.clock.drain()

    def largest(self, values: Sequence[float]) -> list[float]:
        """Agreed: each value's maximum over ranks, so that all count alike."""
        tensor = torch.tensor(values, dtype=torch.float64, device=self.seat.torch_device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return [float(value) for value in tensor.tolist()]

    def all_true(self, value: bool) -> bool:
        """Agreed: whether it is true on every rank."""
        return self.largest([0.0 if value else 1.0])[0] == 0.0

    # --- memory ---

    def free_bytes(self) -> int:
        """Memory this rank may count on: its part of what the device or the host has left."""
        sharing = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        if self.seat.device == "cuda":
            shared = placement.shares_gpu(os.environ)
            return int(torch.cuda.mem_get_info()[0]) // (sharing if shared else 1)
        return _available_host_bytes() // sharing

    def size_limit_bytes(self) -> int:
        """Agreed: the largest size a sweep visits unasked."""
        own = min(LARGEST_BYTES[self.seat.device], int(self.free_bytes() * MEMORY_SHARE / BUFFERS))
        return int(-self.largest([float(-own)])[0])

    def empty(self, count: int, dtype: str) -> Tensor:
        """MemoryError where it does not fit. A host grants memory that it does not have, then kills: so ask first, for
        all buffers of a row, because those that were granted and not yet written still count as free."""
        kind = TORCH_DTYPES[dtype]
        if self.seat.device == "cpu" and BUFFERS * count * kind.itemsize > self.free_bytes():
            raise MemoryError(f"{count * kind.itemsize} bytes a buffer, {self.free_bytes()} are free for each rank")
        try:
            return torch.empty(count, dtype=kind, device=self.seat.torch_device)
        except RuntimeError as error:
            raise MemoryError(first_line(error)) from None

    def allocate(self, operation: Operation, dtype: str, count: int, in_place: bool) -> tuple[Buffers | None, str]:
        """Agreed: buffers on every rank, or on none and the reason."""
        buffers, reason = None, "another rank has no memory for it"
        try:
            buffers = operation.buffers(self.place, count, in_place, lambda elements: self.empty(elements, dtype))
        except MemoryError as error:
            reason = str(error)
        return (buffers, "") if self.all_true(buffers is not None) else (None, reason)

    # --- time ---

    def durations(self, launch: Launch, iterations: int) -> tuple[float, ...]:
        """Agreed: seconds inside each launch, back to back from a common start; no barrier and no wait is inside.

        Each launch has a mark before and one after it: what a slow rank does between launches is not in its own time
        but in that of the ranks that wait for it, by which it is known.
        """
        self.fence()
        marks = []
        for _ in range(iterations):
            begin = self.clock.mark()
            launch()
            marks.append((begin, self.clock.mark()))
        self.clock.drain()
        return tuple(self.clock.elapsed_s(begin, end) for begin, end in marks)

    def wall_s(self, launch: Launch) -> float:
        """One launch until the device has done it, by the host's clock: for estimates only."""
        self.clock.drain()
        begin = time.perf_counter()
        launch()
        self.clock.drain()
        return time.perf_counter() - begin


def affordable(asked: int, seconds_each: float, budget_s: float) -> int:
    """Iterations that the budget pays for, at most those asked and never fewer than FEWEST_ITERATIONS of them."""
    paid = int(budget_s / seconds_each) if seconds_each > 0 else asked
    return min(asked, max(FEWEST_ITERATIONS, paid))


def first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".strip().split("\n")[0]


def _available_host_bytes() -> int:
    """What the host says is available, or what the container may still take where that is less (control group v2)."""
    import psutil

    available = int(psutil.virtual_memory().available)
    try:
        most, used = (Path("/sys/fs/cgroup", name).read_text().strip() for name in ("memory.max", "memory.current"))
        return min(available, int(most) - int(used))
    except (OSError, ValueError):
        return available
