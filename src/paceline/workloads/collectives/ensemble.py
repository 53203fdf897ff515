"""Coordination of the ranks of a sweep: fences, agreement, buffer memory, and durations without barriers."""

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

# Buffers per row: one to send, one to receive.
BUFFERS = 2
# Share of free memory that a sweep uses by default, and its largest default size.
MEMORY_SHARE = 0.25
LARGEST_BYTES = {"cuda": 1 << 30, "cpu": 64 << 20}
FEWEST_ITERATIONS = 5


class Ensemble:
    """Keeps one rank in step with the others. Methods marked `Collective` must be called by all ranks."""

    def __init__(self, seat: Seat, recorder: Recorder) -> None:
        self.seat, self.recorder = seat, recorder
        self.clock: Clock = clock_for(seat.device)
        self.place = Place(seat.rank, seat.world_size)

    def fence(self) -> None:
        """Collective: wait until no rank has queued work, then continue together."""
        self.clock.drain()
        dist.barrier()
        self.clock.drain()

    def largest(self, values: Sequence[float]) -> list[float]:
        """Collective: the maximum of each value over ranks."""
        tensor = torch.tensor(values, dtype=torch.float64, device=self.seat.torch_device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return [float(value) for value in tensor.tolist()]

    def all_true(self, value: bool) -> bool:
        """Collective: whether it is true on every rank."""
        return self.largest([0.0 if value else 1.0])[0] == 0.0

    def free_bytes(self) -> int:
        """Free memory for this rank: its share of what the device or the host has."""
        sharing = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        if self.seat.device == "cuda":
            shared = placement.shares_gpu(os.environ)
            return int(torch.cuda.mem_get_info()[0]) // (sharing if shared else 1)
        return _available_host_bytes() // sharing

    def size_limit_bytes(self) -> int:
        """Collective: the largest size of a sweep by default."""
        own = min(LARGEST_BYTES[self.seat.device], int(self.free_bytes() * MEMORY_SHARE / BUFFERS))
        return int(-self.largest([float(-own)])[0])

    def empty(self, count: int, dtype: str) -> Tensor:
        """An uninitialised buffer; MemoryError if it does not fit. A host overcommits and kills later, so free memory
        is checked first, for all buffers of a row: unwritten ones still count as free."""
        kind = TORCH_DTYPES[dtype]
        if self.seat.device == "cpu" and BUFFERS * count * kind.itemsize > self.free_bytes():
            raise MemoryError(
                f"a buffer needs {count * kind.itemsize} bytes, and each rank has {self.free_bytes()} free"
            )
        try:
            return torch.empty(count, dtype=kind, device=self.seat.torch_device)
        except RuntimeError as error:
            raise MemoryError(first_line(error)) from None

    def allocate(self, operation: Operation, dtype: str, count: int, in_place: bool) -> tuple[Buffers | None, str]:
        """Collective: buffers on every rank, or on none and the reason."""
        buffers, reason = None, "another rank has not enough memory"
        try:
            buffers = operation.buffers(self.place, count, in_place, lambda elements: self.empty(elements, dtype))
        except MemoryError as error:
            reason = str(error)
        return (buffers, "") if self.all_true(buffers is not None) else (None, reason)

    def durations(self, launch: Launch, iterations: int) -> tuple[float, ...]:
        """Collective: seconds of each launch, back to back from a common start, without barriers or waits.

        Each launch has a mark before and after it. Delays of a slow rank between launches show in the times of the
        ranks that wait for it, not in its own.
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
        """Seconds of one launch until the device is done, by the host's clock; for estimates only."""
        self.clock.drain()
        begin = time.perf_counter()
        launch()
        self.clock.drain()
        return time.perf_counter() - begin


def affordable(requested: int, seconds_each: float, budget_s: float) -> int:
    """Iterations within the budget: at most `requested`, and at least FEWEST_ITERATIONS if so many are requested.

    >>> affordable(100, seconds_each=0.1, budget_s=2.0)
    20
    """
    within = int(budget_s / seconds_each) if seconds_each > 0 else requested
    return min(requested, max(FEWEST_ITERATIONS, within))


def first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".strip().split("\n")[0]


def _available_host_bytes() -> int:
    """Available memory of the host, or of the container if that is less (control group v2)."""
    import psutil

    available = int(psutil.virtual_memory().available)
    try:
        most, used = (Path("/sys/fs/cgroup", name).read_text().strip() for name in ("memory.max", "memory.current"))
        return min(available, int(most) - int(used))
    except (OSError, ValueError):
        return available
