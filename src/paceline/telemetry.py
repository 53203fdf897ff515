"""GPU and host gauges, read beside a run by NVML and psutil; what a machine does not tell is None.

Watching must not disturb: one reading costs a few milliseconds of a thread, and no error of a gauge reaches the caller.
"""

from __future__ import annotations

import importlib
import os
import threading
import time
from collections import deque
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from paceline import machine

# Bits of NVML's clocks event reasons that mean the GPU runs slower than it could (nvml.h); idle is not one of them.
THROTTLE_REASONS = {
    0x0002: "applications clocks setting",
    0x0004: "software power cap",
    0x0008: "hardware slowdown",
    0x0010: "sync boost",
    0x0020: "software thermal slowdown",
    0x0040: "hardware thermal slowdown",
    0x0080: "hardware power brake",
    0x0100: "display clock setting",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSample:
    """One GPU at one moment. at_s is `time.time()`; device is CUDA's index. Utilisation is the driver's busy share."""

    at_s: float
    device: int
    utilisation_ratio: float | None
    memory_used_bytes: int | None
    power_w: float | None
    temperature_c: float | None
    sm_clock_hz: float | None
    throttle_reasons: tuple[str, ...] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSample:
    """The host at one moment. cpu is the busy share of all cores since the reading before, None at the first.

    load is the number of runnable processes, averaged over a minute by the kernel.
    """

    at_s: float
    cpu_ratio: float | None
    memory_used_bytes: int | None
    load: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """One reading of everything."""

    host: HostSample
    devices: tuple[DeviceSample, ...]


def read() -> Snapshot:
    """One snapshot of this host and its visible GPUs; never raises."""
    with machine.nvml() as library:
        return Snapshot(host=_host(None), devices=_devices(library, machine.handles(library) if library else []))


class Sampler:
    """Reads every `interval_s` in a thread of its own, from `start` to `stop`; also a context manager.

    Keeps the newest `keep` snapshots. A reading that fails is skipped and counted in `failures`, never raised.
    """

    def __init__(self, interval_s: float = 1.0, keep: int = 3600) -> None:
        self.interval_s = interval_s
        self.failures = 0
        self._snapshots: deque[Snapshot] = deque(maxlen=keep)
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def snapshots(self) -> tuple[Snapshot, ...]:
        """Oldest first; safe to read while sampling."""
        return tuple(self._snapshots.copy())

    def start(self) -> None:
        """Begin; a second start while running changes nothing."""
        if self._thread is None:
            self._ended.clear()
            self._thread = threading.Thread(target=self._run, name="paceline-telemetry", daemon=True)
            self._thread.start()

    def stop(self) -> tuple[Snapshot, ...]:
        """End within one reading and return what was seen."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join(timeout=self.interval_s + 5)
            self._thread = None
        return self.snapshots

    def __enter__(self) -> Sampler:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _run(self) -> None:
        """NVML is opened once: opening it for every reading costs more than the reading."""
        with machine.nvml() as library:
            handles = machine.handles(library) if library else []
            busy: tuple[float, float] | None = None
            while not self._ended.is_set():
                try:
                    now = _cpu_seconds()
                    self._snapshots.append(
                        Snapshot(host=_host(_cpu_ratio(busy, now)), devices=_devices(library, handles))
                    )
                    busy = now
                except Exception:
                    self.failures += 1
                self._ended.wait(self.interval_s)


def throttle_reasons(bits: int) -> tuple[str, ...]:
    """The words for NVML's bit mask."""
    return tuple(word for bit, word in THROTTLE_REASONS.items() if bits & bit)


def _devices(library: Any | None, handles: list[Any]) -> tuple[DeviceSample, ...]:
    if library is None:
        return ()
    return tuple(_device(library, index, handle) for index, handle in enumerate(handles))


def _device(library: Any, index: int, handle: Any) -> DeviceSample:
    ask = machine.ask
    return DeviceSample(
        at_s=time.time(),
        device=index,
        utilisation_ratio=ask(lambda: library.nvmlDeviceGetUtilizationRates(handle).gpu / 100),
        memory_used_bytes=ask(lambda: int(library.nvmlDeviceGetMemoryInfo(handle).used)),
        power_w=ask(lambda: library.nvmlDeviceGetPowerUsage(handle) / 1000),
        temperature_c=ask(lambda: float(library.nvmlDeviceGetTemperature(handle, library.NVML_TEMPERATURE_GPU))),
        sm_clock_hz=ask(lambda: library.nvmlDeviceGetClockInfo(handle, library.NVML_CLOCK_SM) * 1e6),
        throttle_reasons=ask(lambda: throttle_reasons(library.nvmlDeviceGetCurrentClocksThrottleReasons(handle))),
    )


def _host(cpu_ratio: float | None) -> HostSample:
    return HostSample(
        at_s=time.time(),
        cpu_ratio=cpu_ratio,
        memory_used_bytes=machine.ask(_memory_used_bytes),
        load=machine.ask(lambda: os.getloadavg()[0]),
    )


def _memory_used_bytes() -> int:
    memory = importlib.import_module("psutil").virtual_memory()
    return int(memory.total - memory.available)


def _cpu_seconds() -> tuple[float, float] | None:
    """Busy and total CPU seconds of all cores since boot; own arithmetic, as psutil's cpu_percent is shared state."""

    def seconds() -> tuple[float, float]:
        times = importlib.import_module("psutil").cpu_times()._asdict()
        total = sum(times.values()) - times.get("guest", 0.0) - times.get("guest_nice", 0.0)
        return total - times["idle"] - times.get("iowait", 0.0), total

    return machine.ask(seconds)


def _cpu_ratio(before: tuple[float, float] | None, now: tuple[float, float] | None) -> float | None:
    if before is None or now is None or now[1] <= before[1]:
        return None
    return min(1.0, max(0.0, (now[0] - before[0]) / (now[1] - before[1])))
