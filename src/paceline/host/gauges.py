"""GPU and host gauges, read beside a run by NVML and psutil; what a machine does not tell is None.

Watching must not disturb: one reading costs a few milliseconds of a thread, and no error of a gauge reaches the caller.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from paceline.host import machine

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


# Those that take speed away from a run; the others hold a clock where somebody asked for it, or where others are.
SLOWING_REASONS = frozenset(
    {
        "software power cap",
        "hardware slowdown",
        "software thermal slowdown",
        "hardware thermal slowdown",
        "hardware power brake",
    }
)
POWERCAP = Path("/sys/class/powercap")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSample:
    """One GPU at one moment. at_s is `time.time()`; device is CUDA's index. Utilisation is the driver's busy share;
    energy_j counts from when the driver was loaded, so only its differences mean something."""

    at_s: float
    device: int
    utilisation_ratio: float | None
    memory_used_bytes: int | None
    power_w: float | None
    temperature_c: float | None
    sm_clock_hz: float | None
    throttle_reasons: tuple[str, ...] | None
    memory_total_bytes: int | None = None
    memory_clock_hz: float | None = None
    energy_j: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSample:
    """The host at one moment. cpu and cores are busy shares since the reading before, None at the first.

    load is the number of runnable processes, averaged over a minute by the kernel; frequency is the mean of all cores,
    temperature the hottest sensor of the processor's own, energy what its packages took since the first reading.
    """

    at_s: float
    cpu_ratio: float | None
    memory_used_bytes: int | None
    load: float | None
    memory_total_bytes: int | None = None
    cores_ratio: tuple[float, ...] | None = None
    frequency_hz: float | None = None
    temperature_c: float | None = None
    energy_j: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """One reading of everything."""

    host: HostSample
    devices: tuple[DeviceSample, ...]


class Gauges:
    """Reads on demand while open; NVML is opened once, because opening it costs more than a reading.

    devices reads only the first so many visible GPUs; 0 leaves NVML alone.
    """

    def __init__(self, devices: int | None = None) -> None:
        self._devices = devices

    def __enter__(self) -> Gauges:
        self._open = contextlib.ExitStack()
        self._library = self._open.enter_context(machine.nvml()) if self._devices != 0 else None
        self._handles = machine.handles(self._library)[: self._devices] if self._library else []
        self._busy: CoreSeconds | None = None
        self._packages = PackageEnergy()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    def read(self) -> Snapshot:
        """Shares of processors are since the reading before, so the first has none."""
        now = _core_seconds()
        cores = _core_ratios(self._busy, now)
        self._busy = now
        host = replace(_host(cores), energy_j=self._packages.read_j())
        return Snapshot(host=host, devices=_devices(self._library, self._handles))


def read() -> Snapshot:
    """One snapshot of this host and its visible GPUs; never raises."""
    with Gauges() as gauges:
        return gauges.read()


class Sampler:
    """Reads every `interval_s` in a thread of its own, from `start` to `stop`, and once more then; also a context
    manager.

    Keeps the newest `keep` snapshots and hands each to `sink`, in that thread. A reading that fails, or whose sink
    does, is skipped and counted in `failures`, never raised; so is a thread that the system does not grant.
    """

    def __init__(
        self,
        interval_s: float = 1.0,
        keep: int = 3600,
        devices: int | None = None,
        sink: Callable[[Snapshot], None] | None = None,
    ) -> None:
        self.interval_s, self.devices, self.sink = interval_s, devices, sink
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
        if self._thread is not None:
            return
        self._ended.clear()
        thread = threading.Thread(target=self._run, name="paceline-telemetry", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            self.failures += 1
        else:
            self._thread = thread

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
        with Gauges(self.devices) as gauges:
            self._read(gauges)
            while not self._ended.wait(self.interval_s):
                self._read(gauges)
            # What was watched ends here: without a reading now its last moments would lie outside all readings.
            self._read(gauges)

    def _read(self, gauges: Gauges) -> None:
        try:
            snapshot = gauges.read()
            self._snapshots.append(snapshot)
            if self.sink is not None:
                self.sink(snapshot)
        except Exception:
            self.failures += 1


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
        throttle_reasons=ask(lambda: throttle_reasons(_reason_bits(library)(handle))),
        memory_total_bytes=ask(lambda: int(library.nvmlDeviceGetMemoryInfo(handle).total)),
        memory_clock_hz=ask(lambda: library.nvmlDeviceGetClockInfo(handle, library.NVML_CLOCK_MEM) * 1e6),
        energy_j=ask(lambda: library.nvmlDeviceGetTotalEnergyConsumption(handle) / 1000),
    )


def _reason_bits(library: Any) -> Callable[[Any], int]:
    """Throttle reasons became event reasons in NVML 12.2; later libraries may drop the older name."""
    newer: Callable[[Any], int] | None = getattr(library, "nvmlDeviceGetCurrentClocksEventReasons", None)
    return newer or library.nvmlDeviceGetCurrentClocksThrottleReasons


class PackageEnergy:
    """Joules of all processor packages since the first reading, by the kernel's RAPL counters; None where it shows
    none or this user may not read them.

    A counter that has wrapped goes on from 0; it is read far more often than that, so once is all it can have.
    """

    def __init__(self, root: Path | None = None) -> None:
        zones = sorted((root or POWERCAP).glob("intel-rapl:*"))
        # Zones below a package are part of it; psys is the platform, which holds the packages too.
        self._zones = [zone for zone in zones if _line(zone / "name").startswith("package")]
        self._ranges = [_joules(zone / "max_energy_range_uj") for zone in self._zones]
        self._last: list[float] | None = None
        self._total = 0.0

    def read_j(self) -> float | None:
        found = [_joules(zone / "energy_uj") for zone in self._zones]
        now = [joules for joules in found if joules is not None]
        if not now or len(now) != len(found):
            return None
        self._total += sum(map(_advance, self._last or now, now, self._ranges))
        self._last = now
        return self._total


def _advance(before: float, now: float, largest: float | None) -> float:
    return now - before if now >= before else now - before + (largest or before)


def _line(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _joules(path: Path) -> float | None:
    text = _line(path)
    return int(text) / 1e6 if text.isdecimal() else None


def _host(cores: tuple[float, ...] | None) -> HostSample:
    memory = machine.ask(lambda: _psutil().virtual_memory())
    return HostSample(
        at_s=time.time(),
        cpu_ratio=sum(cores) / len(cores) if cores else None,
        memory_used_bytes=memory and int(memory.total - memory.available),
        memory_total_bytes=memory and int(memory.total),
        load=machine.ask(lambda: os.getloadavg()[0]),
        cores_ratio=cores,
        frequency_hz=machine.ask(_frequency_hz),
        temperature_c=machine.ask(_temperature_c),
    )


def _psutil() -> Any:
    return importlib.import_module("psutil")


def _frequency_hz() -> float | None:
    """Virtual machines answer 0 where they know nothing."""
    return float(_psutil().cpu_freq().current) * 1e6 or None


def _temperature_c() -> float | None:
    """Intel's, AMD's and Arm's own sensors by their kernel drivers; a disk's or a battery's is not the processor's."""
    sensors = _psutil().sensors_temperatures()
    own = [entry.current for name in ("coretemp", "k10temp", "cpu_thermal") for entry in sensors.get(name, ())]
    return max(own, default=None)


CoreSeconds = tuple[tuple[float, float], ...]


def _core_seconds() -> CoreSeconds | None:
    """Busy and total seconds of each core since boot; own arithmetic, as psutil's cpu_percent is shared state."""

    def seconds(times: dict[str, float]) -> tuple[float, float]:
        total = sum(times.values()) - times.get("guest", 0.0) - times.get("guest_nice", 0.0)
        return total - times["idle"] - times.get("iowait", 0.0), total

    return machine.ask(lambda: tuple(seconds(core._asdict()) for core in _psutil().cpu_times(percpu=True)))


def _core_ratios(before: CoreSeconds | None, now: CoreSeconds | None) -> tuple[float, ...] | None:
    """None also where a core came or went, or no time has passed on the kernel's clock of 10 ms."""
    if before is None or now is None or len(before) != len(now):
        return None
    pairs = [(b - busy, t - total) for (busy, total), (b, t) in zip(before, now, strict=True)]
    if any(total <= 0 for _, total in pairs):
        return None
    return tuple(min(1.0, max(0.0, busy / total)) for busy, total in pairs)
