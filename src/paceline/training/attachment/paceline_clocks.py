"""Clocks of the device that a process computes on."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable
from typing import Any


class HostClock:
    """perf_counter: on a CPU, work is complete when the call returns."""

    def mark(self) -> float:
        return time.perf_counter()

    def elapsed_s(self, begin: float, end: float) -> float:
        return end - begin

    def passed(self, mark: float) -> bool:
        return True

    def reuse(self, steps: Iterable[Any]) -> None:
        """Numbers need no reuse."""

    def drain(self) -> None:
        """Nothing is queued on a CPU."""


class CudaClock:
    """CUDA events on the current stream: device time, however far ahead the host has run.

    Those of steps that were written are recorded again: to create an event costs about as much as to record it.
    """

    def __init__(self) -> None:
        import torch

        self._create: Callable[[], Any] = functools.partial(torch.cuda.Event, enable_timing=True)
        self._free: list[Any] = []

    def mark(self) -> Any:
        event = self._free.pop() if self._free else self._create()
        event.record()
        return event

    def reuse(self, steps: Iterable[Any]) -> None:
        """Take back the events of steps whose times were read, except their ends, where other steps begin."""
        for step in steps:
            used = {id(step.begin): step.begin}
            for _, begin, end in step.spans:
                used[id(begin)], used[id(end)] = begin, end
            used.pop(id(step.end), None)
            self._free.extend(used.values())

    def elapsed_s(self, begin: Any, end: Any) -> float:
        return float(begin.elapsed_time(end)) / 1e3

    def passed(self, mark: Any) -> bool:
        return bool(mark.query())

    def drain(self) -> None:
        import torch

        torch.cuda.synchronize()
