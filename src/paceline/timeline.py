"""Exposed communication, read from a profile of a few steps after the timed window.

Exposed is the time in which a collective is under way and nothing computes. On CUDA both come from kernels on the
device; on a CPU compute is torch's own operators and a collective lasts from its start to its completion in gloo.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator
from typing import Any

from paceline.measure import Clock, collection_paused
from paceline.records import TraceSample

Span = tuple[float, float]


class Profile:
    """Profiles the block `recording()` and then tells how its time divides."""

    def __init__(self, device: str, clock: Clock) -> None:
        self.device, self.clock = device, clock
        self.compute: list[Span] = []
        self.communication: list[Span] = []
        self.copies: list[Span] = []
        self.wall_s = 0.0

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        import torch.distributed as dist
        from torch.profiler import ProfilerActivity, profile

        activity = ProfilerActivity.CUDA if self.device == "cuda" else ProfilerActivity.CPU
        with profile(activities=[activity]) as profiler:
            # Ranks come here at different times; waiting for the last of them is not communication.
            if dist.is_initialized():
                dist.barrier()
            self.clock.drain()
            begin = time.perf_counter()
            yield
            self.clock.drain()
            self.wall_s = time.perf_counter() - begin
        with collection_paused():
            events = profiler.events() or ()
        for event in events:
            self._sort(event)
        if self.device == "cuda" and self.communication:
            self.communication.remove(min(self.communication))  # the barrier, which NCCL runs as a reduction

    def _sort(self, event: Any) -> None:
        if self.device == "cuda" and "CUDA" not in str(event.device_type):
            return  # a call on the host (launching, waiting) is not work on the device
        span = (event.time_range.start / 1e6, event.time_range.end / 1e6)
        if event.name.startswith("Memcpy HtoD"):
            self.copies.append(span)
        if event.name == "gloo:barrier":
            return
        if event.name.startswith(("nccl", "gloo:")):
            self.communication.append(span)
        elif self.device == "cuda" or event.name.startswith("aten::"):
            self.compute.append(span)

    def sample(self, rank: int, steps: int, batches: int = 0, batch_bytes: int = 0) -> TraceSample:
        """batches and batch_bytes: host-to-device copies of token batches, which are the longest of all such copies."""
        compute = covered_s(self.compute)
        copies = sorted((end - begin for begin, end in self.copies), reverse=True)[:batches]
        complete = len(copies) == batches > 0
        return TraceSample(
            rank=rank,
            steps=steps,
            wall_s=self.wall_s,
            compute_s=compute,
            communication_s=covered_s(self.communication),
            exposed_s=covered_s([*self.compute, *self.communication]) - compute,
            h2d_s=sum(copies) if complete else None,
            h2d_bytes=batches * batch_bytes if complete else None,
        )


def covered_s(spans: Iterable[Span]) -> float:
    """Length of the union of the spans."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total
