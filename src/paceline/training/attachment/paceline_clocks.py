"""Clocks of the device that a process computes on."""

from __future__ import annotations

import time
from typing import Any


class HostClock:
    """perf_counter: on a CPU, work is complete when the call returns."""

    def mark(self) -> float:
        return time.perf_counter()

    def elapsed_s(self, begin: float, end: float) -> float:
        return end - begin

    def passed(self, mark: float) -> bool:
        return True

    def drain(self) -> None:
        """Nothing is queued on a CPU."""


class CudaClock:
    """CUDA events on the current stream: device time, however far ahead the host has run."""

    def mark(self) -> Any:
        import torch

        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def elapsed_s(self, begin: Any, end: Any) -> float:
        return float(begin.elapsed_time(end)) / 1e3

    def passed(self, mark: Any) -> bool:
        return bool(mark.query())

    def drain(self) -> None:
        import torch

        torch.cuda.synchronize()
