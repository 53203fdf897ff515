"""Clocks of the device that a process computes on."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable
from typing import Any


def marks_on(devices: Iterable[Any]) -> list[Any]:
    """An event on the current stream of each GPU among the devices: what was queued there before has arrived when all
    have passed."""
    import torch

    create: Callable[[], Any] = torch.cuda.Event
    found = []
    for number in {device.index for device in devices if device.type == "cuda"}:
        event = create()
        event.record(torch.cuda.current_stream(number))
        found.append(event)
    return found


class HostClock:
    """perf_counter: on a CPU, work is complete when the call returns."""

    devices: frozenset[Any] = frozenset()

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
    """CUDA events on the current stream of a device: device time, however far ahead the host has run.

    Those of steps that were written are recorded again: to create an event costs about as much as to record it. Once
    recorded, an event belongs to its device, so a script's clock has one; without it, events are of the current device.
    """

    def __init__(self, device: Any = None) -> None:
        import torch

        self._create: Callable[[], Any] = functools.partial(torch.cuda.Event, enable_timing=True)
        self._stream: Callable[[int | None], Any] = torch.cuda.current_stream
        self._device: int | None = None if device is None else device.index
        self.devices = frozenset() if device is None else frozenset({device})
        self._free: list[Any] = []

    def mark(self) -> Any:
        event = self._free.pop() if self._free else self._create()
        event.record(self._stream(self._device))
        return event

    def reuse(self, steps: Iterable[Any]) -> None:
        """Take back the events of steps whose times were read, except their ends, where other steps begin."""
        for step in steps:
            used = {id(step.begin): step.begin}
            for _, begin, end in step.spans:
                used[id(begin)], used[id(end)] = begin, end
            used.pop(id(step.end), None)
            self._free.extend(used.values())

    def passed(self, mark: Any) -> bool:
        return bool(mark.query())

    def elapsed_s(self, begin: Any, end: Any) -> float:
        return float(begin.elapsed_time(end)) / 1e3

    def drain(self) -> None:
        import torch

        torch.cuda.synchronize()
